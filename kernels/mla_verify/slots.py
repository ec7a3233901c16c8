"""Where each request's tokens lie in the K/V pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Slots:
    """The slots of a batch, in logical order, the draft tree's nodes last.

    The slot of request ``b`` at position ``j`` is ``indices.flatten()[starts[b] + j]`` for ``0 <= j < lens[b]``.
    So a CSR list and SGLang's ``req_to_token`` table are the same thing, and a server needs no index buffer
    that grows with context. Several requests may share slots (a common prefix, pieces of one prompt).

    indices  int32 or int64, contiguous, any shape
    starts   int64 [batch]: first position of each request in ``indices``
    lens     int32 [batch]: tokens of each request, the nodes of its tree included. Fewer than its nodes (0, say)
             marks a padding row of a captured batch: its output is 0 and its LSE -inf
    max_len  no request is longer. A host number: it sizes grids without asking the device
    """

    indices: Tensor
    starts: Tensor
    lens: Tensor
    max_len: int

    def __post_init__(self) -> None:
        if self.indices.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"indices has dtype {self.indices.dtype}; slot ids are int32 or int64")
        if not self.indices.is_contiguous():
            raise ValueError("indices is not contiguous; pass indices.contiguous()")
        if self.starts.dtype != torch.int64 or self.starts.dim() != 1:
            raise ValueError(f"starts is {self.starts.dtype} {list(self.starts.shape)}; expected int64 [batch]")
        if self.lens.dtype != torch.int32 or self.lens.shape != self.starts.shape:
            raise ValueError(
                f"lens is {self.lens.dtype} {list(self.lens.shape)}; expected int32 {list(self.starts.shape)}"
            )
        if not self.indices.device == self.starts.device == self.lens.device:
            raise ValueError(
                f"indices is on {self.indices.device}, starts on {self.starts.device}, lens on "
                f"{self.lens.device}; put them on one device"
            )
        if not isinstance(self.max_len, int) or self.max_len < 0:
            raise ValueError(f"max_len is {self.max_len!r}; expected a host integer >= 0")

    @property
    def batch(self) -> int:
        return self.starts.numel()

    @classmethod
    def from_table(cls, table: Tensor, rows: Tensor, lens: Tensor, max_len: int | None = None) -> Slots:
        """Rows of a slot table, SGLang's ``req_to_token`` [requests, width]: request ``b`` is ``table[rows[b]]``.

        No host sync. ``max_len`` is the table's width unless a lower bound is known.
        """
        if table.dim() != 2:
            raise ValueError(f"table has shape {list(table.shape)}; expected [requests, width]")
        starts = rows.to(torch.int64) * table.shape[1]
        width = table.shape[1]
        return cls(table, starts, lens.to(torch.int32), width if max_len is None else min(max_len, width))

    @classmethod
    def from_indptr(cls, indices: Tensor, indptr: Tensor, max_len: int) -> Slots:
        """CSR: request ``b`` has ``indices[indptr[b]:indptr[b + 1]]``; ``indptr`` is [batch + 1]. No host sync."""
        if indptr.dim() != 1 or indptr.numel() < 1:
            raise ValueError(f"indptr has shape {list(indptr.shape)}; expected [batch + 1]")
        wide = indptr.to(torch.int64)
        return cls(indices, wide[:-1].contiguous(), (wide[1:] - wide[:-1]).to(torch.int32), max_len)

    @classmethod
    def from_lists(cls, lists: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> Slots:
        """One Python list of slot ids per request."""
        lens = [len(x) for x in lists]
        starts, total = [], 0
        for n in lens:
            starts.append(total)
            total += n
        flat = torch.tensor([s for x in lists for s in x], dtype=torch.int32, device=device)
        return cls(
            flat,
            torch.tensor(starts, dtype=torch.int64, device=device),
            torch.tensor(lens, dtype=torch.int32, device=device),
            max(lens, default=0),
        )

    def check(self, pool_size: int, nodes: Tensor) -> None:
        """Raise ValueError where a length or a slot id does not fit. Reads the device: not for hot paths.

        pool_size  slots of the K/V pool
        nodes      int [batch]: nodes of each request's tree
        """
        lens, nodes, starts = self.lens.long(), nodes.long(), self.starts
        for bad, say in (
            (lens < 0, "is negative"),
            (lens > self.max_len, f"is over max_len = {self.max_len}; raise max_len"),
            ((lens > 0) & (lens < nodes), "is below the request's number of tree nodes; 0 marks padding"),
            (
                (lens > 0) & ((starts < 0) | (starts + lens > self.indices.numel())),
                f"reaches outside indices, which has {self.indices.numel()} entries",
            ),
        ):
            if bad.any():
                b = int(bad.nonzero()[0])
                raise ValueError(f"lens[{b}] = {int(lens[b])} {say}")
        flat = self.indices.flatten()
        for b, (start, n) in enumerate(zip(starts.tolist(), lens.tolist(), strict=True)):
            own = flat[start : start + n]
            bad = (own < 0) | (own >= pool_size)
            if bad.any():
                j = int(bad.nonzero()[0])
                raise ValueError(
                    f"slot {int(own[j])} of request {b} at position {j} is outside the pool of {pool_size} slots"
                )
