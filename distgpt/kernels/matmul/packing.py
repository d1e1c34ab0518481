"""Matrices in the order in which microkernels read them: in panels, k after k, bfloat16 in pairs of k.

A packed matrix is an array (panels, elements of a panel), aligned to cache lines. What lies beyond the last
column, and beyond the last k of an odd number, is zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from distgpt.kernels.api import Array
from distgpt.kernels.fused.jit import inline, jit, put
from distgpt.kernels.matmul.assembled import shape

ROWS, COLUMNS = shape().rows, shape().columns
LINE = 64


def packed(k: int, columns: int, dtype: str) -> Array:
    """Memory for a packed matrix (k, columns); bfloat16 as uint16."""
    pair = 2 if np.dtype(dtype) == np.uint16 else 1
    panels, elements = -(-columns // COLUMNS), -(-k // pair) * pair * COLUMNS
    return aligned((panels, elements), dtype)


def aligned(shape: tuple[int, ...], dtype: str) -> Array:
    """Zeros that begin at a cache line."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + LINE, np.uint8)
    start = -raw.ctypes.data % LINE
    return raw[start : start + size].view(dtype).reshape(shape)


@jit
def round_to(first: int, last: int, out: Any, x: Any) -> None:
    """out ← x in bfloat16, as bits."""
    to, of = out[first:last], x[first:last]  # slices, or negative places would keep it from vectorizing
    for i in range(to.shape[0]):
        put(to, i, of[i])


@jit
def pack_transposed(first: int, last: int, out: Any, w: Any) -> None:
    """Panels first … last of B (k, n) = wᵀ, of w (n, k): what x wᵀ is made with."""
    n, width = w.shape
    words = w.itemsize * width % 4 == 0  # a pair, or a float32, is one word of 32 bits
    for panel in range(first, last):
        to, start = out[panel], panel * COLUMNS
        count = min(COLUMNS, n - start)
        if words:
            _transpose(to.view(np.uint32), w[start : start + count].view(np.uint32))
        else:
            for j in range(count):
                wj = w[start + j]
                for k in range(width):
                    to[(k // 2 * COLUMNS + j) * 2 + k % 2] = wj[k]


@inline
def _transpose(to: Any, words: Any) -> None:
    """to[k · COLUMNS + j] ← words[j, k], a cache line of a row at a time."""
    count, width = words.shape
    for begin in range(0, width, 16):
        end = min(begin + 16, width)
        for j in range(count):
            row = words[j]
            for k in range(begin, end):
                to[k * COLUMNS + j] = row[k]


@jit
def pack_plain(first: int, last: int, out: Any, w: Any) -> None:
    """Panels first … last of B (k, n) = w: what dy w is made with."""
    for panel in range(first, last):
        start = panel * COLUMNS
        _zip(out[panel], w, start, min(COLUMNS, w.shape[1] - start), COLUMNS)


@inline
def _zip(to: Any, w: Any, start: Any, count: Any, wide: Any) -> None:
    """to ← `count` columns of w from `start` on, row after row; in bfloat16 two rows side by side."""
    depth = w.shape[0]
    if w.itemsize == 4:
        for k in range(depth):
            to[k * wide : k * wide + count] = w[k, start : start + count]
        return
    pairs = to.view(np.uint32)
    for k in range(depth // 2):
        low, high = w[2 * k, start : start + count], w[2 * k + 1, start : start + count]
        row = pairs[k * wide : k * wide + count]
        for j in range(count):
            row[j] = np.uint32(low[j]) | np.uint32(np.uint32(high[j]) << np.uint32(16))
    if depth % 2:
        low, row = w[depth - 1, start : start + count], pairs[depth // 2 * wide :]
        for j in range(count):
            row[j] = np.uint32(low[j])


def packed_rows(rows: int, k: int, dtype: str) -> Array:
    """Memory for a packed A (rows, k): tiles of ROWS rows, k after k, bfloat16 in pairs of k."""
    pair = 2 if np.dtype(dtype) == np.uint16 else 1
    return aligned((-(-rows // ROWS), -(-k // pair) * pair * ROWS), dtype)


@jit
def pack_rows_transposed(first: int, last: int, out: Any, a: Any) -> None:
    """Tiles first … last of A (rows, k) = aᵀ, of a (k, rows): what dyᵀ x is made with."""
    for number in range(first, last):
        start = number * ROWS
        _zip(out[number], a, start, min(ROWS, a.shape[1] - start), ROWS)
