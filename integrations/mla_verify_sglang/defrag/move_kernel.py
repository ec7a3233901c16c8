"""The Triton kernel that moves rows along paths. Runs under Triton's interpreter too."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

PIECE, PIECES = 32, 64  # words of a piece, 128 B, and pieces of a program: 4 vectors of 16 B to each of its threads


def move_paths(bases: Tensor, align: int, words: int, table: Tensor, moves: int, paths: int) -> None:
    """Move rows along ``paths`` paths in every buffer.

    bases  int64 [buffers]: addresses of buffers of int32 rows, ``words`` to a row; multiples of ``align`` bytes
    table  int64 [moves + 3 * paths + 1]: sources, starts of the paths (plan.Moves), the first destination and the last
           source of each path
    """
    buffers = bases.numel()
    # Neighbouring programs are paths, of the same few buffers: what they write lies in order, as the paths do.
    grid = (paths, triton.cdiv(buffers * triton.cdiv(words, PIECE), PIECES))
    _move_paths[grid](
        bases, table, moves, paths, buffers, WORDS=words, ALIGN=align, PIECE=PIECE, PIECES=PIECES, num_warps=4
    )


@triton.jit(do_not_specialize=["moves", "paths", "buffers"])  # a server must not compile again for other plans
def _move_paths(
    bases, table, moves, paths, buffers,
    WORDS: tl.constexpr, ALIGN: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    # Rows are cut into pieces, which move independently, so a program is full whatever the width of a row.
    ROW: tl.constexpr = (WORDS + PIECE - 1) // PIECE
    piece = tl.program_id(1) * PIECES + tl.arange(0, PIECES)
    buffer = piece // ROW
    base = tl.load(bases + buffer, mask=buffer < buffers, other=0).to(tl.pointer_type(tl.int32))
    column = (piece % ROW * PIECE)[:, None] + tl.arange(0, PIECE)[None, :]
    inside = (buffer < buffers)[:, None] & (column < WORDS)
    at = tl.multiple_of(base, ALIGN)[:, None] + column

    path = tl.program_id(0)
    starts = table + moves + path
    first, last = tl.load(starts), tl.load(starts + 1) - 1
    target = tl.load(starts + paths + 1)
    end = tl.load(starts + 2 * paths + 1)
    # What the last step moves is read first: in a ring the first step overwrites it, elsewhere no step does.
    kept = tl.load(at + end * WORDS, mask=inside)
    source = tl.load(table + first)
    for i in range(first, last):
        row = tl.load(at + source * WORDS, mask=inside)
        following = tl.load(table + i + 1)
        tl.store(at + target * WORDS, row, mask=inside)
        # The next step overwrites what this one has read: no thread may run ahead.
        tl.debug_barrier()
        target, source = source, following
    tl.store(at + target * WORDS, kept, mask=inside)
