"""Quantization to int4 (see integers.py) in compiled loops; a large model takes seconds."""

from __future__ import annotations

from typing import Any

import numpy as np

from distgpt.core.cpu.compiling.jit import get, inline, jit, put
from distgpt.core.cpu.pool import pool_of
from distgpt.core.ops.api import Array, Floats2d
from distgpt.core.ops.low_precision import BITS
from distgpt.inference.quantized.int4 import BLOCK
from distgpt.inference.quantized.integers import LEAST, MOST, NEAREST, TRIED, Quantised, quantise

WIDE, PARTS = NEAREST.astype(np.float32), np.array(TRIED, np.float32)


def rounded(w: Floats2d, bits: int, threads: int, importance: Array | None = None) -> Quantised:
    """Round a float32 matrix to int8 or int4; `importance` weights the errors of columns in int4."""
    if bits == 8:
        return quantise(w)
    n, k = w.shape
    q, scales = np.empty((n, k), np.int8), np.empty((n, -(-k // BLOCK)), BITS)
    each = np.ones(k, np.float32) if importance is None else importance
    pool_of(threads).split_range(n, 16, _round_rows, q, scales, w, each)
    return Quantised(q, scales, 4)


@jit
def _round_rows(first, last, q, scales, w, importance):
    for i in range(first, last):
        for block in range(scales.shape[1]):
            left, right = block * BLOCK, min((block + 1) * BLOCK, w.shape[1])
            x, to = w[i, left:right], q[i, left:right]
            put(scales[i], block, _best_scale(x, importance[left:right]))
            inverse = _inverse(get(scales[i], block))
            for j in range(x.shape[0]):
                to[j] = NEAREST[_place(x[j] * inverse)]


@inline
def _best_scale(x, importance):
    """Return the candidate scale with the smallest squared error on this block."""
    top: Any = np.float32(0)
    best: Any = np.float32(0)
    scale: Any = np.float32(0)
    for j in range(x.shape[0]):
        top = max(top, abs(x[j]))
    for part in PARTS:
        tried = top / np.float32(MOST) * part
        inverse, product, square = _inverse(tried), np.float32(0), np.float32(LEAST)
        for j in range(x.shape[0]):
            level = WIDE[_place(x[j] * inverse)]
            product += importance[j] * x[j] * inverse * level
            square += importance[j] * level * level
        gain = product * part * product * part / square
        if gain > best:
            best, scale = gain, np.float32(np.float64(product) / square * tried)
    return scale


@inline
def _inverse(scale):
    return np.float32(0) if abs(scale) < np.float32(LEAST) else np.float32(1) / scale


@inline
def _place(x):
    return np.int32(min(max(np.rint(x), np.float32(-MOST)), np.float32(MOST))) + np.int32(MOST)
