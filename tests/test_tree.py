"""Tree and Slots: every way to build one gives the same words; what is no tree is refused in words."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mla_verify import MAX_NODES, Slots, Tree


@st.composite
def parent_lists(draw, most: int = 40) -> list[list[int]]:
    return [
        [draw(st.integers(-1, i - 1)) for i in range(n)]
        for n in draw(st.lists(st.integers(1, most), min_size=1, max_size=4))
    ]


def ancestors(parents: list[int]) -> torch.Tensor:
    mask = torch.eye(len(parents), dtype=torch.bool)
    for i, parent in enumerate(parents):
        if parent >= 0:
            mask[i] |= mask[parent]
    return mask


@settings(max_examples=60, deadline=None)
@given(parent_lists())
def test_from_parents_is_the_ancestor_mask(lists):
    tree = Tree.from_parents(lists)
    tree.check()
    for mask, parents in zip(tree.dense(), lists, strict=True):
        assert torch.equal(mask, ancestors(parents))


@settings(max_examples=40, deadline=None)
@given(parent_lists(), st.integers(0, 90), st.integers(0, 7))
def test_both_sglang_layouts_give_the_words_of_the_parents(lists, prefix, spare):
    n = max(len(p) for p in lists)
    lists = [p + [-1] * (n - len(p)) for p in lists]
    masks = torch.stack([ancestors(p) for p in lists])
    lens = torch.tensor([prefix + b for b in range(len(lists))])
    full = [
        torch.cat([torch.ones(n, int(k), dtype=torch.bool), m], 1).flatten() for k, m in zip(lens, masks, strict=True)
    ]
    full.append(torch.zeros(spare, dtype=torch.bool))  # SGLang's buffers are longer than what is in use
    want = Tree.from_parents(lists)
    for checked in (True, False):
        for tree in (
            Tree.from_mask(masks, checked=checked),
            Tree.from_full_mask(torch.cat(full), lens, n, checked=checked),
        ):
            assert torch.equal(tree.words, want.words)
            assert torch.equal(tree.node_starts, want.node_starts)
            assert tree.max_nodes == want.max_nodes == n


def test_a_chain_is_a_tree_of_single_children():
    for n in (1, 2, 31, 32, 33, 64, 127, 128):
        assert torch.equal(Tree.chain(n).words, Tree.from_parents(list(range(-1, n - 1))).words)
    ragged = Tree.chain([3, 1, 40])
    ragged.check()
    assert [len(m) for m in ragged.dense()] == [3, 1, 40]


@pytest.mark.parametrize(
    ("parents", "say"),
    [
        ([-1, 1], "its own parent"),
        ([-1, 2, 0], "expected -1"),
        ([0], "its own parent"),
        ([-1, -2], "expected -1"),
        ([-1, 0.0], "expected -1"),
        ([], "nodes"),
        ([[-1], []], "0 nodes"),
        ([-1] * (MAX_NODES + 1), "129 nodes"),
    ],
)
def test_what_is_no_tree_is_refused(parents, say):
    with pytest.raises(ValueError, match=say):
        Tree.from_parents(parents)


def test_masks_that_are_no_tree_are_refused():
    chain = torch.ones(4, 4, dtype=torch.bool).tril()

    def broken(*at: tuple[int, int]) -> torch.Tensor:
        mask = chain.clone()
        for r, c in at:
            mask[r, c] = not mask[r, c]
        return mask

    for mask, say in (
        (broken((2, 2)), "does not see itself"),
        (broken((1, 3)), "sees the later node 3"),
        (broken((3, 0)), "no path from a root"),
        (chain.int(), "dtype"),
        (chain[:3], "shape"),
        (torch.ones(129, 129, dtype=torch.bool).tril(), "129 nodes"),
    ):
        with pytest.raises(ValueError, match=say):
            Tree.from_mask(mask)
    full = torch.cat([torch.ones(4, 5, dtype=torch.bool), chain], 1)
    full[2, 1] = False
    with pytest.raises(ValueError, match="hides prefix tokens"):
        Tree.from_full_mask(full.flatten(), torch.tensor([5]), 4)
    with pytest.raises(ValueError, match="need 36"):
        Tree.from_full_mask(full.flatten()[:-1], torch.tensor([5]), 4)


def test_the_three_forms_of_slots_name_the_same_tokens():
    lists = [[5, 3, 9], [], [7, 1]]
    table = torch.full((4, 6), -1, dtype=torch.int32)
    rows = torch.tensor([2, 0, 3])
    for row, own in zip(rows, lists, strict=True):
        table[row, : len(own)] = torch.tensor(own, dtype=torch.int32)
    lens = torch.tensor([len(x) for x in lists])
    flat = torch.tensor([s for x in lists for s in x])
    indptr = torch.tensor([0, 3, 3, 5])
    for slots in (Slots.from_lists(lists), Slots.from_table(table, rows, lens), Slots.from_indptr(flat, indptr, 3)):
        index = slots.indices.flatten().tolist()
        pairs = zip(slots.starts.tolist(), slots.lens.tolist(), strict=True)
        assert [index[a : a + n] for a, n in pairs] == lists
        slots.check(10, torch.tensor([1, 1, 1]))


def test_slots_of_the_wrong_kind_are_refused():
    one = torch.zeros(1, dtype=torch.int64)
    for make, say in (
        (lambda: Slots(one.float(), one, one.int(), 1), "indices has dtype"),
        (lambda: Slots(one, one.int(), one.int(), 1), "starts is"),
        (lambda: Slots(one, one, one, 1), "lens is"),
        (lambda: Slots(one, one, one.int(), -1), "max_len is -1"),
        (lambda: Slots(torch.zeros(4, 4, dtype=torch.int32).T, one, one.int(), 1), "not contiguous"),
        (lambda: Slots.from_table(one, one, one), "table has shape"),
    ):
        with pytest.raises(ValueError, match=say):
            make()
