"""How scattered a pool is, and which rows to move where. Pure: host arrays in, host arrays out.

A unit is what SGLang's allocator hands out: one slot, or a page of them. Unit 0 is the dummy that padding writes to
and is never held. All ranks of a server hold the same units, so the same layout, and ties are broken by unit
number alone: every rank plans the same moves without asking the others.

A plan is a one-to-one map of units in which each is moved once. What it writes is free or moved away by the same
map, so the map falls into paths that end in a free unit, and rings. Along a path, from its end, nothing is overwritten
before it is read; a ring needs one row kept aside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LONG = 64  # tokens; a run of this length is copied as well as any longer one, and is left where it is
PIECE = 4096  # units; the longest stretch that is looked at as a whole
TRIES, MISSES = 256, 16  # stretches looked at in one plan, and in a row for nothing: bounds the time it takes


@dataclass(frozen=True, eq=False)
class Layout:
    """Who holds which unit.

    size    units 1 to size can be held
    chains  int64 arrays: units in logical order, every held unit once over all of them
    growth  for each chain the units to keep free behind its end, where it will grow
    free    int64, ascending
    """

    size: int
    chains: tuple[np.ndarray, ...]
    growth: tuple[int, ...]
    free: np.ndarray


@dataclass(frozen=True)
class Fragmentation:
    """tokens held, the runs of neighbours that they lie in, those in runs of LONG tokens or more, and the same of
    the free slots."""

    tokens: int
    runs: int
    long_tokens: int
    free_tokens: int
    free_runs: int
    largest_free: int

    @property
    def runs_per_1000(self) -> float:
        return 1000 * self.runs / self.tokens if self.tokens else 0.0

    @property
    def long_share(self) -> float:
        """Share of tokens in runs of at least LONG; 1 for an empty pool."""
        return self.long_tokens / self.tokens if self.tokens else 1.0


@dataclass(frozen=True, eq=False)
class Moves:
    """What lies in src[i] goes to dst[i]. int64; no unit occurs twice in src or in dst.

    src, dst  in an order in which nothing is overwritten before it is read, but for rings
    starts    int64 [paths + 1]: path p is moves starts[p] to starts[p + 1], each into what the move before it left. A
              path whose last source is its first destination is a ring: that row is read before the path begins
    """

    src: np.ndarray
    dst: np.ndarray
    starts: np.ndarray

    def __len__(self) -> int:
        return len(self.src)

    def back(self) -> Moves:
        """The moves that undo these."""
        return moves_of(self.dst, self.src)


def chains_of(segments: Sequence[tuple[np.ndarray, int, int]]) -> tuple[tuple[np.ndarray, ...], tuple[int, ...]]:
    """Join segments of a prefix tree into chains and give each its growth.

    segments  (units in logical order, index of the segment before it or -1, growth). The continuation of a segment
              is its largest one, the smallest first unit deciding ties; others start a chain. Chains come in the
              order of their first units, so the order of ``segments`` does not matter.
    """
    below: dict[int, list[int]] = {}
    for i, (_, parent, _) in enumerate(segments):
        below.setdefault(parent, []).append(i)
    weight = [len(units) for units, _, _ in segments]
    order, stack = [], list(below.get(-1, ()))
    while stack:
        i = stack.pop()
        order.append(i)
        stack += below.get(i, ())
    if len(order) != len(segments):
        raise ValueError(f"{len(segments) - len(order)} segments have no way to a root; parents form a ring")
    for i in reversed(order):
        if segments[i][1] >= 0:
            weight[segments[i][1]] += weight[i]

    def first(i: int) -> int:
        return int(segments[i][0][0]) if len(segments[i][0]) else -1

    heads, chains = list(below.get(-1, ())), []
    while heads:
        i = heads.pop()
        parts = []
        while i >= 0:
            parts.append(i)
            following = sorted(below.get(i, ()), key=lambda j: (-weight[j], first(j)))
            heads += following[1:]
            i = following[0] if following else -1
        units = np.concatenate([segments[j][0] for j in parts]).astype(np.int64)
        if len(units):
            chains.append((units, segments[parts[-1]][2]))
    chains.sort(key=lambda chain: int(chain[0][0]))
    return tuple(c for c, _ in chains), tuple(g for _, g in chains)


def measure(layout: Layout, page: int = 1) -> Fragmentation:
    """The fragmentation of a layout whose units are ``page`` tokens."""
    tokens = runs = long_tokens = 0
    for chain in layout.chains:
        lengths = _run_lengths(chain) * page
        tokens += int(lengths.sum())
        runs += len(lengths)
        long_tokens += int(lengths[lengths >= LONG].sum())
    free = _run_lengths(layout.free) * page
    return Fragmentation(tokens, runs, long_tokens, int(free.sum()), len(free), int(free.max(initial=0)))


def plan(layout: Layout, budget: int, page: int = 1) -> Moves:
    """Moves of at most ``budget`` units that leave fewer runs; empty when nothing is worth moving.

    Stretches of short runs are moved, the most runs for each unit first, into the smallest free run that holds them
    (and the growth of their chain). Where there is none, they change places with the neighbours that lose least.
    """
    if budget < 2:
        return moves_of(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
    board, left = _Board(layout), budget
    long = max(1, -(-LONG // page))
    misses = 0
    for stretch, growth in _stretches(layout, long, min(PIECE, budget))[:TRIES]:
        if left < 2 or misses == MISSES:
            break
        took = board.place(stretch[:left], growth, left)
        misses = 0 if took else misses + 1
        left -= took
    return moves_of(board.units, board.now[board.units])


def moves_of(src: np.ndarray, dst: np.ndarray) -> Moves:
    """Order a one-to-one map into paths; units that stay are left out."""
    goes = src != dst
    src, dst = src[goes].astype(np.int64), dst[goes].astype(np.int64)
    count = len(src)
    if not count:
        return Moves(src, dst, np.zeros(1, dtype=np.int64))
    leaves = np.full(max(src.max(), dst.max()) + 1, -1, dtype=np.int64)  # the move that empties a unit
    leaves[src] = np.arange(count)
    if len(np.unique(dst)) != count or (leaves[src] != np.arange(count)).any():
        raise ValueError("two units would move to one place, or one to two")
    # The move before a move is the one that empties its destination; the first of a path has none.
    before = leaves[dst]
    first, _, smallest = _follow(before, dst)
    ring = first < 0
    before[ring & (dst == smallest)] = -1  # a ring begins at its smallest unit
    first, rank, _ = _follow(before, dst)
    order = np.lexsort((rank, dst[first]))
    starts = np.append(np.flatnonzero(rank[order] == 0), count)
    return Moves(src[order], dst[order], starts.astype(np.int64))


def _follow(before: np.ndarray, unit: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each move the first of its path, how many come before it, and the smallest unit among them.

    Every round looks twice as far back. In a ring nothing is first (-1), and its smallest unit is found.
    """
    count = len(before)
    first = np.where(before < 0, np.arange(count), -1)
    back, rank, smallest = before.copy(), (before >= 0).astype(np.int64), unit.copy()
    for _ in range(max(1, int(count).bit_length())):
        more = np.flatnonzero(back >= 0)
        if not len(more):
            break
        there = back[more]
        smallest[more] = np.minimum(smallest[more], smallest[there])
        first[more] = first[there]
        rank[more] += rank[there]
        back[more] = back[there]
    return first, rank, smallest


def where_to(moves: Moves, size: int) -> np.ndarray:
    """int64 [size + 1]: where each held unit's content is after the moves."""
    where = np.arange(size + 1)
    where[moves.src] = moves.dst
    return where


def moved(layout: Layout, moves: Moves) -> Layout:
    """The layout after the moves."""
    where = where_to(moves, layout.size)
    chains = tuple(where[c] for c in layout.chains)
    return Layout(layout.size, chains, layout.growth, free_units(layout.size, chains))


def free_units(size: int, held: Sequence[np.ndarray]) -> np.ndarray:
    """Units 1 to ``size`` in none of ``held``, ascending."""
    free = np.ones(size + 1, dtype=bool)
    free[0] = False
    for units in held:
        free[units] = False
    return np.flatnonzero(free)


def _run_lengths(units: np.ndarray) -> np.ndarray:
    if not len(units):
        return np.zeros(0, dtype=np.int64)
    cuts = np.flatnonzero(np.diff(units) != 1) + 1
    return np.diff(np.concatenate([[0], cuts, [len(units)]]))


def _stretches(layout: Layout, long: int, most: int) -> list[tuple[np.ndarray, int]]:
    """Neighbouring short runs of each chain, cut to ``most`` units, most runs for each unit first."""
    found = []
    for chain, growth in zip(layout.chains, layout.growth, strict=True):
        lengths = _run_lengths(chain)
        short = lengths < long
        ends = np.cumsum(lengths)
        edges = np.flatnonzero(np.diff(np.concatenate([[False], short, [False]]).astype(np.int8)))
        for first, last in zip(edges[::2], edges[1::2], strict=True):
            start, stop = int(ends[first] - lengths[first]), int(ends[last - 1])
            for at in range(start, stop, most):
                piece = chain[at : min(at + most, stop)]
                if at and len(piece) < long and at == stop - len(piece):
                    # a short end keeps company with the units before it, or it would stay a short run for ever
                    piece = chain[max(0, stop - most) : stop]
                found.append((len(_run_lengths(piece)) / len(piece), piece, growth if stop == len(chain) else 0))
    found.sort(key=lambda f: (-f[0], int(f[1][0])))
    return [(piece, growth) for _, piece, growth in found]


_Swap = tuple[np.ndarray, np.ndarray]  # sources, destinations


class _Board:
    """The pool while a plan is made. Pieces name units as they were at the start; ``now`` says where they went and
    ``was`` who is there. A swap touches the units that it moves and their neighbours, whatever the size of the pool."""

    def __init__(self, layout: Layout) -> None:
        n = layout.size + 2
        self.size = layout.size
        self.now, self.was = np.arange(n), np.arange(n)
        self.where = np.arange(n)  # scratch: where a swap puts each unit
        self.units = np.concatenate([np.zeros(0, dtype=np.int64), *layout.chains])
        self.after = np.full(n, -1, dtype=np.int64)  # unit of the next token of the chain
        self.before = np.full(n, -1, dtype=np.int64)
        self.held = np.zeros(n, dtype=bool)
        for chain in layout.chains:
            self.held[chain] = True
            self.after[chain[:-1]] = chain[1:]
            self.before[chain[1:]] = chain[:-1]
        self._survey()

    def _survey(self) -> None:
        """What finding windows needs: free runs, and sums of held units and of joined neighbours up to each unit."""
        n = self.size
        edges = np.flatnonzero(np.diff(np.concatenate([[True], self.held[1 : n + 1], [True]]).astype(np.int8)))
        self.free_starts, self.free_lengths = edges[::2] + 1, edges[1::2] - edges[::2]
        units = np.arange(n + 1)
        joined = self.after[: n + 1] == units + 1
        self.joined = np.concatenate([[0], np.cumsum(joined)])  # [i]: units below i with their successor beside them
        self.taken = np.concatenate([[0], np.cumsum(self.held[: n + 1])])

    def place(self, piece: np.ndarray, growth: int, most: int) -> int:
        """Make ``piece`` one run with at most ``most`` moves, where that helps; the moves it took."""
        piece = self.now[piece]
        swap = self._best(piece, growth, most)
        if swap is None and len(piece) > most // 2 >= 2:
            swap = self._best(piece[: most // 2], 0, most)  # changing places costs twice the piece
        if swap is None:
            return 0
        self._apply(*swap)
        return len(swap[0])

    def _apply(self, src: np.ndarray, dst: np.ndarray) -> None:
        before, after = self._mapped(src, dst, self.before[src]), self._mapped(src, dst, self.after[src])
        was = self.was[src]
        for links, none in ((self.held, False), (self.before, -1), (self.after, -1)):
            links[src] = none
        self.now[was], self.was[dst], self.held[dst] = dst, was, True
        self.before[dst], self.after[dst] = before, after
        self.after[before[before >= 0]] = dst[before >= 0]
        self.before[after[after >= 0]] = dst[after >= 0]
        self._survey()

    def _mapped(self, src: np.ndarray, dst: np.ndarray, units: np.ndarray) -> np.ndarray:
        """Where ``units`` are after a swap; -1 stays."""
        self.where[src] = dst
        found = np.where(units >= 0, self.where[units], -1)
        self.where[src] = src
        return found

    def _best(self, piece: np.ndarray, growth: int, most: int) -> _Swap | None:
        best: tuple[tuple[int, int, int], _Swap] | None = None
        ahead, m = int(self.before[piece[0]]), len(piece)
        places = [self._free_window(m + growth), self._free_window(m), self._cheapest_window(m)]
        places += [ahead + 1 if ahead >= 0 else -1, int(piece[0])]
        for start in dict.fromkeys(places):
            if start < 1 or start + m - 1 > self.size:
                continue
            swap = self._swap(piece, start)
            if not 0 < len(swap[0]) <= most:
                continue
            gain = self._gain(*swap)
            score = (-gain, len(swap[0]), start)
            if gain > 0 and (best is None or score < best[0]):
                best = score, swap
        return best[1] if best else None

    def _free_window(self, m: int) -> int:
        """Start of the smallest free run of at least ``m`` units, the lowest of equals; -1 where there is none."""
        fits = np.flatnonzero(self.free_lengths >= m)
        return int(self.free_starts[fits[np.argmin(self.free_lengths[fits])]]) if len(fits) else -1

    def _cheapest_window(self, m: int) -> int:
        """Start of the window of ``m`` units whose occupants lose the fewest neighbours, then are the fewest."""
        if m > self.size:
            return -1
        joined = self.joined[m + 1 :] - self.joined[: self.size - m + 1]
        taken = self.taken[m + 1 :] - self.taken[1 : self.size - m + 2]
        return 1 + int(np.argmin(joined * (m + 1) + taken))

    def _swap(self, piece: np.ndarray, start: int) -> _Swap:
        """``piece`` into the window at ``start``; who was there takes the places that the piece left."""
        m = len(piece)
        window = np.arange(start, start + m)
        inside = (piece >= start) & (piece < start + m)
        own = np.zeros(m, dtype=bool)
        own[piece[inside] - start] = True
        others = window[self.held[start : start + m] & ~own]
        left = np.sort(piece[~inside])[: len(others)]
        src, dst = np.concatenate([piece, others]), np.concatenate([window, left])
        stays = src == dst
        return src[~stays], dst[~stays]

    def _gain(self, src: np.ndarray, dst: np.ndarray) -> int:
        """How many breaks between a token and its successor the swap removes."""
        before = self.before[src]
        first = np.unique(np.concatenate([src, before[before >= 0]]))
        first = first[self.after[first] >= 0]
        second = self.after[first]
        return int((second != first + 1).sum()) - int(
            (self._mapped(src, dst, second) != self._mapped(src, dst, first) + 1).sum()
        )
