"""What contiguous slots are worth to ``verify``, on one GPU; the gates runs-worth-bf16, runs-worth-fp8 and worth-table.

usage: bench_worth.py gates [--rounds N]   the gates of phase.yaml that name this file
       bench_worth.py table [--rounds N]   the same, for a person

Each shape is timed on scattered slots, on pages of 64 in random order and on contiguous slots, as the kernel is: a copy
for each row. Beside them stands what copies of whole runs could reach, a probe: the same kernel with one copy for each
tile of 16 tokens, which then lie in shared memory without the padding that keeps its reads free of conflicts. What the
probe computes is wrong and is not looked at; its time is what counts. Where scattered slots are read at 85 % of the
probe's speed or more, run descriptors have nothing to give, and that share over 0.85 is the gates' figure.

A sample is a graph replay between two events, after a flush of L2; the order of the five rotates.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import mla_verify
import torch
from mla_verify import Slots, Tree, cuda_kernels
from mla_verify_bench.records import Ratio, ratio_of_medians
from mla_verify_bench.timing import FLUSHED, WARMUPS, graph, measure
from rich.console import Console
from rich.progress import track
from rich.table import Table

LENGTHS = (1024, 16_384, 65_536, 185_000)
ROWS = {8: (8, 1), 16: (16, 1), 64: (8, 8), 128: (8, 16), 256: (16, 16), 1024: (16, 64)}  # heads and nodes of each
DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
POOL, PAGE, SEED = 262_144, 64, 3
LONG, FEW_ROWS = 65_536, 64  # the memory-bound shapes: this long or longer, this many rows or fewer
ENOUGH = 0.85
SM_SCALE = 192**-0.5
CALLS = ("scattered", "page 64", "contiguous", "page 64, runs", "contiguous, runs")
Cell = tuple[str, int, int]  # dtype, rows, length
A_COPY_A_ROW = """  copy_bulk(tile[warp * 2], kv + (i64)slots.a * DIM, DIM * sizeof(KV), full);
  copy_bulk(tile[warp * 2 + 1], kv + (i64)slots.b * DIM, DIM * sizeof(KV), full);
"""
A_COPY_A_TILE = "  if (warp == 0) copy_bulk(tile[0], kv + (i64)slots.a * DIM, KEYS * DIM * sizeof(KV), full);\n"


def layouts() -> dict[str, torch.Tensor]:
    """Slot ids of a request as long as the pool, by layout; the pool has a tile more, which the probe may read."""
    generator = torch.Generator("cuda").manual_seed(SEED)
    pages = torch.randperm(POOL // PAGE, device="cuda", generator=generator)[:, None] * PAGE
    return {
        "scattered": torch.randperm(POOL, device="cuda", generator=generator).int(),
        "page 64": (pages + torch.arange(PAGE, device="cuda")).flatten().int(),
        "contiguous": torch.arange(POOL, device="cuda").int(),
    }


def probe_kernels() -> Callable[[int, cuda_kernels.Variant], dict]:
    """As ``cuda_kernels._kernels``, of the source with a copy for each tile."""
    text = cuda_kernels.SOURCE.read_text(encoding="utf-8")
    if text.count(A_COPY_A_ROW) != 1:
        raise SystemExit("verify.cu has not the two copies of load_tile_bulk any more; the probe takes their place")
    built: dict[cuda_kernels.Variant, dict] = {}
    load = cuda_kernels._kernels.__wrapped__  # past its cache, and before the probe takes its place

    def kernels(device: int, variant: cuda_kernels.Variant) -> dict:
        if variant not in built:
            with tempfile.TemporaryDirectory() as folder:
                source = Path(folder, "probe.cu")
                source.write_text(text.replace(A_COPY_A_ROW, A_COPY_A_TILE), encoding="utf-8")
                with mock.patch.object(cuda_kernels, "SOURCE", source):
                    built[variant] = load(device, variant)
        return built[variant]

    return kernels


def times(cell: Cell, pool: torch.Tensor, orders: dict[str, torch.Tensor], probe: Callable, rounds: int) -> dict:
    """Microseconds of the five calls at one shape."""
    _, rows, length = cell
    heads, nodes = ROWS[rows]
    generator = torch.Generator("cuda").manual_seed(SEED)
    q = torch.randn(nodes, heads, 576, device="cuda", dtype=torch.bfloat16, generator=generator)
    tree = Tree.from_parents([-1] + [(i - 1) // 2 for i in range(1, nodes)], device="cuda")
    ends = torch.tensor([0, length + nodes], device="cuda")

    def replay(name: str) -> Callable[[], None]:
        layout, _, runs = name.partition(", ")
        slots = Slots.from_indptr(orders[layout][: length + nodes].contiguous(), ends, length + nodes)

        def call() -> object:
            return mla_verify.verify(q, pool, slots, tree, sm_scale=SM_SCALE, impl="cuda")

        if not runs:
            return graph(call)
        with mock.patch.object(cuda_kernels, "_kernels", probe):
            return graph(call)

    return measure({name: replay(name) for name in CALLS}, rounds)


def shares(taken: dict[Cell, dict], dtype: str) -> dict[str, Ratio]:
    """Of the memory-bound shapes: how fast scattered slots are read, of what whole runs reach."""
    return {
        f"{rows} rows, {length} tokens": ratio_of_medians(
            of["scattered"], of["contiguous, runs"], peer="the probe with a copy for each tile", seed=SEED
        )
        for (name, rows, length), of in taken.items()
        if name == dtype and rows <= FEW_ROWS and length >= LONG
    }


def report(taken: dict[Cell, dict]) -> dict:
    gates: dict[str, dict] = {"worth-table": {"metrics": {"cells": 3 * len(taken)}}}
    for dtype in DTYPES:
        found = shares(taken, dtype)
        gates[f"runs-worth-{dtype}"] = {
            "metrics": {"of_required_low": min(r.low for r in found.values()) / ENOUGH},
            "ratios": {name: ratio.model_dump() for name, ratio in found.items()},
        }
    samples = {
        f"{dtype}, {rows} rows, {length} tokens, {name}": {"values": values, "warmups": WARMUPS, "unit": "us"}
        for (dtype, rows, length), of in taken.items()
        for name, values in of.items()
    }
    notes = [FLUSHED, "runs: a probe, its time only"]
    return {"gates": gates, "samples": samples, "seeds": {"slots": SEED}, "notes": notes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["gates", "table"])
    parser.add_argument("--rounds", type=int, default=9, help="samples of each; 3 or more")
    args = parser.parse_args()
    if args.rounds < 3:
        raise SystemExit(f"--rounds is {args.rounds}; expected 3 or more, or an interval of the median says nothing")
    if why := mla_verify.implementations()["cuda"]:
        raise SystemExit(f"bench_worth.py times the CUDA kernel, which cannot run here: {why}")
    if torch.cuda.get_device_capability() < (9, 0):
        raise SystemExit("bench_worth.py compares bulk copies, which need compute capability 9.0 or newer")
    orders, probe = layouts(), probe_kernels()
    cells = list(itertools.product(DTYPES, ROWS, LENGTHS))
    taken: dict[Cell, dict] = {}
    pools: dict[str, torch.Tensor] = {}
    for cell in track(cells, description="shapes", console=Console(stderr=True)):
        if cell[0] not in pools:
            generator = torch.Generator("cuda").manual_seed(SEED)
            pools = {cell[0]: torch.randn(POOL + PAGE, 576, device="cuda", generator=generator).to(DTYPES[cell[0]])}
        taken[cell] = times(cell, pools[cell[0]], orders, probe, args.rounds)
    table = Table("K/V", "rows", "tokens", *(f"{name}, µs" for name in CALLS), "scattered, of runs")
    for (dtype, rows, length), of in taken.items():
        medians = {name: statistics.median(values) for name, values in of.items()}
        share = medians["contiguous, runs"] / medians["scattered"]
        table.add_row(dtype, str(rows), f"{length:,}", *(f"{v:.1f}" for v in medians.values()), f"{share:.2f}")
    Console(width=120).print(table)
    if path := os.environ.get("MLA_VERIFY_GATE_OUT"):
        with open(path, "w", encoding="utf-8") as f:
            json.dump(report(taken), f)


if __name__ == "__main__":
    main()
