"""What a move costs, on one GPU; the gates of phase 3 that need no server.

usage: bench.py gates [--rounds N]   the gates of phase.yaml that name this file
       bench.py table [--rounds N]   the same, for a person

move-bandwidth  16,384 scattered rows of 61 layers into a free run, the plan on the device: bytes read and written over
                the copy bandwidth of this run. The order of the two rotates, L2 is flushed before each
whole-pool      200,000 tokens of 61 layers, every slot out of place: time from the finished plan on the host to the
                last row, over 2 ms for each GB plus 5 ms. Planning comes before anything moves and is printed beside it
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from contextlib import ExitStack

import numpy as np
import torch
from mla_verify_bench.records import ratio_of_medians
from mla_verify_bench.timing import WARMUPS, measure, sample
from mla_verify_sglang.defrag import plan
from mla_verify_sglang.defrag.move import RowMover

LAYERS, WIDTH, DTYPE = 61, 576, torch.bfloat16
ROW_BYTES = LAYERS * WIDTH * 2
SOME, WHOLE, CHAINS = 16_384, 200_000, 8
SEED = 3


def scattered(size: int, held: int) -> plan.Layout:
    """``held`` units of CHAINS requests anywhere in a pool of ``size``."""
    order = np.random.default_rng(SEED).permutation(np.arange(1, size + 1))
    chains = tuple(np.array(c) for c in np.array_split(order[:held], CHAINS))
    return plan.Layout(size, chains, (0,) * CHAINS, plan.free_units(size, chains))


def pool(slots: int) -> list[torch.Tensor]:
    """Layers of a pool; the first words of a row name its slot and layer, so that a lost row is seen."""
    layers = [torch.empty(slots + 1, 1, WIDTH, dtype=DTYPE, device="cuda") for _ in range(LAYERS)]
    names = torch.arange(slots + 1, dtype=torch.int32, device="cuda")
    for i, layer in enumerate(layers):
        layer.view(slots + 1, -1).view(torch.int32)[:] = (names * LAYERS + i)[:, None]
    return layers


def require_moved(layers: list[torch.Tensor], moves: plan.Moves) -> None:
    """Exit where a row is not the one that the plan says."""
    src, dst = torch.from_numpy(moves.src).cuda(), torch.from_numpy(moves.dst).cuda()
    for i, layer in enumerate(layers):
        rows = layer.view(len(layer), -1).view(torch.int32)[dst]
        if not torch.equal(rows, (src.int() * LAYERS + i)[:, None].expand_as(rows)):
            sys.exit(f"layer {i}: rows are not where the plan puts them; no time counts")


def move_samples(rounds: int) -> tuple[list[float], list[float]]:
    """Milliseconds of moving SOME rows of all layers, and of a plain copy of as many bytes."""
    size = 4 * SOME
    layers = pool(size)
    order = np.random.default_rng(SEED).permutation(np.arange(1, 2 * SOME))[:SOME]
    there = plan.moves_of(order, np.arange(size - SOME + 1, size + 1))
    mover = RowMover(layers)
    mover.launch(there)
    require_moved(layers, there)
    source = torch.empty(SOME * ROW_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    (move,) = mover.prepared(there)  # all rows are of one width
    calls = {"move": move, "copy": lambda: target.copy_(source)}
    taken = measure(calls, rounds)
    return [us / 1e3 for us in taken["move"]], [us / 1e3 for us in taken["copy"]]


def whole_samples(rounds: int) -> tuple[list[float], list[float], plan.Moves, plan.Fragmentation]:
    """Milliseconds of moving a whole pool, and seconds of planning it."""
    layout = scattered(WHOLE + WHOLE // 10, WHOLE)
    planning = []
    for _ in range(3):
        began = time.perf_counter()
        moves = plan.plan(layout, 2 * WHOLE)
        planning.append(time.perf_counter() - began)
    layers = pool(layout.size)
    mover, back = RowMover(layers), moves.back()
    with ExitStack() as undo:
        mover.move(moves, undo)
        require_moved(layers, moves)
    taken = []
    for i in range(WARMUPS + rounds):
        took = sample(lambda: mover.launch(moves)) / 1e3
        mover.launch(back)
        if i >= WARMUPS:
            taken.append(took)
    return taken, planning, moves, plan.measure(plan.moved(layout, moves))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["gates", "table"])
    parser.add_argument("--rounds", type=int, default=15, help="samples of each; 3 or more")
    args = parser.parse_args()
    if args.rounds < 3:
        raise SystemExit(f"--rounds is {args.rounds}; expected 3 or more, or an interval of the median says nothing")
    if not torch.cuda.is_available():
        raise SystemExit("bench.py needs a CUDA GPU")
    move, copy = move_samples(args.rounds)
    share = ratio_of_medians(move, copy, peer="copy of as many bytes", seed=SEED)
    torch.cuda.empty_cache()
    whole, planning, moves, after = whole_samples(args.rounds)
    gigabytes = len(moves) * ROW_BYTES / 1e9
    allowed = 2 * gigabytes + 5
    over = ratio_of_medians([allowed], whole, peer="2 ms a GB and 5 ms", seed=SEED)
    print(
        f"move {SOME:,} rows: {statistics.median(move):.3f} ms, copy {statistics.median(copy):.3f} ms, "
        f"share {share.ratio:.3f} [{share.low:.3f}, {share.high:.3f}]\n"
        f"whole pool: {len(moves):,} rows, {gigabytes:.2f} GB: {statistics.median(whole):.2f} ms of {allowed:.2f} ms; "
        f"planned in {statistics.median(planning) * 1e3:.0f} ms; {after.runs} runs, {after.long_share:.1%} long",
        file=sys.stderr if args.what == "gates" else sys.stdout,
    )
    report = {
        "gates": {
            "move-bandwidth": {
                "metrics": {"share_low": share.low},
                "ratios": {"copy": share.model_dump()},
                "samples": {
                    "move": {"values": move, "warmups": WARMUPS, "unit": "ms"},
                    "copy": {"values": copy, "warmups": WARMUPS, "unit": "ms"},
                },
            },
            "whole-pool": {
                "metrics": {"ratio_high": over.high, "gigabytes": gigabytes, "planning_s": statistics.median(planning)},
                "ratios": {"allowed": over.model_dump()},
                "samples": {"whole": {"values": whole, "warmups": WARMUPS, "unit": "ms"}},
            },
        },
        "seeds": {"layout": SEED},
    }
    if out := os.environ.get("MLA_VERIFY_GATE_OUT"):
        with open(out, "w", encoding="utf-8") as f:
            json.dump(report, f)


if __name__ == "__main__":
    main()
