"""The Triton kernel that moves rows along paths. Runs under Triton's interpreter too."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def move_paths(bases: Tensor, words: int, table: Tensor, moves: int, paths: int) -> None:
    """Move rows along ``paths`` paths in every buffer.

    bases  int64 [buffers]: addresses of buffers of int32 rows, ``words`` to a row
    table  int64 [2 * moves + paths + 1]: sources, destinations, starts of the paths (plan.Moves)
    """
    grid = (paths, bases.numel())
    _move_paths[grid](bases, table, moves, words, BLOCK=triton.next_power_of_2(words), num_warps=4)


@triton.jit
def _move_paths(bases, table, moves, words, BLOCK: tl.constexpr):
    path = tl.program_id(0)
    base = tl.load(bases + tl.program_id(1)).to(tl.pointer_type(tl.int32))
    column = tl.arange(0, BLOCK)
    inside = column < words
    first = tl.load(table + 2 * moves + path)
    last = tl.load(table + 2 * moves + path + 1) - 1
    end = tl.load(table + moves + first)
    # Of a ring this is the row that the path overwrites first and needs last; of another path nobody needs it.
    kept = tl.load(base + end * words + column, mask=inside)
    for i in range(first, last):
        row = tl.load(base + tl.load(table + i) * words + column, mask=inside)
        tl.store(base + tl.load(table + moves + i) * words + column, row, mask=inside)
        # The next step overwrites what this one has read: no thread may run ahead.
        tl.debug_barrier()
    source = tl.load(table + last)
    row = tl.load(base + source * words + column, mask=inside)
    row = tl.where(source == end, kept, row)
    tl.store(base + tl.load(table + moves + last) * words + column, row, mask=inside)
