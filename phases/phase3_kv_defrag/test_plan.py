"""The planner alone, on any layout: what it promises, whatever the pool looks like."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mla_verify_sglang.defrag import plan


@st.composite
def layouts(draw) -> plan.Layout:
    size = draw(st.integers(1, 90))
    held = draw(st.integers(0, size))
    g = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    units = g.permutation(np.arange(1, size + 1))[:held]
    if draw(st.booleans()):
        units = np.sort(units)
    cuts = np.sort(g.integers(0, held + 1, draw(st.integers(0, 4))))
    chains = tuple(c for c in np.split(units, cuts) if len(c))
    growth = tuple(int(x) for x in g.integers(0, 5, len(chains)))
    return plan.Layout(size, chains, growth, plan.free_units(size, chains))


@settings(max_examples=300, deadline=None, database=None)
@given(layout=layouts(), budget=st.integers(0, 120), page=st.sampled_from((1, 4, 64)))
def test_plan(layout, budget, page):
    moves = plan.plan(layout, budget, page)
    held = set(np.concatenate([np.zeros(0, dtype=int), *layout.chains]).tolist())
    src, dst = moves.src.tolist(), moves.dst.tolist()
    assert len(set(src)) == len(src) <= budget and len(set(dst)) == len(dst)
    assert set(src) <= held, "a free unit would be moved"
    assert all(1 <= d <= layout.size and (d not in held or d in set(src)) for d in dst), "a held unit would be lost"
    after = plan.moved(layout, moves)
    assert plan.measure(after, page).tokens == plan.measure(layout, page).tokens
    if src:
        assert plan.measure(after).runs < plan.measure(layout).runs
    pool = np.arange(layout.size + 1) * 7
    for rows, steps in ((pool, moves), (pool, moves.back())):
        _run(rows, steps)
        where = after.chains if steps is moves else layout.chains
        for chain, at in zip(layout.chains, where, strict=True):
            assert (rows[at] == chain * 7).all(), "rows do not follow their tokens"


def _run(rows: np.ndarray, moves: plan.Moves) -> None:
    """What the kernel does: one path after the other, a ring's first destination kept aside."""
    assert moves.starts[0] == 0 and moves.starts[-1] == len(moves)
    for begin, end in zip(moves.starts[:-1], moves.starts[1:], strict=True):
        kept = rows[moves.dst[begin]]
        for i in range(begin, end):
            ring = i == end - 1 and moves.src[i] == moves.dst[begin]
            rows[moves.dst[i]] = kept if ring else rows[moves.src[i]]


@settings(max_examples=100, deadline=None, database=None)
@given(layout=layouts(), order=st.randoms(use_true_random=False))
def test_chains_of_in_any_order(layout, order):
    """A tree of segments gives the same chains, every unit once, in whatever order its segments come."""
    segments = [
        (chain, i - 1 if i % 3 else -1, g)
        for i, (chain, g) in enumerate(zip(layout.chains, layout.growth, strict=True))
    ]
    chains, growth = plan.chains_of(segments)
    assert sorted(np.concatenate([*chains, []]).tolist()) == sorted(np.concatenate([*layout.chains, []]).tolist())
    places = list(range(len(segments)))
    order.shuffle(places)
    at = {old: new for new, old in enumerate(places)}
    shuffled = [(segments[i][0], at.get(segments[i][1], -1), segments[i][2]) for i in places]
    again, growth_again = plan.chains_of(shuffled)
    assert growth == growth_again and all(np.array_equal(a, b) for a, b in zip(chains, again, strict=True))


def test_what_is_wrong_is_said():
    with pytest.raises(ValueError, match="one place"):
        plan.moves_of(np.array([1, 2]), np.array([3, 3]))
    with pytest.raises(ValueError, match="one place"):
        plan.moves_of(np.array([1, 1]), np.array([3, 4]))
    with pytest.raises(ValueError, match="ring"):
        plan.chains_of([(np.array([1]), 1, 0), (np.array([2]), 0, 0)])


def test_a_scattered_pool_comes_right():
    """90 % full, every slot anywhere: whole requests in long runs, and nothing left to do."""
    g = np.random.default_rng(1)
    units = g.permutation(np.arange(1, 20_001))
    chains = tuple(np.split(units[:18_000], [5_000, 12_000]))
    layout = plan.Layout(20_000, chains, (64, 64, 64), plan.free_units(20_000, chains))
    for _ in range(3):
        layout = plan.moved(layout, plan.plan(layout, 40_000))
    assert plan.measure(layout).long_share == 1.0 and plan.measure(layout).runs < 30
