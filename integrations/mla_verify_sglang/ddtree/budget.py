"""How wide the next verify pass is: the width that gives most tokens a second, by what steps have cost and brought.

    tokens a second of width w = (1 + drafts that are accepted at w) / seconds of a step at w

Seconds are measured, for each width, batch size and depth. Accepted drafts are what the drafter's own probabilities
promise (``DraftTree.expected_drafts``), which is known for all widths as soon as something was drafted, times how much
of such promises came true. Both arrive steps later. Nothing here reads a clock or draws at random: ranks that are
given the same observations choose the same widths.

Width 1 does not draft at all; the drafter's block is the chain's cost; the widest is the most a window holds.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

NODES = "ddtree_nodes"  # in meta_info
SAMPLES = 9  # the median of so many last steps is what a step costs
ENOUGH = 3  # fewer are no measurement
SETTLING = 1  # steps after a switch that do not count: the first replay of a graph uploads it
MARGIN = 0.015  # a width must promise so much more before it replaces the one in use
CLOSE = 0.15  # widths that promise so much less than the best may be the best: worth a measurement
DRIFT = 1.25  # a cost that has changed by so much makes those of the other widths, which were not in use, worthless
STALE = 512  # steps after which a close width is measured again
ANSWER = 32  # steps within which a measurement has come back, or never will
READ = 4  # of so many drafts one promise is read
PROBING = 0.01  # of the time without drafts that trying one may take, to see whether it would pay now
HOLD = 8  # steps from one decision to the next, which takes the host some 50 µs
FADE = 1 - 1 / 128  # of what came true, a step
PRIOR = 100.0  # drafts that a width's own record must outweigh: a measurement's few steps say little of it


def ladder(block: int, widest: int) -> tuple[int, ...]:
    """The widths to choose from, one set of graphs each: 1, the drafter's block, powers of two above, ``widest``."""
    return (1, block, *(w for w in (16, 32, 64, 128) if block < w < widest), *((widest,) if widest > block else ()))


@dataclass(frozen=True)
class Observation:
    """A step that has run: ``batch`` requests, the longest of ``depth`` tokens.

    ``seconds`` until the next one began; None where something else came between. ``promised``: for each width of the
    policy the accepted drafts a request that the drafter's probabilities promise; None where nothing was read.
    """

    width: int
    batch: int
    depth: int
    seconds: float | None = None
    promised: tuple[float, ...] | None = None


def note_nodes(request, width: int, tokens: int) -> None:
    """A pass of ``width`` nodes gave the next ``tokens`` tokens of this SGLang request: say so in its meta_info.

    ``ddtree_nodes`` there is a list by token, as SGLang hands such lists out; 0 for a token that prefill gave.
    """
    if request.customized_info is None:
        request.customized_info = {}
    nodes = request.customized_info.setdefault(NODES, [])
    before = len(request.output_ids)
    del nodes[before:]  # of tokens that were taken back
    nodes += [0] * (before - len(nodes)) + [width] * tokens


Cell = tuple[int, int]  # batch and depth, each as a power of two


@dataclass
class _Cost:
    samples: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    at: int = 0  # the step of the last one
    seconds: float | None = None  # the median; None while there are too few
    once: float | None = None  # what that was when the other widths were measured

    @property
    def lasts(self) -> float:
        """Steps until it is to be measured again: few samples are soon not enough."""
        return STALE * (len(self.samples) / SAMPLES) ** 2

    def add(self, seconds: float, step: int) -> bool:
        """Whether it has drifted."""
        self.samples.append(seconds)
        self.at = step
        if len(self.samples) < ENOUGH:
            return False
        self.seconds = sorted(self.samples)[len(self.samples) // 2]
        drifted = self.once is not None and not 1 / DRIFT < self.seconds / self.once < DRIFT
        if drifted or self.once is None:
            self.once = self.seconds
        return drifted


class Policy:
    """Chooses among ``widths``, increasing; one width is no choice and costs nothing."""

    def __init__(self, widths: Sequence[int]) -> None:
        self.widths = tuple(widths)
        self.drafting = [w for w in self.widths if w > 1]
        self.steps: Counter[int] = Counter()
        self._step = 0
        self._now = self.drafting[0]
        self._since = 0  # step at which the width in use came into use
        self._burst: list[int] = []  # widths of the next steps
        self._costs: dict[tuple[int, int], dict[int, _Cost]] = {}  # by width and batch, then by depth
        self._asked: dict[tuple[int, Cell], int] = {}  # the step at which a measurement was begun
        self._promised: dict[int, float] = {}
        self._promised_at = self._read_at = 0
        self._came_true = {w: [0.0, 0.0] for w in self.drafting}  # accepted, promised
        self._undrafted, self._probes = 0, 0
        self._held, self._decides, self._cell = self._now, 0, (-1, -1)  # the last decision, and until when it holds

    @property
    def is_choice(self) -> bool:
        return len(self.widths) > 1

    def choose(self, batch: int, depth: int) -> int:
        """The width of the next step, of ``batch`` requests of which the longest has ``depth`` tokens."""
        self._step += 1
        width = self._next(((batch - 1).bit_length(), depth.bit_length())) if self.is_choice else self.widths[0]
        if width != self._now:
            self._now, self._since = width, self._step
        self._undrafted = self._undrafted + 1 if width == 1 else 0
        self.steps[width] += 1
        return width

    # ---- what is observed ----

    def observe(self, seen: Iterable[Observation]) -> None:
        for one in seen:
            if one.seconds is not None and one.seconds > 0:
                batch, depth = (one.batch - 1).bit_length(), one.depth.bit_length()
                if (
                    self._costs.setdefault((one.width, batch), {})
                    .setdefault(depth, _Cost())
                    .add(one.seconds, self._step)
                ):
                    for other in self.widths:
                        if other != one.width:
                            self._costs.get((other, batch), {}).pop(depth, None)
                            self._asked.pop((other, (batch, depth)), None)
            if one.promised is not None:
                # After steps without drafts the text is another one.
                weight = 0.5 if self._step - self._promised_at > 8 * READ else 0.125
                for width, promise in zip(self.widths, one.promised, strict=True):
                    before = self._promised.get(width, promise)
                    self._promised[width] = before + weight * (promise - before)
                self._promised_at = self._step

    def accepted(self, width: int, drafts: Sequence[int]) -> None:
        """A step of ``width`` accepted so many drafts of each request."""
        if width > 1 and self._promised:
            record = self._came_true[width]
            record[0] = record[0] * FADE + sum(drafts) / len(drafts)
            record[1] = record[1] * FADE + self._promised[width]

    def settled(self) -> bool:
        """Whether the step that was chosen last is one to measure."""
        return self._step - self._since >= SETTLING

    def reads_promise(self) -> bool:
        """Whether the promise of the step that was chosen last is to be read."""
        due = self._now > 1 and self.is_choice and (self._step - self._read_at >= READ or not self._promised)
        self._read_at = self._step if due else self._read_at
        return due

    # ---- what follows from it ----

    def tokens(self) -> dict[int, float]:
        """Tokens that a step is expected to commit for a request, by width; before anything was drafted only of 1."""
        found = {1: 1.0} if self.widths[0] == 1 else {}
        if self._promised:
            total = [sum(part) for part in zip(*self._came_true.values(), strict=True)]
            shared = PRIOR * (total[0] + 1.0) / (total[1] + 1.0)
            for width, (accepted, promised) in self._came_true.items():
                found[width] = 1.0 + self._promised[width] * (accepted + shared) / (promised + PRIOR)
        return found

    def seconds(self, width: int, cell: Cell) -> float | None:
        """What a step costs in ``cell``: measured there, else as at the nearest depth, scaled by what both have.

        From one batch size to another widths do not scale alike: there they are measured anew.
        """
        batch, depth = cell
        known = self._costs.get((width, batch), {})
        if (own := known.get(depth)) is not None and own.seconds is not None:
            return own.seconds
        near = [d for d, cost in known.items() if cost.seconds is not None]
        if not near:
            return None
        other = min(near, key=lambda d: (abs(d - depth), d))
        scales = []
        for w in self.widths:
            costs = self._costs.get((w, batch), {})
            here, there = costs.get(depth), costs.get(other)
            if here and there and here.seconds and there.seconds:
                scales.append(here.seconds / there.seconds)
        return known[other].seconds * (sorted(scales)[len(scales) // 2] if scales else 1.0)

    def _next(self, cell: Cell) -> int:
        if self._burst:
            return self._burst.pop()
        if self._step < self._decides and cell == self._cell:
            return self._held
        self._decides, self._cell = self._step + HOLD, cell
        self._held = self._decide(cell)
        return self._held

    def _decide(self, cell: Cell) -> int:
        tokens, costs, speeds = self.tokens(), {}, {}
        for width in self.widths:
            if (seconds := self.seconds(width, cell)) is not None:
                costs[width] = seconds
                if width in tokens:
                    speeds[width] = tokens[width] / seconds
        if (unknown := self._worth_measuring(cell, speeds, tokens, costs)) is not None:
            self._burst = [unknown] * (SETTLING + ENOUGH - 1)
            self._decides = 0
            return unknown
        if not speeds:
            return self.drafting[0]  # nothing has come back yet
        best = max(speeds, key=lambda w: speeds[w])
        if self._now in speeds and speeds[best] <= speeds[self._now] * (1 + MARGIN):
            best = self._now
        if best > 1:
            self._probes = 0
        elif self._undrafted >= self._patience(costs):
            self._probes += 1
            self._decides = 0
            return self.drafting[0]
        return best

    def _patience(self, costs: dict[int, float]) -> float:
        """Steps without a draft before one is tried: few at first, in the end so many that it costs no more."""
        chain, plain = costs.get(self.drafting[0]), costs.get(1)
        dear = max(chain / plain - 1.0, 0.2) if chain and plain else 1.0
        return dear / PROBING * min(1.0, 2.0 ** (self._probes - 3))

    def _worth_measuring(
        self, cell: Cell, speeds: dict[int, float], tokens: dict[int, float], costs: dict[int, float]
    ) -> int | None:
        """The most promising width of which too little is known here and that may be the best."""
        best, chosen = max(speeds.values(), default=0.0), None
        never = [w for w in self.drafting if w not in speeds]
        for width in self.widths if speeds else ():
            cost = self._costs.get((width, cell[0]), {}).get(cell[1])
            fresh = cost is not None and cost.seconds is not None and self._step - cost.at < cost.lasts
            # One step up the ladder after another: each says what the next one costs at least.
            if width == self._now or fresh or width in never[1:] or self._in_flight(width, cell):
                continue
            speed, least = speeds.get(width), best * (1 - CLOSE)
            if speed is None:
                speed, least = tokens.get(width, 0.0) / self._at_least(width, costs), best * (1 + MARGIN)
            if speed > least and (chosen is None or speed > chosen[0]):
                chosen = speed, width
        if chosen is None:
            return None
        self._asked[chosen[1], cell] = self._step
        return chosen[1]

    def _in_flight(self, width: int, cell: Cell) -> bool:
        return self._step - self._asked.get((width, cell), -ANSWER) < ANSWER

    def _at_least(self, width: int, costs: dict[int, float]) -> float:
        """Seconds of a width that was never measured, by those that were.

        More nodes cost no less than fewer, and where a pass has begun to cost more for its nodes, at least half as
        much for each one more. No draft: at least a quarter of a step with one.
        """
        below = [w for w in costs if w < width]
        if not below:
            return min(costs.values()) / 4
        least = costs[below[-1]]
        if len(below) > 1 and below[-2] > 1:
            slope = (least - costs[below[-2]]) / (below[-1] - below[-2])
            least += 0.5 * max(0.0, slope) * (width - below[-1])
        return least
