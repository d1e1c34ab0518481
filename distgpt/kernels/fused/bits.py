"""bfloat16 in NumPy, which has no such type: the bits, in arrays of uint16."""

from __future__ import annotations

import numpy as np

from distgpt.kernels.api import Array

BITS = np.dtype(np.uint16)


def to_float32(bits: Array) -> Array:
    wide: Array = (bits.astype(np.uint32) << 16).view(np.float32)
    return wide


def to_bits(x: Array) -> Array:
    """The nearest bfloat16, ties to even."""
    from distgpt.kernels.fused import rowwise  # compiled loops, which the way back does without

    flat = np.ascontiguousarray(x, np.float32).reshape(-1)
    out = np.empty(len(flat), BITS)
    rowwise.rounded(0, len(flat), out, flat)
    return out.reshape(np.shape(x))
