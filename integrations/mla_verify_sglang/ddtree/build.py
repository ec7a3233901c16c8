"""The draft tree: the ``budget`` most probable continuations under a drafter's per-position marginals.

A drafter that fills a block at once gives one distribution for each position; the probability of a path is their
product. Best first: take the most probable path not taken yet, offer its next sibling (same depth, next rank) and
its first child. A path is never more probable than its parent or its better sibling, so this takes the most
probable ones, in order, each after its parent; the tree of a budget is the beginning of that of any larger one.
Equal probabilities: the lexicographically smaller tuple of ranks first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# A tuple of ranks is kept in two 63-bit keys of 7 bits a depth, rank + 1, so that a parent is below its children.
RANK_BITS = 7
DEPTHS_PER_KEY = 9
MAX_BUDGET = 2**RANK_BITS - 1
MAX_DEPTH = 2 * DEPTHS_PER_KEY


@dataclass(frozen=True)
class DraftTree:
    """Trees of a batch, N nodes each. Node 0 is the root: the last token that is certain.

    tokens   int64 [batch, N]
    parents  int32 [batch, N]; -1 for the root and for nodes that are no part of the tree
    depths   int32 [batch, N]; the root's is 0, and so is that of nodes outside the tree
    words    int32 [batch, N, ceil(N / 32)]: bit j of row i: node i sees node j (``mla_verify.Tree.words``).
             A node outside the tree sees itself alone
    scores   float32 [batch, N]: the log-probability of the path to a node, by the draft; -inf outside the tree
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    words: Tensor
    scores: Tensor

    @classmethod
    def empty(cls, batch: int, nodes: int, device: torch.device | str) -> DraftTree:
        def of(dtype: torch.dtype, *more: int) -> Tensor:
            return torch.zeros((batch, nodes, *more), dtype=dtype, device=device)

        words = of(torch.int32, (nodes + 31) // 32)
        return cls(of(torch.int64), of(torch.int32), of(torch.int32), words, of(torch.float32))

    @classmethod
    def roots(cls, tokens: Tensor) -> DraftTree:
        """Trees of a root alone; tokens int64 [batch]."""
        made = cls.empty(len(tokens), 1, tokens.device)
        made.parents.fill_(-1)
        made.words.fill_(1)
        return replace(made, tokens=tokens.contiguous().view(-1, 1))

    @property
    def nodes(self) -> int:
        return self.tokens.shape[1]

    def first(self, batch: int, nodes: int | None = None) -> DraftTree:
        """The first ``nodes`` nodes of the first ``batch`` requests, which are trees too; the same storage."""
        n = self.nodes if nodes is None else nodes
        return DraftTree(
            self.tokens[:batch, :n], self.parents[:batch, :n], self.depths[:batch, :n],
            self.words[:batch, :n, : (n + 31) // 32], self.scores[:batch, :n],
        )  # fmt: skip

    def sees(self) -> Tensor:
        """``words`` unpacked: bool [batch, N, N], row i sees column j."""
        index = torch.arange(self.nodes, device=self.words.device)
        return ((self.words[:, :, index >> 5] >> (index & 31)) & 1).bool()

    def expected_drafts(self, widths: Sequence[int]) -> Tensor:
        """By the draft's own probabilities, how many nodes beside the root a target accepts: float32 [batch, widths].

        A node is accepted when its whole path is; so it is the sum of ``exp(scores)`` over the first ``width`` nodes.
        """
        sums = self.scores.exp().cumsum(1) - 1.0
        return torch.stack([sums[:, width - 1] for width in widths], 1)


def log_probabilities(logits: Tensor, lse: Tensor) -> Tensor:
    """logits - lse, at most 0: rounding must not make a path more probable than its parent."""
    return (logits - lse).nan_to_num(nan=float("-inf")).clamp(max=0.0)


def build(bonus: Tensor, ids: Tensor, logprobs: Tensor, budget: int, out: DraftTree) -> DraftTree:
    """Build the tree of each request into ``out`` and return it. Nothing waits for the device.

    bonus     int64 [batch], the root's token
    ids       int64 [batch, D, K]: for each of D positions the K most probable tokens
    logprobs  float32 [batch, D, K], non-increasing along K, at most 0; -inf: no candidate
    budget    nodes beside the root, 1 to 127. Fewer where there are fewer candidates; K = 1 gives the chain
    out       N >= budget + 1 nodes
    Raises ValueError for what does not fit.
    """
    batch, depth, width = ids.shape
    if not 1 <= budget <= MAX_BUDGET:
        raise ValueError(f"budget is {budget}; a tree has 1 to {MAX_BUDGET} nodes beside its root")
    if budget >= out.nodes:
        raise ValueError(f"budget is {budget} but out has {out.nodes} nodes, the root counted; give it {budget + 1}")
    if not 1 <= depth <= MAX_DEPTH:
        raise ValueError(f"ids has {depth} positions; expected 1 to {MAX_DEPTH}, a block of at most {MAX_DEPTH + 1}")
    if logprobs.shape != ids.shape or logprobs.dtype != torch.float32 or not 1 <= width <= MAX_BUDGET:
        raise ValueError(
            f"logprobs is {logprobs.dtype} {list(logprobs.shape)}, ids {list(ids.shape)}; expected float32, the same "
            f"shape, and at most {MAX_BUDGET} candidates"
        )
    if ids.is_cuda:
        from .kernels import build_trees

        build_trees(bonus, ids, logprobs, budget, out)
    else:
        _build(bonus, ids, logprobs, budget, out)
    return out


def _build(bonus: Tensor, ids: Tensor, logprobs: Tensor, budget: int, out: DraftTree) -> None:
    """``kernels._build_tree`` in torch, all requests in step."""
    batch, depth, width = ids.shape
    device, row = ids.device, torch.arange(batch, device=ids.device)
    biggest = torch.iinfo(torch.int64).max

    def field(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((batch, budget + 1), value, dtype=dtype, device=device)

    # What may be taken next. A slot is a path; its sibling takes its place, its child the slot of the node's number.
    score, above = field(float("-inf"), torch.float32), field(0, torch.float32)
    high, low, at, rank, parent = (field(0, torch.int64) for _ in range(5))
    score[:, 0] = logprobs[:, 0, 0]
    high[:, 0], at[:, 0] = 1 << RANK_BITS * (DEPTHS_PER_KEY - 1), 1
    out.tokens.zero_()
    out.parents.fill_(-1)
    out.depths.zero_()
    out.scores.fill_(float("-inf"))
    out.tokens[:, 0], out.scores[:, 0] = bonus, 0.0
    see = torch.eye(out.nodes, dtype=torch.bool, device=device).repeat(batch, 1, 1)
    for node in range(1, budget + 1):
        best = score.amax(1)
        alive = best > float("-inf")
        tied = score == best[:, None]
        for key in (high, low):
            tied &= key == torch.where(tied, key, biggest).amin(1, keepdim=True)
        slot = tied.int().argmax(1)
        d, r, p = at[row, slot], rank[row, slot], parent[row, slot]
        h, l, s = high[row, slot], low[row, slot], above[row, slot]
        out.tokens[:, node] = torch.where(alive, ids[row, (d - 1).clamp(min=0), r], 0)
        out.parents[:, node] = torch.where(alive, p, -1).int()
        out.depths[:, node] = torch.where(alive, d, 0).int()
        out.scores[:, node] = best
        see[:, node] |= see[row, p] & alive[:, None]
        deeper = d.clamp(max=depth - 1)
        score[:, node] = torch.where(alive & (d < depth), best + logprobs[row, deeper, 0], float("-inf"))
        above[:, node], at[:, node], rank[:, node], parent[:, node] = best, d + 1, 0, node
        unit_high, unit_low = _unit(d + 1)
        high[:, node], low[:, node] = h + unit_high, l + unit_low
        after = (r + 1).clamp(max=width - 1)
        sibling = s + logprobs[row, (d - 1).clamp(min=0), after]
        score[row, slot] = torch.where(alive & (r + 1 < width), sibling, float("-inf"))
        rank[row, slot] = r + 1
        unit_high, unit_low = _unit(d)
        high[row, slot], low[row, slot] = h + unit_high, l + unit_low
    out.words.copy_(_pack(see))


def _unit(depth: Tensor) -> tuple[Tensor, Tensor]:
    """What a rank at ``depth`` counts in each key."""
    one = torch.ones_like(depth)
    shift = RANK_BITS * ((DEPTHS_PER_KEY - depth) % DEPTHS_PER_KEY)
    first = depth <= DEPTHS_PER_KEY
    return torch.where(first, one << shift, 0), torch.where(first, 0, one << shift)


def _pack(see: Tensor) -> Tensor:
    from mla_verify import Tree

    return Tree.from_mask(see, checked=False).words.view(*see.shape[:2], -1)
