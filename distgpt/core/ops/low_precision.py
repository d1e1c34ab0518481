"""bfloat16 in plain NumPy. NumPy has no bfloat16, so arrays of uint16 hold its bits."""

from __future__ import annotations

import numpy as np

from distgpt.core.ops.api import Array

BITS = np.dtype(np.uint16)


def to_bfloat16(values: Array) -> Array:
    """Return the bits of the nearest bfloat16, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    quiet = (bits >> 16) | 0x40
    return np.where(np.isnan(values), quiet, rounded).astype(BITS)


def from_bfloat16(bits: Array) -> Array:
    return (np.asarray(bits, np.uint32) << 16).view(np.float32)
