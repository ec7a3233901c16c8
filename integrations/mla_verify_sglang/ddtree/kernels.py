"""Triton kernels of DDTREE, one launch a step each: build, accept, move. They run under Triton's interpreter too."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from .accept import Accepted
    from .build import DraftTree

COLUMNS = 128  # words of a row that one program moves


def build_trees(bonus: Tensor, ids: Tensor, logprobs: Tensor, budget: int, out: DraftTree) -> None:
    """See ``build.build``; one program a request."""
    batch, depth, width = ids.shape
    ids, logprobs = ids.contiguous(), logprobs.contiguous()
    bonus = bonus.contiguous()  # it may be a column of the drafter's input
    _build_tree[(batch,)](
        bonus, ids, logprobs, out.tokens, out.parents, out.depths, out.words, out.scores, depth, width, budget,
        out.nodes, WORDS=out.words.shape[2], SLOTS=triton.next_power_of_2(budget + 1),
        LANES=triton.next_power_of_2(out.nodes), num_warps=1,
    )  # fmt: skip


def accept_paths(tree: DraftTree, targets: Tensor, done: Accepted) -> None:
    """See ``accept.accept``; one program a request. The trees may be the first nodes of larger ones."""
    batch, nodes = tree.tokens.shape
    longest = done.path.shape[1]
    _accept_path[(batch,)](
        tree.tokens, tree.parents, tree.depths, tree.words, targets, done.path, done.count, done.tokens, done.bonus,
        nodes, longest, tree.tokens.stride(0), tree.words.stride(1), WORDS=tree.words.shape[2],
        LANES=triton.next_power_of_2(nodes), PLACES=triton.next_power_of_2(longest), num_warps=1,
    )  # fmt: skip


def move_rows(addresses: Tensor, like: Tensor, window: Tensor, path: Tensor, count: Tensor) -> None:
    """See ``commit.Mover``; one program for each request, layer and 128 words of a row."""
    words, longest = like.shape[1], path.shape[1]
    _move_rows[(window.shape[0], addresses.numel(), triton.cdiv(words, COLUMNS))](
        addresses, window, path, count, window.stride(0), words, longest, PLACES=triton.next_power_of_2(longest),
        COLUMNS=COLUMNS, WIDE=like.dtype == torch.int32, num_warps=4,
    )  # fmt: skip


# RANK_BITS = 7, DEPTHS_PER_KEY = 9: build.py says why


@triton.jit
def _unit(depth, FIRST: tl.constexpr):
    """What a rank at ``depth`` counts in the first or the second key."""
    one = (depth * 0 + 1).to(tl.int64)
    if FIRST:
        return tl.where(depth <= 9, one << (7 * tl.maximum(9 - depth, 0)), 0)
    return tl.where(depth > 9, one << (7 * tl.maximum(18 - depth, 0)), 0)


@triton.jit
def _build_tree(
    bonus, ids, logprobs, tokens, parents, depths, words, scores, depth, width, budget, nodes,
    WORDS: tl.constexpr, SLOTS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """A slot is a path that may be taken next: its sibling takes its place, its child the slot of the node's number.

    Slots live in registers of one warp; a step is eight reductions over them and four scalar stores.
    """
    b = tl.program_id(0).to(tl.int64)
    ids += b * depth * width
    logprobs += b * depth * width
    tokens += b * nodes
    parents += b * nodes
    depths += b * nodes
    words += b * nodes * WORDS
    scores += b * nodes
    nothing = float("-inf")
    lane = tl.arange(0, LANES)
    tl.store(tokens + lane, tl.where(lane == 0, tl.load(bonus + b), 0), mask=lane < nodes)
    tl.store(parents + lane, tl.full([LANES], -1, tl.int32), mask=lane < nodes)
    tl.store(depths + lane, tl.zeros([LANES], tl.int32), mask=lane < nodes)
    tl.store(scores + lane, tl.where(lane == 0, 0.0, nothing), mask=lane < nodes)
    tl.debug_barrier()

    slot = tl.arange(0, SLOTS)
    score = tl.where(slot == 0, tl.load(logprobs), nothing)
    above = tl.zeros([SLOTS], tl.float32)
    high = tl.zeros([SLOTS], tl.int64) + _unit(slot * 0 + 1, True)
    low = tl.zeros([SLOTS], tl.int64)
    place = tl.zeros([SLOTS], tl.int32) + 1  # depth
    rank = tl.zeros([SLOTS], tl.int32)
    parent = tl.zeros([SLOTS], tl.int32)
    for node in range(1, budget + 1):
        best = tl.max(score, 0)
        if best > nothing:
            tied = score == best
            h = tl.min(tl.where(tied, high, 0x7FFFFFFFFFFFFFFF), 0)
            tied = tied & (high == h)
            l = tl.min(tl.where(tied, low, 0x7FFFFFFFFFFFFFFF), 0)
            tied = tied & (low == l)
            chosen = slot == tl.min(tl.where(tied, slot, SLOTS), 0)
            d = tl.sum(tl.where(chosen, place, 0), 0)
            r = tl.sum(tl.where(chosen, rank, 0), 0)
            p = tl.sum(tl.where(chosen, parent, 0), 0)
            s = tl.sum(tl.where(chosen, above, 0.0), 0)
            tl.store(tokens + node, tl.load(ids + (d - 1) * width + r))
            tl.store(parents + node, p)
            tl.store(depths + node, d)
            tl.store(scores + node, best)
            sibling = s + tl.load(logprobs + (d - 1) * width + r + 1, mask=r + 1 < width, other=nothing)
            child = best + tl.load(logprobs + d * width, mask=d < depth, other=nothing)
            score = tl.where(chosen, sibling, score)
            rank = tl.where(chosen, r + 1, rank)
            high = tl.where(chosen, h + _unit(d, True), high)
            low = tl.where(chosen, l + _unit(d, False), low)
            new = slot == node
            score = tl.where(new, child, score)
            above = tl.where(new, best, above)
            high = tl.where(new, h + _unit(d + 1, True), high)
            low = tl.where(new, l + _unit(d + 1, False), low)
            place = tl.where(new, d + 1, place)
            rank = tl.where(new, 0, rank)
            parent = tl.where(new, node, parent)

    # Every lane climbs from its node to the root and notes whom it passes.
    tl.debug_barrier()
    at = tl.where(lane < nodes, lane, -1)
    w0 = tl.zeros([LANES], tl.int32)
    w1 = tl.zeros([LANES], tl.int32)
    w2 = tl.zeros([LANES], tl.int32)
    w3 = tl.zeros([LANES], tl.int32)
    for _ in range(0, depth + 1):
        bit = tl.where(at >= 0, 1, 0) << (at & 31)
        w0 |= tl.where((at >> 5) == 0, bit, 0)
        w1 |= tl.where((at >> 5) == 1, bit, 0)
        w2 |= tl.where((at >> 5) == 2, bit, 0)
        w3 |= tl.where((at >> 5) == 3, bit, 0)
        at = tl.load(parents + at, mask=at >= 0, other=-1)
    tl.store(words + lane * WORDS, w0, mask=lane < nodes)
    if WORDS > 1:
        tl.store(words + lane * WORDS + 1, w1, mask=lane < nodes)
    if WORDS > 2:
        tl.store(words + lane * WORDS + 2, w2, mask=lane < nodes)
    if WORDS > 3:
        tl.store(words + lane * WORDS + 3, w3, mask=lane < nodes)


@triton.jit
def _accept_path(
    tokens, parents, depths, words, targets, path, count, committed, bonus, nodes, longest, stride, row,
    WORDS: tl.constexpr, LANES: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """A node is taken when it and all its ancestors agree: one pass over all nodes, no walk."""
    b = tl.program_id(0).to(tl.int64)
    tokens += b * stride
    parents += b * stride
    depths += b * stride
    words += b * stride * row
    targets += b * nodes
    path += b * longest
    committed += b * longest
    lane = tl.arange(0, LANES)
    inside = lane < nodes
    token = tl.load(tokens + lane, mask=inside, other=0)
    parent = tl.load(parents + lane, mask=inside, other=-1)
    depth = tl.load(depths + lane, mask=inside, other=0)
    asked = tl.load(targets + parent, mask=parent >= 0, other=0)
    agrees = ((parent >= 0) & (asked == token)) | (lane == 0)
    taken = (parent >= 0) | (lane == 0)
    for word in tl.static_range(WORDS):
        mine = (lane >> 5) == word
        bits = tl.sum(tl.where(mine & agrees, tl.full([LANES], 1, tl.int32) << (lane & 31), 0), 0)
        seen = tl.load(words + lane * row + word, mask=inside, other=0)
        taken = taken & ((seen & ~bits) == 0)
    accepted = tl.max(tl.where(taken, depth, 0), 0)
    last = tl.sum(tl.where(taken & (depth == accepted), lane, 0), 0)
    after = tl.load(targets + last)
    place = tl.arange(0, PLACES)
    free = (place < longest) & (place > accepted)
    tl.store(path + place, place.to(tl.int64), mask=free)
    tl.store(committed + place, tl.where(place == accepted, after, 0), mask=(place < longest) & (place >= accepted))
    tl.store(path + depth, lane.to(tl.int64), mask=taken)
    tl.store(committed + depth - 1, token, mask=taken & (depth > 0))
    tl.store(count + b, accepted + 1)
    tl.store(bonus + b, after)


@triton.jit
def _move_rows(
    addresses, window, path, count, stride, words, longest,
    PLACES: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    address = tl.load(addresses + tl.program_id(1))
    if WIDE:
        rows = address.to(tl.pointer_type(tl.int32))
    else:
        rows = address.to(tl.pointer_type(tl.uint8))
    place = tl.arange(0, PLACES)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    node = tl.load(path + b * longest + place, mask=place < longest, other=0)
    moves = (place < tl.load(count + b)) & (place < longest) & (node != place)
    source = tl.load(window + b * stride + node, mask=moves, other=0).to(tl.int64)
    target = tl.load(window + b * stride + place, mask=moves, other=0).to(tl.int64)
    mask = moves[:, None] & (column < words)[None, :]
    kept = tl.load(rows + source[:, None] * words + column[None, :], mask=mask)
    tl.debug_barrier()  # what one thread overwrites another may still have to read
    tl.store(rows + target[:, None] * words + column[None, :], kept, mask=mask)
