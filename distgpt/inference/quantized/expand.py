"""Loops that expand quantized rows and add a low-rank product; models/quantized/held.py has the format."""

from __future__ import annotations

import numpy as np
from numba import types

from distgpt.core.cpu.compiling.jit import FORCED, by_types, inline, jit, put
from distgpt.core.cpu.fused.flat import dithered

BLOCK = 32  # columns that share a scale
HALF = BLOCK // 2


@jit
def add_to_bytes(first, last, y, q, scales, steps, sums, scale):
    """Rows first … last of y ← w + scale · sums, which also become these rows; row 0 is for row `first`."""
    for i in range(first, last):
        to = sums[i - first]
        for block in range(scales.shape[1]):
            left, right = block * BLOCK, min(block * BLOCK + BLOCK, y.shape[1])
            own = steps[scales[i, block]]
            _add_bytes(to[left:right], q[i, left:right], own, sums.dtype.type(scale))
        _put_row(y[i], to, i * y.shape[1])


@jit
def add_to_nibbles(first, last, y, q, scales, steps, levels, sums, scale):
    """As `add_to_bytes`."""
    for i in range(first, last):
        to = sums[i - first]
        for block in range(scales.shape[1]):
            left, right = block * BLOCK, min(block * BLOCK + BLOCK, y.shape[1])
            packed, own = q[i, block * HALF : block * HALF + HALF], steps[scales[i, block]]
            middle = min(left + HALF, right)
            _add_nibbles(to[left:middle], packed, levels, 0, own, sums.dtype.type(scale))
            _add_nibbles(to[middle:right], packed, levels, 4, own, sums.dtype.type(scale))
        _put_row(y[i], to, i * y.shape[1])


@jit
def rows_of_bytes(first, last, y, q, scales, steps, tokens):
    """Rows first … last of y ← rows of a matrix in int8."""
    for i in range(first, last):
        row, token = y[i], tokens[i]
        for block in range(scales.shape[1]):
            own = steps[scales[token, block]]
            for j in range(block * BLOCK, min(block * BLOCK + BLOCK, y.shape[1])):
                put(row, j, np.float32(q[token, j]) * own)


@inline
def _add_bytes(to, q, own, scale):
    for j in range(to.shape[0]):
        to[j] = np.float32(q[j]) * own + scale * to[j]


@inline
def _add_nibbles(to, q, levels, shift, own, scale):
    for j in range(to.shape[0]):
        to[j] = levels[np.int32(q[j]) >> shift & 15] * own + scale * to[j]


@by_types(**FORCED)
def _put_row(y, x, index):
    """y ← x; in bfloat16 rounded stochastically by the element's index in its matrix."""

    def plain(y, x, index):
        for j in range(y.shape[0]):
            y[j] = x[j]

    def rounded(y, x, index):
        for j in range(y.shape[0]):
            y[j] = dithered(x[j], index + j, 0)

    return rounded if y.dtype == types.uint16 else plain
