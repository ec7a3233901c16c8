"""Phase 1 gates of the CUDA kernel on a GPU, beside the acceptance tests: many random cases, a soak, faults."""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
import operator
import os
import random
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from mla_verify import Slots, Tree, cuda_kernels
from mla_verify.testing import Case, Problem, compare

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

from test_acceptance import BITS, EDGES, bits_hold  # noqa: E402

CASES = 2000
REPLAYS = 10_000
LONGEST = 1_000_003
VOCABULARY = 8  # compare draws its projection on the CPU: 512 tokens would take most of the time of a small case


class Dense(Problem):
    """A problem whose oracle is dense float64 attention on the device: a few operations a request, not a node."""

    def oracle(self) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.zeros(*self.q.shape[:2], 512, dtype=torch.float64, device=self.q.device)
        lse = torch.full(self.q.shape[:2], float("-inf"), dtype=torch.float64, device=self.q.device)
        flat = self.slots.indices.flatten()
        first = self.tree.node_starts.tolist()
        requests = zip(self.slots.starts.tolist(), self.slots.lens.tolist(), self.tree.dense(), strict=True)
        for b, (start, length, visible) in enumerate(requests):
            nodes = len(visible)
            if length < nodes:
                continue
            keys = self.kv[flat[start : start + length].long()].to(torch.float64) * self.kv_scale
            rows = slice(first[b], first[b + 1])
            scores = (self.q[rows].to(torch.float64) @ keys.T) * self.sm_scale
            scores[:, :, length - nodes :].masked_fill_(~visible[:, None], float("-inf"))
            lse[rows] = scores.logsumexp(-1)
            out[rows] = scores.softmax(-1) @ keys[:, :512]
        return out, lse


def pairs() -> list[tuple[torch.dtype, torch.dtype]]:
    """Dtypes of q and K/V that this GPU's kernel takes."""
    capability = torch.cuda.get_device_capability()
    found = dict.fromkeys((v.q, v.kv) for v in cuda_kernels.VARIANTS)
    return [pair for pair in found if not cuda_kernels.unsupported(*pair, capability)]


def random_case(seed: int, taken: list[tuple[torch.dtype, torch.dtype]]) -> Case:
    """Anything the kernel takes. Most cases are small; every 25th has 8,192 rows, or a batch of up to 64."""
    r = random.Random(seed)
    heads, batch, rows, longest = r.choice([1, 2, 3, 5, 8, 16, 20, 64, 128]), r.choice([1, 1, 2, 3, 5]), 300, 900
    if seed % 50 == 0:
        heads, batch, rows, longest = r.choice([64, 128]), 1, 8192, 2000
    elif seed % 50 == 25:
        batch = r.choice([33, 63, 64])
        rows, longest = 64, 600
    elif seed % 50 == 10:
        batch, longest = 1, 30_000
    else:
        rows, longest = r.choice([16, 40, 128, rows]), r.choice([70, 600, longest])
    most = max(1, min(128, rows // heads))
    nodes = tuple(most if rows == 8192 else r.choice([1, r.randint(1, most), most]) for _ in range(batch))
    lengths = [0, 1, r.randint(0, 80), r.randint(0, longest), 16 * r.randint(0, longest // 16)]
    if longest == 30_000:
        lengths = [r.randint(5000, longest)]
    prefixes = tuple(-1 if batch > 1 and r.random() < 0.06 else r.choice(lengths) for _ in range(batch))
    q, kv = r.choice(taken)
    return Case(
        prefixes, nodes, heads, q, kv, kv_scale=r.choice([1.0, 0.5, 0.037]) if kv != q else 1.0,
        branching=r.choice([0.0, 0.3, 1.0]), scattered=r.random() < 0.8, wide_index=r.random() < 0.3, seed=seed,
    )  # fmt: skip


def varied(problem: Problem, seed: int) -> Problem:
    """Some problems get peaked scores, so that bases move; a looser max_len; or one list that all requests share."""
    r = random.Random(seed)
    if r.random() < 0.3:
        problem = dataclasses.replace(problem, q=problem.q * 4)
    slots = problem.slots
    if r.random() < 0.3:
        slots = dataclasses.replace(slots, max_len=slots.max_len + r.choice([1, 64, 5000]))
    lens = slots.lens.tolist()
    if r.random() < 0.3 and lens[0]:
        nodes = [len(own) for own in problem.parents]
        fitting = [n if n >= own else 0 for n, own in zip((min(n, lens[0]) for n in lens), nodes, strict=True)]
        slots = dataclasses.replace(
            slots, starts=slots.starts[:1].expand(len(lens)).contiguous(), lens=slots.lens.new_tensor(fitting)
        )
    return dataclasses.replace(problem, slots=slots)


def held(problem: Problem, what: object, metrics: dict) -> None:
    c = compare(Dense(**vars(problem)), *problem.run("cuda"), vocabulary=VOCABULARY)
    assert not c.problem, f"{what}: {c.problem}"
    metrics["cases"] = metrics.get("cases", 0) + 1
    metrics["worst_row_error"] = max(metrics.get("worst_row_error", 0.0), c.row_error)
    metrics["near_ties"] = metrics.get("near_ties", 0) + c.near_ties


def far_problem(q: torch.dtype, kv: torch.dtype, tokens: int) -> Problem:
    """One request of ``tokens``, strewn over a pool four times as large, drawn on the device; NaN everywhere else.

    At a million tokens an element of the pool has an offset that 32 bits do not hold.
    """
    small = Case((64,), (3,), 4, q, kv, seed=7).build("cuda")
    g = torch.Generator("cuda").manual_seed(7)
    ids = torch.randperm(4 * tokens, generator=g, device="cuda")[:tokens]
    pool = torch.empty(4 * tokens, 576, dtype=kv, device="cuda")
    pool.view(torch.uint8).fill_(0xFF)  # NaN in all three dtypes
    pool.view(torch.uint8)[ids] = torch.randn(tokens, 576, generator=g, device="cuda").to(kv).view(torch.uint8)
    slots = Slots.from_indptr(ids.int(), torch.tensor([0, tokens], device="cuda"), tokens)
    return dataclasses.replace(small, kv=pool, slots=slots)


def random_cases(seeds: range) -> dict:
    """What ``held`` found, seed by seed; in a process of its own."""
    torch.set_num_threads(1)
    metrics: dict = {}
    for seed in seeds:
        case = random_case(seed, pairs())
        held(varied(case.build("cuda"), seed), f"seed {seed}, {case}", metrics)
    return metrics


def test_random_cases(gate_metrics):
    for case, (q, kv) in itertools.product(EDGES, pairs()):
        problem = dataclasses.replace(case, q_dtype=q, kv_dtype=kv).build("cuda")
        for quick, slow in zip(Dense(**vars(problem)).oracle(), problem.oracle(), strict=True):
            torch.testing.assert_close(quick, slow, rtol=1e-10, atol=1e-10)
        held(problem, case, gate_metrics)
    # A case is some hundred small operations, which one process can't hand over any faster.
    workers = min(8, os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for found in pool.map(random_cases, [range(i, CASES, workers) for i in range(workers)]):
            gate_metrics["cases"] += found["cases"]
            gate_metrics["worst_row_error"] = max(gate_metrics["worst_row_error"], found["worst_row_error"])
            gate_metrics["near_ties"] += found["near_ties"]
    for q, kv in pairs():
        torch.cuda.empty_cache()
        tokens = min(LONGEST, torch.cuda.mem_get_info()[0] // 24_000)  # the pool, and the oracle's K/V in float64
        held(far_problem(q, kv, tokens), f"{tokens} tokens, {q}, {kv}", gate_metrics)
        gate_metrics["longest"] = tokens


def test_bits_independent(gate_metrics, monkeypatch):
    run = operator.methodcaller("run", "cuda")
    cases = [*BITS, Case((70_001, 129, 5000), (16, 64, 1), heads=16), Case((3000, 40), (128, 9), heads=8)]
    comparisons = 0
    for case, (q, kv) in itertools.product(cases, pairs()):
        problem = dataclasses.replace(case, q_dtype=q, kv_dtype=kv).build("cuda")
        comparisons += bits_hold(problem, run)
        want = run(problem)
        with monkeypatch.context() as m:
            m.setattr(cuda_kernels, "WORKSPACE_BYTES", 1)  # a launch for each block of rows of each request
            for got, expected in zip(run(problem), want, strict=True):
                assert torch.equal(got, expected), f"{case}, {q}, {kv}: several launches give other bits"
        comparisons += 1
    gate_metrics["comparisons"] = comparisons


def test_poisoned_slots(gate_metrics):
    """NaN in every unused slot, ids far outside the pool between requests: neither is read, nothing of it shows."""
    for (q, kv), nodes in itertools.product(pairs(), (1, 5, 16, 33, 128)):
        case = Case((70, 0, -1, 1311), (nodes,) * 4, 4, q, kv, seed=nodes)
        problem = case.build("cuda")
        assert torch.isnan(problem.kv.float()).any() and (problem.slots.indices >= 1 << 30).any()
        held(problem, case, gate_metrics)


def test_soak(gate_metrics):
    """Graph replays without end: the same bits each time, compared on the device, NaN in between."""
    shapes = [Case((9000, 70, 0), (16, 16, 16), 16), Case((500, 33), (1, 1), 16), Case((65, 2000), (5, 2), 6)]
    problems = [
        dataclasses.replace(case, q_dtype=q, kv_dtype=kv, seed=3).build("cuda")
        for case, (q, kv) in itertools.product(shapes, pairs())
    ]
    wanted = [p.run("cuda") for p in problems]
    differing = torch.zeros(len(problems), dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    graphs, kept = [], []
    for i, (p, (want, want_lse)) in enumerate(zip(problems, wanted, strict=True)):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            out, lse = p.run("cuda")
            differing[i] += (out.view(torch.int16) != want.view(torch.int16)).sum()
            differing[i] += (lse.view(torch.int32) != want_lse.view(torch.int32)).sum()
            out.fill_(float("nan"))
            lse.fill_(float("nan"))
        kept.append((out, lse))
    replays = 0
    while replays < REPLAYS:
        for graph in graphs:  # one behind another: no kernel finds the caches as its last replay left them
            graph.replay()
            replays += 1
    found = differing.tolist()
    for p, count in zip(problems, found, strict=True):
        what = f"{p.q.dtype}, {p.kv.dtype}, lengths {p.slots.lens.tolist()}"
        assert count == 0, f"{count} values changed in {replays // len(graphs)} replays of {what}"
    for p, graph in zip(problems, graphs, strict=True):  # and the comparison can fail
        p.q[0].neg_()
        graph.replay()
    assert (differing > 0).all(), "another query went unnoticed"
    gate_metrics["replays"] = replays


def test_negative_controls(gate_metrics):
    """Faults in what the kernel is given turn the comparison red, in each row block and dtype."""
    caught = 0
    for (q, kv), heads in itertools.product(pairs(), (2, 4, 8)):
        p = Case((300,), (8,), heads, q, kv, branching=1.0, seed=3).build("cuda")
        assert not compare(p, *p.run("cuda")).problem
        own, dense = p.lists()[0], p.tree.dense()[0]
        row, column = (dense ^ torch.ones_like(dense).tril()).nonzero()[0].tolist()
        wrong = p.tree.words.clone()
        wrong[row, column // 32] |= 1 << column % 32
        for what, change in {
            "a wrong mask bit": dict(tree=dataclasses.replace(p.tree, words=wrong)),
            "a chain for a tree": dict(tree=Tree.chain(8, device="cuda")),
            "a skipped piece": dict(slots=Slots.from_lists([own[:64] + own[128:]], "cuda")),
            "slots shifted by one": dict(slots=Slots.from_lists([own[1:] + own[:1]], "cuda")),
            "one wrong slot": dict(slots=Slots.from_lists([[own[1], *own[1:]]], "cuda")),
            "another scale": dict(sm_scale=p.sm_scale * 1.02),
        }.items():
            out, lse = dataclasses.replace(p, **change).run("cuda")
            assert compare(p, out, lse).problem, f"{q}, {kv}, {heads} heads: {what} went unnoticed"
            caught += 1
    gate_metrics["caught"] = caught
