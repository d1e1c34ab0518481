"""Operands of the decoder's matmuls: rows in the form that packed weights want, and tiles of them.

The form is that of the weights: float32, bfloat16 as uint16, or int8 (quantised.py) as uint8.
"""

from __future__ import annotations

from numba import types
from numba.extending import overload

from distgpt.kernels.api import Array
from distgpt.kernels.decoding import quantised
from distgpt.kernels.decoding.quantised import A_RECORD, quantise_row, unpacked
from distgpt.kernels.fused.jit import FORCED, get, inline, put
from distgpt.kernels.matmul import packing
from distgpt.kernels.matmul.assembled import tile
from distgpt.kernels.matmul.int8 import BLOCK
from distgpt.kernels.matmul.packing import COLUMNS, aligned

UNIT = 64  # columns are handed out in multiples of this: whole panels and whole blocks
LONGEST = 1024  # steps of k whose part of a panel, 128 KB, stays in the L2 cache while rows go past


def factor_rows(count: int, columns: int, dtype: str) -> Array:
    """Make memory for rows of factors, in whole units; their distance is no multiple of 4 KB."""
    if dtype == "uint8":
        return aligned((count, -(-columns // BLOCK) * A_RECORD + 64), dtype)
    return aligned((count, -(-columns // UNIT) * UNIT + 32), dtype)


def put_row(to, x, first, last):
    """Elements first … last of a row of factors ← those of x; `first` begins a unit of columns."""
    raise NotImplementedError


def element(w, column, k):
    """Return an element of a packed matrix, by its column and its k."""
    raise NotImplementedError


def multiply(rows, begin, end, a, panel, c, columns, bias, flags):
    """C's columns at a panel ← [C +] the product over k from `begin` to `end` [+ bias]."""
    raise NotImplementedError


@inline
def stretch(w):
    """Return the longest stretch of k that is summed at once; in int8 all, in one order for all rows."""
    return 1 << 40 if w.itemsize == 1 else LONGEST * 4 // w.itemsize


@inline
def most_rows(w):
    """Return the number of rows that `multiply` computes at once."""
    return quantised.ROWS if w.itemsize == 1 else packing.ROWS


@overload(put_row, jit_options=FORCED)
def _put_row(to, x, first, last):
    def rounded(to, x, first, last):
        out, of = to[first:last], x[first:last]
        for j in range(of.shape[0]):
            put(out, j, of[j])

    def quantised(to, x, first, last):
        quantise_row(to, x, first, last)

    return quantised if to.dtype == types.uint8 else rounded


@overload(element, jit_options=FORCED)
def _element(w, column, k):
    pair = 2 if w.dtype == types.uint16 else 1

    def plain(w, column, k):
        panel, j = w[column // COLUMNS], column % COLUMNS
        return get(panel, (k // pair * COLUMNS + j) * pair + k % pair)

    def restored(w, column, k):
        return unpacked(w, column, k)

    return restored if w.dtype == types.uint8 else plain


@overload(multiply, jit_options=FORCED)
def _multiply(rows, begin, end, a, panel, c, columns, bias, flags):
    def by_tile(rows, begin, end, a, panel, c, columns, bias, flags):
        own, out = a[:, begin:], panel[begin * COLUMNS :]
        tile(rows, end - begin, own, a.strides[0], 4, out, c, c.strides[0], columns, bias, flags)

    def by_blocks(rows, begin, end, a, panel, c, columns, bias, flags):
        blocks = (end - begin + BLOCK - 1) // BLOCK
        quantised.tile(rows, blocks, a, a.strides[0], panel, c, c.strides[0], columns, bias, flags)

    return by_blocks if panel.dtype == types.uint8 else by_tile
