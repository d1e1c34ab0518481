"""Arithmetic of gradients between ranks: rounding to bfloat16 at random, and sums over ranks."""

from __future__ import annotations

from numba import types
from numba.extending import intrinsic

from distgpt.kernels.api import PIECE
from distgpt.kernels.fused.jit import I16, I32, get, jit
from distgpt.kernels.fused.rowwise import add_to

WEYL, MIX = 0x9E3779B1, (0x85EBCA6B, 0xC2B2AE35)  # of Murmur3's finalizer


@intrinsic
def _dithered(context, value=None, index=None, key=None):
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
        oi[i] = _dithered(xi[i], index + first + i, key)


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
