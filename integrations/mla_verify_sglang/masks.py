"""A verify batch's QLEN_ONLY mask as packed words, in one launch; it runs under Triton's interpreter too."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def pack(mask: Tensor, batch: int, nodes: int) -> Tensor:
    """int32 [batch * nodes, ceil(nodes / 32)], as ``Tree.words``, from bool [>= batch * nodes * nodes]."""
    if mask.numel() < batch * nodes * nodes:
        raise ValueError(f"mask has {mask.numel()} entries; {batch} trees of {nodes} nodes have {batch * nodes**2}")
    width = (nodes + 31) // 32
    words = torch.empty(batch * nodes, width, dtype=torch.int32, device=mask.device)
    if batch:
        _pack[(batch * nodes,)](mask.view(torch.uint8), words, nodes, WIDTH=width, num_warps=1)
    return words


@triton.jit(do_not_specialize=("nodes",))
def _pack(mask, words, nodes, WIDTH: tl.constexpr):
    """One row of a mask."""
    row = tl.program_id(0)
    bit = tl.arange(0, 32)
    for word in tl.static_range(WIDTH):
        at = word * 32 + bit
        seen = tl.load(mask + row * nodes + at, mask=at < nodes, other=0) != 0
        tl.store(words + row * WIDTH + word, tl.sum(seen.to(tl.int32) << bit))
