"""Loops over flat buffers: AdamW, Nesterov momentum, the gradient's norm; sums and rounding between ranks."""

from __future__ import annotations

import numpy as np
from numba import types
from numba.extending import intrinsic

from distgpt.core.cpu.compiling.jit import I16, I32, get, inline, jit, number
from distgpt.core.cpu.fused.rowwise import add_to, round_to
from distgpt.core.ops.api import PIECE


@jit
def squares(first, last, parts, g):
    """parts[i] ← Σ g² of piece number i, in the array's own precision; pieces first … last."""
    for i in range(first, last):
        piece = g[i * PIECE : min((i + 1) * PIECE, g.shape[0])]
        square = number(g, 0)
        for j in range(piece.shape[0]):
            square += get(piece, j) * get(piece, j)
        parts[i] = square


@jit
def adamw(first, last, p, low, m, v, g, ranges, step, groups, constants):
    """Elements first … last of p, and of `low`, their rounded copy, where there is one."""
    if low is None:
        _update(first, last, p, low, m, v, g, ranges, step, groups, constants)
        return
    for start in range(first, last, PIECE):
        stop = min(start + PIECE, last)
        _update(start, stop, p, low, m, v, g, ranges, step, groups, constants)


@inline
def _update(first, last, p, low, m, v, g, ranges, step, groups, constants):
    """Update one piece; the formula is that of `adamw` in api.py.

    `step` is (grad_scale, inv_sqrt_correction), `groups` (step_size, decay_factor) of each, `constants`
    (beta1, beta2, eps).
    """
    for i in range(ranges.shape[0]):
        start, stop, group = max(first, ranges[i, 0]), min(last, ranges[i, 1]), ranges[i, 2]
        if start < stop and group >= 0:
            moved = ranges[i, 3] - ranges[i, 0]
            pi, mi, vi, gi = p[start:stop], m[start:stop], v[start + moved : stop + moved], g[start:stop]
            rate, factor, (beta1, beta2, eps) = groups[group, 0], groups[group, 1], constants
            _adamw(pi, mi, vi, gi, step[0], rate, factor, step[1], beta1, beta2, eps)
            if low is not None:
                round_to(low[start:stop], pi)


@inline
def _adamw(p, m, v, g, grad_scale, step_size, decay, correction, beta1, beta2, eps):
    real = p.dtype.type
    scale, step, decay, eps, correction = (
        real(grad_scale),
        real(step_size),
        real(decay),
        real(eps),
        real(correction),
    )
    b1, b2, c1, c2 = real(beta1), real(beta2), real(1 - beta1), real(1 - beta2)
    for i in range(p.shape[0]):
        gi = g[i] * scale
        mi = b1 * m[i] + c1 * gi
        vi = b2 * v[i] + c2 * gi * gi
        m[i] = mi
        v[i] = vi
        p[i] = decay * p[i] - step * mi / (np.sqrt(vi) * correction + eps)


@jit
def subtract(first, last, y, a, b):
    """Elements first … last of y ← a - b."""
    yi, ai, bi = y[first:last], a[first:last], b[first:last]
    for i in range(yi.shape[0]):
        yi[i] = ai[i] - bi[i]


@jit
def nesterov(first, last, p, low, round_start, velocity, change, constants):
    """Elements first … last. `constants` is (scale, lr, momentum)."""
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


# -- between ranks

WEYL, MIX = 0x9E3779B1, (0x85EBCA6B, 0xC2B2AE35)  # of Murmur3's finalizer


@intrinsic
def dithered(context, value=None, index=None, key=None):
    """The bits of one of the two bfloat16 around a float32, the nearer one more likely: right on average.

    Which one depends on index and key alone. As IR, since Numba would count in 64 bits.
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


@jit
def dither(first, last, out, x, index, key):
    """Elements first … last of out, bfloat16 ← x, which begins at this index of a larger array."""
    oi, xi = out[first:last], x[first:last]
    for i in range(oi.shape[0]):
        oi[i] = dithered(xi[i], index + first + i, key)


@jit
def widen(first, last, out, x):
    """Elements first … last of out ← x, bfloat16."""
    oi, xi = out[first:last], x[first:last]
    for i in range(oi.shape[0]):
        oi[i] = get(xi, i)


@jit
def join(first, last, out, x, branches):
    """Elements first … last of out ← x + Σ over rows of branches, in their order; out may be x."""
    for start in range(first, last, PIECE):
        stop = min(start + PIECE, last)
        oi, xi = out[start:stop], x[start:stop]
        for i in range(oi.shape[0]):
            oi[i] = xi[i]
        for branch in range(branches.shape[0]):
            add_to(oi, branches[branch, start:stop])


@jit
def add_tree(first, last, total, parts):
    """Elements first … last of total ← Σ over rows of parts, neighbours first. Overwrites parts."""
    for start in range(first, last, PIECE):
        stop = min(start + PIECE, last)
        stride = 1
        while stride < parts.shape[0]:
            for rank in range(0, parts.shape[0] - stride, 2 * stride):
                add_to(parts[rank, start:stop], parts[rank + stride, start:stop])
            stride *= 2
        ti, pi = total[start:stop], parts[0, start:stop]
        for i in range(ti.shape[0]):
            ti[i] = pi[i]


@jit
def add_parts(first, last, total, parts):
    """Elements first … last of total ← Σ over rows of parts, in their order."""
    for start in range(first, last, PIECE):
        stop = min(start + PIECE, last)
        ti, pi = total[start:stop], parts[0, start:stop]
        for i in range(ti.shape[0]):
            ti[i] = get(pi, i)
        for rank in range(1, parts.shape[0]):
            add_to(ti, parts[rank, start:stop])
