"""The CUDA kernel beside its peers and the floor, on one GPU, in one run; the gates and a table.

usage: bench_cuda.py gates [--rounds N] [--plot FILE.svg]  every gate of phase.yaml that names this file
       bench_cuda.py table [--rounds N] [--plot FILE.svg]  the same shapes, for a person

Ours includes the draft tree and the merge. FlashInfer's fa2 takes the prefix alone, which favours it; it is timed as
shipped and held to the branch that sm_120 gets (a scratch copy of its headers in which the two larger configurations
are out of reach). The floor of a shape is the longer of its K/V bytes over copy bandwidth and its products over the
rate of mma.sync, both measured here. A sample is a graph replay between two events, after a flush of L2;
the order rotates. A peer that is missing, or that computes something else, leaves its gates unmeasured and says why.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import os
import re
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

import mla_verify
import numpy as np
import torch
from mla_verify import Slots, Tree
from mla_verify_bench.records import Ratio, ratio_of_medians
from mla_verify_bench.timing import FLUSHED, WARMUPS, graph, measure
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench import POOL, POOL_DTYPE, SEED, SM_SCALE, Shape, sglang_verify

LENGTHS = (1024, 16_384, 65_536, 185_000)
SHAPES = [Shape(h, n, length) for h, n, length in itertools.product((8, 16, 64), (1, 8, 16, 64), LENGTHS)]
SHORT = [Shape(h, n, length) for (h, n), length in itertools.product(((8, 1), (16, 16), (16, 64)), (0, 1, 17, 64, 300))]
LONG = 65_536
SERIAL_ROWS = 256  # SGLang's serial kernel is timed up to here: the gates ask no further, and it takes 35 ms a call
BATCH = (1_000, 3_000, 9_000, 20_000, 33_000, 50_000, 65_000, 80_000)
BATCH_HEADS, BATCH_NODES = 16, 16
SPLITS = (8, 16, 32, 64, 128, 256)
ROW_BYTES, ROW_FLOP = 1152, 2 * (576 + 512)
SLOW = ("sglang", *(f"sglang decode {splits}" for splits in SPLITS))
Samples = dict[str, list[float]]

MMA_SOURCE = r"""
extern "C" __global__ void __launch_bounds__(256, 2) products(float* out, int turns) {
  float c[8][4] = {};
  const unsigned x = threadIdx.x * 2654435761u, a = x & 0x3fff3fffu, b = (x ^ 0x3c003c00u) & 0xbfffbfffu;
  for (int t = 0; t < turns; ++t)
#pragma unroll
    for (int i = 0; i < 8; ++i)
      asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                   "{%0,%1,%2,%3}, {%4,%5,%4,%5}, {%5,%4}, {%0,%1,%2,%3};"
                   : "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3]) : "r"(a), "r"(b));
  float sum = 0;
  for (int i = 0; i < 8; ++i) for (int j = 0; j < 4; ++j) sum += c[i][j];
  if (sum == 1.2345f) out[0] = sum;
}
"""


def median_ms(call: Callable[[], object]) -> float:
    """Median milliseconds of seven calls on the current stream."""
    return statistics.median(measure({"": call}, 7)[""]) / 1e3


def copy_bandwidth() -> float:
    """Bytes a second of a large copy on the device, read and written."""
    source = torch.ones(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / (median_ms(lambda: target.copy_(source)) / 1e3)


def mma_kernel(architecture: str) -> object:
    from cuda.core import Program, ProgramOptions

    return Program(MMA_SOURCE, "c++", ProgramOptions(arch=architecture, std="c++17")).compile("cubin")


def mma_rate() -> float:
    """FLOP a second of mma.sync m16n8k16 bf16 with nothing else in the way."""
    from cuda.core import Device, LaunchConfig, Stream, launch

    device = torch.cuda.current_device()
    Device(device).set_current()
    kernel = mma_kernel("sm_{}{}".format(*torch.cuda.get_device_capability())).get_kernel("products")
    blocks, turns = 2 * torch.cuda.get_device_properties(device).multi_processor_count, 32_768
    out = torch.zeros(1, device="cuda")
    config = LaunchConfig(grid=blocks, block=256)
    ours = torch.cuda.Stream()
    theirs = Stream.from_handle(ours.cuda_stream)
    torch.cuda.synchronize()
    with torch.cuda.stream(ours):
        ms = median_ms(lambda: launch(theirs, config, kernel, out.data_ptr(), np.int32(turns)))
    return blocks * 8 * turns * 8 * (2 * 16 * 8 * 16) / (ms / 1e3)


def floor_us(shape: Shape, ceilings: dict[str, float]) -> float:
    """No call can be faster: each latent row of the prefix once, each product of the prefix once."""
    move = shape.prefix * ROW_BYTES / ceilings["copy_bytes_s"]
    multiply = ROW_FLOP * shape.heads * shape.nodes * shape.prefix / ceilings["mma_flop_s"]
    return 1e6 * max(move, multiply)


def rows(shape: Shape) -> int:
    return shape.heads * shape.nodes


def out_of_reach(header: str) -> str:
    """FlashInfer's attention/mla.cuh with the first two of three branches of DISPATCH_SMEM_CONFIG never taken."""
    macro = re.search(r"#define DISPATCH_SMEM_CONFIG\((?:[^\n]*\\\n)+[^\n]*", header)
    branches = re.findall(r"smem_limit_per_sm >= \d+", macro[0]) if macro else []
    if len(branches) != 3:
        raise ValueError(f"mla.cuh has {len(branches)} branches in DISPATCH_SMEM_CONFIG; expected 3: hold it anew")
    held = macro[0]
    for branch in branches[:2]:
        held = held.replace(branch, "smem_limit_per_sm >= 99999999")
    return header.replace(macro[0], held)


@contextlib.contextmanager
def held_headers(scratch: Path) -> Iterator[None]:
    """FlashInfer compiles from a changed copy of its headers, and takes nothing that was compiled before."""
    from flashinfer.jit import env

    scratch = scratch.resolve()
    include = scratch / "include"
    shutil.copytree(env.FLASHINFER_INCLUDE_DIR, include)
    header = include / "flashinfer" / "attention" / "mla.cuh"
    header.write_text(out_of_reach(header.read_text(encoding="utf-8")), encoding="utf-8")
    folders = {"FLASHINFER_INCLUDE_DIR": include}
    for name in ("FLASHINFER_GEN_SRC_DIR", "FLASHINFER_JIT_DIR", "FLASHINFER_AOT_DIR"):
        folders[name] = scratch / name.lower()
        folders[name].mkdir()
    with mock.patch.multiple(env, **folders):
        yield
    if not any(str(include) in file.read_text() for file in folders["FLASHINFER_JIT_DIR"].rglob("build.ninja")):
        raise RuntimeError("FlashInfer did not compile from the changed headers; its figures would be those as shipped")


class Fa2:
    """FlashInfer's fa2 over a prefix, page size 1; compiles (some 20 s) unless FlashInfer has it in its cache."""

    def __init__(self, scratch: Path | None) -> None:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper

        self._home = importlib.import_module(BatchMLAPagedAttentionWrapper.__module__)
        build = self._home.get_batch_mla_module.__wrapped__  # past its cache, which knows no headers
        with held_headers(scratch) if scratch else contextlib.nullcontext():
            self._module = build("fa2", POOL_DTYPE, POOL_DTYPE, POOL_DTYPE, torch.int32, 512, 64, False)
        workspace = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
        self._wrapper = BatchMLAPagedAttentionWrapper(workspace, backend="fa2")

    def call(self, shape: Shape, pool: torch.Tensor, order: torch.Tensor, q: torch.Tensor) -> Callable:
        """Good until the next one is made: the wrapper's plan is one for all, and keeps the slots."""
        torch.cuda.synchronize()
        ends = [torch.tensor([0, n], dtype=torch.int32, device="cuda") for n in (shape.nodes, shape.prefix)]
        lens = torch.tensor([shape.prefix], dtype=torch.int32, device="cuda")
        slots = order[: shape.prefix].contiguous()
        with mock.patch.object(self._home, "get_batch_mla_module", lambda *_: self._module):
            self._wrapper.plan(*ends, slots, lens, shape.heads, 512, 64, 1, False, SM_SCALE, POOL_DTYPE, POOL_DTYPE)
        parts = q[..., :512].contiguous(), q[..., 512:].contiguous()
        pages = pool[:, None]
        return lambda: self._wrapper.run(*parts, pages[..., :512], pages[..., 512:], return_lse=True)[0]


def sglang_decode(shape: Shape, pool: torch.Tensor, order: torch.Tensor, q: torch.Tensor, splits: int) -> Callable:
    """SGLang's split decode kernel over the prefix, as its Triton backend calls it."""
    from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd

    pages, slots = pool[:, None], order[: shape.prefix].long()
    ends = torch.tensor([0, shape.prefix], device="cuda", dtype=torch.int64)
    out = torch.empty(1, shape.heads, 512, device="cuda", dtype=POOL_DTYPE)
    logits = torch.empty(1, shape.heads, splits, 512, device="cuda", dtype=torch.float32)
    lse = torch.empty(1, shape.heads, splits, device="cuda", dtype=torch.float32)
    count = torch.full((1,), splits, device="cuda", dtype=torch.int32)

    def call() -> torch.Tensor:
        decode_attention_fwd(
            q, pages, pages[..., :512], out, ends, slots, logits, lse, count, splits, SM_SCALE, 1.0, 1.0
        )
        return out

    return call


def agreeing(call: Callable[[], torch.Tensor], pool: torch.Tensor, slots: torch.Tensor, q: torch.Tensor) -> Callable:
    """The call, once its first and last node are attention over the prefix."""
    out, keys = call(), pool[slots.long()].float()
    for node in {0, len(q) - 1}:
        want = (q[node].float() @ keys.T * SM_SCALE).softmax(-1) @ keys[:, :512]
        apart = ((out[node].float() - want).norm() / want.norm()).item()
        if not apart < 0.02:
            raise RuntimeError(f"it is {apart:.3f} from attention over the prefix: not the same computation")
    return call


def naive(q: torch.Tensor, pool: torch.Tensor, slots: Slots, mask: torch.Tensor) -> torch.Tensor:
    """Gather, two matrix products and a softmax, in torch."""
    k = pool[slots.indices.long()]
    scores = torch.einsum("nhd,kd->nhk", q, k).float() * SM_SCALE
    scores = scores.masked_fill(~mask[:, None], float("-inf"))
    return torch.einsum("nhk,kd->nhd", scores.softmax(-1).to(q.dtype), k[:, :512])


class Bench:
    """The pool, the peers, and what each peer that is missing said."""

    def __init__(self, rounds: int, scratch: Path) -> None:
        self.rounds = rounds
        self.pool = torch.randn(POOL, 576, device="cuda", dtype=POOL_DTYPE)
        self.pool8 = self.pool.to(torch.float8_e4m3fn)
        self.order = torch.randperm(POOL, device="cuda").int()
        self.missing: dict[str, str] = {}
        fa2 = {name: self._attempt(name, Fa2, place) for name, place in (("fa2", None), ("fa2 held", scratch))}
        self.fa2 = {name: made for name, made in fa2.items() if made}

    def _attempt(self, name: str, make: Callable, *given: object) -> object | None:
        """A peer that fails once is missing from there on: its gates go unmeasured, ours do not fail for it."""
        if name in self.missing:
            return None
        try:
            return make(*given)
        except (Exception, SystemExit) as error:
            lines = str(error).strip().splitlines() or [""]
            self.missing[name] = f"{name}: {type(error).__name__}: {lines[0]}"[:300]
            print(self.missing[name], *lines[-20:], sep="\n", file=sys.stderr)
            return None

    def problem(self, nodes: int, heads: int, prefixes: Sequence[int]) -> tuple[torch.Tensor, Slots, Tree]:
        """Requests of ``nodes`` nodes each, a binary tree, behind one another in the shuffled slots."""
        ends = np.cumsum([0, *(length + nodes for length in prefixes)]).tolist()
        indptr = torch.tensor(ends, device="cuda")
        slots = Slots.from_indptr(self.order[: ends[-1]].contiguous(), indptr, max(prefixes) + nodes)
        q = torch.randn(nodes * len(prefixes), heads, 576, device="cuda", dtype=POOL_DTYPE)
        parents = [-1] + [(i - 1) // 2 for i in range(1, nodes)]
        return q, slots, Tree.from_parents([parents] * len(prefixes), device="cuda")

    def ours(self, q: torch.Tensor, slots: Slots, tree: Tree, impl: str = "cuda", narrow: bool = False) -> Callable:
        pool = self.pool8 if narrow else self.pool
        return graph(lambda: mla_verify.verify(q, pool, slots, tree, sm_scale=SM_SCALE, impl=impl))

    def calls(self, shape: Shape) -> dict[str, Callable[[], None]]:
        """What is timed at one shape."""
        q, slots, tree = self.problem(shape.nodes, shape.heads, [shape.prefix])
        timed = {"cuda": self.ours(q, slots, tree)}
        given = shape, self.pool, self.order, q

        def add(name: str, make: Callable[[], Callable[[], None]]) -> None:
            if call := self._attempt(name, make):
                timed[name] = call

        def over_prefix(call: Callable) -> Callable[[], None]:
            return graph(agreeing(call, self.pool, self.order[: shape.prefix], q))

        add("cuda e4m3", lambda: self.ours(q, slots, tree, narrow=True))
        add("triton", lambda: self.ours(q, slots, tree, impl="triton"))
        scores_bytes = 16 * rows(shape) * (shape.prefix + shape.nodes)
        if scores_bytes < torch.cuda.mem_get_info()[0] // 2:
            before = torch.ones(shape.nodes, shape.prefix, dtype=torch.bool, device="cuda")
            mask = torch.cat([before, tree.dense()[0]], 1)
            add("naive", lambda: graph(lambda: naive(q, self.pool, slots, mask)))
        if shape not in SHAPES:
            return timed
        if rows(shape) <= SERIAL_ROWS:
            add("sglang", lambda: graph(sglang_verify(*given, tree)))
        if shape.nodes == 1 and shape.prefix >= 16_384:
            for splits in SPLITS:
                add(
                    f"sglang decode {splits}",
                    lambda splits=splits: over_prefix(sglang_decode(*given, splits)),
                )
        for name, peer in self.fa2.items():
            add(name, lambda peer=peer: over_prefix(peer.call(*given)))
        return timed

    def measure(self, shape: Shape) -> Samples:
        """Microseconds of everything timed at a shape. What takes milliseconds a call gets fewer rounds."""
        timed = self.calls(shape)
        slow = {name: timed.pop(name) for name in SLOW if name in timed and shape.prefix >= 16_384}
        samples = measure(timed, self.rounds)
        if slow:
            samples |= measure(slow, max(3, self.rounds // 3))
        return samples

    def measure_batch(self) -> list[float]:
        """Eight requests of unequal lengths in one call."""
        call = self.ours(*self.problem(BATCH_NODES, BATCH_HEADS, BATCH))
        return measure({"cuda": call}, self.rounds)["cuda"]


def report(
    taken: dict[Shape, Samples], batch: list[float], ceilings: dict[str, float], missing: dict[str, str]
) -> dict:
    """Gates, ratios and samples of a run, in the form that the gate runner reads."""
    gates: dict[str, dict] = {}

    def against(ours: Sequence[float], theirs: Sequence[float], peer: str) -> Ratio:
        return ratio_of_medians(ours, theirs, peer=peer, seed=SEED)

    def gate(name: str, metric: str, ratios: dict[str, Ratio], absent: Sequence[str] = ()) -> None:
        """The worst bound of the intervals; unmeasured where a peer is absent."""
        if absent or not ratios:
            gates[name] = {"passed": None, "reason": absent[0] if absent else "no shape of this gate was measured"}
            return
        bounds = {at: r.high if metric.endswith("high") else r.low for at, r in ratios.items()}
        at = (max if metric.endswith("high") else min)(bounds, key=bounds.get)
        plain = {key: r.model_dump() for key, r in ratios.items()}
        gates[name] = {"metrics": {metric: bounds[at]}, "ratios": plain, "reason": f"worst at {at}"}

    def absent(peers: Sequence[str], shapes: Sequence[Shape]) -> list[str]:
        found = dict.fromkeys(p for s in shapes for p in peers if p not in taken.get(s, {}))
        return [missing.get(p, f"{p} was not measured at every shape") for p in found]

    def versus(name: str, peer: str, shapes: Sequence[Shape], ours: str = "cuda") -> None:
        lost = absent((ours, peer), shapes)
        ratios = {} if lost else {str(s): against(taken[s][ours], taken[s][peer], f"{peer} at {s}") for s in shapes}
        gate(name, "ratio_low", ratios, lost)

    def bounded(name: str, shapes: Sequence[Shape]) -> None:
        gate(name, "ratio_high", {
            str(s): against([floor_us(s, ceilings)], taken[s]["cuda"], f"floor at {s}") for s in shapes
        }, absent(("cuda",), shapes))  # fmt: skip

    for name, length in (("1k", 1024), ("16k", 16_384), ("185k", 185_000)):
        serial = [s for s in SHAPES if s.prefix == length and rows(s) <= SERIAL_ROWS]
        versus(f"cuda-vs-sglang-{name}", "sglang", serial)
    long = [s for s in SHAPES if s.prefix >= LONG]
    narrow = [s for s in long if rows(s) <= 64]
    versus("cuda-vs-fa2-held-long", "fa2 held", long)
    versus("cuda-vs-fa2-held", "fa2 held", SHAPES)
    versus("cuda-vs-fa2-shipped", "fa2", SHAPES)
    bounded("cuda-vs-floor-narrow", narrow)
    bounded("cuda-vs-floor-wide", [s for s in long if rows(s) > 64])
    short = [s for s in SHAPES if s.prefix == 1024 and rows(s) <= 256]
    gate("cuda-graph-1k", "us_high", {str(s): against([1.0], taken[s]["cuda"], f"1 µs at {s}") for s in short})
    gate("cuda-never-slower", "ratio_low", {
        f"{peer} at {s}": against(of["cuda"], of[peer], f"{peer} at {s}")
        for s, of in taken.items() for peer in ("triton", "naive") if peer in of
    }, [missing[peer] for peer in ("triton", "naive") if peer in missing])  # fmt: skip
    versus("cuda-fp8-vs-bf16", "cuda", narrow, ours="cuda e4m3")
    floors = sum(floor_us(Shape(BATCH_HEADS, BATCH_NODES, length), ceilings) for length in BATCH)
    gate("cuda-batch-8", "ratio_high", {f"lengths {BATCH}": against([floors], batch, "sum of floors")})
    splits = [f"sglang decode {s}" for s in SPLITS]
    single = [s for s in SHAPES if s.nodes == 1 and s.prefix >= 16_384]
    lost, best = absent(splits, single), {}
    for s in () if lost else single:
        peer = min(splits, key=lambda name: statistics.median(taken[s][name]))
        best[f"{peer} at {s}"] = against(taken[s]["cuda"], taken[s][peer], f"{peer} at {s}")
    gate("cuda-decode-vs-sglang", "ratio_low", best, lost)
    samples = {
        f"{name} {shape}": {"values": values, "warmups": WARMUPS, "unit": "us"}
        for shape, of in taken.items()
        for name, values in of.items()
    }
    samples["cuda batch of 8"] = {"values": batch, "warmups": WARMUPS, "unit": "us"}
    notes = [FLUSHED, "fa2 and SGLang's decode kernel take the prefix alone"]
    return {"samples": samples, "gates": gates, "metrics": ceilings, "seeds": {"torch": SEED}, "notes": notes}


def show(taken: dict[Shape, Samples], batch: list[float], ceilings: dict[str, float], console: Console) -> None:
    names = list(dict.fromkeys(name for of in taken.values() for name in of if not name.startswith("sglang decode")))
    table = Table(
        "shape", "floor", *names, "decode, best", "cuda / floor", title="medians in µs", caption_justify="left"
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for shape, of in taken.items():
        medians = {name: statistics.median(values) for name, values in of.items()}
        floor = floor_us(shape, ceilings)
        decode = min((v for name, v in medians.items() if name.startswith("sglang decode")), default=None)
        table.add_row(
            str(shape), f"{floor:.1f}", *(f"{medians[n]:.1f}" if n in medians else "" for n in names),
            "" if decode is None else f"{decode:.1f}", f"{medians['cuda'] / floor:.2f}" if floor else "",
        )  # fmt: skip
    copy, multiply = ceilings["copy_bytes_s"] / 1e12, ceilings["mma_flop_s"] / 1e12
    table.caption = (
        f"copy {copy:.2f} TB/s, mma.sync {multiply:.0f} TFLOP/s; {len(BATCH)} requests of {BATCH[0]:,} to "
        f"{BATCH[-1]:,} tokens in one call: {statistics.median(batch):.1f} µs"
    )
    console.print(table)


def plot(taken: dict[Shape, Samples], ceilings: dict[str, float], path: Path) -> None:
    """Time over the length of the prefix, a panel for each of four numbers of rows."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    panels = [(8, 1), (8, 16), (16, 16), (64, 64)]
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4 * len(panels), 3.6), layout="constrained")
    for axis, (heads, nodes) in zip(axes, panels, strict=True):
        shapes = [s for s in SHAPES if (s.heads, s.nodes) == (heads, nodes) and s in taken]
        for name in ("cuda", "cuda e4m3", "triton", "fa2", "fa2 held", "sglang"):
            points = [(s.prefix, statistics.median(taken[s][name])) for s in shapes if name in taken[s]]
            axis.loglog(*zip(*points, strict=True) if points else ((), ()), "o-", markersize=3, label=name)
        axis.loglog([s.prefix for s in shapes], [floor_us(s, ceilings) for s in shapes], "k:", label="floor")
        axis.set_title(f"{heads} heads, {nodes} node{'s' * (nodes > 1)}")
        axis.set_xlabel("prefix, tokens")
    axes[0].set_ylabel("µs")
    axes[-1].legend(fontsize=8)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["gates", "table"])
    parser.add_argument("--rounds", type=int, default=15, help="samples of each peer at each shape; 3 or more")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="also draw time over length")
    args = parser.parse_args()
    if args.rounds < 3:
        raise SystemExit(f"--rounds is {args.rounds}; expected 3 or more, or an interval of the median says nothing")
    if not torch.cuda.is_available():
        raise SystemExit("bench_cuda.py needs a CUDA GPU")
    if why := mla_verify.implementations()["cuda"]:
        raise SystemExit(f"the CUDA kernel cannot run here: {why}")
    torch.manual_seed(SEED)
    ceilings = {"copy_bytes_s": copy_bandwidth(), "mma_flop_s": mma_rate()}
    torch.cuda.empty_cache()
    taken: dict[Shape, Samples] = {}
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(args.rounds, Path(scratch))
        for shape in track([*SHORT, *SHAPES], description="shapes", console=Console(stderr=True)):
            taken[shape] = bench.measure(shape)
            torch.cuda.empty_cache()
        batch = bench.measure_batch()
    if out := os.environ.get("MLA_VERIFY_GATE_OUT"):
        with open(out, "w", encoding="utf-8") as f:
            json.dump(report(taken, batch, ceilings, bench.missing), f)
    console = Console(width=max(160, Console().width)) if args.what == "table" else Console(stderr=True, width=160)
    show(taken, batch, ceilings, console)
    for why in bench.missing.values():
        console.print(f"not measured: {why}", markup=False)
    if args.plot:
        plot(taken, ceilings, args.plot)


if __name__ == "__main__":
    main()
