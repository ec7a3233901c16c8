"""From a drafter's hidden states to draft trees, through the target's head, whole or in shards."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .build import DraftTree, build, log_probabilities


class TreeHead:
    """Its output has a fixed address, so that the drafter's graph can capture it.

    weight  [rows, H], this rank's shard of the head: its first ``own`` rows are tokens ``start`` to ``start + own``
    group   the tensor-parallel group: ``world_size`` and ``all_gather(tensor, dim)``
    block   tokens that the drafter fills, the bonus token counted
    budget  nodes of a tree beside its root
    count   candidates of a position
    trees   what is written, for as many requests as a step may have
    widths  sizes of tree, for which ``expected`` [requests, widths] is written as well (``DraftTree.expected_drafts``)
    """

    def __init__(
        self, weight: Tensor, *, own: int, start: int, group, block: int, budget: int, count: int, trees: DraftTree,
        widths: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self.weight, self.own, self.start, self.group = weight, own, start, group
        self.block, self.budget, self.count, self.trees, self.widths = block, budget, count, trees, widths
        self.expected = weight.new_zeros(len(trees.tokens), len(widths), dtype=torch.float32) if widths else None

    def __call__(self, hidden: Tensor, input_ids: Tensor) -> DraftTree:
        """hidden [batch * block, H] and the ids that the drafter was fed; the first of a block is the bonus token."""
        batch = hidden.shape[0] // self.block
        masks = hidden.view(batch, self.block, -1)[:, 1:].to(self.weight.dtype)
        ids, logprobs = self.candidates(masks @ self.weight.T)
        tree = build(input_ids.view(batch, -1)[:, 0], ids, logprobs, self.budget, self.trees.first(batch))
        if self.expected is not None:
            self.expected[:batch].copy_(tree.expected_drafts(self.widths))
        return tree

    def candidates(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Token ids and log-probabilities [batch, D, K] over the vocabulary of all ranks, from this rank's logits."""
        wide = logits.float().nan_to_num(nan=float("-inf"))
        wide[..., self.own :] = float("-inf")  # rows that pad the shard
        best, local = wide.topk(min(self.count, wide.shape[-1]), dim=-1)
        lse = wide.logsumexp(-1, keepdim=True)
        ids = local + self.start  # from here on ids are those of the whole vocabulary
        if self.group.world_size > 1:
            best, ids = (self._gather(t).movedim(0, -2).flatten(-2) for t in (best, ids))
            lse = self._gather(lse).logsumexp(0)
            # Stable, so that every rank orders equal logits alike.
            best, order = torch.sort(best, dim=-1, descending=True, stable=True)
            best, ids = best[..., : self.count], ids.gather(-1, order)[..., : self.count]
        return ids, log_probabilities(best, lse)

    def _gather(self, mine: Tensor) -> Tensor:
        """[ranks, *shape]"""
        whole = self.group.all_gather(mine.contiguous().view(1, -1), dim=0)
        return whole.view(self.group.world_size, *mine.shape)
