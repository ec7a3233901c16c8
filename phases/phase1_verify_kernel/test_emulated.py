"""Phase 1 gates of the CUDA source on a machine with no GPU: verify.cu run on the CPU, thread by thread.

See tests/emulator. The address sanitizer watches every read, asynchronous copies land as late as they may, and warps
run in an order that the seed draws.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from pathlib import Path

import pytest
import torch
from mla_verify import cuda_kernels
from mla_verify.testing import Case, Problem, compare

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "emulator"))

import emulator  # noqa: E402
from test_acceptance import BITS, EDGES, bits_hold, random_case  # noqa: E402

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
pytestmark = pytest.mark.skipif(emulator.compiler() is None, reason="needs a C++ compiler (g++ or clang++)")
# dtypes of q and K/V, wide slot ids, and whether tiles come by bulk copies (sm_90 and newer) or by cp.async
BUILDS = [
    (BF16, BF16, False, True), (BF16, E4M3, False, True), (FP16, FP16, True, True), (BF16, BF16, False, False),
    (FP16, E4M3, True, False),
]  # fmt: skip
ROW_BLOCKS = [
    Case((150,), (2,), heads=64), Case((213, 40), (3, 1), heads=8), Case((99,), (1,), heads=16),
    Case((0, 0), (3, 5), heads=16),  # rows of several blocks and no prefix at all
]  # fmt: skip


def built(case: Case, build: tuple[torch.dtype, torch.dtype, bool, bool]) -> Problem:
    q, kv, wide, _ = build
    return dataclasses.replace(case, q_dtype=q, kv_dtype=kv, wide_index=wide, kv_scale=0.5 if kv == E4M3 else 1).build()


@pytest.mark.parametrize("number", range(len(BUILDS)))
def test_emulated_matches_oracle(number, gate_metrics):
    """Edges on every build, and random cases."""
    build = BUILDS[number]
    edges = EDGES if number == 0 else EDGES[2:4]
    wanted = [(case, int(number > 0)) for case in [*edges, *ROW_BLOCKS]]
    for seed in range(number, 10, len(BUILDS)):
        wanted.append((random_case(seed, BF16, BF16, longest=200, rows=100), seed))
    for case, seed in wanted:
        problem = built(case, build)
        c = compare(problem, *emulator.run(problem, bulk=build[3], seed=seed))
        assert not c.problem, f"{case}, {build}: {c.problem}"
    gate_metrics["cases"] = len(wanted)


@pytest.mark.parametrize("case, build", list(zip([*BITS, Case((70,), (9,), heads=7), BITS[1]], BUILDS, strict=True)))
def test_emulated_bits_independent(case, build, gate_metrics):
    """A row's bits depend on the row alone: also whether 16, 32 or 64 rows share its block."""
    gate_metrics["comparisons"] = bits_hold(built(case, build), lambda p: emulator.run(p, bulk=build[3]))


# What breaks when a line of verify.cu goes missing: each must turn the comparison, or the emulator, red.
FAULTS = {
    "a bulk copy's wait left out": (
        "if ((i + 1) * KEYS < tokens) barrier_wait(&sh.full[k_stage], k_phase);",
        "",
    ),
    "the barrier before scores are read left out": (
        "const bool rescale = __syncthreads_or(shrunk);\n    float x",
        "const bool rescale = shrunk;\n    float x",
    ),
    "the barrier after scores are read left out": (
        "whole_scores<ROWS>(x, sh, my_row, sub, score_scale);\n    __syncthreads();",
        "whole_scores<ROWS>(x, sh, my_row, sub, score_scale);",
    ),
    "a tile loaded over one that is still read": ("AHEAD = STAGES - 2;", "AHEAD = STAGES - (ROWS == 64 ? 2 : 1);"),
    "tokens past the end not masked": ("left = tokens - i * KEYS - sub * N;", "left = N;"),
    "a row of K/V too far": ("kv + (i64)slots.b * DIM, DIM", "kv + (i64)(slots.b + 1) * DIM, DIM"),
    "slots read past the end": ("low[min(token + 1, last) * WORDS]", "low[(token + 1) * WORDS]"),
    "a base that moves without rescaling": ("\n        shrink = exp2_fast(top - base);", "\n        shrink = 1.f;"),
    "a piece left out of the merge": (
        "const int count = min((prefix + each - 1) / each, splits) + 1;",
        "const int count = min((prefix + each - 1) / each, splits);",
    ),
    "a merge that does not wait for the pieces": ("  wait_for_launch_before();\n", ""),
    "a tree's tile that is not waited for": (
        "wait_all_but<1>();\n    __syncthreads();\n    const KV* from",
        "__syncthreads();\n    const KV* from",
    ),
    "a tree that is not masked": ("(word >> token) & 1u && at + token < nodes", "at + token < nodes"),
}
# The same in the loop of 64 rows.
FAULTS_64 = {
    "64 rows: a bulk copy's wait left out": ("      barrier_wait(&sh.full[stage], phase);\n", ""),
    "64 rows: scores read before they are there": (
        "const bool rescale = sync_or(shrunk);  // here",
        "const bool rescale = shrunk;  // here",
    ),
    "64 rows: scores written over before they are read": ("score_scale);\n      sync();\n", "score_scale);\n"),
    "64 rows: P read before it is there": (
        "& 1;\n    const bool rescale = sync_or(shrunk);",
        "& 1;\n    const bool rescale = shrunk;",
    ),
    "64 rows: a stage filled that the other half still reads": (
        "barrier_wait(&sh.empty[to], phase ^ (to < stage) ^ 1);",
        "",
    ),
    "64 rows: norms read before they are there": ("    sync();\n    store_output<64>", "    store_output<64>"),
    "64 rows: tokens past the end not masked": (
        "const int left = tokens - i * KEYS - sub * 4;",
        "const int left = 4;",
    ),
    "64 rows: a base that moves without rescaling": (
        "          shrink = exp2_fast(top - base);\n          top",
        "          shrink = 1.f;\n          top",
    ),
    "64 rows: the last piece's P in the first products of the next": (
        "sh.p[1][my_row][sub * 4]) = uint2{0u, 0u};",
        "sh.p[0][my_row][0]) = uint2{0u, 0u};",
    ),
    "64 rows: one piece's sums go on in the next": (
        "    total[0] = total[1] = 0.f;\n    bool shrunk",
        "    bool shrunk",
    ),
    "64 rows: a piece's tiles from another's tokens": ("if (at >= end) at = end + skip,", "if (at >= end) at = end,"),
}


def tried(case: Case) -> list[Problem]:
    """What faults are tried on; the kernel as it is passes."""
    problem = built(case, BUILDS[0])
    spread = dataclasses.replace(problem, q=problem.q * 30)  # scores far apart, so that bases move
    for p in (problem, spread):
        c = compare(p, *emulator.run(p))
        assert not c.problem, c.problem
    return [problem, spread]


@pytest.fixture(scope="module")
def problems() -> dict[int, list[Problem]]:
    """By rows of a block: 32, and 64 with two pieces to a block."""
    return {
        32: tried(Case((430, 77), (7, 5), heads=4, branching=1.0, seed=2)),
        64: tried(Case((430, 77), (24, 5), heads=4, branching=1.0, seed=2)),
    }


@pytest.mark.parametrize("fault", [*FAULTS, *FAULTS_64])
def test_emulated_negative_controls(fault, problems, gate_metrics):
    """Lines taken out of the kernel: the gates above would notice."""
    line, instead = (FAULTS | FAULTS_64)[fault]
    source = cuda_kernels.SOURCE.read_text()
    assert source.count(line) == 1, f"the line of {fault!r} is not, or not once, in verify.cu any more"
    for problem, seed in itertools.product(problems[64 if fault in FAULTS_64 else 32], range(3)):
        try:
            noticed = compare(problem, *emulator.run(problem, seed=seed, source=source.replace(line, instead))).problem
        except emulator.EmulatorError as error:
            noticed = str(error)
        if noticed:
            break
    assert noticed, f"{fault}: went unnoticed"
    gate_metrics["caught"] = 1
