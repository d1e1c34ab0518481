"""Loops over flat buffers (AdamW, Nesterov momentum, gradient norm) and low-rank matrix updates."""

from __future__ import annotations

import math

import numpy as np
from numba import types
from numba.extending import intrinsic

from distgpt.core.cpu.compiling.jit import FORCED, I16, I32, by_types, get, inline, jit, number
from distgpt.core.cpu.fused.rowwise import round_to
from distgpt.core.ops.api import PIECE, StepScalars

CORRECTION = StepScalars._fields.index("inv_sqrt_bias_correction")


@jit
def squares(first, last, parts, g):
    """parts[i] ← Σ g² of pieces first … last, in the array's own precision."""
    for i in range(first, last):
        piece = g[i * PIECE : min((i + 1) * PIECE, g.shape[0])]
        square = number(g, 0)
        for j in range(piece.shape[0]):
            square += get(piece, j) * get(piece, j)
        parts[i] = square


@by_types(**FORCED)
def grad_scale(norm, scalars):
    """Return the gradient scale of an update, and whether to update at all; see `clipped`.

    Every thread computes it from arrays, so that recorded calls need no Python. The arithmetic of a
    `by_types` function is never reordered, so the result is bitwise identical to `clipped`.
    """

    def computed(norm, scalars):
        scale, clip = scalars[0], scalars[1]
        length = scale * math.sqrt(norm[0])
        is_finite = math.isfinite(length)
        if is_finite and clip != 0 and length > clip:
            scale = scale * (clip / length)
        return scale, is_finite

    return computed


@jit
def adamw(first, last, p, low, m, v, g, ranges, norm, scalars, groups, constants):
    """Update elements first … last of p and, if present, `low`, its rounded copy.

    With a copy, the loop works in pieces, so that the values to round are still in a cache. `scalars` are
    `StepScalars`, `groups` are (step_size, decay_factor) per group, and `constants` are (beta1, beta2, eps).
    """
    scale, is_finite = grad_scale(norm, scalars)
    if not is_finite:
        return
    beta1, beta2, eps = constants
    piece = max(1, last - first) if low is None else PIECE
    for begin in range(first, last, piece):
        for i in range(ranges.shape[0]):
            start = max(begin, ranges[i, 0])
            stop = min(begin + piece, last, ranges[i, 1])
            group = ranges[i, 2]
            if start < stop and group >= 0:
                moved = ranges[i, 3] - ranges[i, 0]
                pi = p[start:stop]
                vi = v[start + moved : stop + moved]
                rate, decay = groups[group, 0], groups[group, 1]
                how = scale, rate, decay, scalars[CORRECTION], beta1, beta2, eps
                _adamw(pi, m[start:stop], vi, g[start:stop], how)
                if low is not None:
                    round_to(low[start:stop], pi)


@inline
def _adamw(p, m, v, g, how):
    grad_scale, step_size, decay, correction, beta1, beta2, eps = how
    real = p.dtype.type
    scale, step, decay = real(grad_scale), real(step_size), real(decay)
    eps, correction = real(eps), real(correction)
    b1 = real(beta1)
    b2 = real(beta2)
    c1 = real(1 - beta1)
    c2 = real(1 - beta2)
    for i in range(p.shape[0]):
        gi = g[i] * scale
        mi = b1 * m[i] + c1 * gi
        vi = b2 * v[i] + c2 * gi * gi
        m[i] = mi
        v[i] = vi
        p[i] = decay * p[i] - step * mi / (np.sqrt(vi) * correction + eps)


@jit
def zero(first, last, x):
    x[first:last] = 0


@jit
def nesterov(first, last, p, low, round_start, velocity, change, constants):
    """Update elements first … last. `constants` is (scale, lr, momentum)."""
    for start in range(first, last, PIECE):
        stop = min(start + PIECE, last)
        _nesterov(p[start:stop], round_start[start:stop], velocity[start:stop], change[start:stop], constants)
        if low is not None:
            round_to(low[start:stop], p[start:stop])


@inline
def _nesterov(p, round_start, velocity, change, constants):
    real = p.dtype.type
    scale, lr, momentum = real(constants[0]), real(constants[1]), real(constants[2])
    for i in range(p.shape[0]):
        moved = scale * change[i]
        speed = momentum * velocity[i] + moved
        velocity[i] = speed
        round_start[i] += lr * (momentum * speed + moved)
        p[i] = round_start[i]


# Odd factors that spread an index over 32 bits: from the golden ratio and from Murmur3's finalizer
WEYL, MIX = 0x9E3779B1, (0x85EBCA6B, 0xC2B2AE35)


@intrinsic
def dithered(context, value=None, index=None, key=None):
    """Round a float32 stochastically to one of its two bfloat16 neighbors, correct on average.

    The choice depends only on index and key. Written as IR because Numba would compute in 64 bits.
    """

    def generate(context, builder, signature, values):
        number, index, key = values
        noise = builder.add(builder.mul(builder.trunc(index, I32), I32(WEYL)), builder.trunc(key, I32))
        for shift, factor in zip((16, 13), MIX, strict=True):
            noise = builder.mul(builder.xor(noise, builder.lshr(noise, I32(shift))), I32(factor))
        bits = builder.bitcast(number, I32)
        exponent = builder.and_(bits, I32(0x7F800000))
        is_finite = builder.icmp_unsigned("!=", exponent, I32(0x7F800000))
        up = builder.lshr(noise, I32(16))
        quiet = builder.icmp_unsigned(">", builder.and_(bits, I32(0x7FFFFFFF)), I32(0x7F800000))
        beyond = builder.select(quiet, builder.or_(bits, I32(0x400000)), bits)
        chosen = builder.select(is_finite, builder.add(bits, up), beyond)
        return builder.trunc(builder.lshr(chosen, I32(16)), I16)

    return types.uint16(types.float32, types.int64, types.int64), generate


# Limits of `add_low_rank`
SUMS_BYTES = 256 << 10  # bytes of b a per block: part of the L2 cache
LEAST_ROWS = 56  # minimum rows per block, four tiles, since a is packed again for each


@jit
def copy_rows(first, last, y, w):
    for i in range(first, last):
        yi, wi = y[i], w[i]
        for j in range(yi.shape[0]):
            yi[j] = wi[j]


@jit
def add_low_rank(first, last, y, w, sums, scale):
    """Rows first … last of y ← w + scale · sums. Row 0 of `sums` belongs to row `first`."""
    for i in range(first, last):
        _add_row(y[i], w[i], sums[i - first], sums.dtype.type(scale), i * y.shape[1])


@by_types(**FORCED)
def _add_row(y, w, sums, scale, index):
    """y ← w + scale · sums; in bfloat16 rounded stochastically by the element's index in its matrix."""

    def plain(y, w, sums, scale, index):
        for j in range(y.shape[0]):
            y[j] = w[j] + scale * sums[j]

    def rounded(y, w, sums, scale, index):
        for j in range(y.shape[0]):
            y[j] = dithered(get(w, j) + scale * sums[j], index + j, 0)

    return rounded if y.dtype == types.uint16 else plain
