"""Loops of Muon: momentum, orthogonalised updates, and the step along them. A matrix is one worker's."""

from __future__ import annotations

from math import prod
from typing import NamedTuple, TypeAlias

import numpy as np

from distgpt.core.cpu.compiling.jit import get, inline, jit, put
from distgpt.core.cpu.fused.rowwise import round_to
from distgpt.core.cpu.matmul import blocked
from distgpt.core.cpu.matmul.blas import PLAIN, gemm, squared
from distgpt.core.cpu.matmul.blocked import rows_conflict
from distgpt.core.cpu.matmul.packing import aligned
from distgpt.core.ops.api import TINY, Array
from distgpt.core.ops.low_precision import BITS

BLOCK = 16  # rows and columns that are transposed at once
Memory: TypeAlias = "tuple[Array | Memory, ...]"
HALF = 192  # rows of a square whose columns behind the diagonal are left out


@jit
def momentum(first, last, m, g, scale, mu):
    """Elements first … last of m ← μ m + (1 - μ) s g; g ← (1 - μ) s g + μ m."""
    real = m.dtype.type
    keep, new = real(mu), real((1 - mu) * scale)
    mi, gi = m[first:last], g[first:last]
    for i in range(mi.shape[0]):
        fresh = new * gi[i]
        moved = keep * mi[i] + fresh
        mi[i] = moved
        gi[i] = fresh + keep * moved


def order(shape: tuple[int, ...]) -> int:
    """Sort matrices by the work to orthogonalise them, the largest first."""
    return -prod(shape) * min(shape)


def bytes_of(memory: Memory) -> int:
    """Return the size of scratch memory: arrays, and tuples of them."""
    return sum(bytes_of(each) if isinstance(each, tuple) else each.nbytes for each in memory)


def scratch(low: int, long: int, dtype: str) -> Memory:
    """Make two (low, long) buffers and two (low, low) ones. A matrix taller than wide is transposed."""
    return tuple(np.empty(shape, dtype) for shape in ((low, long), (low, long), (low, low), (low, low)))


@jit
def orthogonalise(u, memory, coefficients):
    """See `Kernels.orthogonalise`. A matrix with more rows than columns is transposed first."""
    x, y, square, fourth = memory
    _lay_down(x, u)
    low, long = x.shape
    for i in range(coefficients.shape[0]):
        squared(square, x)
        _mirror(square)
        squared(fourth, square)
        _combine(square, fourth, coefficients[i, 0], coefficients[i, 1], coefficients[i, 2])
        gemm(PLAIN, PLAIN, low, long, low, square, low, x, long, 0.0, y, long)
        x, y = y, x
    _put_back(u, x)


class LowMemory(NamedTuple):
    """Memory to orthogonalise a matrix in bfloat16: sums of matmuls stay float32."""

    x: Array
    y: Array
    square: Array
    fourth: Array
    factor: Array  # a square, rounded
    long: blocked.Scratch  # of matmuls over the longer side
    short: blocked.Scratch


def low_scratch(low: int, long: int, wide: str) -> LowMemory:
    """Make the memory for matrices with these shorter and longer sides."""
    lying, square = (low, long), (low, low)
    shapes = (lying, BITS.name), (lying, BITS.name), (square, wide), (square, wide), (square, BITS.name)
    x, y, square_sums, fourth, factor = (aligned(*each) for each in shapes)
    over_long = blocked.scratch(BITS, low, long, rows_conflict(x))
    over_short = blocked.scratch(BITS, low, low, rows_conflict(factor))
    return LowMemory(x, y, square_sums, fourth, factor, over_long, over_short)


@jit
def orthogonalise_low(u, memory, coefficients):
    """Do the same by our own matmuls of bfloat16."""
    x, y = memory.x, memory.y
    square, fourth, factor = memory.square, memory.fourth, memory.factor
    _lay_down(x, u)
    for i in range(coefficients.shape[0]):
        _squared_low(square, x, memory.long)
        _mirror(square)
        _round_all(factor, square)
        _squared_low(fourth, factor, memory.short)
        _combine(square, fourth, coefficients[i, 0], coefficients[i, 1], coefficients[i, 2])
        _round_all(factor, square)
        blocked.backward(0, x.shape[0], 0, x.shape[1], y, factor, x, memory.short)
        x, y = y, x
    _put_back(u, x)


@inline
def _squared_low(c, a, scratch):
    """The lower half of c ← a aᵀ, and at most HALF - 1 columns more."""
    n = a.shape[0]
    for top in range(0, n, HALF):
        bottom = min(top + HALF, n)
        blocked.forward(top, bottom, 0, bottom, c, a, a, None, scratch)


@inline
def _combine(square, fourth, a, b, c):
    """square ← a + b · square + c · fourth, of which only the lower halves are given."""
    real = square.dtype.type
    ra, rb, rc = real(a), real(b), real(c)
    for i in range(square.shape[0]):
        row, other = square[i], fourth[i]
        for j in range(i + 1):
            row[j] = rb * row[j] + rc * other[j]
        row[i] += ra
    _mirror(square)


@inline
def _mirror(square):
    """Copy the lower half of a matrix to its upper half."""
    for start in range(0, square.shape[0], BLOCK):
        for i in range(start, square.shape[0]):
            for j in range(start, min(start + BLOCK, i)):
                square[j, i] = square[i, j]


@inline
def _round_all(low, x):
    for i in range(x.shape[0]):
        round_to(low[i], x[i])


@inline
def _lay_down(x, u):
    """x ← u / (1.02 ‖u‖), transposed if u has more rows than columns."""
    total = 0.0
    for i in range(u.shape[0]):
        row, part = u[i], u.dtype.type(0)
        for j in range(row.shape[0]):
            part += row[j] * row[j]
        total += part
    scale = u.dtype.type(1 / (1.02 * np.sqrt(total) + TINY))
    if u.shape[0] > u.shape[1]:
        _transpose(x, u, scale)
    else:
        _copy(x, u, scale)


@inline
def _put_back(u, x):
    if u.shape[0] > u.shape[1]:
        _transpose(u, x, u.dtype.type(1))
    else:
        _copy(u, x, u.dtype.type(1))


@inline
def _copy(y, x, scale):
    for i in range(y.shape[0]):
        yi, xi = y[i], x[i]
        for j in range(xi.shape[0]):
            put(yi, j, get(xi, j) * scale)


@inline
def _transpose(y, x, scale):
    """y ← scale · xᵀ, by blocks that stay in the cache."""
    for start in range(0, y.shape[0], BLOCK):
        for j in range(y.shape[1]):
            for i in range(start, min(start + BLOCK, y.shape[0])):
                put(y[i], j, get(x[j], i) * scale)


@jit
def step(p, low, v, u, rate, decay, beta2):
    """See `Kernels.muon`; `rate` has the factor for the matrix's shape."""
    if u.shape[0] >= u.shape[1]:
        _by_rows(v, u, beta2)
    else:
        _by_columns(v, u, beta2)
    real = p.dtype.type
    lr, shrink = real(rate), real(rate * decay)
    for i in range(p.shape[0]):
        pi, ui = p[i], u[i]
        for j in range(pi.shape[0]):
            kept = shrink * pi[j] if ui[j] * pi[j] >= 0 else real(0)
            pi[j] -= lr * ui[j] + kept
        if low is not None:
            round_to(low[i], pi)


@inline
def _by_rows(v, u, beta2):
    """v ← the mean squares of rows; u ← each row / √v, then all scaled back to the norm of before."""
    real = u.dtype.type
    before = after = 0.0
    for i in range(u.shape[0]):
        row, part = u[i], real(0)
        for j in range(row.shape[0]):
            part += row[j] * row[j]
        v[i] = real(beta2) * v[i] + real(1 - beta2) * (part / real(row.shape[0]))
        before += part
        after += part / (np.sqrt(v[i]) + real(TINY)) ** 2
    factor = np.sqrt(before / (after + TINY))
    for i in range(u.shape[0]):
        row, scale = u[i], real(factor) / (np.sqrt(v[i]) + real(TINY))
        for j in range(row.shape[0]):
            row[j] *= scale


@inline
def _by_columns(v, u, beta2):
    """Do the same by columns. v holds the squares' sums in between."""
    real = u.dtype.type
    old, new = real(beta2), real((1 - beta2) / u.shape[0])
    before = after = 0.0
    for j in range(v.shape[0]):
        v[j] *= old
    for i in range(u.shape[0]):
        row, part = u[i], real(0)
        for j in range(row.shape[0]):
            square = row[j] * row[j]
            part += square
            v[j] += new * square
        before += part
    for i in range(u.shape[0]):
        row, part = u[i], real(0)
        for j in range(row.shape[0]):
            row[j] /= np.sqrt(v[j]) + real(TINY)
            part += row[j] * row[j]
        after += part
    factor = real(np.sqrt(before / (after + TINY)))
    for i in range(u.shape[0]):
        row = u[i]
        for j in range(row.shape[0]):
            row[j] *= factor
