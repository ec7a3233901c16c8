"""The CUDA kernel beside its peers and the floor, on one GPU, in one run; the gates and a table.

usage: bench_cuda.py gates [--rounds N]                    every gate of phase.yaml that names this file
       bench_cuda.py table [--rounds N] [--plot FILE.svg]  the same shapes, for a person

Ours includes the draft tree and the merge. FlashInfer's fa2 takes the prefix alone, which favours it; it is timed as
shipped and held to the branch that sm_120 gets (a scratch copy of its headers with the two larger configurations put
out of reach). The floor of a shape is the longer of its K/V bytes over copy bandwidth and its products over the rate of
mma.sync, both measured here. Samples are graph replays between events, L2 flushed, the order rotated.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import mla_verify
import torch
from mla_verify import Slots, Tree, cuda_kernels
from mla_verify.testing import Case
from mla_verify_bench.records import ratio_of_medians
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench import POOL, POOL_DTYPE, SEED, SM_SCALE, WARMUPS, Shape, graph, measure, sglang_verify

LENGTHS = (1024, 16_384, 65_536, 185_000)
SHAPES = [Shape(h, n, length) for h, n, length in itertools.product((8, 16, 64), (1, 8, 16, 64), LENGTHS)]
SHORT = [Shape(16, n, length) for n, length in itertools.product((1, 16), (0, 1, 64, 300))]
LONG = 65_536
SERIAL_ROWS = 256  # SGLang's serial kernel is timed up to here: the gates ask no further, and it takes 35 ms a call
BATCH = (1_000, 3_000, 9_000, 20_000, 33_000, 50_000, 65_000, 80_000)
SPLITS = (8, 16, 32, 64, 128, 256)
ROW_BYTES, ROW_FLOP = 1152, 2 * (576 + 512)
Samples = dict[str, list[float]]

MMA_SOURCE = r"""
extern "C" __global__ void __launch_bounds__(256, 2) products(float* out, int turns) {
  float c[8][4] = {};
  const unsigned x = threadIdx.x * 2654435761u, a = x & 0x3fff3fffu, b = (x ^ 0x3c003c00u) & 0x3fff3fffu;
  for (int t = 0; t < turns; ++t)
#pragma unroll
    for (int i = 0; i < 8; ++i)
      asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                   "{%0,%1,%2,%3}, {%4,%4,%5,%5}, {%4,%5}, {%0,%1,%2,%3};"
                   : "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3]) : "r"(a), "r"(b));
  float sum = 0;
  for (int i = 0; i < 8; ++i) for (int j = 0; j < 4; ++j) sum += c[i][j];
  if (sum == 1.2345f) out[0] = sum;
}
"""


def timed_ms(call: Callable[[], object], times: int = 7) -> float:
    """Median milliseconds of a call, after two that warm up."""
    taken = []
    for i in range(times + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        if i >= 2:
            taken.append(begin.elapsed_time(end))
    return statistics.median(taken)


def copy_bandwidth() -> float:
    """Bytes a second of a large copy on the device, read and written."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / (timed_ms(lambda: target.copy_(source)) / 1e3)


def mma_rate() -> float:
    """FLOP a second of mma.sync m16n8k16 bf16 with nothing else in the way."""
    from cuda.core import Device, LaunchConfig, Program, ProgramOptions, Stream, launch

    device = torch.cuda.current_device()
    Device(device).set_current()
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    program = Program(MMA_SOURCE, "c++", ProgramOptions(arch=arch, std="c++17"))
    kernel = program.compile("cubin").get_kernel("products")
    blocks, turns = 2 * torch.cuda.get_device_properties(device).multi_processor_count, 4096
    out = torch.zeros(1, device="cuda")
    stream = Stream.from_handle(torch.cuda.Stream().cuda_stream)
    config = LaunchConfig(grid=blocks, block=256)
    run_on = torch.cuda.ExternalStream(int(stream.handle))

    def call() -> None:
        run_on.wait_stream(torch.cuda.current_stream())
        launch(stream, config, kernel, out.data_ptr(), turns)
        torch.cuda.current_stream().wait_stream(run_on)

    return blocks * 8 * turns * 8 * 16 * 8 * 16 * 2 / (timed_ms(call) / 1e3)


def floor_us(shape: Shape, bandwidth: float, rate: float, row_bytes: int = ROW_BYTES) -> float:
    rows, length = shape.heads * shape.nodes, shape.prefix + shape.nodes
    return 1e6 * max(length * row_bytes / bandwidth, rows * length * ROW_FLOP / rate)


class FlashInfer:
    """fa2 as shipped and held to sm_120's branch; ``why`` says which are missing."""

    def __init__(self, scratch: Path) -> None:
        self.scratch, self.why = scratch, ""
        try:
            import flashinfer.mla  # noqa: F401
        except Exception as error:  # noqa: BLE001 - it imports a compiler chain; whatever fails is the reason
            self.why = f"FlashInfer is not here: {type(error).__name__}: {error}"[:200]

    def call(self, shape: Shape, pool: torch.Tensor, order: torch.Tensor, q: torch.Tensor, held: bool):
        """A call over the prefix alone, through the same slots."""
        from flashinfer.jit import env
        from flashinfer.mla import BatchMLAPagedAttentionWrapper, _core

        kept = {n: getattr(env, n) for n in ("FLASHINFER_INCLUDE_DIR", "FLASHINFER_GEN_SRC_DIR", "FLASHINFER_JIT_DIR")}
        if held:
            include = self.scratch / "include"
            if not include.exists():
                shutil.copytree(kept["FLASHINFER_INCLUDE_DIR"], include)
                header = include / "flashinfer" / "attention" / "mla.cuh"
                text = header.read_text()
                changed = text.replace(">= 221696", ">= 99999999").replace(">= 147968", ">= 99999999")
                if changed.count("99999999") != 2:
                    raise RuntimeError("FlashInfer's mla.cuh has other thresholds than those known; hold it anew")
                header.write_text(changed)
            env.FLASHINFER_INCLUDE_DIR = include
            for name in ("FLASHINFER_GEN_SRC_DIR", "FLASHINFER_JIT_DIR"):
                setattr(env, name, self.scratch / name.lower())
                (self.scratch / name.lower()).mkdir(exist_ok=True)
        _core.get_batch_mla_module.cache_clear()
        try:
            workspace = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
            wrapper = BatchMLAPagedAttentionWrapper(workspace, backend="fa2")
            ends = [torch.tensor([0, n], dtype=torch.int32, device="cuda") for n in (shape.nodes, shape.prefix)]
            lens = torch.tensor([shape.prefix], dtype=torch.int32, device="cuda")
            slots = order[: shape.prefix].contiguous()
            wrapper.plan(*ends, slots, lens, shape.heads, 512, 64, 1, False, SM_SCALE, POOL_DTYPE, POOL_DTYPE)
        finally:
            for name, value in kept.items():
                setattr(env, name, value)
            _core.get_batch_mla_module.cache_clear()
        parts = q[..., :512].contiguous(), q[..., 512:].contiguous()
        pages = pool[:, None]
        return lambda: wrapper.run(*parts, pages[..., :512], pages[..., 512:], return_lse=True)


def problem(shape: Shape, order: torch.Tensor) -> tuple[torch.Tensor, Slots, Tree]:
    n, length = shape.nodes, shape.prefix
    q = torch.randn(n, shape.heads, 576, device="cuda", dtype=POOL_DTYPE)
    ends = torch.tensor([0, length + n], device="cuda")
    slots = Slots.from_indptr(order[: length + n].contiguous(), ends, length + n)
    return q, slots, Tree.from_parents([-1] + [(i - 1) // 2 for i in range(1, n)], device="cuda")


def naive(q: torch.Tensor, pool: torch.Tensor, slots: Slots, mask: torch.Tensor) -> torch.Tensor:
    """Gather, two matrix products and a softmax, in torch."""
    k = pool[slots.indices.long()]
    scores = torch.einsum("nhd,kd->nhk", q, k).float() * SM_SCALE
    scores = scores.masked_fill(~mask[:, None], float("-inf"))
    return torch.einsum("nhk,kd->nhd", scores.softmax(-1).to(q.dtype), k[:, :512])


def calls(
    shape: Shape, pool: torch.Tensor, pool8: torch.Tensor, order: torch.Tensor, fa2: FlashInfer
) -> dict[str, Callable[[], None]]:
    """What is timed at one shape."""
    q, slots, tree = problem(shape, order)
    rows = shape.heads * shape.nodes
    told = dict(sm_scale=SM_SCALE)
    timed = {
        "cuda": graph(lambda: mla_verify.verify(q, pool, slots, tree, impl="cuda", **told)),
        "cuda e4m3": graph(lambda: mla_verify.verify(q, pool8, slots, tree, impl="cuda", **told)),
        "triton": graph(lambda: mla_verify.verify(q, pool, slots, tree, impl="triton", **told)),
    }
    if shape.prefix <= 16_384 and rows <= 256:
        prefix = torch.ones(shape.nodes, shape.prefix, dtype=torch.bool, device="cuda")
        mask = torch.cat([prefix, tree.dense()[0]], 1)
        timed["naive"] = graph(lambda: naive(q, pool, slots, mask))
    if rows <= SERIAL_ROWS and shape in SHAPES:
        timed["sglang"] = graph(sglang_verify(shape, pool, order, q, tree))
    if shape.nodes == 1 and shape.prefix >= 16_384:
        timed |= {f"sglang decode {s}": graph(c) for s, c in sglang_decode(shape, pool, order, q).items()}
    if not fa2.why and shape in SHAPES:
        timed["fa2"] = graph(fa2.call(shape, pool, order, q, held=False))
        timed["fa2 held"] = graph(fa2.call(shape, pool, order, q, held=True))
    return timed


def sglang_decode(shape: Shape, pool: torch.Tensor, order: torch.Tensor, q: torch.Tensor) -> dict[int, Callable]:
    from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd

    pages, heads = pool[:, None], shape.heads
    slots = order[: shape.prefix].long()
    ends = torch.tensor([0, shape.prefix], device="cuda", dtype=torch.int64)
    out = torch.empty(1, heads, 512, device="cuda", dtype=POOL_DTYPE)
    found = {}
    for splits in SPLITS:
        logits = torch.empty(1, heads, splits, 512, device="cuda", dtype=torch.float32)
        lse = torch.empty(1, heads, splits, device="cuda", dtype=torch.float32)
        count = torch.full((1,), splits, device="cuda", dtype=torch.int32)
        found[splits] = lambda logits=logits, lse=lse, count=count, splits=splits: decode_attention_fwd(
            q, pages, pages[..., :512], out, ends, slots, logits, lse, count, splits, SM_SCALE, 1.0, 1.0
        )
    return found


def ragged(pool: torch.Tensor) -> tuple[Callable[[], None], list[Shape]]:
    """Eight requests of unequal lengths, 16 heads, 16 nodes."""
    p = Case(BATCH, (16,) * len(BATCH), 16, POOL_DTYPE, POOL_DTYPE, branching=1.0, seed=SEED).build("cuda")
    call = graph(lambda: mla_verify.verify(p.q, p.kv, p.slots, p.tree, sm_scale=SM_SCALE, impl="cuda"))
    return call, [Shape(16, 16, length) for length in BATCH]


def report(taken: dict[Shape, Samples], batch: list[float], ceilings: dict[str, float], why_no_fa2: str = "") -> dict:
    """Gates, ratios and samples of a run, in the form that the gate runner reads."""
    gates: dict[str, dict] = {}

    def gate(name: str, metric: str, found: dict[str, float], ratios: dict | None = None, reason: str = "") -> None:
        if not found:
            gates[name] = {"passed": None, "reason": reason or "no shape of this gate was measured"}
            return
        worst = max if metric.endswith("high") else min
        at = worst(found, key=found.get)
        gates[name] = {"metrics": {metric: found[at]}, "ratios": ratios or {}, "reason": f"worst at {at}"}

    def against(name: str, peer: str, shapes: Iterable[Shape], reason: str = "") -> None:
        ratios = {
            str(s): ratio_of_medians(taken[s]["cuda"], taken[s][peer], peer=f"{peer} at {s}", seed=SEED)
            for s in shapes
            if s in taken and peer in taken[s]
        }
        plain = {k: r.model_dump() for k, r in ratios.items()}
        gate(name, "ratio_low", {k: r.low for k, r in ratios.items()}, plain, reason)

    def bounded(name: str, shapes: Iterable[Shape]) -> None:
        found = {}
        for s in shapes:
            if s in taken:
                floor = floor_us(s, ceilings["copy_bytes_s"], ceilings["mma_flop_s"])
                found[str(s)] = ratio_of_medians([floor], taken[s]["cuda"], peer=f"floor at {s}", seed=SEED).high
        gate(name, "ratio_high", found)

    rows = {s: s.heads * s.nodes for s in SHAPES}
    for name, length in (("1k", 1024), ("16k", 16_384), ("185k", 185_000)):
        against(f"cuda-vs-sglang-{name}", "sglang", [s for s in SHAPES if s.prefix == length and rows[s] <= 256])
    against("cuda-vs-fa2-held-long", "fa2 held", [s for s in SHAPES if s.prefix >= LONG], why_no_fa2)
    against("cuda-vs-fa2-held", "fa2 held", SHAPES, why_no_fa2)
    against("cuda-vs-fa2-shipped", "fa2", SHAPES, why_no_fa2)
    bounded("cuda-vs-floor-narrow", [s for s in SHAPES if s.prefix >= LONG and rows[s] <= 64])
    bounded("cuda-vs-floor-wide", [s for s in SHAPES if s.prefix >= LONG and rows[s] > 64])
    short = {str(s): _upper(taken[s]["cuda"]) for s in taken if s.prefix == 1024 and rows.get(s, 999) <= 256}
    gate("cuda-graph-1k", "us_high", short)

    faster, plain = {}, {}
    for s, samples in taken.items():
        for peer in ("triton", "naive"):
            if peer in samples:
                r = ratio_of_medians(samples["cuda"], samples[peer], peer=f"{peer} at {s}", seed=SEED)
                faster[f"{peer} at {s}"], plain[f"{peer} at {s}"] = r.low, r.model_dump()
    gate("cuda-never-slower", "ratio_low", faster, plain)
    narrow = {
        str(s): ratio_of_medians(taken[s]["cuda e4m3"], taken[s]["cuda"], peer=f"bf16 at {s}", seed=SEED)
        for s in SHAPES
        if s in taken and s.prefix >= LONG and rows[s] <= 64
    }
    plain = {k: r.model_dump() for k, r in narrow.items()}
    gate("cuda-fp8-vs-bf16", "ratio_low", {k: r.low for k, r in narrow.items()}, plain)
    if batch:
        floors = sum(floor_us(Shape(16, 16, n), ceilings["copy_bytes_s"], ceilings["mma_flop_s"]) for n in BATCH)
        high = ratio_of_medians([floors], batch, peer="sum of floors", seed=SEED).high
        gate("cuda-batch-8", "ratio_high", {f"lengths {BATCH}": high})
    decode, plain = {}, {}
    for s, samples in taken.items():
        split = {k: v for k, v in samples.items() if k.startswith("sglang decode")}
        if split:
            best = min(split, key=lambda k: statistics.median(split[k]))
            r = ratio_of_medians(samples["cuda"], split[best], peer=f"{best} splits at {s}", seed=SEED)
            decode[f"{best} at {s}"], plain[f"{best} at {s}"] = r.low, r.model_dump()
    gate("cuda-decode-vs-sglang", "ratio_low", decode, plain)
    samples = {
        f"{name} {shape}": {"values": values, "warmups": WARMUPS, "unit": "us"}
        for shape, of in taken.items()
        for name, values in of.items()
    }
    samples["cuda batch of 8"] = {"values": batch, "warmups": WARMUPS, "unit": "us"}
    notes = ["L2 flushed before each sample", "fa2 takes the prefix alone"]
    return {"samples": samples, "gates": gates, "metrics": ceilings, "seeds": {"torch": SEED}, "notes": notes}


def _upper(values: list[float]) -> float:
    """Upper end of a distribution-free 95 % interval of the median."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) / 2 + 0.98 * len(ordered) ** 0.5))]


def show(taken: dict[Shape, Samples], ceilings: dict[str, float]) -> None:
    names = list(dict.fromkeys(name for of in taken.values() for name in of if not name.startswith("sglang decode")))
    table = Table("shape", "floor", *(f"{n}, µs" for n in names), "cuda / floor")
    for shape, of in taken.items():
        floor = floor_us(shape, ceilings["copy_bytes_s"], ceilings["mma_flop_s"])
        medians = [f"{statistics.median(of[n]):.1f}" if n in of else "" for n in names]
        table.add_row(str(shape), f"{floor:.1f}", *medians, f"{statistics.median(of['cuda']) / floor:.2f}")
    Console(width=150).print(table)
    Console().print(
        f"copy {ceilings['copy_bytes_s'] / 1e12:.2f} TB/s, mma.sync {ceilings['mma_flop_s'] / 1e12:.0f} TFLOP/s"
    )


def plot(taken: dict[Shape, Samples], ceilings: dict[str, float], path: Path) -> None:
    """Time over the length of the prefix, one panel for each number of rows."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    panels = [(8, 1), (8, 16), (16, 16), (64, 64)]
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4 * len(panels), 3.6), layout="constrained")
    for axis, (heads, nodes) in zip(axes, panels, strict=True):
        shapes = sorted((s for s in taken if (s.heads, s.nodes) == (heads, nodes) and s.prefix), key=lambda s: s.prefix)
        for name in ("cuda", "cuda e4m3", "triton", "fa2", "fa2 held", "sglang"):
            xs = [s.prefix for s in shapes if name in taken[s]]
            axis.loglog(xs, [statistics.median(taken[s][name]) for s in shapes if name in taken[s]], "o-", label=name)
        floors = [floor_us(s, ceilings["copy_bytes_s"], ceilings["mma_flop_s"]) for s in shapes]
        axis.loglog([s.prefix for s in shapes], floors, "k:", label="floor")
        axis.set_title(f"H = {heads}, N = {nodes}")
        axis.set_xlabel("prefix, tokens")
    axes[0].set_ylabel("µs")
    axes[-1].legend(fontsize=8)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["gates", "table"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--plot", type=Path, metavar="FILE.svg")
    args = parser.parse_args()
    if args.rounds < 3:
        raise SystemExit(f"--rounds is {args.rounds}; expected 3 or more, or an interval of the median says nothing")
    if not torch.cuda.is_available():
        raise SystemExit("bench_cuda.py needs a CUDA GPU")
    torch.manual_seed(SEED)
    pool = torch.randn(POOL, 576, device="cuda", dtype=POOL_DTYPE)
    pool8 = pool.to(torch.float8_e4m3fn)
    order = torch.randperm(POOL, device="cuda").int()
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    ceilings = {"copy_bytes_s": copy_bandwidth(), "mma_flop_s": mma_rate()}
    taken: dict[Shape, Samples] = {}
    with tempfile.TemporaryDirectory() as scratch:
        fa2 = FlashInfer(Path(scratch))
        for shape in track([*SHORT, *SHAPES], description="shapes", console=Console(stderr=True)):
            taken[shape] = measure(calls(shape, pool, pool8, order, fa2), flush, args.rounds)
            torch.cuda.empty_cache()
        batch = measure({"cuda": ragged(pool)[0]}, flush, args.rounds)["cuda"]
    show(taken, ceilings)
    if args.plot:
        plot(taken, ceilings, args.plot)
    if out := os.environ.get("MLA_VERIFY_GATE_OUT"):
        with open(out, "w", encoding="utf-8") as f:
            json.dump(report(taken, batch, ceilings, fa2.why), f)


assert cuda_kernels.BLOCK_ROWS[-1] == 64  # R ≤ 64 of the gates is one block of rows

if __name__ == "__main__":
    main()
