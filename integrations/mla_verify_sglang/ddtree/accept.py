"""Which nodes of a draft tree the target agrees with, and what it says instead.

The target has a token for every node: its argmax, or a draw from its distribution. A node is accepted when its
parent is and the parent's token is the node's. The children of a node differ, so one path is accepted; the target's
token at its end follows. Every token that is committed is thus the target's own, whatever the tree proposed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from .build import DraftTree


@dataclass(frozen=True)
class Accepted:
    """What a verify pass commits, P = 1 + the longest path.

    path    int64 [batch, P]: the accepted node at each depth, the root first; then each index itself
    count   int32 [batch]: tokens that are committed, the accepted nodes and the target's own
    tokens  int64 [batch, P]: these tokens; 0 behind them
    bonus   int64 [batch]: the last of them, which is the next root
    """

    path: Tensor
    count: Tensor
    tokens: Tensor
    bonus: Tensor

    def rows(self, nodes: int) -> Tensor:
        """int64 [batch * P]: the rows of ``path`` in what a verify pass of ``nodes`` nodes a request puts out."""
        first = nodes * torch.arange(len(self.path), device=self.path.device)
        return (self.path.clamp(max=nodes - 1) + first[:, None]).view(-1)


def accept(tree: DraftTree, targets: Tensor, longest: int) -> Accepted:
    """Walk each tree. Nothing waits for the device.

    targets  int64 [batch, N]: the target's token at each node
    longest  P: 1 + the largest depth a tree can have
    Trees of a root alone cost no launch; their ``path`` and ``count`` are shared and must not be written to.
    """
    batch, nodes = tree.tokens.shape
    if targets.shape != tree.tokens.shape:
        raise ValueError(f"targets has shape {list(targets.shape)}; expected {list(tree.tokens.shape)}, one per node")
    if nodes == longest == 1:
        return Accepted(*_alone(batch, targets.device), targets, targets.reshape(-1))
    if tree.tokens.is_cuda:
        from .kernels import accept_paths

        device = tree.tokens.device
        done = Accepted(
            torch.empty(batch, longest, dtype=torch.int64, device=device),
            torch.empty(batch, dtype=torch.int32, device=device),
            torch.empty(batch, longest, dtype=torch.int64, device=device),
            torch.empty(batch, dtype=torch.int64, device=device),
        )
        accept_paths(tree, targets.contiguous(), done)
        return done
    return _accept(tree, targets, longest)


@cache
def _alone(batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Path and count of roots alone, the same at every step of a batch size."""
    zeros = torch.zeros(batch, 1, dtype=torch.int64, device=device)
    return zeros, torch.ones(batch, dtype=torch.int32, device=device)


def _accept(tree: DraftTree, targets: Tensor, longest: int) -> Accepted:
    """``kernels._accept_path`` in torch."""
    batch, nodes = tree.tokens.shape
    index = torch.arange(nodes, device=targets.device)
    parents = tree.parents.long()
    agrees = (parents >= 0) & (targets.gather(1, parents.clamp(min=0)) == tree.tokens)
    agrees[:, 0] = True
    taken = (agrees[:, None] | ~tree.sees()).all(-1)
    taken[:, 1:] &= parents[:, 1:] >= 0
    depths = torch.where(taken, tree.depths.long(), 0)
    accepted = depths.amax(1)
    path = torch.arange(longest, device=targets.device).repeat(batch, 1)
    spot = torch.where(taken, depths, longest)  # one place more, for those that are not taken
    path = torch.cat([path, path[:, :1]], 1).scatter(1, spot, index.expand(batch, -1))[:, :longest]
    place = torch.arange(longest, device=targets.device)
    bonus = targets.gather(1, path.gather(1, accepted[:, None]))[:, 0]
    following = torch.cat([path[:, 1:], path[:, :1]], 1)
    tokens = torch.where(place < accepted[:, None], tree.tokens.gather(1, following.clamp(max=nodes - 1)), 0)
    tokens = torch.where(place == accepted[:, None], bonus[:, None], tokens)
    return Accepted(path, (accepted + 1).int(), tokens, bonus)
