"""One rearrangement of a pool, whole or not at all, and what has been done so far."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass

from .holders import Holders, NotNow
from .move import Point, RowMover, nothing, rows_of
from .plan import Fragmentation, Layout, measure, moved, plan

logger = logging.getLogger(__name__)


@dataclass
class Counters:
    """What has been done since the server started."""

    runs: int = 0  # rearrangements that moved something
    moved_tokens: int = 0
    moved_bytes: int = 0
    seconds: float = 0.0  # planning, and moving as far as the host waits for it
    postponed: int = 0  # safe points at which the pool could not be rearranged
    failed: int = 0  # rearrangements that were undone


@dataclass(frozen=True)
class Outcome:
    """What one rearrangement did, for a log line and for ``mla-verify frag``."""

    before: Fragmentation
    after: Fragmentation
    tokens: int
    bytes: int
    seconds: float


class Defragmenter:
    """Rearranges one pool. Call it at a safe point only: no step may be reading or writing K/V.

    holders  who holds slots
    buffers  K/V tensors of the target and, where it has slots of the same numbers, of the draft
    """

    def __init__(self, holders: Holders, buffers) -> None:
        self.holders = holders
        self.mover = RowMover(buffers)
        self.counters = Counters()
        self.latest: Fragmentation | None = None

    def run(self, budget_bytes: int | None = None, point: Point = nothing) -> Outcome | None:
        """Rearrange, moving at most ``budget_bytes``; None when nothing was worth it or nothing could be moved.

        Raises what went wrong after everything has been put back.
        """
        began = time.perf_counter()
        try:
            layout = self.holders.read()
        except NotNow as reason:
            self.counters.postponed += 1
            logger.debug("K/V stays where it is: %s", reason)
            return None
        page = self.holders.page
        before = self.latest = measure(layout, page)
        held = sum(len(c) for c in layout.chains)
        budget = 2 * held if budget_bytes is None else budget_bytes // (self.mover.row_bytes * page)
        moves = plan(layout, budget, page)
        if not len(moves):
            return None
        try:
            with ExitStack() as undo:
                point("planned")
                self.mover.move(rows_of(moves, page), undo, point)
                self.holders.rewrite(moves, undo, point)
                undo.pop_all()
        except BaseException:
            self.counters.failed += 1
            raise
        after = self.latest = measure(moved(layout, moves), page)
        tokens = len(moves) * page
        outcome = Outcome(before, after, tokens, tokens * self.mover.row_bytes, time.perf_counter() - began)
        self.counters.runs += 1
        self.counters.moved_tokens += outcome.tokens
        self.counters.moved_bytes += outcome.bytes
        self.counters.seconds += outcome.seconds
        return outcome

    def layout(self) -> Layout:
        """The pool as it is. Raises NotNow."""
        return self.holders.read()

    def report(self) -> dict[str, dict]:
        """Counters and the latest fragmentation, plain numbers."""
        return {
            "counters": asdict(self.counters),
            "fragmentation": asdict(self.latest) if self.latest else {},
        }
