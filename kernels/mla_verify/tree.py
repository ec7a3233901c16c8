"""The draft tree: which nodes of a request see which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_NODES = 128


@dataclass(frozen=True)
class Tree:
    """Draft trees of a batch, packed: a node sees every prefix token, its ancestors and itself.

    words       int32 [T, W], W = ceil(max_nodes / 32), T the nodes of all requests. Bit ``j % 32`` of word
                ``j // 32`` in the row of node ``i`` is set when ``i`` sees node ``j`` of its own request
    node_starts int32 [batch + 1]: the rows of request ``b`` are ``node_starts[b]:node_starts[b + 1]``
    max_nodes   no request has more nodes; a host number, 1 to 128

    Nodes are in topological order, a parent before its children, as every speculation algorithm emits them.
    """

    words: Tensor
    node_starts: Tensor
    max_nodes: int

    def __post_init__(self) -> None:
        if not isinstance(self.max_nodes, int) or not 1 <= self.max_nodes <= MAX_NODES:
            raise ValueError(f"max_nodes is {self.max_nodes!r}; a tree has 1 to {MAX_NODES} nodes")
        width = _width(self.max_nodes)
        if self.words.dtype != torch.int32 or self.words.dim() != 2 or self.words.shape[1] != width:
            raise ValueError(f"words is {self.words.dtype} {list(self.words.shape)}; expected int32 [nodes, {width}]")
        if self.node_starts.dtype != torch.int32 or self.node_starts.dim() != 1:
            raise ValueError(
                f"node_starts is {self.node_starts.dtype} {list(self.node_starts.shape)}; expected int32 [batch + 1]"
            )
        if self.node_starts.numel() < 1:
            raise ValueError("node_starts is empty; expected [batch + 1] entries")
        if not self.words.is_contiguous():
            raise ValueError("words is not contiguous; pass words.contiguous()")

    @property
    def batch(self) -> int:
        return self.node_starts.numel() - 1

    @property
    def rows(self) -> int:
        """T: the nodes of all requests."""
        return self.words.shape[0]

    def nodes(self) -> Tensor:
        """int32 [batch]: nodes of each request."""
        return self.node_starts[1:] - self.node_starts[:-1]

    @classmethod
    def chain(cls, nodes: int | Sequence[int], batch: int = 1, device: torch.device | str = "cpu") -> Tree:
        """Chains: node ``i`` sees nodes 0 to ``i``. ``nodes`` is one length for all or one for each request."""
        counts = [nodes] * batch if isinstance(nodes, int) else list(nodes)
        _check_counts(counts)
        most = max(counts, default=1)
        full = _pack(torch.ones(most, most, dtype=torch.bool).tril()[None])
        rows = [full[:n] for n in counts] or [full[:0]]
        return cls(torch.cat(rows).to(device), _starts(counts, device), most)

    @classmethod
    def from_parents(
        cls, parents: Tensor | Sequence[int] | Sequence[Sequence[int]], device: torch.device | str | None = None
    ) -> Tree:
        """Trees from each node's parent, -1 for a root: [N], [batch, N] or one list for each request.

        A parent comes before its children: a forward parent, a node that is its own parent (the cycles that a
        parent list can hold) and a parent out of range raise ValueError.
        """
        if isinstance(parents, Tensor):
            device = parents.device if device is None else device
            parents = parents.tolist()
        lists = [list(p) for p in parents] if parents and not isinstance(parents[0], int) else [list(parents)]
        _check_counts([len(p) for p in lists])
        most = max(len(p) for p in lists)
        rows = []
        for b, own in enumerate(lists):
            masks: list[int] = []
            for i, parent in enumerate(own):
                if not isinstance(parent, int) or not -1 <= parent < i:
                    why = "its own parent: a cycle" if parent == i else f"expected -1 (a root) to {i - 1}"
                    raise ValueError(f"parents[{b}][{i}] = {parent!r}: {why}. A parent stands before its children")
                masks.append((masks[parent] if parent >= 0 else 0) | 1 << i)
            rows += [[_signed(m >> 32 * w) for w in range(_width(most))] for m in masks]
        device = "cpu" if device is None else device
        words = torch.tensor(rows, dtype=torch.int32, device=device)
        return cls(words, _starts([len(p) for p in lists], device), most)

    @classmethod
    def from_mask(cls, mask: Tensor, *, checked: bool = True) -> Tree:
        """Trees from a boolean mask [batch, N, N] (SGLang's QLEN_ONLY) or [N, N]; row ``i`` sees column ``j``.

        ``checked`` reads the mask on the host and refuses what is no tree: a node that does not see itself, sees a
        later node, or sees a node without that node's ancestors. Without it the mask is packed as it stands, on the
        device, with no host sync, as a captured graph needs.
        """
        if mask.dim() == 2:
            mask = mask[None]
        if mask.dim() != 3 or mask.shape[1] != mask.shape[2]:
            raise ValueError(f"mask has shape {list(mask.shape)}; expected [batch, nodes, nodes]")
        if mask.dtype != torch.bool:
            raise ValueError(f"mask has dtype {mask.dtype}; expected torch.bool (True = visible)")
        batch, nodes = mask.shape[:2]
        _check_counts([nodes])
        if checked:
            _check_mask(mask.cpu())
        steps = torch.arange(batch + 1, dtype=torch.int32, device=mask.device) * nodes
        return cls(_pack(mask), steps, nodes)

    @classmethod
    def from_full_mask(cls, mask: Tensor, seq_lens: Tensor, nodes: int, *, checked: bool = True) -> Tree:
        """Trees from SGLang's FULL_MASK: per request, row-major [nodes, seq_len + nodes], flattened and joined.

        mask      bool [>= sum over requests of nodes * (seq_len + nodes)]: SGLang's buffers may be longer
        seq_lens  int [batch], the draft nodes not counted
        ``checked`` also verifies that every prefix column is True, which the kernel takes for granted.
        """
        _check_counts([nodes])
        if mask.dim() != 1 or mask.dtype != torch.bool:
            raise ValueError(f"mask is {mask.dtype} {list(mask.shape)}; expected flat torch.bool")
        lens = seq_lens.to(torch.int64)
        width = lens + nodes
        ends = torch.cumsum(width * nodes, 0)
        begin = ends - width * nodes
        if checked:
            need = int(ends[-1]) if len(ends) else 0
            if mask.numel() < need:
                raise ValueError(f"mask has {mask.numel()} entries; seq_lens and {nodes} nodes need {need}")
            for b, (at, prefix) in enumerate(zip(begin.tolist(), lens.tolist(), strict=True)):
                own = mask[at : at + nodes * (prefix + nodes)].view(nodes, prefix + nodes)
                if not own[:, :prefix].all():
                    raise ValueError(f"mask of request {b} hides prefix tokens; a draft node sees the whole prefix")
        i = torch.arange(nodes, device=mask.device)
        at = (begin + lens)[:, None, None] + i[None, :, None] * width[:, None, None] + i[None, None, :]
        return cls.from_mask(mask[at], checked=checked)

    def to(self, device: torch.device | str) -> Tree:
        return Tree(self.words.to(device), self.node_starts.to(device), self.max_nodes)

    def dense(self) -> list[Tensor]:
        """One boolean mask [n, n] for each request. Reads the device; for the oracle, tests and pictures."""
        bits = torch.arange(32, device=self.words.device, dtype=torch.int32)
        wide = ((self.words[:, :, None] >> bits) & 1).bool().flatten(1)
        starts = self.node_starts.tolist()
        return [wide[a:b, : b - a] for a, b in zip(starts[:-1], starts[1:], strict=True)]

    def check(self) -> None:
        """Raise ValueError where the packed words are no tree. Reads the device: not for hot paths."""
        starts = self.node_starts.tolist()
        if starts[0] != 0 or starts[-1] != self.rows:
            raise ValueError(
                f"node_starts runs from {starts[0]} to {starts[-1]}; expected 0 to {self.rows}, the rows of words"
            )
        for b, (at, end) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
            if not 0 <= end - at <= self.max_nodes:
                raise ValueError(
                    f"request {b} has {end - at} nodes in node_starts; expected 0 to max_nodes = {self.max_nodes}"
                )
        for b, mask in enumerate(self.cpu_dense()):
            _check_mask(mask[None], first=b)
        bits = torch.arange(self.words.shape[1] * 32, device=self.words.device)
        counts = torch.repeat_interleave(self.nodes().long(), self.nodes().long())
        wide = ((self.words[:, :, None] >> bits[:32].int()) & 1).flatten(1)
        if (wide.bool() & (bits[None] >= counts[:, None])).any():
            raise ValueError("words has bits beyond a request's nodes; a node sees nodes of its own request only")

    def cpu_dense(self) -> list[Tensor]:
        return self.to("cpu").dense()


def _width(nodes: int) -> int:
    return (nodes + 31) // 32


def _signed(word: int) -> int:
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >> 31 else word


def _check_counts(counts: Sequence[int]) -> None:
    for b, n in enumerate(counts):
        if not 1 <= n <= MAX_NODES:
            raise ValueError(f"request {b} has {n} nodes; a tree has 1 to {MAX_NODES}")


def _starts(counts: Sequence[int], device: torch.device | str) -> Tensor:
    ends = torch.tensor([0, *counts], dtype=torch.int64).cumsum(0)
    return ends.to(dtype=torch.int32, device=device)


def _pack(mask: Tensor) -> Tensor:
    """bool [batch, N, N] -> int32 [batch * N, W]. Device operations only."""
    batch, nodes = mask.shape[:2]
    width = _width(nodes)
    padded = torch.nn.functional.pad(mask, (0, 32 * width - nodes)).view(batch * nodes, width, 32)
    weights = torch.ones((), dtype=torch.int32, device=mask.device) << torch.arange(
        32, dtype=torch.int32, device=mask.device
    )
    return (padded.to(torch.int32) * weights).sum(-1, dtype=torch.int32)


def _check_mask(mask: Tensor, first: int = 0) -> None:
    nodes = mask.shape[-1]
    i = torch.arange(nodes)
    for bad, say in (
        (~mask & (i[:, None] == i[None]), "node {i} does not see itself; set mask[{b}, {i}, {i}]"),
        (
            mask & (i[None] > i[:, None]),
            "node {i} sees the later node {j}; order nodes so that a parent stands before its children",
        ),
    ):
        if bad.any():
            b, r, c = bad.nonzero()[0].tolist()
            raise ValueError(f"mask of request {b + first}: " + say.format(b=b + first, i=r, j=c))
    # A tree's rows nest: what node i sees is itself and all that its parent, the latest of its ancestors, sees.
    before = mask & (i[None] < i[:, None])
    parent = torch.where(before, i.expand_as(before), -1).amax(-1)
    expected = torch.gather(mask, 1, parent.clamp(min=0)[..., None].expand_as(mask)) & (parent >= 0)[..., None]
    bad = (before != expected).any(-1)
    if bad.any():
        b, r = bad.nonzero()[0].tolist()
        raise ValueError(
            f"mask of request {b + first}: node {r} sees a set that is no path from a root; it must see its parent's "
            "ancestors, its parent and itself"
        )
