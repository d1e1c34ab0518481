"""bfloat16 and GGUF's blocks of integers in plain NumPy. Arrays of uint16 hold the bits of bfloat16."""

from __future__ import annotations

import numpy as np

from distgpt.core.ops.api import Array

BITS = np.dtype(np.uint16)
BLOCK = 32  # elements that share a scale d; in Q4_0, the first 16 are in the lower halves of its bytes
BLOCKS = {
    "Q8_0": np.dtype([("d", "<f2"), ("q", "i1", BLOCK)]),
    "Q4_0": np.dtype([("d", "<f2"), ("q", "u1", BLOCK // 2)]),
}


def to_bfloat16(values: Array) -> Array:
    """Return the bits of the nearest bfloat16, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    quiet = (bits >> 16) | 0x40
    return np.where(np.isnan(values), quiet, rounded).astype(BITS)


def from_bfloat16(bits: Array) -> Array:
    return (np.asarray(bits, np.uint32) << 16).view(np.float32)


def nibbles(q: Array) -> Array:
    """Return the integers in Q4_0's bytes."""
    return np.concatenate([q & 15, q >> 4], axis=-1).view(np.int8) - np.int8(8)


def from_blocks(blocks: Array) -> Array:
    """Return the float32 elements of blocks, flattened."""
    q = blocks["q"]
    if q.dtype == np.uint8:
        q = nibbles(q)
    with np.errstate(all="ignore"):  # readers check for values that are not finite
        result: Array = (q * blocks["d"].astype(np.float32)[..., None]).reshape(-1)
    return result
