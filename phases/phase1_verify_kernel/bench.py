"""Time ``verify`` beside SGLang's own verify kernel, on one GPU, in one run; the gates and a table.

usage: bench.py gates     the shapes that phase.yaml names, JSON to $MLA_VERIFY_GATE_OUT
       bench.py table     more shapes, for a person

A sample is one graph replay between two events, after a flush of L2; the peers' order rotates from round to round.
Ours includes the draft tree and the merge; SGLang's kernel is called as its Triton backend calls it for a verify step:
the prefix through slot ids, the draft nodes' K/V beside it, a full boolean mask.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass

import mla_verify
import torch
from mla_verify import Slots, Tree
from mla_verify_bench.records import ratio_of_medians
from mla_verify_bench.timing import FLUSHED, WARMUPS, graph, measure
from rich.console import Console
from rich.progress import track
from rich.table import Table

SEED = 0
ROUNDS = 15
SM_SCALE = 192**-0.5
POOL = 262_144
POOL_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Shape:
    heads: int
    nodes: int
    prefix: int

    def __str__(self) -> str:
        return f"H={self.heads} N={self.nodes} L={self.prefix}"


GATES = {
    "triton-vs-sglang-16k": [Shape(8, 16, 16_384), Shape(16, 16, 16_384)],
    "triton-vs-sglang-185k": [Shape(8, 16, 185_000), Shape(16, 16, 185_000)],
}
TABLE = [Shape(h, n, length) for h, n, length in itertools.product((8, 16), (1, 16), (1024, 16_384, 65_536, 185_000))]


def peers(shape: Shape, pool: torch.Tensor, order: torch.Tensor) -> dict[str, Callable[[], None]]:
    """What is timed at one shape. All read the same prefix through the same scattered slots."""
    n, length, device = shape.nodes, shape.prefix, pool.device
    q = torch.randn(n, shape.heads, 576, device=device, dtype=POOL_DTYPE)
    slots = Slots.from_indptr(
        order[: length + n].contiguous(), torch.tensor([0, length + n], device=device), length + n
    )
    tree = Tree.from_parents([-1] + [(i - 1) // 2 for i in range(1, n)], device=device)
    timed = {
        impl: graph(lambda impl=impl: mla_verify.verify(q, pool, slots, tree, sm_scale=SM_SCALE, impl=impl))
        for impl, why in mla_verify.implementations().items()
        if not why and impl != "reference"
    }
    timed["sglang"] = graph(sglang_verify(shape, pool, order, q, tree))
    return timed


def sglang_verify(
    shape: Shape, pool: torch.Tensor, order: torch.Tensor, q: torch.Tensor, tree: Tree
) -> Callable[[], None]:
    """SGLang's own verify kernel at this shape, held to the oracle first."""
    try:
        from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd
    except ImportError as error:
        sys.exit(f"this bench needs SGLang's Triton kernels beside it (pip install sglang==0.5.17): {error}")
    n, length, device = shape.nodes, shape.prefix, pool.device
    draft = pool[order[length : length + n].long()][:, None]
    mask = torch.cat([torch.ones(n, length, dtype=torch.bool, device=device), tree.dense()[0]], 1).flatten()
    out = torch.empty(n, shape.heads, 512, device=device, dtype=POOL_DTYPE)
    wide = order[:length].long()
    pool3 = pool[:, None]
    ends = [torch.tensor([0, end], device=device, dtype=torch.int64) for end in (n, length, mask.numel())]

    def sglang() -> None:
        extend_attention_fwd(
            q, draft, draft[..., :512], out, pool3, pool3[..., :512], ends[0], ends[1], wide, mask, True, ends[2], n,
            1.0, 1.0, sm_scale=SM_SCALE,
        )  # fmt: skip

    sglang()
    slots = Slots.from_indptr(
        order[: length + n].contiguous(), torch.tensor([0, length + n], device=device), length + n
    )
    want, _ = mla_verify.verify(q, pool, slots, tree, sm_scale=SM_SCALE, impl="reference")
    apart = ((out.double() - want.double()).norm() / want.double().norm()).item()
    if not apart < 0.02:
        sys.exit(f"at {shape} SGLang's kernel and the oracle differ by {apart:.3f}: they do not compute the same thing")
    return sglang


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["gates", "table"])
    what = parser.parse_args().what
    if not torch.cuda.is_available():
        sys.exit("bench.py needs a CUDA GPU")
    shapes = list(dict.fromkeys([*itertools.chain(*GATES.values()), *(TABLE if what == "table" else TABLE[:1])]))
    torch.manual_seed(SEED)
    pool = torch.randn(POOL, 576, device="cuda", dtype=POOL_DTYPE)
    order = torch.randperm(POOL, device="cuda").int()
    taken = {}
    for shape in track(shapes, description="shapes", console=Console(stderr=True)):
        taken[shape] = measure(peers(shape, pool, order), ROUNDS)
    table = Table("shape", *(f"{name}, µs" for name in next(iter(taken.values()))), "best of ours against SGLang")
    for shape, samples in taken.items():
        medians = {name: statistics.median(values) for name, values in samples.items()}
        best = min(v for name, v in medians.items() if name != "sglang")
        table.add_row(str(shape), *(f"{v:.1f}" for v in medians.values()), f"{medians['sglang'] / best:.1f} ×")
    Console(width=120).print(table)
    if path := os.environ.get("MLA_VERIFY_GATE_OUT"):
        with open(path, "w", encoding="utf-8") as f:
            json.dump(report(taken), f)


def report(taken: dict[Shape, dict[str, list[float]]]) -> dict:
    gates = {}
    for gate, shapes in GATES.items():
        ratios = {
            str(shape): ratio_of_medians(
                taken[shape]["triton"], taken[shape]["sglang"], peer=f"sglang at {shape}", seed=SEED
            )
            for shape in shapes
        }
        gates[gate] = {
            "metrics": {"ratio_low": min(r.low for r in ratios.values())},
            "ratios": {name: r.model_dump() for name, r in ratios.items()},
        }
    samples = {
        f"{name} {shape}": {"values": values, "warmups": WARMUPS, "unit": "us"}
        for shape, of in taken.items()
        for name, values in of.items()
    }
    return {"samples": samples, "gates": gates, "seeds": {"torch": SEED}, "notes": [FLUSHED]}


if __name__ == "__main__":
    main()
