"""A matrix plus one of low rank: what a layer with adapters computes with."""

from __future__ import annotations

from typing import Any

from numba import types

from distgpt.kernels.api import Array
from distgpt.kernels.fused.flat import dithered
from distgpt.kernels.fused.jit import FORCED, by_types, get, inline, jit, put
from distgpt.kernels.matmul.packing import aligned

STEPS = 4  # of the rank, in one pass over a row of sums


def scratch(rank: int, columns: int, wide: Any) -> tuple[Array, Array]:
    """Make a worker's memory: a in the wide type, its rank filled up with zeros, and a row of sums."""
    padded = -(-rank // STEPS) * STEPS
    factor = aligned((padded, columns), wide)
    factor[...] = 0
    return factor, aligned((1, columns), wide)


@jit
def copy(first, last, y, w):
    for i in range(first, last):
        yi, wi = y[i], w[i]
        for j in range(yi.shape[0]):
            yi[j] = wi[j]


@jit
def add_low_rank(first, last, y, w, b, a, scale, factor, sums):
    """Rows first … last of y ← w + scale · b a; `factor` and `sums` are scratch memory."""
    rank, columns = a.shape
    for k in range(rank):
        to, of = factor[k], a[k]
        for j in range(columns):
            to[j] = get(of, j)
    row, real = sums[0], sums.dtype.type
    for i in range(first, last):
        _widened(row, w[i])
        for k in range(0, rank, STEPS):
            _add(row, factor[k : k + STEPS], b[i], k, min(STEPS, rank - k), real(scale))
        put_row(y[i], row, i * columns)


@inline
def _widened(row, w):
    for j in range(row.shape[0]):
        row[j] = get(w, j)


@inline
def _add(row, a, b, start, count, scale):
    """row ← row + scale · Σ b[start + k] a[k], over `count` rows of a; the others are zeros."""
    first = scale * get(b, start)
    second = scale * get(b, start + 1) if count > 1 else first
    third = scale * get(b, start + 2) if count > 2 else first
    fourth = scale * get(b, start + 3) if count > 3 else first
    a0, a1, a2, a3 = a[0], a[1], a[2], a[3]
    for j in range(row.shape[0]):
        row[j] += first * a0[j] + second * a1[j] + third * a2[j] + fourth * a3[j]


@by_types(**FORCED)
def put_row(y, row, index):
    """y ← row; in bfloat16 rounded up or down, by an element's index in its matrix."""

    def plain(y, row, index):
        for j in range(row.shape[0]):
            put(y, j, row[j])

    def rounded(y, row, index):
        for j in range(row.shape[0]):
            y[j] = dithered(row[j], index + j, 0)

    return rounded if y.dtype == types.uint16 else plain
