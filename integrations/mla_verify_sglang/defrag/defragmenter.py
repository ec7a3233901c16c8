"""One rearrangement of a pool, whole or not at all, and what has been done so far."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from dataclasses import dataclass

from .holders import Holders, NotNow
from .move import Point, RowMover, nothing, rows_of
from .plan import Fragmentation, Layout, Moves, measure, moved, plan, where_to
from .policy import BestFit

logger = logging.getLogger(__name__)


class UndoFailedError(RuntimeError):
    """The pool is neither as it was nor as it should be: nobody may read it any more."""


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
    policy   cut anew after every look at the pool
    """

    def __init__(self, holders: Holders, buffers, policy: BestFit | None = None) -> None:
        self.holders = holders
        self.policy = policy
        self.mover = RowMover(buffers)
        self.counters = Counters()
        self.latest: Fragmentation | None = None

    def run(self, budget_bytes: int | None = None, point: Point = nothing) -> Outcome | None:
        """Rearrange, moving at most ``budget_bytes`` (None: all); None when nothing was moved.

        Raises what went wrong after everything has been put back, UndoFailedError where even that failed.
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
            self._cut(layout, moves)
            return None
        cause: BaseException | None = None
        try:
            with ExitStack() as undo:
                try:
                    point("planned")
                    if self.policy is not None:
                        self.policy.forget()
                    self.mover.move(rows_of(moves, page), undo, point)
                    self.holders.rewrite(moves, undo, point)
                except BaseException as error:
                    cause = error
                    raise
                undo.pop_all()
        except BaseException as error:
            self.counters.failed += 1
            if error is not cause:
                raise UndoFailedError(f"K/V rows were moved by half ({cause!r}) and can't be put back") from error
            raise
        rearranged = moved(layout, moves)
        self._cut(rearranged, moves)
        after = self.latest = measure(rearranged, page)
        tokens = len(moves) * page
        outcome = Outcome(before, after, tokens, tokens * self.mover.row_bytes, time.perf_counter() - began)
        self.counters.runs += 1
        self.counters.moved_tokens += outcome.tokens
        self.counters.moved_bytes += outcome.bytes
        self.counters.seconds += outcome.seconds
        return outcome

    def _cut(self, layout: Layout, moves: Moves) -> None:
        if self.policy is not None:
            where = where_to(moves, layout.size)
            self.policy.cut(layout.free, [(name, int(where[last])) for name, last in self.holders.ends])
