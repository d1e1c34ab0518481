"""A matrix plus one of low rank, as `Kernels.add_low_rank` says."""

from __future__ import annotations

from numba import types

from distgpt.core.cpu.compiling.jit import FORCED, by_types, get, jit
from distgpt.core.cpu.fused.flat import dithered

SUMS_BYTES = 256 << 10  # of b a at a time: part of the L2 cache
LEAST_ROWS = 56  # of it, since a is packed anew each time: four tiles


@jit
def copy(first, last, y, w):
    for i in range(first, last):
        yi, wi = y[i], w[i]
        for j in range(yi.shape[0]):
            yi[j] = wi[j]


@jit
def add(first, last, y, w, sums, scale):
    """Rows first … last of y ← w + scale · sums, whose first row is that of `first`."""
    for i in range(first, last):
        add_row(y[i], w[i], sums[i - first], sums.dtype.type(scale), i * y.shape[1])


@by_types(**FORCED)
def add_row(y, w, sums, scale, index):
    """y ← w + scale · sums; in bfloat16 rounded up or down, by an element's index in its matrix."""

    def plain(y, w, sums, scale, index):
        for j in range(y.shape[0]):
            y[j] = w[j] + scale * sums[j]

    def rounded(y, w, sums, scale, index):
        for j in range(y.shape[0]):
            y[j] = dithered(get(w, j) + scale * sums[j], index + j, 0)

    return rounded if y.dtype == types.uint16 else plain
