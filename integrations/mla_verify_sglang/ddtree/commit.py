"""Accepted K/V rows move to the front of their request's window, so that the cache holds one path in order.

A key carries its final position already: a node's position was its depth. Rows are read before any is written, for a
row may be both read and overwritten. The bytes are moved, whatever their dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Mover:
    """Moves the rows of ``buffers`` [slots, 1, D] or [slots, D], one for each layer, alike in shape and dtype."""

    def __init__(self, buffers: list[Tensor]) -> None:
        if not buffers:
            raise ValueError("buffers is empty; expected one K/V buffer for each layer")
        rows = [b.view(b.shape[0], -1) for b in buffers]
        if any(b.shape != rows[0].shape or b.dtype != rows[0].dtype or not b.is_contiguous() for b in rows):
            raise ValueError("buffers differ in shape or dtype, or have gaps; expected contiguous rows of one kind")
        size = rows[0].shape[1] * rows[0].element_size()
        word = torch.int32 if size % 4 == 0 else torch.uint8
        self.rows = [b.view(word) for b in rows]
        addresses = [b.data_ptr() for b in self.rows]
        self._addresses = torch.tensor(addresses, dtype=torch.int64, device=rows[0].device)

    def move(self, window: Tensor, path: Tensor, count: Tensor) -> None:
        """Row ``window[b, path[b, j]]`` goes to ``window[b, j]`` for the first ``count[b]`` j.

        window int64 [batch, N], path int64 [batch, P] increasing along P, count int32 [batch].
        """
        if window.is_cuda:
            from .kernels import move_rows

            move_rows(self._addresses, self.rows[0], window, path, count)
            return
        place = torch.arange(path.shape[1], device=path.device)
        source = window.gather(1, torch.where(place < count[:, None], path, place)).flatten()
        target = window[:, : path.shape[1]].flatten()
        for rows in self.rows:
            rows[target] = rows[source]
