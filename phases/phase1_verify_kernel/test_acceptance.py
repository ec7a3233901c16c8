"""Phase 1 gates: ``verify`` is right, its bits depend on nothing but the row, and the gates can fail."""

from __future__ import annotations

import dataclasses
import itertools
import json
import operator
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import mla_verify
import pytest
import torch
from mla_verify import Slots, Tree
from mla_verify.testing import Case, Problem, compare

BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
HERE = Path(__file__).parent

needs_gpu = pytest.mark.skipif(not GPU, reason="needs a CUDA GPU")
needs_interpreter = pytest.mark.skipif(
    not INTERPRETED or bool(mla_verify.implementations("cpu")["triton"]),
    reason="needs TRITON_INTERPRET=1, and a Triton whose interpreter works with this numpy",
)

# Every edge that serving meets: empty prefixes, one token, a tile and one more, padding, 1 and 128 nodes, odd heads.
EDGES = [
    Case((0,), (1,), heads=1),
    Case((1,), (1,), heads=5),
    Case((63, 64, 65), (1, 2, 3), heads=4),
    Case((130, -1, 0, 7), (4, 4, 4, 4), heads=4),
    Case((257,), (33,), heads=3),
    Case((700, 5), (8, 1), heads=4, wide_index=True),
    Case((90,), (128,), heads=1),
    Case((40, 600), (5, 16), heads=4, branching=1.0),
    Case((150,), (2,), heads=128, branching=0.0),
    Case((513,), (7,), heads=16, scattered=False),
]
# The interpreter is wrong in bfloat16, so bfloat16 belongs to the GPU.
PAIRS = [(FP32, FP32), (FP16, FP16), (FP32, E4M3), (FP16, E4M3), (FP32, FP16), (FP16, FP32)]
GPU_IMPLEMENTATIONS = {
    "triton": [(BF16, BF16), (BF16, E4M3), (FP16, FP16), (FP32, FP32)],
    "cuda": [(BF16, BF16), (BF16, E4M3), (FP16, FP16), (FP16, E4M3)],
}


def implementations() -> list[str]:
    """What runs here: the oracle always, Triton on a GPU or interpreted."""
    return [name for name, why in mla_verify.implementations().items() if not why]


def held(case: Case, impl: str, device: str, metrics: dict) -> None:
    problem = case.build(device)
    c = compare(problem, *problem.run(impl))
    assert not c.problem, f"{impl}, {case}: {c.problem}"
    metrics["worst_row_error"] = max(metrics.get("worst_row_error", 0.0), c.row_error)
    metrics["near_ties"] = metrics.get("near_ties", 0) + c.near_ties
    metrics["cases"] = metrics.get("cases", 0) + 1


def random_case(seed: int, q_dtype: torch.dtype, kv_dtype: torch.dtype, *, longest: int, rows: int) -> Case:
    """Anything the op takes, within ``rows`` query rows a request."""
    r = random.Random(seed)
    heads = r.choice([1, 2, 3, 4, 8, 16, 20, 64, 128])
    batch = r.choice([1, 1, 2, 3, 5, 9])
    most = max(1, min(128, rows // heads))
    nodes = tuple(r.choice([1, r.randint(1, most), most]) for _ in range(batch))
    lengths = [0, 1, r.randint(0, 80), r.randint(0, longest), 64 * r.randint(0, longest // 64)]
    prefixes = tuple(-1 if r.random() < 0.06 else r.choice(lengths) for _ in range(batch))
    return Case(
        prefixes, nodes, heads, q_dtype, kv_dtype,
        kv_scale=r.choice([1.0, 0.5, 0.037]) if kv_dtype == E4M3 else 1.0,
        branching=r.choice([0.0, 0.3, 1.0]), scattered=r.random() < 0.8, wide_index=r.random() < 0.3, seed=seed,
    )  # fmt: skip


def test_oracle_reference(gate_metrics):
    """The oracle against attention written down once more, densely, with an explicit mask."""
    for case in EDGES:
        problem = case.build()
        out, lse = problem.run("reference")
        for b, (slots, mask) in enumerate(zip(problem.lists(), problem.tree.dense(), strict=True)):
            n, rows = len(mask), problem.rows(b)
            if len(slots) < n:
                assert (out[rows] == 0).all() and torch.isneginf(lse[rows]).all()
                continue
            k = problem.kv[slots].double()
            s = torch.einsum("nhd,kd->nhk", problem.q[rows].double(), k) * problem.sm_scale
            s[:, :, len(slots) - n :].masked_fill_(~mask[:, None], float("-inf"))
            want = torch.einsum("nhk,kd->nhd", s.softmax(-1), k[:, :512])
            torch.testing.assert_close(out[rows].double(), want, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(lse[rows].double(), s.logsumexp(-1), rtol=1e-6, atol=1e-6)
    gate_metrics["cases"] = len(EDGES)


@needs_interpreter
def test_triton_matches_oracle_interpreted(gate_metrics):
    for i, case in enumerate(EDGES):
        q_dtype, kv_dtype = PAIRS[i % len(PAIRS)]
        held(dataclasses.replace(case, q_dtype=q_dtype, kv_dtype=kv_dtype), "triton", "cpu", gate_metrics)
    for seed in range(12):
        held(random_case(seed, *PAIRS[seed % len(PAIRS)], longest=300, rows=24), "triton", "cpu", gate_metrics)


def gpu_sweep(impl: str, seeds: int, metrics: dict) -> None:
    pairs = GPU_IMPLEMENTATIONS[impl]
    for case, pair in itertools.product(EDGES, pairs):
        held(dataclasses.replace(case, q_dtype=pair[0], kv_dtype=pair[1]), impl, "cuda", metrics)
    for seed in range(seeds):
        held(random_case(seed, *pairs[seed % len(pairs)], longest=5000, rows=1024), impl, "cuda", metrics)
    for prefix, nodes in ((185_000, 16), (100_001, 3)):
        held(Case((prefix, 17), (nodes, 5), 8, BF16, BF16, seed=prefix), impl, "cuda", metrics)


@needs_gpu
def test_triton_matches_oracle_gpu(gate_metrics):
    gpu_sweep("triton", 40, gate_metrics)
    for q_dtype, kv_dtype in ((FP32, E4M3), (FP16, E4M3), (FP32, FP16), (FP16, FP32), (BF16, FP16), (FP32, BF16)):
        case = Case((130, -1, 0, 700), (4, 4, 4, 4), heads=4, q_dtype=q_dtype, kv_dtype=kv_dtype)
        held(case, "triton", "cuda", gate_metrics)


@needs_gpu
def test_cuda_matches_oracle_gpu(gate_metrics):
    gpu_sweep("cuda", 100, gate_metrics)


def bits_hold(problem: Problem, run: Callable[[Problem], tuple[torch.Tensor, torch.Tensor]]) -> int:
    """The promise of the op: a row's bits depend on the row alone. Returns the number of comparisons."""
    out, lse = run(problem)
    count = 0

    def same(other: Problem, rows_here: slice, rows_there: slice, what: str) -> None:
        nonlocal count
        o, l = run(other)
        assert torch.equal(o[rows_there], out[rows_here]), f"{what}: output bits differ"
        assert torch.equal(l[rows_there], lse[rows_here]), f"{what}: LSE bits differ"
        count += 1

    everything = slice(None)
    same(problem, everything, everything, "run again")
    same(problem.moved(5), everything, everything, "slots moved")
    wider = dataclasses.replace(problem.slots, max_len=problem.slots.max_len + 5000)
    same(dataclasses.replace(problem, slots=wider), everything, everything, "larger max_len")
    batch = range(problem.slots.batch)
    backwards = problem.only(list(batch)[::-1])
    for b in batch:
        same(problem.only([b]), problem.rows(b), everything, f"request {b} alone")
        same(backwards, problem.rows(b), backwards.rows(len(batch) - 1 - b), "batch reversed")
        own = problem.parents[b]
        if len(problem.lists()[b]) < len(own):
            continue
        for node in {0, len(own) // 2, len(own) - 1}:
            row = problem.rows(b).start + node
            same(problem.path(b, node), slice(row, row + 1), slice(-1, None), f"node {node} with no siblings")
    # What no node but one sees may be NaN for all the others care.
    b = max(batch, key=lambda b: len(problem.parents[b]))
    slots, own = problem.lists()[b], problem.parents[b]
    last = len(own) - 1
    if last and len(slots) >= len(own):
        kv = problem.kv.clone()
        kv[slots[-1]] = kv[slots[-1]] * float("nan") if kv.element_size() > 1 else kv.new_full((576,), float("nan"))
        keep = slice(problem.rows(b).start, problem.rows(b).start + last)
        same(dataclasses.replace(problem, kv=kv), keep, keep, "a sibling of NaN")
    return count


BITS = [
    Case((100, 0, -1, 333), (8, 3, 2, 5), heads=4, branching=1.0),
    Case((65, 513), (33, 1), heads=2),
    Case((20,), (40,), heads=3, branching=1.0),
]


def plain_matmul(a, b, dtype=None):
    """numpy's matmul, each element summed alike wherever it stands, as tensor cores do; BLAS does not on every CPU."""
    import numpy as np

    return np.einsum("mk,nk->mn", np.ascontiguousarray(a, dtype), np.ascontiguousarray(b.T, dtype))


@needs_interpreter
def test_bits_independent_interpreted(gate_metrics, monkeypatch):
    monkeypatch.setattr("numpy.matmul", plain_matmul)  # what the interpreter makes of tl.dot
    gate_metrics["comparisons"] = sum(
        bits_hold(dataclasses.replace(case, q_dtype=q, kv_dtype=kv).build(), operator.methodcaller("run", impl))
        for case, (q, kv) in zip(BITS, [(FP32, FP32), (FP16, E4M3), (FP16, FP16)], strict=True)
        for impl in ("reference", "triton")
    )


@needs_gpu
def test_bits_independent_gpu(gate_metrics):
    cases = [*BITS, Case((70_001, 129, 5000), (16, 64, 1), heads=16), Case((3000, 40), (128, 9), heads=8)]
    gate_metrics["comparisons"] = sum(
        bits_hold(dataclasses.replace(case, q_dtype=q, kv_dtype=kv).build("cuda"), operator.methodcaller("run", impl))
        for impl, pairs in GPU_IMPLEMENTATIONS.items()
        for case in cases
        for q, kv in pairs
    )


def graph_holds(impl: str, q_dtype: torch.dtype, kv_dtype: torch.dtype) -> int:
    """One capture serves other lengths, slots and trees: what the device holds decides, not the capture."""
    replays = 0
    shape = dict(nodes=(16, 16, 16), heads=16, q_dtype=q_dtype, kv_dtype=kv_dtype)
    problems = [
        Case(p, **shape, seed=i).build("cuda") for i, p in enumerate([(900, 70, 5), (0, 6000, 64), (-1, 3, 2500)])
    ]
    most, pool = 8192, max(p.kv.shape[0] for p in problems)
    q = torch.empty_like(problems[0].q)
    kv = torch.zeros(pool, 576, device="cuda").to(kv_dtype)
    table = torch.zeros(3, most, dtype=torch.int32, device="cuda")
    lens = torch.zeros(3, dtype=torch.int32, device="cuda")
    words = torch.empty_like(problems[0].tree.words)
    slots = Slots.from_table(table, torch.arange(3, device="cuda"), lens)
    slots = dataclasses.replace(slots, lens=lens)
    tree = Tree(words, problems[0].tree.node_starts, 16)

    def load(p: Problem) -> None:
        q.copy_(p.q)
        kv.view(torch.uint8)[: p.kv.shape[0]].copy_(p.kv.view(torch.uint8))
        for b, own in enumerate(p.lists()):
            table[b, : len(own)] = torch.tensor(own, dtype=torch.int32)
        lens.copy_(p.slots.lens)
        words.copy_(p.tree.words)

    def call():
        return mla_verify.verify(q, kv, slots, tree, sm_scale=problems[0].sm_scale, impl=impl)

    load(problems[0])
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = call()
    for _ in range(20):
        for p in problems:
            load(p)
            graph.replay()
            want, want_lse = p.run(impl)
            assert torch.equal(out, want) and torch.equal(lse, want_lse), "a replay differs from an eager call"
            replays += 1
    return replays


@needs_gpu
def test_graph_replay_bits(gate_metrics):
    gate_metrics["replays"] = sum(
        graph_holds(impl, *pair) for impl, pair in itertools.product(("triton", "cuda"), ((BF16, BF16), (BF16, E4M3)))
    )


@needs_gpu
def test_no_host_sync(gate_metrics):
    problem = Case((3000, 100), (16, 16), 16, BF16, BF16).build("cuda")
    for impl in GPU_IMPLEMENTATIONS:
        problem.run(impl)
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for impl in GPU_IMPLEMENTATIONS:
            problem.run(impl)
        mask = torch.ones(2, 16, 16, dtype=torch.bool, device="cuda").tril()
        Tree.from_mask(mask, checked=False)
        full = torch.ones(3 * 16 * 5000, dtype=torch.bool, device="cuda")
        Tree.from_full_mask(full, problem.slots.lens - 16, 16, checked=False)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    gate_metrics["calls"] = 2 + len(GPU_IMPLEMENTATIONS)


def test_opcheck(gate_metrics):
    """torch.library's own checks: schema, fake implementation, autograd registration, AOT dispatch."""
    device = "cuda" if GPU else "cpu"
    for impl in implementations():
        for case in (Case((70, 0), (3, 2), heads=2), Case((5,), (1,), heads=1, q_dtype=FP16, kv_dtype=FP16)):
            if impl == "cuda" and case.q_dtype == FP32:
                continue
            p = case.build(device)
            args = (
                p.q, p.kv, p.slots.indices, p.slots.starts, p.slots.lens, p.slots.max_len, p.tree.words,
                p.tree.node_starts, p.tree.max_nodes, p.sm_scale, p.kv_scale, impl,
            )  # fmt: skip
            torch.library.opcheck(torch.ops.mla_verify.verify.default, args)
    gate_metrics["implementations"] = len(implementations())


def test_bad_input(gate_metrics):
    """Each is refused in words that name the argument, on every implementation, before anything runs."""
    p = Case((40, 9), (4, 4), heads=2).build("cuda" if GPU else "cpu")
    dev = p.q.device

    def slots(**change) -> Slots:
        return dataclasses.replace(p.slots, **change)

    def index(value: int) -> Slots:
        changed = p.slots.indices.clone()
        changed[int(p.slots.starts[1]) + 3] = value
        return slots(indices=changed)

    def words(row: int, value: int) -> Tree:
        changed = p.tree.words.clone()
        changed[row, 0] = value
        return dataclasses.replace(p.tree, words=changed)

    lens = lambda *n: torch.tensor(n, dtype=torch.int32, device=dev)  # noqa: E731
    bad = {
        "q has shape": dict(q=p.q[..., :500]),
        "q has dtype": dict(q=p.q.double()),
        "q has 129 heads": dict(q=p.q.new_zeros(8, 129, 576)),
        "kv has shape": dict(kv=p.kv[:, :512]),
        "kv has dtype": dict(kv=p.kv.to(torch.int32)),
        "kv has strides": dict(kv=torch.cat([p.kv, p.kv], 1)[:, :576]),
        "kv is on meta": dict(kv=p.kv.to("meta")),
        "tree has 8 nodes but q has 7": dict(q=p.q[:7]),
        "tree has 1 requests but slots has 2": dict(tree=Tree.chain(8, device=dev)),
        "impl is 'fast'": dict(impl="fast"),
        "outside the pool": dict(slots=index(p.kv.shape[0])),
        "slot -1 of request 1 at position 3": dict(slots=index(-1)),
        "pool smaller than asked": dict(kv=p.kv[:9]),
        "over max_len": dict(slots=slots(lens=lens(44, 60))),
        "below the request's number": dict(slots=slots(lens=lens(44, 2))),
        "is negative": dict(slots=slots(lens=lens(44, -2))),
        "reaches outside indices": dict(slots=slots(lens=lens(44, 44))),
        "sees the later node": dict(tree=words(0, 0b11)),
        "does not see itself": dict(tree=words(1, 0b01)),
        "no path from a root": dict(tree=dataclasses.replace(p.tree, words=Tree.chain(4, 2).words.to(dev) & ~2 | 2 ** 0
            | torch.tensor([0, 2, 0, 0, 0, 2, 0, 0], dtype=torch.int32, device=dev)[:, None]
            | torch.tensor([0, 0, 0, 2, 0, 0, 0, 2], dtype=torch.int32, device=dev)[:, None])),
        "bits beyond": dict(tree=words(3, p.tree.words[3, 0].item() | 1 << 20)),
    }  # fmt: skip
    for impl, (say, change) in itertools.product(implementations(), bad.items()):
        given = dict(q=p.q, kv=p.kv, slots=p.slots, tree=p.tree, impl=impl) | change
        if say == "pool smaller than asked":
            say = "outside the pool"
        with pytest.raises(ValueError, match=say):
            mla_verify.verify(
                given["q"], given["kv"], given["slots"], given["tree"], sm_scale=1.0, impl=given["impl"], checked=True
            )
    for parents in ([-1, 1], [-1, 2, 0], [0], [-1, -2], [[-1], []], [-1] * 129, []):
        with pytest.raises(ValueError, match="parent|nodes"):
            Tree.from_parents(parents)
    gate_metrics["refused"] = len(bad) + 7


def test_poisoned_slots(gate_metrics):
    """Unused slots hold NaN and unused index entries point outside the pool: nothing of it is read or shows."""
    device = "cuda" if GPU else "cpu"
    for impl in implementations():
        for case in (
            Case((70, 0, 131), (3, 2, 5), heads=2, q_dtype=FP16, kv_dtype=FP16),
            Case((64,), (32,), heads=1, kv_dtype=E4M3),
        ):
            if impl == "cuda" and case.q_dtype == FP32:
                continue
            problem = case.build(device)
            assert torch.isnan(problem.kv.float()).any() and (problem.slots.indices >= 1 << 30).any()
            out, lse = problem.run(impl)
            assert torch.isfinite(out).all() and torch.isfinite(lse).all()
            assert not compare(problem, out, lse).problem
    gate_metrics["implementations"] = len(implementations())


def test_negative_controls(gate_metrics):
    """Broken on purpose, the comparison turns red: a gate that cannot fail proves nothing."""
    device = "cuda" if GPU else "cpu"
    caught = 0
    for impl in implementations():
        p = Case((300,), (8,), heads=4, q_dtype=FP16, kv_dtype=FP16, branching=1.0, seed=3).build(device)
        assert not compare(p, *p.run(impl)).problem
        dense = p.tree.dense()[0]
        row, column = (dense ^ torch.ones_like(dense).tril()).nonzero()[0].tolist()
        wrong_bit = p.tree.words.clone()
        wrong_bit[row, column // 32] |= 1 << column % 32
        own = p.lists()[0]
        broken = {
            "a wrong mask bit": dict(tree=dataclasses.replace(p.tree, words=wrong_bit)),
            "a chain for a tree": dict(tree=Tree.chain(8, device=device)),
            "a skipped piece": dict(slots=Slots.from_lists([own[:64] + own[128:]], device)),
            "a slot shifted by one": dict(slots=Slots.from_lists([own[1:] + own[:1]], device)),
            "one wrong slot": dict(slots=Slots.from_lists([[own[1], *own[1:]]], device)),
            "another scale": dict(sm_scale=p.sm_scale * 1.02),
        }
        for what, change in broken.items():
            out, lse = dataclasses.replace(p, **change).run(impl)
            assert compare(p, out, lse).problem, f"{impl}: {what} went unnoticed"
            caught += 1
    gate_metrics["caught"] = caught


def test_triton_compiles_sm120(gate_metrics):
    """Compiled ahead of time for sm_90, 100 and 120 with the tiles chosen there: shared memory, no spills."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(HERE / "compile_triton.py")], env=env, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    for kernel in report:
        assert kernel["shared_bytes"] <= kernel["shared_limit"], kernel
        if kernel["must_not_spill"]:
            assert kernel["stack_bytes"] == 0, kernel
    sm120 = [k for k in report if k["capability"] == 120]
    assert sm120
    gate_metrics["sm120_shared_bytes"] = max(k["shared_bytes"] for k in sm120)
    gate_metrics["kernels"] = len(report)
