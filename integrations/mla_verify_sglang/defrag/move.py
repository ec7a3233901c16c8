"""Rows of K/V from slot to slot, in every layer of every pool, so that either all have moved or none.

On a GPU one Triton kernel moves all layers: a program takes one path of the plan through a few layers, 1,152 bytes read
and 1,152 written for each step and layer, with no scratch. Elsewhere torch gathers and scatters layer by layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import numpy as np
import torch
from torch import Tensor

from .plan import Moves

Point = Callable[[str], None]  # called between the steps of a move; a test raises from it


def nothing(_: str) -> None:
    """The point of a run that nobody disturbs."""


def buffers_of(pool) -> list[Tensor]:
    """The K/V tensors of an SGLang pool, one row for each slot: MLA has one a layer, MHA and GQA two."""
    if hasattr(pool, "kv_buffer"):
        return list(pool.kv_buffer)
    return [*pool.k_buffer, *pool.v_buffer]


def rows_of(moves: Moves, page: int) -> Moves:
    """Moves of slots from moves of pages of ``page`` slots; slots of a page follow each other's paths."""
    if page == 1:
        return moves
    at = np.arange(page)
    paths = [slice(a, b) for a, b in zip(moves.starts[:-1], moves.starts[1:], strict=True)]
    src = [(moves.src[p, None] * page + at).T.reshape(-1) for p in paths]
    dst = [(moves.dst[p, None] * page + at).T.reshape(-1) for p in paths]
    lengths = np.repeat(np.diff(moves.starts), page)
    empty = np.zeros(0, dtype=np.int64)
    return Moves(
        np.concatenate([empty, *src]), np.concatenate([empty, *dst]), np.concatenate([[0], np.cumsum(lengths)])
    )


class RowMover:
    """Moves rows in ``buffers``, contiguous tensors on one device with one row for each slot."""

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        self.rows = [_words(b) for b in buffers]
        self.device = self.rows[0].device
        self.row_bytes = sum(b.shape[1] * b.element_size() for b in self.rows)  # of one slot, all layers
        self._groups: dict[int, tuple[Tensor, int]] | None = None  # by width: addresses, and what divides them

    def move(self, moves: Moves, undo: ExitStack, point: Point = nothing) -> None:
        """Move rows; what has been moved is put back when ``undo`` unwinds.

        moves  of slots (``rows_of``)
        undo   gets a callback before anything is overwritten; ``pop_all`` it when all holders know the new slots
        """
        if not len(moves):
            return
        if self.device.type == "cuda":
            self._fused(moves, undo, point)
        else:
            self._layer_by_layer(moves, undo, point)

    def _layer_by_layer(self, moves: Moves, undo: ExitStack, point: Point) -> None:
        src, dst = torch.from_numpy(moves.src).to(self.device), torch.from_numpy(moves.dst).to(self.device)
        half = len(src) // 2
        for layer, rows in enumerate(self.rows):
            point(f"before buffer {layer}")
            was = rows[src]
            # A destination is free or moves away itself: all that gets lost is among ``was``.
            undo.callback(rows.index_copy_, 0, src, was)
            rows[dst[:half]] = was[:half]
            point(f"half of buffer {layer}")
            rows[dst[half:]] = was[half:]
        point("after the rows")

    def _fused(self, moves: Moves, undo: ExitStack, point: Point) -> None:
        point("before the rows")
        for i, launch in enumerate(self.prepared(moves)):
            launch()
            undo.callback(lambda i=i: self.prepared(moves.back())[i]())
        point("after the rows")

    def launch(self, moves: Moves) -> None:
        """Enqueue the moves on the current stream, one launch for each width of row."""
        for launch in self.prepared(moves):
            launch()

    def prepared(self, moves: Moves) -> list[Callable[[], None]]:
        """These launches, with the table of the moves on the device already."""
        from .move_kernel import move_paths

        if self._groups is None:
            groups: dict[int, list[int]] = {}
            for rows in self.rows:
                groups.setdefault(rows.shape[1], []).append(rows.data_ptr())
            self._groups = {
                words: (torch.tensor(bases, dtype=torch.int64, device=self.device), math.gcd(16, *bases))
                for words, bases in groups.items()
            }
        begin, end = moves.starts[:-1], moves.starts[1:]
        table = np.concatenate([moves.src, moves.starts, moves.dst[begin], moves.src[end - 1]])
        table, paths = torch.from_numpy(table).to(self.device), len(begin)
        return [
            partial(move_paths, bases, align, words, table, len(moves), paths)
            for words, (bases, align) in self._groups.items()
        ]


def _words(buffer: Tensor) -> Tensor:
    """A buffer as rows of int32, the bits whatever the dtype."""
    if not buffer.is_contiguous():
        raise ValueError(f"a K/V buffer of shape {list(buffer.shape)} is not contiguous; rows can't be addressed")
    rows = buffer.view(buffer.shape[0], -1).view(torch.uint8)
    if rows.shape[1] % 4:
        raise ValueError(f"a K/V row has {rows.shape[1]} bytes; expected a multiple of 4")
    return rows.view(torch.int32)
