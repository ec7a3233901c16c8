"""A pool as a short text, small enough for a status reply."""

from __future__ import annotations

import numpy as np

from .plan import Layout

CELLS = 256


def strip(layout: Layout) -> dict:
    """The pool in at most CELLS equal cells, for each of them the units held and the runs that begin there.

    Returns ``units`` (of one cell, the last may be shorter), ``held`` and ``runs``: lists of one number a cell.
    """
    cell = max(1, -(-layout.size // CELLS))
    count = -(-layout.size // cell)
    held = np.zeros(count, dtype=np.int64)
    runs = np.zeros(count, dtype=np.int64)
    for chain in layout.chains:
        where = (chain - 1) // cell
        held += np.bincount(where, minlength=count)
        begins = np.concatenate([[True], np.diff(chain) != 1])
        runs += np.bincount(where[begins], minlength=count)
    return {"units": cell, "held": held.tolist(), "runs": runs.tolist()}
