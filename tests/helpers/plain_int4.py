"""Rounding to int4 in plain NumPy, for comparison with compiled loops."""

import numpy as np
from distgpt.core.ops.low_precision import from_bfloat16, to_bfloat16
from distgpt.inference.quantized.integers import BLOCKS, LEAST, MOST, TRIED, Quantised, inverse, nearest


def quantise4(w):
    """Round a float32 matrix to int4, each block by the tried scale with the smallest error.

    The best scale for integers q is Σ w q / Σ q², which reduces the squared error by (Σ w q)² / Σ q².
    """
    n, k = w.shape
    block = BLOCKS[4]
    blocks = -(-k // block)
    padded = np.zeros((n, blocks * block), np.float32)
    padded[:, :k] = w
    each = padded.reshape(n, blocks, block)
    top = np.abs(each).max(2) / np.float32(MOST)
    best, scale = np.zeros_like(top), np.zeros_like(top)
    for part in TRIED:
        tried = (top * part)[..., None]
        x, q = each * inverse(tried), nearest(each, tried).astype(np.float32)
        product, square = (x * q).sum(2), (q * q).sum(2) + np.float32(LEAST)
        gain = (product * part) ** 2 / square
        scale = np.where(gain > best, product / square * (top * part), scale)
        best = np.maximum(best, gain)
    bits = to_bfloat16(scale)
    q = nearest(each, from_bfloat16(bits)[..., None])
    return Quantised(np.ascontiguousarray(q.reshape(n, -1)[:, :k]), bits, 4)
