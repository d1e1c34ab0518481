"""Operands of the decoder's matmuls: rows in the form that packed weights want, and tiles of them.

The form is that of the weights: float32, or bfloat16 as uint16. Numba chooses by the type of an array, so
another form is added by implementations for a type of its own (`also_for`).
"""

from __future__ import annotations

from numba import types

from distgpt.core.cpu.compiling.jit import FORCED, by_types, get, put
from distgpt.core.cpu.matmul.assembled import tile
from distgpt.core.cpu.matmul.packing import COLUMNS, ROWS, zeros_as_used
from distgpt.core.ops.api import Array

UNIT = 64  # columns are handed out in multiples of this: whole panels and whole blocks
LONGEST = 1024  # steps of k whose part of a panel, 128 KB, stays in the L2 cache while rows go past
FLOATS = types.float32, types.uint16


def operand_rows(count: int, columns: int, dtype: str) -> Array:
    """Make memory for rows of operands, in whole units; their distance is no multiple of 4 KB."""
    return zeros_as_used((count, -(-columns // UNIT) * UNIT + 32), dtype)


@by_types(**FORCED)
def at_once(w):
    """Return how many steps of k are summed at once, at most, and how many rows `multiply` computes."""

    def floats(w):
        return LONGEST * 4 // w.itemsize, ROWS

    return floats if w.dtype in FLOATS else None


@by_types(**FORCED)
def put_row(to, x, first, last):
    """Elements first … last of a row of operands ← those of x; `first` begins a unit of columns."""

    def rounded(to, x, first, last):
        out, of = to[first:last], x[first:last]
        for j in range(of.shape[0]):
            put(out, j, of[j])

    return rounded if to.dtype in FLOATS else None


@by_types(**FORCED)
def element(w, column, k):
    """Return an element of a packed matrix, by its column and its k."""
    pair = 2 if w.dtype == types.uint16 else 1

    def floats(w, column, k):
        panel, j = w[column // COLUMNS], column % COLUMNS
        return get(panel, (k // pair * COLUMNS + j) * pair + k % pair)

    return floats if w.dtype in FLOATS else None


@by_types(**FORCED)
def multiply(rows, begin, end, a, panel, c, columns, bias, flags):
    """C's columns at a panel ← [C +] the product over k from `begin` to `end` [+ bias]."""

    def by_tile(rows, begin, end, a, panel, c, columns, bias, flags):
        own, out = a[:, begin:], panel[begin * COLUMNS :]
        tile(rows, end - begin, own, a.strides[0], 4, out, c, c.strides[0], columns, bias, flags)

    return by_tile if panel.dtype in FLOATS else None
