"""The oracle: plain torch, float64 inside. Slow, readable, right on any device.

It says what ``verify`` means: a node attends the prefix and its own ancestors, and nothing else is even looked at.
So a row's bits cannot depend on siblings or on other requests.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .slots import Slots
from .tree import Tree

LATENT_DIM = 512


def verify_float64(
    q: Tensor, kv: Tensor, slots: Slots, tree: Tree, sm_scale: float, kv_scale: float
) -> tuple[Tensor, Tensor]:
    """``verify`` before the last rounding: out [T, H, 512] and lse [T, H], both float64."""
    out = torch.zeros(q.shape[0], q.shape[1], LATENT_DIM, dtype=torch.float64, device=q.device)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=torch.float64, device=q.device)
    flat = slots.indices.flatten()
    first = tree.node_starts.tolist()
    requests = zip(slots.starts.tolist(), slots.lens.tolist(), tree.dense(), strict=True)
    for b, (start, length, visible) in enumerate(requests):
        nodes = len(visible)
        if length < nodes or nodes == 0:
            continue
        own = flat[start : start + length].long()
        keys = kv[own].to(torch.float64) * kv_scale
        for i in range(nodes):
            seen = torch.cat([keys[: length - nodes], keys[length - nodes :][visible[i]]])
            scores = q[first[b] + i].to(torch.float64) @ seen.T * sm_scale
            lse[first[b] + i] = torch.logsumexp(scores, -1)
            out[first[b] + i] = torch.softmax(scores, -1) @ seen[:, :LATENT_DIM]
    return out, lse


def verify(q: Tensor, kv: Tensor, slots: Slots, tree: Tree, sm_scale: float, kv_scale: float) -> tuple[Tensor, Tensor]:
    out, lse = verify_float64(q, kv, slots, tree, sm_scale, kv_scale)
    return out.to(q.dtype), lse.to(torch.float32)
