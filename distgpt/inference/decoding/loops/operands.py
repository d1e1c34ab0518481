"""Operands of the decoder's matmuls: rows in the format of the packed weights, and their tiles.

The format is float32, or bfloat16 as uint16. Numba dispatches on the type of an array, so `also_for` adds a
format by implementations for its type.
"""

from __future__ import annotations

from numba import types

from distgpt.core.cpu.compiling.jit import FORCED, by_types, get, put
from distgpt.core.cpu.matmul.assembled import tile
from distgpt.core.cpu.matmul.packing import COLUMNS, ROWS, zeros_as_used
from distgpt.core.ops.api import Array

UNIT = 64  # threads get multiples of UNIT columns: whole panels and whole blocks
LONGEST = 1024  # steps of k whose part of a panel, 128 KB, stays in the L2 cache for all rows
FLOATS = types.float32, types.uint16


def operand_rows(count: int, columns: int, dtype: str) -> Array:
    """Allocate rows of operands, padded to whole units; their stride is not a multiple of 4 KB."""
    return zeros_as_used((count, -(-columns // UNIT) * UNIT + 32), dtype)


@by_types(**FORCED)
def at_once(w):
    """Return the most steps of k to sum at a time, and the number of rows that `multiply` computes."""

    def floats(w):
        return LONGEST * 4 // w.itemsize, ROWS

    return floats if w.dtype in FLOATS else None


@by_types(**FORCED)
def put_row(to, x, first, last):
    """Elements first … last of a row of operands ← elements of x; `first` must start a unit of columns."""

    def rounded(to, x, first, last):
        out, of = to[first:last], x[first:last]
        for j in range(of.shape[0]):
            put(out, j, of[j])

    return rounded if to.dtype in FLOATS else None


@by_types(**FORCED)
def element(w, column, k):
    """Return the element (column, k) of a packed matrix."""
    pair = 2 if w.dtype == types.uint16 else 1

    def floats(w, column, k):
        panel, j = w[column // COLUMNS], column % COLUMNS
        return get(panel, (k // pair * COLUMNS + j) * pair + k % pair)

    return floats if w.dtype in FLOATS else None


@by_types(**FORCED)
def multiply(rows, begin, end, a, panel, c, columns, bias, flags):
    """C's columns of a panel ← [C +] the product over k from `begin` to `end` [+ bias]."""

    def by_tile(rows, begin, end, a, panel, c, columns, bias, flags):
        own, out = a[:, begin:], panel[begin * COLUMNS :]
        tile(rows, end - begin, own, a.strides[0], 4, out, c, c.strides[0], columns, bias, flags)

    return by_tile if panel.dtype in FLOATS else None
