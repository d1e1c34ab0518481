"""Operands of the decoder's matmuls: rows in the form that packed weights want, and tiles of them.

The form is that of the weights: float32, bfloat16 as uint16, int8 as uint8, or int4 as int8. Rows for
weights in int8 and in int4 are both int8, but in blocks of different sizes.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numba import types

from distgpt.kernels.api import Array
from distgpt.kernels.fused.jit import FORCED, by_types, get, inline, jit, put
from distgpt.kernels.low_precision import BLOCKS, MOST, Quantised
from distgpt.kernels.matmul import int4, int8
from distgpt.kernels.matmul.assembled import external, tile
from distgpt.kernels.matmul.microkernel import BIAS
from distgpt.kernels.matmul.packing import COLUMNS, ROWS, aligned, zeros_as_used
from distgpt.kernels.matmul.processor import features, shape

UNIT = 64  # columns are handed out in multiples of this: whole panels and whole blocks
FORMS = {"uint8": BLOCKS[8], "int8": BLOCKS[4]}  # columns that share a scale, by the type that holds them
LONGEST = 1024  # steps of k whose part of a panel, 128 KB, stays in the L2 cache while rows go past


def factor_rows(count: int, columns: int, dtype: str) -> Array:
    """Make memory for rows of factors, in whole units; their distance is no multiple of 4 KB."""
    if block := FORMS.get(dtype):
        return zeros_as_used((count, -(-columns // block) * DOT.a_record(block) + 64), dtype)
    return zeros_as_used((count, -(-columns // UNIT) * UNIT + 32), dtype)


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

    return quantised if to.dtype in _TILES else rounded


@by_types(**FORCED)
def element(w, column, k):
    """Return an element of a packed matrix, by its column and its k."""
    pair = 2 if w.dtype == types.uint16 else 1

    def plain(w, column, k):
        panel, j = w[column // COLUMNS], column % COLUMNS
        return get(panel, (k // pair * COLUMNS + j) * pair + k % pair)

    def restored(w, column, k):
        return unpacked(w, column, k)

    return restored if w.dtype in _TILES else plain


@by_types(**FORCED)
def multiply(rows, begin, end, a, panel, c, columns, bias, flags):
    """C's columns at a panel ← [C +] the product over k from `begin` to `end` [+ bias]."""

    def by_tile(rows, begin, end, a, panel, c, columns, bias, flags):
        own, out = a[:, begin:], panel[begin * COLUMNS :]
        tile(rows, end - begin, own, a.strides[0], 4, out, c, c.strides[0], columns, bias, flags)

    def by_blocks(rows, begin, end, a, panel, c, columns, bias, flags):
        blocks = (end - begin + block_of(panel) - 1) // block_of(panel)
        blocks_tile(rows, blocks, a, a.strides[0], panel, c, c.strides[0], columns, bias, flags)

    return by_blocks if panel.dtype in _TILES else by_tile


# -- matrices in int8 and int4 (low_precision.py), packed for the microkernels of matmul/

DOT = int8.dot_of(shape(), features())
INT8_ROWS = DOT.rows
ORDER, OFFSET = DOT.order, DOT.offset
STEP = len(ORDER)
INTEGER = np.dtype(DOT.integer)
SCALES = 2 * COLUMNS  # bytes of the scales in a block of a panel, behind its integers
LEVELS = np.array(int4.LEVELS, np.int8)
PLACES = np.array([int4.LEVELS.index(q) if q in int4.LEVELS else 0 for q in range(-128, 128)], np.uint8)

_BLOCKS = {getattr(types, name): block for name, block in FORMS.items()}
_I, _P = types.int64, types.voidptr
# Registered when this file is imported, as microkernels are.
_TILES = {
    kind: external(
        f"tile-{name}", partial(of.module, shape(), DOT), tile=(_I, _I, _P, _I, _P, _P, _I, _I, _P, _I)
    )["tile"]
    for kind, name, of in ((types.uint8, "int8", int8), (types.int8, "int4", int4))
}


def rounded_panels(w: Quantised, count: int, columns: int) -> Array:
    """Make memory for `count` matrices like this one in panels, padded to `columns`: int4 as int8."""
    record = BLOCKS[w.bits] * COLUMNS * w.bits // 8 + SCALES
    shape = count, columns // COLUMNS, w.scales.shape[1] * record
    return aligned(shape, "int8" if w.bits == 4 else "uint8")


def pack_rounded(panels: Array, w: Quantised, first: int, last: int) -> None:
    """Panels ← rows first … last of a matrix."""
    _pack(panels.view(np.uint8), w.q[first:last], w.scales[first:last], w.bits == 4, BLOCKS[w.bits])


@jit
def _pack(out, q, scales, halves, block_size):
    rows, depth = q.shape
    size = out.shape[1] // scales.shape[1]
    for column in range(out.shape[0] * COLUMNS):
        for block in range(scales.shape[1]):
            place = column % COLUMNS
            to = out[column // COLUMNS, block * size : (block + 1) * size]
            for i in range(block_size):
                k = block * block_size + i
                value = np.int32(q[column, k] if column < rows and k < depth else 0)
                if halves:
                    at, shift = half_of(place, i)
                    to[at] |= PLACES[value + 128] << shift
                else:
                    to[byte_of(place, i)] = value + OFFSET & 255
            of = to[size - SCALES :].view(np.uint16)
            of[place] = scales[column, block] if column < rows else 0


@inline
def byte_of(place, i):
    """Return the byte index of a column's element k = i within a block of int8."""
    return (i // STEP * COLUMNS + place) * STEP + ORDER[i % STEP]


@inline
def half_of(place, i):
    """Return (byte index, bit shift) of a column's element k = i within a block of int4."""
    if STEP == 8:
        return (i // 8 * COLUMNS // 2 + place // 4 * 2 + place % 2) * 8 + i % 8, place // 2 % 2 * 4
    return (i // 8 * COLUMNS + place) * 4 + ORDER[i % 4], i // 4 % 2 * 4


@by_types(**FORCED)
def unpacked(w, column, k):
    """Return an element of a packed matrix."""
    block = _BLOCKS[w.dtype]

    def of_bytes(w, column, k):
        size = block * COLUMNS + SCALES
        record = w[column // COLUMNS, k // block * size : (k // block + 1) * size]
        place, i = column % COLUMNS, k % block
        bits = np.int32(record[byte_of(place, i)])
        q = (bits - OFFSET + 128 & 255) - 128
        return np.float32(q) * get(record[block * COLUMNS :].view(np.uint16), place)

    def of_halves(w, column, k):
        size = block * COLUMNS // 2 + SCALES
        record = w[column // COLUMNS, k // block * size : (k // block + 1) * size]
        place, i = column % COLUMNS, k % block
        at, shift = half_of(place, i)
        q = LEVELS[record[at] >> shift & 15]
        return np.float32(q) * get(record[block * COLUMNS // 2 :].view(np.uint16), place)

    return of_bytes if w.dtype == types.uint8 else of_halves


@inline
def quantise_row(to, x, first, last):
    """Quantise elements first … last of a row of A, with zeros behind the last in its block."""
    block, integers, size = record_of(to)
    for left in range(first, last, block):
        record = to[left // block * size : (left // block + 1) * size]
        of = x[left : min(left + block, last)]
        top, check = np.float32(0), np.float32(0)
        for j in range(of.shape[0]):
            top = max(top, abs(of[j]))
            check += of[j] * np.float32(0)  # NaN where there is one, or an infinite number
        inverse = np.float32(0) if top == np.float32(0) else np.float32(MOST) / top
        q, total = record[:integers].view(INTEGER), np.int32(0)
        for j in range(of.shape[0]):
            rounded = np.int32(np.rint(of[j] * inverse))
            q[j] = rounded
            total += rounded
        for j in range(of.shape[0], block):
            q[j] = 0
        record[integers : integers + 4].view(np.float32)[0] = top / np.float32(MOST) + check
        record[integers + 4 :].view(np.int32)[0] = -OFFSET * total


@by_types(**FORCED)
def block_of(w):
    """Return the columns that share a scale, in packed weights and in rows for them."""
    block = _BLOCKS[w.dtype]

    def known(w):
        return block

    return known


@by_types(**FORCED)
def record_of(a):
    """Return the columns of a block of A, and the bytes of its integers and of all of it."""
    block = _BLOCKS[a.dtype]
    sizes = block, DOT.integers(block), DOT.a_record(block)

    def known(a):
        return sizes

    return known


@by_types()
def blocks_tile(rows, blocks, a, row, b, c, ldc, columns, bias, flags):
    """Compute a tile of C inside compiled loops; see matmul/int8.py and int4.py."""
    routine = _TILES[b.dtype]

    def call(rows, blocks, a, row, b, c, ldc, columns, bias, flags):
        routine(rows, blocks, a.ctypes, row, b.ctypes, c.ctypes, ldc, columns, bias.ctypes, flags)

    return call


@jit
def quantise_rows(first, last, a, x):
    """Rows first … last of factors ← those of x."""
    for i in range(first, last):
        quantise_row(a[i], x[i], 0, x.shape[1])


@jit
def multiply_columns(first, last, y, a, w, bias, k):
    """Columns first … last of y ← a wᵀ [+ bias]; `first` begins a panel."""
    blocks, n = (k + block_of(w) - 1) // block_of(w), y.shape[0]
    for column in range(first, last, COLUMNS):
        panel, count = w[column // COLUMNS], min(COLUMNS, last - column)
        for top in range(0, n, INT8_ROWS):
            rows, of, to = min(INT8_ROWS, n - top), a[top:], y[top:, column:]
            if bias is None:
                blocks_tile(rows, blocks, of, a.strides[0], panel, to, y.strides[0], count, panel, 0)
            else:
                blocks_tile(
                    rows, blocks, of, a.strides[0], panel, to, y.strides[0], count, bias[column:], BIAS
                )


@jit
def unpack_rows(first, last, out, w, rows):
    """Rows first … last of out ← these rows of a packed matrix."""
    for i in range(first, last):
        for k in range(out.shape[1]):
            out[i, k] = unpacked(w, rows[i], k)
