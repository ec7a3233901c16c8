"""What the CUDA kernel should take on sm_120 cards: a PREDICTION from one card's measured record, never a measurement.

usage: predict.py            a table from the newest record of a GPU in results/ that timed the kernel

A block of 64 rows (or fewer) on one multiprocessor works through its share of the prefix in tiles of 16 tokens. From
the record: cycles of a tile, of which the matrix pipe needs a part that the record's mma.sync rate gives; the rest is
waiting, barriers, softmax. On another card the waiting is taken as equal in cycles, the matrix part is scaled by what
its multiprocessor multiplies a cycle, and the whole can't be shorter than the K/V bytes over the share of the card's
bandwidth that copies reached in the record.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path

from bench_cuda import ROW_BYTES, ROW_FLOP
from mla_verify_bench import records
from mla_verify_bench.diagnose import GPUS

from bench import Shape

KEYS, FIXED_US = 16, 8.0  # fixed: launches, first tiles, merge at few rows


@dataclass(frozen=True)
class Card:
    """Published figures. ``mma_tflops`` dense bf16 with float32 sums."""

    name: str
    multiprocessors: int
    clock_ghz: float
    bandwidth_gb_s: float
    mma_tflops: float

    def flop_per_cycle(self) -> float:
        """Of one multiprocessor."""
        return self.mma_tflops * 1e3 / self.multiprocessors / self.clock_ghz


def bandwidth(name: str) -> float:
    return GPUS[name.lower()][0]


MEASURED_CARDS = {"NVIDIA H200": Card("H200", 132, 1.98, bandwidth("H200"), 0)}
CARDS = [
    Card("RTX PRO 6000", 188, 2.6, bandwidth("RTX PRO 6000"), 504),
    Card("RTX 5090", 170, 2.4, bandwidth("RTX 5090"), 209.5),
]
SHAPES = [(8, 1), (16, 1), (8, 8), (8, 16), (16, 16), (64, 64)]
LENGTH = 185_000


@dataclass(frozen=True)
class Measured:
    """One record's figures: the card, its ceilings, and medians in µs by (heads, nodes) at ``LENGTH``."""

    card: Card
    copy_gb_s: float
    mma_tflops: float
    us: dict[tuple[int, int], float]


def newest(results: Path) -> Measured | None:
    """From the newest record that timed the kernel on a card known here; None where there is none."""
    for _, record in sorted(records.read_all(results), key=lambda pair: pair[1].utc, reverse=True):
        gpu = record.hardware.gpu
        card = MEASURED_CARDS.get(gpu.name) if gpu else None
        for run in record.runs if card and record.phase == "phase1" else ():
            if "mma_flop_s" in run.metrics:
                names = {(h, n): f"cuda {Shape(h, n, LENGTH)}" for h, n in SHAPES}
                us = {at: run.samples[name].median for at, name in names.items() if name in run.samples}
                return Measured(card, run.metrics["copy_bytes_s"] / 1e9, run.metrics["mma_flop_s"] / 1e12, us)
    return None


def tiles_in_a_row(card: Card, rows: int) -> float:
    """Tiles that the busiest multiprocessor works through, one block at a time (cuda_kernels.SplitRule)."""
    pieces = card.multiprocessors - 1
    blocks = -(-rows // 64) * pieces
    each = math.ceil(LENGTH / pieces / KEYS)
    return math.ceil(blocks / card.multiprocessors) * each


def predict(measured: Measured, card: Card, rows: int, us: float) -> float:
    """µs on ``card`` of what took ``us`` on the measured one."""
    matrix = ROW_FLOP * min(64, max(16, rows)) * KEYS  # FLOP of a tile; a block has 16 rows at least
    here = measured.card
    rate = measured.mma_tflops * 1e3 / here.multiprocessors / here.clock_ghz
    cycles = (us - FIXED_US) * 1e3 * here.clock_ghz / tiles_in_a_row(here, rows)
    waiting = max(0.0, cycles - matrix / rate)
    there = waiting + matrix / card.flop_per_cycle()
    compute = tiles_in_a_row(card, rows) * there / (card.clock_ghz * 1e3)
    copies = LENGTH * ROW_BYTES / (card.bandwidth_gb_s * measured.copy_gb_s / here.bandwidth_gb_s) / 1e3
    return FIXED_US + max(compute, copies)


def predictions(measured: Measured) -> dict[str, float]:
    """µs by card and shape, at ``LENGTH``, batch 1, bf16."""
    return {
        f"{card.name} H={h} N={n}": predict(measured, card, h * n, us)
        for card in CARDS
        for (h, n), us in measured.us.items()
    }


def main() -> None:
    from rich.console import Console
    from rich.table import Table

    measured = newest(Path(__file__).resolve().parents[2] / "results")
    if measured is None:
        sys.exit("no record in results/ times the CUDA kernel on a known GPU; run nox -s phase1 there first")
    table = Table(
        "shape", f"{measured.card.name}, measured", *(c.name for c in CARDS), title="µs; PREDICTED but for one"
    )
    found = predictions(measured)
    for (h, n), us in measured.us.items():
        cells = (f"{found[f'{card.name} H={h} N={n}']:.0f}" for card in CARDS)
        table.add_row(f"H={h} N={n} L={LENGTH:,}", f"{us:.0f}", *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
