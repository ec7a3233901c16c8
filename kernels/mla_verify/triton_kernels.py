"""``verify`` in Triton: the prefix split over programs, the tree in a tail of its own, a merge in fixed order.

A request's query rows are its nodes times its heads, row ``node * H + head``: they share every latent row, so a tile
of rows reads the prefix once for all of them. Three kinds of work:

1. split   [block_rows x 576] @ [keys x 576]^T over one piece of the prefix, online softmax, P @ latent. No mask.
2. tail    the N draft nodes under the tree mask. Sums over nodes run one by one in float32, so a hidden node adds
           exactly nothing and a row has the bits of a chain of its own ancestors.
3. merge   the partial results of a row, tail first, then the pieces in order.

Where a piece begins follows from the request's own prefix length, on the device: no host sync, graph-safe, and the same
bits for a row in any batch. Launch shapes may depend on the batch, tile shapes never do.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .slots import Slots
from .tree import Tree

LATENT = 512
LOG2_E = 1.4426950408889634
WORKSPACE_BYTES = 1 << 28  # partial results of one launch; larger batches take several launches
# Numbers that change from call to call: Triton must not compile again when one becomes 1 or a multiple of 16.
VARYING = ("first_request", "first_block", "first_row", "heads", "max_rows", "splits", "width")
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


@dataclass(frozen=True)
class Config:
    """Tile shapes and split rule. Everything here decides bits, so it depends on the device and dtype alone."""

    block_rows: int
    block_keys: int
    warps: int
    stages: int
    max_splits: int  # pieces of a long prefix: about one wave of programs at one tile of rows
    min_split: int  # tokens of a piece at least: below, the merge costs more than the split saves
    tail_parts: int = 4  # programs that share the 512 output columns of one tile and tree


def config(dtype: torch.dtype, capability: tuple[int, int], sm_count: int, shared_bytes: int) -> Config:
    """``dtype`` is that of the products: bf16, fp16 or fp32."""
    if INTERPRETED:
        # The interpreter's cost is the number of operations, whatever their size: large tiles
        return Config(block_rows=64, block_keys=64, warps=4, stages=1, max_splits=8, min_split=64, tail_parts=1)
    if dtype == torch.float32:
        return Config(block_rows=16, block_keys=16, warps=4, stages=1, max_splits=sm_count, min_split=64)
    # Measured on one H200, bf16, ms at H, N, L = 8, 16, 1k / 16, 16, 16k / 16, 1, 185k / 8, 16, 185k / 16, 16, 185k:
    #   64 x 64 keys, 8 warps            0.032 / 0.115 / 0.138 / 0.258 / 0.472
    #   64 x 32 keys, 8 warps, 3 stages  0.036 / 0.133 / 0.176 / 0.341 / 0.647
    #   128 x 32 keys, two parts         0.036 / 0.092 / 0.245 / 0.258 / 0.481
    #   32 x 32 keys (fits sm_120)       0.036 / 0.200 / 0.198 / 0.703 / 1.343
    if shared_bytes >= 227 * 1024:  # sm_90, sm_100
        return Config(block_rows=64, block_keys=64, warps=8, stages=2, max_splits=sm_count, min_split=64)
    # sm_80 to sm_89, sm_120: 99 KiB. Eight warps, or the accumulator spills
    return Config(block_rows=32, block_keys=32, warps=8, stages=2, max_splits=sm_count, min_split=64)


@functools.cache
def _device_config(dtype: torch.dtype, index: int | None) -> Config:
    if index is None:
        return config(dtype, (0, 0), 1, 0)
    p = torch.cuda.get_device_properties(index)
    return config(dtype, (p.major, p.minor), p.multi_processor_count, p.shared_memory_per_block_optin)


@triton.jit
def _piece(prefix, MAX_SPLITS: tl.constexpr, MIN_SPLIT: tl.constexpr, BLOCK_KEYS: tl.constexpr):
    """Tokens of a piece of a prefix, whole tiles of keys."""
    each = (prefix + MAX_SPLITS - 1) // MAX_SPLITS
    return tl.maximum((each + BLOCK_KEYS - 1) // BLOCK_KEYS * BLOCK_KEYS, MIN_SPLIT)


@triton.jit
def _widen(x, DTYPE: tl.constexpr, E4M3: tl.constexpr):
    """A stored K/V element in the dtype of the products.

    e4m3 arrives as raw bytes: its bits are those of a float16 with the exponent bias 8 too small, subnormals included,
    so a shift and a multiplication by 256 are exact, on cards without the type too.
    """
    if E4M3:
        bits = x.to(tl.int16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        value = half.to(tl.float16, bitcast=True) * 256.0
        value = tl.where((bits & 0x7F) == 0x7F, float("nan"), value)
        return value.to(DTYPE)
    return x.to(DTYPE)


@triton.jit(do_not_specialize=VARYING)
def _prefix(
    q, kv, indices, starts, lens, node_starts, part_out, part_lse,
    score_scale, first_request, first_block, heads, max_rows, splits,
    DTYPE: tl.constexpr, E4M3: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    MAX_SPLITS: tl.constexpr, MIN_SPLIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One tile of rows against one piece of the prefix. grid (row blocks, splits, requests).

    part_out [requests, max_rows, splits + 1, 512] takes normalised float32, part_lse [requests, max_rows, splits + 1]
    its log2-sum-exp2; index 0 is the tail's.
    """
    block = first_block + tl.program_id(0)
    split = tl.program_id(1)
    local = tl.program_id(2)
    request = first_request + local
    first_node = tl.load(node_starts + request)
    nodes = tl.load(node_starts + request + 1) - first_node
    prefix = tl.load(lens + request) - nodes
    each = _piece(prefix, MAX_SPLITS, MIN_SPLIT, BLOCK_KEYS)
    begin = split * each
    if (block * BLOCK_ROWS < nodes * heads) & (begin < prefix):
        end = tl.minimum(begin + each, prefix)
        row = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        mine = row < nodes * heads
        own = indices + tl.load(starts + request)
        d = tl.arange(0, 512)
        dr = 512 + tl.arange(0, 64)
        q_row = q + (first_node.to(tl.int64) * heads + row) * 576
        qn = tl.load(q_row[:, None] + d[None], mask=mine[:, None], other=0.0).to(DTYPE)
        qr = tl.load(q_row[:, None] + dr[None], mask=mine[:, None], other=0.0).to(DTYPE)
        top = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_ROWS], tl.float32)
        acc = tl.zeros([BLOCK_ROWS, 512], tl.float32)
        key = tl.arange(0, BLOCK_KEYS)
        for at in tl.range(begin, end, BLOCK_KEYS, num_stages=STAGES):
            here = at + key < end
            slot = tl.load(own + at + key, mask=here, other=0).to(tl.int64)
            kn = tl.load(kv + slot[:, None] * 576 + d[None], mask=here[:, None], other=0)
            kr = tl.load(kv + slot[:, None] * 576 + dr[None], mask=here[:, None], other=0)
            kn = _widen(kn, DTYPE, E4M3)
            s = tl.dot(qn, tl.trans(kn), input_precision="ieee")
            s = tl.dot(qr, tl.trans(_widen(kr, DTYPE, E4M3)), s, input_precision="ieee") * score_scale
            s = tl.where(here[None], s, float("-inf"))
            higher = tl.maximum(top, tl.max(s, 1))
            p = tl.exp2(s - higher[:, None])
            shrink = tl.exp2(top - higher)
            total = total * shrink + tl.sum(p, 1)
            acc = tl.dot(p.to(DTYPE), kn, acc * shrink[:, None], input_precision="ieee")
            top = higher
        to = (local * max_rows + row - first_block * BLOCK_ROWS).to(tl.int64) * (splits + 1) + 1 + split
        tl.store(part_out + to[:, None] * 512 + d[None], acc / total[:, None], mask=mine[:, None])
        tl.store(part_lse + to, top + tl.log2(total), mask=mine)


@triton.jit(do_not_specialize=VARYING)
def _tail(
    q, kv, indices, starts, lens, words, node_starts, part_out, part_lse,
    score_scale, first_request, first_block, heads, max_rows, splits, width,
    WIDTH: tl.constexpr, DTYPE: tl.constexpr, E4M3: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """One tile of rows against the draft nodes they see. grid (row blocks, 512 / COLUMNS, requests)."""
    block = first_block + tl.program_id(0)
    part = tl.program_id(1)
    local = tl.program_id(2)
    request = first_request + local
    first_node = tl.load(node_starts + request)
    nodes = tl.load(node_starts + request + 1) - first_node
    prefix = tl.load(lens + request) - nodes
    if (block * BLOCK_ROWS < nodes * heads) & (prefix >= 0):
        row = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        mine = row < nodes * heads
        own = indices + tl.load(starts + request) + prefix
        dv = part * COLUMNS + tl.arange(0, COLUMNS)
        q_row = q + (first_node.to(tl.int64) * heads + row) * 576
        at = tl.arange(0, WIDTH)
        slot = tl.load(own + at, mask=at < nodes, other=0).to(tl.int64)
        s = tl.zeros([BLOCK_ROWS, WIDTH], tl.float32)
        for c in tl.range(0, 576, 64, num_stages=3):
            dc = c + tl.arange(0, 64)
            qc = tl.load(q_row[:, None] + dc[None], mask=mine[:, None], other=0.0).to(DTYPE)
            kc = tl.load(kv + slot[:, None] * 576 + dc[None], mask=(at < nodes)[:, None], other=0)
            s = tl.dot(qc, tl.trans(_widen(kc, DTYPE, E4M3)), s, input_precision="ieee")
        word = words + (first_node + row // heads) * width
        word = tl.load(word[:, None] + at[None] // 32, mask=mine[:, None] & (at < nodes)[None], other=0)
        s = tl.where(((word >> (at % 32)[None]) & 1) == 1, s * score_scale, float("-inf"))
        top = tl.max(s, 1)
        p = tl.exp2(s - tl.where(top == float("-inf"), 0.0, top)[:, None])
        total = tl.zeros([BLOCK_ROWS], tl.float32)
        acc = tl.zeros([BLOCK_ROWS, COLUMNS], tl.float32)
        for first in range(0, nodes, 4):
            for more in tl.static_range(4):  # four loads under way at once
                j = first + more
                one = tl.load(own + j, mask=j < nodes, other=0).to(tl.int64)
                v = _widen(tl.load(kv + one * 576 + dv, mask=dv < tl.where(j < nodes, 512, 0), other=0), DTYPE, E4M3)
                pj = tl.sum(tl.where(at[None] == j, p, 0.0), 1)
                # A hidden node is skipped, not multiplied by 0: its K/V may be anything, NaN too.
                acc = tl.where((pj != 0.0)[:, None], acc + pj[:, None] * v.to(tl.float32)[None], acc)
                total += pj
        some = tl.where(total == 0.0, 1.0, total)
        to = (local * max_rows + row - first_block * BLOCK_ROWS).to(tl.int64) * (splits + 1)
        tl.store(part_out + to[:, None] * 512 + dv[None], acc / some[:, None], mask=mine[:, None])
        if part == 0:
            lse = tl.where(total == 0.0, float("-inf"), top + tl.log2(some))
            tl.store(part_lse + to, lse, mask=mine)


@triton.jit(do_not_specialize=VARYING)
def _merge(
    part_out, part_lse, lens, node_starts, out, lse_out, kv_scale, first_request, first_row, heads, max_rows, splits,
    SLOTS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_KEYS: tl.constexpr, MAX_SPLITS: tl.constexpr,
    MIN_SPLIT: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Join the partial results of one row, in the order of their index. grid (rows, 512 / COLUMNS, requests)."""
    local_row = tl.program_id(0)
    part = tl.program_id(1)
    local = tl.program_id(2)
    request = first_request + local
    row = first_row + local_row
    first_node = tl.load(node_starts + request)
    nodes = tl.load(node_starts + request + 1) - first_node
    prefix = tl.load(lens + request) - nodes
    if row < nodes * heads:
        d = part * COLUMNS + tl.arange(0, COLUMNS)
        to = first_node.to(tl.int64) * heads + row
        if prefix < 0:
            tl.store(out + to * 512 + d, tl.zeros([COLUMNS], tl.float32).to(out.dtype.element_ty))
            if part == 0:
                tl.store(lse_out + to, float("-inf"))
        else:
            each = _piece(prefix, MAX_SPLITS, MIN_SPLIT, BLOCK_KEYS)
            count = tl.minimum((prefix + each - 1) // each, splits) + 1
            base = (local * max_rows + local_row).to(tl.int64) * (splits + 1)
            # SLOTS and CHUNK are fixed for a device: how many pieces a launch has room for must not move a sum.
            i = tl.arange(0, SLOTS)
            every = tl.load(part_lse + base + i, mask=i < count, other=float("-inf"))
            top = tl.max(every, 0)
            top = tl.where(top == float("-inf"), 0.0, top)
            total = tl.sum(tl.exp2(every - top), 0)
            acc = tl.zeros([COLUMNS], tl.float32)
            c = tl.arange(0, CHUNK)
            for at in range(0, count, CHUNK):
                w = tl.exp2(tl.load(part_lse + base + at + c, mask=at + c < count, other=float("-inf")) - top)
                o = tl.load(
                    part_out + (base + at + c)[:, None] * 512 + d[None], mask=(at + c < count)[:, None], other=0.0
                )
                acc += tl.sum(w[:, None] * o, 0)
            some = tl.where(total == 0.0, 1.0, total)
            tl.store(out + to * 512 + d, (acc / some * kv_scale).to(out.dtype.element_ty))
            if part == 0:
                lse = tl.where(total == 0.0, float("-inf"), (top + tl.log2(some)) * 0.6931471805599453)
                tl.store(lse_out + to, lse)


_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def product_dtype(q: torch.dtype, kv: torch.dtype) -> torch.dtype:
    """The dtype that holds both exactly: e4m3 fits every query dtype; bf16 beside fp16 needs fp32."""
    return q if kv == torch.float8_e4m3fn else torch.promote_types(q, kv)


def verify(q: Tensor, kv: Tensor, slots: Slots, tree: Tree, sm_scale: float, kv_scale: float) -> tuple[Tensor, Tensor]:
    dtype = product_dtype(q.dtype, kv.dtype)
    cfg = _device_config(dtype, q.get_device() if q.is_cuda else None)
    rows, heads = q.shape[:2]
    out = q.new_empty(rows, heads, LATENT)
    lse = q.new_empty(rows, heads, dtype=torch.float32)
    if rows == 0:
        return out, lse
    q = q.contiguous()
    e4m3 = kv.dtype == torch.float8_e4m3fn
    if e4m3:
        kv = kv.view(torch.uint8)
    splits = min(cfg.max_splits, -(-slots.max_len // cfg.min_split))
    blocks = -(-tree.max_nodes * heads // cfg.block_rows)
    row_bytes = (splits + 1) * (LATENT + 1) * 4
    block_step = max(1, min(blocks, WORKSPACE_BYTES // (row_bytes * cfg.block_rows)))
    max_rows = block_step * cfg.block_rows
    request_step = max(1, min(slots.batch, WORKSPACE_BYTES // (row_bytes * max_rows)))
    part_out = torch.empty(request_step, max_rows, splits + 1, LATENT, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(request_step, max_rows, splits + 1, dtype=torch.float32, device=q.device)
    rule = dict(BLOCK_KEYS=cfg.block_keys, MAX_SPLITS=cfg.max_splits, MIN_SPLIT=cfg.min_split)
    for r in range(0, slots.batch, request_step):
        requests = min(request_step, slots.batch - r)
        for b in range(0, blocks, block_step):
            count = min(block_step, blocks - b)
            where = (sm_scale * kv_scale * LOG2_E, r, b, heads, max_rows, splits)
            tile = dict(DTYPE=_DTYPES[dtype], E4M3=e4m3, BLOCK_ROWS=cfg.block_rows, num_warps=cfg.warps)
            if splits:
                _prefix[(count, splits, requests)](
                    q, kv, slots.indices, slots.starts, slots.lens, tree.node_starts, part_out, part_lse, *where,
                    STAGES=cfg.stages, num_stages=cfg.stages, **tile, **rule,
                )  # fmt: skip
            _tail[(count, cfg.tail_parts, requests)](
                q, kv, slots.indices, slots.starts, slots.lens, tree.words, tree.node_starts, part_out, part_lse,
                *where, tree.words.shape[1],
                WIDTH=32 * triton.next_power_of_2(tree.words.shape[1]),
                COLUMNS=LATENT // cfg.tail_parts, num_stages=1, **tile,
            )  # fmt: skip
            _merge[(min(count * cfg.block_rows, tree.max_nodes * heads - b * cfg.block_rows), 4, requests)](
                part_out, part_lse, slots.lens, tree.node_starts, out, lse, kv_scale, r, b * cfg.block_rows, heads,
                max_rows, splits, SLOTS=triton.next_power_of_2(cfg.max_splits + 1), CHUNK=32, COLUMNS=LATENT // 4,
                num_warps=4, **rule,
            )  # fmt: skip
    return out, lse
