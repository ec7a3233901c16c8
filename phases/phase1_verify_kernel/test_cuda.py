"""Phase 1 gates of the CUDA kernel on a GPU, beside the acceptance tests: many random cases, a soak, faults."""

from __future__ import annotations

import dataclasses
import itertools
import operator
import random

import pytest
import torch
from mla_verify import Slots, Tree, verify
from mla_verify.cuda_kernels import VARIANTS, unsupported
from mla_verify.testing import Case, Problem, compare

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

from test_acceptance import BITS, EDGES, bits_hold  # noqa: E402

CASES = 2000
REPLAYS = 10_000


def pairs() -> list[tuple[torch.dtype, torch.dtype]]:
    """Dtypes of q and K/V that this GPU's kernel takes."""
    capability = torch.cuda.get_device_capability()
    return list(dict.fromkeys((v.q, v.kv) for v in VARIANTS if not unsupported(v.q, v.kv, capability)))


def random_case(seed: int) -> Case:
    """Anything the kernel takes: rows 1 to 8,192, nodes 1 to 128, batch 1 to 64, any order of slots.

    Most cases are small: the oracle computes in float64.
    """
    r = random.Random(seed)
    heads = r.choice([1, 2, 3, 5, 8, 16, 20, 64, 128])
    large = seed % 50 == 0
    batch = r.choice([1, 8, 33, 64]) if large else r.choice([1, 1, 2, 3, 5])
    rows = 8192 if large and batch == 1 else r.choice([16, 40, 128, 300])
    most = max(1, min(128, rows // heads))
    nodes = tuple(r.choice([1, r.randint(1, most), most]) for _ in range(batch))
    longest = 2000 if batch > 8 or rows > 300 else r.choice([70, 600, 6000, 30_000 if seed % 10 == 0 else 900])
    lengths = [0, 1, r.randint(0, 80), r.randint(0, longest), 16 * r.randint(0, longest // 16)]
    prefixes = tuple(-1 if r.random() < 0.05 else r.choice(lengths) for _ in range(batch))
    q, kv = r.choice(pairs())
    return Case(
        prefixes, nodes, heads, q, kv, kv_scale=r.choice([1.0, 0.5, 0.037]) if kv != q else 1.0,
        branching=r.choice([0.0, 0.3, 1.0]), scattered=r.random() < 0.8, wide_index=r.random() < 0.3, seed=seed,
    )  # fmt: skip


def held(case: Case, metrics: dict) -> None:
    problem = case.build("cuda")
    c = compare(problem, *problem.run("cuda"))
    assert not c.problem, f"{case}: {c.problem}"
    metrics["cases"] = metrics.get("cases", 0) + 1
    metrics["worst_row_error"] = max(metrics.get("worst_row_error", 0.0), c.row_error)
    metrics["near_ties"] = metrics.get("near_ties", 0) + c.near_ties


def test_random_cases(gate_metrics):
    for case, (q, kv) in itertools.product(EDGES, pairs()):
        held(dataclasses.replace(case, q_dtype=q, kv_dtype=kv), gate_metrics)
    for seed in range(CASES):
        held(random_case(seed), gate_metrics)
    for q, kv in pairs():
        held(Case((1_000_003,), (3,), 4, q, kv, seed=7), gate_metrics)


def test_bits_independent(gate_metrics):
    run = operator.methodcaller("run", "cuda")
    cases = [*BITS, Case((70_001, 129, 5000), (16, 64, 1), heads=16), Case((3000, 40), (128, 9), heads=8)]
    gate_metrics["comparisons"] = sum(
        bits_hold(dataclasses.replace(case, q_dtype=q, kv_dtype=kv).build("cuda"), run)
        for case, (q, kv) in itertools.product(cases, pairs())
    )


def test_poisoned_slots(gate_metrics):
    """NaN in every unused slot, ids far outside the pool between requests: neither is read, nothing of it shows."""
    for (q, kv), nodes in itertools.product(pairs(), (1, 5, 16, 33, 128)):
        problem = Case((70, 0, -1, 1311), (nodes,) * 4, 4, q, kv, seed=nodes).build("cuda")
        assert torch.isnan(problem.kv.float()).any() and (problem.slots.indices >= 1 << 30).any()
        out, lse = problem.run("cuda")
        assert not compare(problem, out, lse).problem
        gate_metrics["cases"] = gate_metrics.get("cases", 0) + 1


def test_soak(gate_metrics):
    """Graph replays without end: the same bits each time, compared on the device."""
    problems = [Case((9000, 70, 0), (16, 16, 16), 16, q, kv, seed=3).build("cuda") for q, kv in pairs()]
    replays = 0
    for p in problems:
        want, want_lse = p.run("cuda")
        differing = torch.zeros(1, dtype=torch.int64, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse = p.run("cuda")
            differing += (out.view(torch.int16) != want.view(torch.int16)).sum()
            differing += (lse.view(torch.int32) != want_lse.view(torch.int32)).sum()
        differing.zero_()
        for _ in range(-(-REPLAYS // len(problems))):
            graph.replay()
            replays += 1
        assert differing.item() == 0, f"{differing.item()} values changed in {replays} replays of {p.q.dtype}"
    gate_metrics["replays"] = replays


def test_negative_controls(gate_metrics):
    """Faults in what the kernel is given turn the comparison red, in each row block and dtype."""
    caught = 0
    for (q, kv), heads in itertools.product(pairs(), (2, 4, 8)):
        p = Case((300,), (8,), heads, q, kv, branching=1.0, seed=3).build("cuda")
        assert not compare(p, *p.run("cuda")).problem
        own = p.lists()[0]
        dense = p.tree.dense()[0]
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
            broken: Problem = dataclasses.replace(p, **change)
            out, lse = verify(
                broken.q,
                broken.kv,
                broken.slots,
                broken.tree,
                sm_scale=broken.sm_scale,
                kv_scale=p.kv_scale,
                impl="cuda",
            )
            assert compare(p, out, lse).problem, f"{q}, {kv}, {heads} heads: {what} went unnoticed"
            caught += 1
    gate_metrics["caught"] = caught
