"""Anything the op takes, drawn by hypothesis: implementations under the interpreter against the oracle."""

from __future__ import annotations

import mla_verify
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mla_verify.testing import Case, compare

FP16, FP32, E4M3 = torch.float16, torch.float32, torch.float8_e4m3fn


@st.composite
def cases(draw) -> Case:
    batch = draw(st.integers(1, 3))
    heads = draw(st.sampled_from([1, 2, 3, 8]))
    return Case(
        prefixes=tuple(draw(st.sampled_from([-1, 0, 1, 17, 63, 64, 65, 129, 200])) for _ in range(batch)),
        nodes=tuple(draw(st.integers(1, 12)) for _ in range(batch)),
        heads=heads,
        q_dtype=draw(st.sampled_from([FP16, FP32])),
        kv_dtype=draw(st.sampled_from([FP16, FP32, E4M3])),
        kv_scale=draw(st.sampled_from([1.0, 0.25])),
        branching=draw(st.sampled_from([0.0, 0.5, 1.0])),
        scattered=draw(st.booleans()),
        wide_index=draw(st.booleans()),
        seed=draw(st.integers(0, 2**20)),
    )


@pytest.mark.skipif(bool(mla_verify.implementations("cpu")["triton"]), reason="needs Triton's interpreter")
@settings(max_examples=15, deadline=None, derandomize=True)
@given(cases())
def test_triton_equals_the_oracle(case):
    problem = case.build()
    assert not compare(problem, *problem.run("triton", checked=True)).problem


@settings(max_examples=25, deadline=None, derandomize=True)
@given(cases(), st.integers(0, 99))
def test_the_oracle_does_not_look_where_it_must_not(case, seed):
    problem = case.build()
    out, lse = problem.run("reference")
    moved_out, moved_lse = problem.moved(seed).run("reference")
    assert torch.equal(out, moved_out) and torch.equal(lse, moved_lse)
    assert torch.isfinite(out).all()


def test_an_empty_batch_gives_empty_outputs():
    slots, tree = (
        mla_verify.Slots.from_lists([]),
        mla_verify.Tree(torch.zeros(0, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), 1),
    )
    for impl, why in mla_verify.implementations("cpu").items():
        if not why:
            out, lse = mla_verify.verify(
                torch.zeros(0, 4, 576), torch.zeros(8, 576), slots, tree, sm_scale=1.0, impl=impl, checked=True
            )
            assert out.shape == (0, 4, 512) and lse.shape == (0, 4)
