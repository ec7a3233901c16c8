"""Times on the current CUDA device: events, L2 flushed before each sample, peers in rotating order.

L2 is flushed by reading: what a flush by writing leaves in L2 is written back while the next kernel runs, at its cost.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch

WARMUPS = 2
FLUSHED = "L2 flushed by reading before each sample"


def graph(call: Callable[[], object]) -> Callable[[], None]:
    """A replay of ``call`` from a CUDA graph."""
    call()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        call()

    def replay(_reads: Callable[[], object] = call) -> None:  # a graph does not keep what it reads: ``call`` does
        captured.replay()

    return replay


@functools.cache
def _more_than_l2(device: int) -> torch.Tensor:
    del device
    return torch.zeros(64 << 20, device="cuda")  # 256 MB


def sample(call: Callable[[], object]) -> float:
    """Microseconds of one call on the current stream, after a flush of L2."""
    _more_than_l2(torch.cuda.current_device()).sum()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3


def measure(timed: Mapping[str, Callable[[], object]], rounds: int, warmups: int = WARMUPS) -> dict[str, list[float]]:
    """Microseconds of each peer, ``rounds`` samples in the order taken, after ``warmups`` that do not count."""
    names, samples = list(timed), {name: [] for name in timed}
    for i in range(warmups + rounds):
        for k in range(len(names)):
            name = names[(i + k) % len(names)]
            took = sample(timed[name])
            if i >= warmups:
                samples[name].append(took)
    return samples
