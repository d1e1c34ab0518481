"""Operands of the decoder's matmuls: rows in the form that packed weights want, and tiles of them.

The form is that of the weights: float32, bfloat16 as uint16, or int8 as uint8.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numba import types

from distgpt.kernels.api import Array
from distgpt.kernels.fused.jit import FORCED, by_types, get, inline, jit, put
from distgpt.kernels.low_precision import MOST, Quantised
from distgpt.kernels.matmul import int8
from distgpt.kernels.matmul.assembled import external, tile
from distgpt.kernels.matmul.int8 import BLOCK, OFFSET
from distgpt.kernels.matmul.microkernel import BIAS
from distgpt.kernels.matmul.packing import COLUMNS, ROWS, aligned
from distgpt.kernels.matmul.processor import features, shape

UNIT = 64  # columns are handed out in multiples of this: whole panels and whole blocks
LONGEST = 1024  # steps of k whose part of a panel, 128 KB, stays in the L2 cache while rows go past


def factor_rows(count: int, columns: int, dtype: str) -> Array:
    """Make memory for rows of factors, in whole units; their distance is no multiple of 4 KB."""
    if dtype == "uint8":
        return aligned((count, -(-columns // BLOCK) * A_RECORD + 64), dtype)
    return aligned((count, -(-columns // UNIT) * UNIT + 32), dtype)


@inline
def stretch(w):
    """Return the longest stretch of k that is summed at once; in int8 all, in one order for all rows."""
    return 1 << 40 if w.itemsize == 1 else LONGEST * 4 // w.itemsize


@inline
def most_rows(w):
    """Return the number of rows that `multiply` computes at once."""
    return INT8_ROWS if w.itemsize == 1 else ROWS


@by_types(**FORCED)
def put_row(to, x, first, last):
    """Elements first … last of a row of factors ← those of x; `first` begins a unit of columns."""

    def rounded(to, x, first, last):
        out, of = to[first:last], x[first:last]
        for j in range(of.shape[0]):
            put(out, j, of[j])

    def quantised(to, x, first, last):
        quantise_row(to, x, first, last)

    return quantised if to.dtype == types.uint8 else rounded


@by_types(**FORCED)
def element(w, column, k):
    """Return an element of a packed matrix, by its column and its k."""
    pair = 2 if w.dtype == types.uint16 else 1

    def plain(w, column, k):
        panel, j = w[column // COLUMNS], column % COLUMNS
        return get(panel, (k // pair * COLUMNS + j) * pair + k % pair)

    def restored(w, column, k):
        return unpacked(w, column, k)

    return restored if w.dtype == types.uint8 else plain


@by_types(**FORCED)
def multiply(rows, begin, end, a, panel, c, columns, bias, flags):
    """C's columns at a panel ← [C +] the product over k from `begin` to `end` [+ bias]."""

    def by_tile(rows, begin, end, a, panel, c, columns, bias, flags):
        own, out = a[:, begin:], panel[begin * COLUMNS :]
        tile(rows, end - begin, own, a.strides[0], 4, out, c, c.strides[0], columns, bias, flags)

    def by_blocks(rows, begin, end, a, panel, c, columns, bias, flags):
        blocks = (end - begin + BLOCK - 1) // BLOCK
        int8_tile(rows, blocks, a, a.strides[0], panel, c, c.strides[0], columns, bias, flags)

    return by_blocks if panel.dtype == types.uint8 else by_tile


# -- matrices in int8 (low_precision.py), packed for the microkernel of matmul/int8.py

DOT = int8.dot_of(shape(), features())
INT8_ROWS = DOT.rows
ORDER = DOT.order
INTEGER, INTEGERS, A_RECORD = np.dtype(DOT.integer), DOT.integers, DOT.a_record
B_RECORD = int8.b_record(shape())

_I, _P = types.int64, types.voidptr
# Registered when this file is imported, as microkernels are.
_TILE = external(
    "tile-int8", partial(int8.module, shape(), DOT), tile=(_I, _I, _P, _I, _P, _P, _I, _I, _P, _I)
)["tile"]


def packed_int8(ws: list[Quantised], columns: int) -> Array:
    """Pack matrices of one shape in panels, padded to `columns`."""
    k = ws[0].q.shape[1]
    out = aligned((len(ws), columns // COLUMNS, -(-k // BLOCK) * B_RECORD), "uint8")
    for to, w in zip(out, ws, strict=True):
        _pack(to, w.q, w.scales)
    return out


@jit
def _pack(out, q, scales):
    rows, depth = q.shape
    for column in range(out.shape[0] * COLUMNS):
        for block in range(scales.shape[1]):
            place = column % COLUMNS
            to = out[column // COLUMNS, block * B_RECORD : (block + 1) * B_RECORD]
            for i in range(BLOCK):
                k = block * BLOCK + i
                there = column < rows and k < depth
                to[(i // 4 * COLUMNS + place) * 4 + ORDER[i % 4]] = OFFSET + (q[column, k] if there else 0)
            of = to[BLOCK * COLUMNS :].view(np.uint16)
            of[place] = scales[column, block] if column < rows else 0


@inline
def unpacked(w, column, k):
    """Return an element of a packed matrix."""
    record = w[column // COLUMNS, k // BLOCK * B_RECORD : (k // BLOCK + 1) * B_RECORD]
    place, i = column % COLUMNS, k % BLOCK
    q = np.int32(record[(i // 4 * COLUMNS + place) * 4 + ORDER[i % 4]]) - np.int32(OFFSET)
    return np.float32(q) * get(record[BLOCK * COLUMNS :].view(np.uint16), place)


@inline
def quantise_row(to, x, first, last):
    """Quantise elements first … last of a row of A, with zeros behind the last in its block."""
    for left in range(first, last, BLOCK):
        record = to[left // BLOCK * A_RECORD : (left // BLOCK + 1) * A_RECORD]
        of = x[left : min(left + BLOCK, last)]
        top, check = np.float32(0), np.float32(0)
        for j in range(of.shape[0]):
            top = max(top, abs(of[j]))
            check += of[j] * np.float32(0)  # NaN where there is one, or an infinite number
        inverse = np.float32(0) if top == np.float32(0) else np.float32(MOST) / top
        q, total = record[:INTEGERS].view(INTEGER), np.int32(0)
        for j in range(of.shape[0]):
            rounded = np.int32(np.rint(of[j] * inverse))
            q[j] = rounded
            total += rounded
        for j in range(of.shape[0], BLOCK):
            q[j] = 0
        record[INTEGERS : INTEGERS + 4].view(np.float32)[0] = top / np.float32(MOST) + check
        record[INTEGERS + 4 :].view(np.int32)[0] = -OFFSET * total


@inline
def int8_tile(rows, blocks, a, row, b, c, ldc, columns, bias, flags):
    """Compute a tile of C inside compiled loops; see matmul/int8.py."""
    _TILE(rows, blocks, a.ctypes, row, b.ctypes, c.ctypes, ldc, columns, bias.ctypes, flags)


@jit
def quantise_rows(first, last, a, x):
    """Rows first … last of factors ← those of x."""
    for i in range(first, last):
        quantise_row(a[i], x[i], 0, x.shape[1])


@jit
def multiply_columns(first, last, y, a, w, bias, k):
    """Columns first … last of y ← a wᵀ [+ bias]; `first` begins a panel."""
    blocks, n = (k + BLOCK - 1) // BLOCK, y.shape[0]
    for column in range(first, last, COLUMNS):
        panel, count = w[column // COLUMNS], min(COLUMNS, last - column)
        for top in range(0, n, INT8_ROWS):
            rows, of, to = min(INT8_ROWS, n - top), a[top:], y[top:, column:]
            if bias is None:
                int8_tile(rows, blocks, of, a.strides[0], panel, to, y.strides[0], count, panel, 0)
            else:
                int8_tile(rows, blocks, of, a.strides[0], panel, to, y.strides[0], count, bias[column:], BIAS)


@jit
def unpack_rows(first, last, out, w, rows):
    """Rows first … last of out ← these rows of a packed matrix."""
    for i in range(first, last):
        for k in range(out.shape[1]):
            out[i, k] = unpacked(w, rows[i], k)
