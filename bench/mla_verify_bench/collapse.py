"""What one verify step costs a layer, SGLang's kernel against ours, from a phase 1 record.

usage: python -m mla_verify_bench.collapse RECORD.json docs/collapse.svg
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from . import records

NAMES = {"sglang": "SGLang's verify kernel", "cuda": "ours, CUDA (sm_120's instructions)", "triton": "ours, Triton"}
COLOURS = {"sglang": "#b8bcc4", "cuda": "#e8833a", "triton": "#2b6cb0"}
KEY = re.compile(r"(?P<peer>\w+) H=(?P<heads>\d+) N=(?P<nodes>\d+) L=(?P<prefix>\d+)")


def draw(record: records.Record, to: Path) -> None:
    """Bars of the median time per shape, log scale, with how many times faster the better of ours is."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "mla-verify"
    import matplotlib.pyplot as plt

    medians: dict[tuple[int, int, int], dict[str, float]] = {}
    for run in record.runs:
        for name, samples in run.samples.items():
            if (m := KEY.fullmatch(name)) and int(m["nodes"]) == 16:
                shape = (int(m["prefix"]), int(m["heads"]), int(m["nodes"]))
                medians.setdefault(shape, {})[m["peer"]] = samples.median / 1e3
    shapes = sorted(shape for shape, times in medians.items() if NAMES.keys() <= times.keys())
    figure, axes = plt.subplots(figsize=(8.6, 4.4), layout="constrained")
    for i, peer in enumerate(NAMES):
        times = [medians[s][peer] for s in shapes]
        bars = axes.bar([x + 0.27 * (i - 1) for x in range(len(shapes))], times, 0.25, color=COLOURS[peer])
        axes.bar_label(bars, [f"{t:.2f}" if t < 10 else f"{t:.1f}" for t in times], padding=2, fontsize=8)
        bars.set_label(NAMES[peer])
    for x, shape in enumerate(shapes):
        best = min(t for peer, t in medians[shape].items() if peer != "sglang")
        axes.annotate(
            f"{medians[shape]['sglang'] / best:.0f} ×", (x, 1.02), xycoords=("data", "axes fraction"), ha="center",
            fontsize=12, weight="bold", color=COLOURS["triton"],
        )  # fmt: skip
    axes.set_yscale("log")
    axes.set_ylim(0.01, 120)
    axes.set_xticks(range(len(shapes)), [f"{p:,} tokens\n{h} heads" for p, h, _ in shapes], fontsize=8)
    axes.set_ylabel("ms per layer and verify step")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left", fontsize=9)
    figure.suptitle(f"MLA verify attention, 16 nodes, bf16, batch 1, one {record.hardware.name}", fontsize=11)
    figure.savefig(to, metadata={"Date": None})


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    draw(records.read(Path(sys.argv[1])), Path(sys.argv[2]))
