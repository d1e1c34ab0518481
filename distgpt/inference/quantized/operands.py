"""Packing of quantized operands: weights (int8 as uint8, int4 as int8) and rows of activations.

Rows are int8 for both kinds of weights, but the block sizes differ.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numba import types

from distgpt.core.cpu.compiling.jit import FORCED, also_for, by_types, get, inline, jit
from distgpt.core.cpu.compiling.processor import features, shape
from distgpt.core.cpu.matmul.assembled import external
from distgpt.core.cpu.matmul.microkernel import BIAS
from distgpt.core.cpu.matmul.packing import COLUMNS, aligned, zeros_as_used
from distgpt.core.ops.api import Array
from distgpt.inference.decoding.loops import operands
from distgpt.inference.decoding.loops.weights import Form
from distgpt.inference.quantized import int4, int8, integers
from distgpt.inference.quantized.integers import BLOCKS, MOST, PLACES

FORMS = {"uint8": BLOCKS[8], "int8": BLOCKS[4]}  # columns that share a scale, by storage type


DOT = int8.dot_of(shape(), features())
INT8_ROWS = DOT.rows
ORDER, OFFSET = DOT.order, int8.OFFSET
INTEGER = np.dtype(DOT.integer)
SCALES = 2 * COLUMNS  # bytes of the scales in a block of a panel, after its integers
LEVELS = np.array(integers.LEVELS, np.int8)

_BLOCKS = {getattr(types, name): block for name, block in FORMS.items()}
_I, _P = types.int64, types.voidptr
# Register the tiles at import, as microkernels are.
_TILES = {
    kind: external(
        f"tile-{name}", partial(of.module, shape(), DOT), tile=(_I, _I, _P, _I, _P, _P, _I, _I, _P, _I)
    )["tile"]
    for kind, name, of in ((types.uint8, "int8", int8), (types.int8, "int4", int4))
}


class Integers(Form):
    """A `Quantised` matrix; int4 is stored as int8."""

    def nonzero(self) -> Array:
        result: Array = self._w.q != 0
        return result

    def panels(self, count: int, columns: int) -> Array:
        record = BLOCKS[self._w.bits] * COLUMNS * self._w.bits // 8 + SCALES
        shape = count, columns // COLUMNS, self._w.scales.shape[1] * record
        return aligned(shape, "int8" if self._w.bits == 4 else "uint8")

    def pack(self, panels: Array, first: int, last: int) -> None:
        q, scales, bits = self._w.q[first:last], self._w.scales[first:last], self._w.bits
        _pack(panels.view(np.uint8), q, scales, bits == 4, BLOCKS[bits])


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
                    to[at] |= PLACES[value & 255] << shift
                else:
                    to[byte_of(place, i)] = value + OFFSET & 255
            of = to[size - SCALES :].view(np.uint16)
            of[place] = scales[column, block] if column < rows else 0


@inline
def byte_of(place, i):
    """Return the byte index of a column's element k = i in a block of int8."""
    return (i // 4 * COLUMNS + place) * 4 + ORDER[i % 4]


@inline
def half_of(place, i):
    """Return (byte index, bit shift) of a column's element k = i in a block of int4."""
    return (i // 8 * COLUMNS + place) * 4 + ORDER[i % 4], i // 4 % 2 * 4


@inline
def quantise_row(to, x, first, last):
    """Quantize elements first … last of a row of A, and pad its last block with zeros."""
    block, integers, size = record_of(to)
    for left in range(first, last, block):
        record = to[left // block * size : (left // block + 1) * size]
        of = x[left : min(left + block, last)]
        top, check = np.float32(0), np.float32(0)
        for j in range(of.shape[0]):
            top = max(top, abs(of[j]))
            check += of[j] * np.float32(0)  # NaN if any element is NaN or infinite
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
def record_of(a):
    """Return (columns that share a scale, bytes of their integers, bytes of their record in A)."""
    block = _BLOCKS[a.dtype]
    sizes = block, DOT.integers(block), DOT.a_record(block)

    def known(a):
        return sizes

    return known


@by_types()
def blocks_tile(rows, blocks, a, row, b, c, ldc, columns, bias, flags):
    """Compute a tile of C in compiled loops; see int8.py and int4.py."""
    routine = _TILES[b.dtype]

    def call(rows, blocks, a, row, b, c, ldc, columns, bias, flags):
        routine(rows, blocks, a.ctypes, row, b.ctypes, c.ctypes, ldc, columns, bias.ctypes, flags)

    return call


@jit
def quantise_rows(first, last, a, x):
    """Rows first … last of a ← quantized rows of x."""
    for i in range(first, last):
        quantise_row(a[i], x[i], 0, x.shape[1])


@jit
def multiply_columns(first, last, y, a, w, bias, k):
    """Columns first … last of y ← a wᵀ [+ bias]; `first` must start a panel."""
    block, n = record_of(a)[0], y.shape[0]
    blocks = (k + block - 1) // block
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
    """Rows first … last of out ← the given rows of a packed matrix."""
    for i in range(first, last):
        for k in range(out.shape[1]):
            out[i, k] = operands.element(w, rows[i], k)


# -- the decoder's functions, for these types


def operand_rows(count: int, columns: int, dtype: str) -> Array:
    """Allocate rows of operands, quantized or float."""
    if block := FORMS.get(dtype):
        return zeros_as_used((count, -(-columns // block) * DOT.a_record(block) + 64), dtype)
    return operands.operand_rows(count, columns, dtype)


@also_for(operands.at_once, **FORCED)
def _at_once(w):
    """Sum all of k in the same order for every row."""

    def integers(w):
        return 1 << 40, INT8_ROWS

    return integers if w.dtype in _TILES else None


@also_for(operands.put_row, **FORCED)
def _put_row(to, x, first, last):
    def quantised(to, x, first, last):
        quantise_row(to, x, first, last)

    return quantised if to.dtype in _TILES else None


@also_for(operands.element, **FORCED)
def _element(w, column, k):
    if w.dtype not in _TILES:
        return None
    block, halves = _BLOCKS[w.dtype], w.dtype == types.int8
    integers = block * COLUMNS // (2 if halves else 1)
    size = integers + SCALES

    def restored(w, column, k):
        record = w[column // COLUMNS, k // block * size : (k // block + 1) * size]
        place, i = column % COLUMNS, k % block
        if halves:
            at, shift = half_of(place, i)
            q = np.int32(LEVELS[record[at] >> shift & 15])
        else:
            q = np.int32(record[byte_of(place, i)]) - OFFSET
        return np.float32(q) * get(record[integers:].view(np.uint16), place)

    return restored


@also_for(operands.multiply, **FORCED)
def _multiply(rows, begin, end, a, panel, c, columns, bias, flags):
    if panel.dtype not in _TILES:
        return None
    block = _BLOCKS[panel.dtype]
    size = block * COLUMNS // (2 if panel.dtype == types.int8 else 1) + SCALES

    def by_blocks(rows, begin, end, a, panel, c, columns, bias, flags):
        first, blocks = begin // block, (end - begin + block - 1) // block  # `begin` is a multiple of UNIT
        own, out = a[:, first * record_of(a)[2] :], panel[first * size :]
        blocks_tile(rows, blocks, own, a.strides[0], out, c, c.strides[0], columns, bias, flags)

    return by_blocks
