"""Which free slots a request gets: neighbours, so that there is less to put right afterwards.

SGLang's allocator hands out the front of its free list and appends what comes back, so requests that decode together
take slots in turn and nobody's lie side by side. With this policy the free list is cut into runs now and then (at a
safe point, when it has been read anyway). A prompt gets the smallest run that holds it and its growth; a request that
grows has a lane of free slots behind its last one. Lanes are free slots like others: whoever finds nothing else gets
them, so no request is refused that the stock allocator would serve.

Between two cuts nothing is read from the device: cuts are known on the host by their place in the list, what is freed
is appended uncut, and an allocation is made of slices. The free list is what lies between the holes that allocations
have left, so a step costs as many slices as there are requests, however many runs there are. For pages of one slot;
larger pages are runs already.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

RUNS = 4096  # the largest runs that are handed out as such; a pool with more needs moves, not a policy

Part = list[int]  # [start, stop) in the list as it was cut


class BestFit:
    """Replaces ``alloc`` of one TokenToKVPoolAllocator.

    lane  slots to keep free behind a growing request
    """

    def __init__(self, allocator, lane: int) -> None:
        if allocator.page_size != 1:
            raise ValueError(f"page_size is {allocator.page_size}; best-fit runs are for pages of one slot")
        self.allocator, self.lane = allocator, lane
        self._stock, self._clear = allocator.alloc, allocator.clear
        self._expected: list[tuple[str, int]] = []
        self.forget()
        allocator.alloc, allocator.clear = self.alloc, self.clear

    def expect(self, needs: Sequence[tuple[str, int]]) -> None:
        """The next allocation is for these requests, (name, slots) in the order in which they get them."""
        self._expected = list(needs)

    def cut(self, free: np.ndarray, ends: Iterable[tuple[str, int]]) -> None:
        """Cut the free list into runs.

        free  all free slots, ascending
        ends  (name, last slot) of the requests that will grow, in an order that all ranks share
        """
        free = np.asarray(free, dtype=np.int64)
        edges = np.flatnonzero(np.diff(free, prepend=-1) != 1)
        starts, stops = edges.copy(), np.append(edges, len(free))[1:]
        self._lanes = {}
        for name, last in ends:
            at = int(np.searchsorted(free, last + 1))
            if at < len(free) and free[at] == last + 1:
                run = int(np.searchsorted(edges, at))
                starts[run] = min(stops[run], at + self.lane)
                self._lanes[name] = [at, int(starts[run])]
        sizes = stops - starts
        largest = np.argsort(-sizes, kind="stable")[:RUNS]
        largest = largest[sizes[largest] >= max(1, self.lane // 4)]  # crumbs cost a step more than they bring
        self._runs = sorted(zip(sizes[largest].tolist(), starts[largest].tolist(), strict=True))
        self._list = torch.from_numpy(free).to(self.allocator.device)
        self._holes = []
        self._cut_left = len(free)
        self.allocator.free_pages = self._list
        self.allocator.release_pages = self.allocator.release_pages[:0]

    def alloc(self, need_size: int) -> Tensor | None:
        """``need_size`` slots; None where there are not as many."""
        needs, self._expected = self._expected, []
        if self._list is None or need_size <= 0 or self.allocator.need_sort:
            return self._stock(need_size)
        free = self.allocator.free_pages
        if need_size > len(free):
            return None
        if sum(count for _, count in needs) != need_size:
            needs = [("", need_size)]
        uncut = free[self._cut_left :]
        parts: list[Part] = []
        short = 0
        for name, count in needs:
            taken = self._take(name, count)
            short += count - sum(stop - start for start, stop in taken)
            parts += taken
            for start, stop in taken:
                self._punch(start, stop)
            if short:  # what is cut does not suffice: the whole rest comes from lanes and from what was freed since
                return self._plain(need_size, parts, uncut)
        self._cut_left -= need_size
        self.allocator.free_pages = torch.cat([*self._slices(self._left()), uncut])
        return torch.cat(self._slices(parts))

    def clear(self) -> None:
        """Of the allocator: all slots are free and in order again."""
        self._clear()
        self.forget()

    def forget(self) -> None:
        """The free list is somebody else's now, and uncut."""
        self._list: Tensor | None = None
        self._lanes: dict[str, Part] = {}  # by request
        self._runs: list[tuple[int, int]] = []  # (size, start) of the other runs, ascending
        self._holes: list[Part] = []  # what has been handed out since; ascending, no two touch
        self._cut_left = 0

    def _take(self, name: str, count: int) -> list[Part]:
        """Up to ``count`` slots: the request's lane, then runs, the best first."""
        taken: list[Part] = []
        lane = self._lanes.get(name) if name else None
        if lane is not None:
            part = [lane[0], min(lane[1], lane[0] + count)]
            lane[0] = part[1]
            taken += [part] if part[0] < part[1] else []
            count -= part[1] - part[0]
        room = self.lane if name else 0
        while count and self._runs:
            best = bisect_left(self._runs, (count + room, 0))
            size, start = self._runs.pop(min(best, len(self._runs) - 1))
            stop = start + min(size, count)
            taken.append([start, stop])
            count -= stop - start
            end = stop
            if not count and room:
                end = min(start + size, stop + room)
                self._lanes[name] = [stop, end]
            if end < start + size:
                insort(self._runs, (start + size - end, end))
        return taken

    def _punch(self, start: int, stop: int) -> None:
        """[start, stop) has been handed out."""
        holes = self._holes
        i = bisect_left(holes, [start, stop])
        if i and holes[i - 1][1] == start:
            i -= 1
            holes[i][1] = stop
        else:
            holes.insert(i, [start, stop])
        if i + 1 < len(holes) and holes[i + 1][0] == stop:
            holes[i][1] = holes.pop(i + 1)[1]

    def _left(self) -> list[Part]:
        edges = [0, *(edge for hole in self._holes for edge in hole), len(self._list)]
        return [[start, stop] for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop]

    def _plain(self, need_size: int, parts: list[Part], uncut: Tensor) -> Tensor:
        """Everything is one uncut list from now on, what was chosen so far first."""
        whole = torch.cat([*self._slices(parts), *self._slices(self._left()), uncut])
        self.forget()
        self.allocator.free_pages = whole[need_size:]
        return whole[:need_size]

    def _slices(self, parts: list[Part]) -> list[Tensor]:
        return [self._list[start:stop] for start, stop in parts]
