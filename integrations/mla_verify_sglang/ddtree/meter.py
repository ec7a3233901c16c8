"""What steps cost and what their drafts promised, read from the device without ever waiting for it.

A step lasts until the next one begins, so that the host's time counts where the host is the limit. A step's beginning
is an event on its stream; it is asked whether it has come, never waited for. Promises are copied to pinned memory
behind the step and are there when the next step's event is.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from .budget import Observation

LATE = 16  # steps that may be open; a device that is further behind is not observed


@dataclass
class _Open:
    width: int
    batch: int
    depth: int
    requests: tuple[int, ...]
    counts: bool
    began: torch.cuda.Event | float
    ended: torch.cuda.Event | float | None = None
    promised: Tensor | None = None  # on the host, [batch, widths]


class Meter:
    """Observes the decode steps of one worker."""

    def __init__(self, device: torch.device | str) -> None:
        self._cuda = torch.device(device).type == "cuda"
        self._last: _Open | None = None
        self._ended: deque[_Open] = deque()
        self._pinned: deque[Tensor] = deque()

    def begin(self, width: int, depth: int, requests: tuple[int, ...], counts: bool) -> None:
        """A decode step begins, of the requests of these ids. ``counts``: how long it takes is to be known."""
        if self._cuda:
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
        else:
            mark = time.perf_counter()
        if (last := self._last) is not None and len(self._ended) < LATE:
            last.ended = mark
            last.counts &= last.requests == requests  # else the scheduler may have waited for them in between
            self._ended.append(last)
        self._last = _Open(width, len(requests), depth, requests, counts, mark)

    def interrupt(self) -> None:
        """Something else than a decode step runs."""
        if self._last is not None:
            self._last.counts = False

    def promise(self, expected: Tensor) -> None:
        """What the step that began last promises: ``DraftTree.expected_drafts``, [batch, widths]."""
        if not self._cuda:
            self._last.promised = expected.clone()
            return
        kept = self._pinned.popleft() if self._pinned else None
        if kept is None or len(kept) < len(expected):
            kept = torch.empty(max(16, 2 * len(expected)), expected.shape[1], pin_memory=True)
        kept[: len(expected)].copy_(expected, non_blocking=True)
        self._last.promised = kept

    def read(self) -> list[Observation]:
        """The steps that have ended since it was last asked, in order."""
        found = []
        while self._ended and (not self._cuda or self._ended[0].ended.query()):
            step = self._ended.popleft()
            seconds = promised = None
            if step.counts:
                seconds = step.began.elapsed_time(step.ended) / 1e3 if self._cuda else step.ended - step.began
            if step.promised is not None:
                promised = tuple(step.promised[: step.batch].mean(0).tolist())
                if self._cuda:
                    self._pinned.append(step.promised)
            if seconds is not None or promised is not None:
                found.append(Observation(step.width, step.batch, step.depth, seconds, promised))
        return found
