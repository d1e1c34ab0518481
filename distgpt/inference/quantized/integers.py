"""int8 and int4 quantization in plain NumPy: integers and scales.

int8 is symmetric: w ≈ q · scale, q in -127 … 127, with one scale per block of k in a row. A scale is a
bfloat16, rounded up so that the largest element of the block fits. int4 has smaller blocks, q is one of the
16 LEVELS, and a search finds the scale, which may be negative.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from distgpt.core.ops.api import Array, Floats2d
from distgpt.core.ops.low_precision import BITS, from_bfloat16

# Columns that share a scale, by bits. int4 blocks are half as long: the lower error is worth the extra
# scales.
BLOCKS = {8: 64, 4: 32}
MOST = 127
# Levels are dense where weights are frequent. They are nearly optimal for normal and Student's t
# distributions (8 degrees of freedom) with the best scale, of either sign, for each block. The positive
# levels end earlier, so that the scale's sign can move the largest weight to the end that fits it better.
LEVELS = (-127, -97, -75, -58, -44, -32, -20, -9, 0, 12, 23, 34, 47, 62, 79, 105)


class Quantised(NamedTuple):
    """A matrix (n, k): q int8 (n, k) and bfloat16 scales as uint16 (n, blocks). In int4, q are LEVELS."""

    q: Array
    scales: Array
    bits: int = 8


def quantise(w: Floats2d) -> Quantised:
    """Round a float32 matrix to int8."""
    n, k = w.shape
    block = BLOCKS[8]
    blocks = -(-k // block)
    q, scales = np.empty((n, k), np.int8), np.empty((n, blocks), BITS)
    for i in range(0, n, 1024):  # a part that fits in the cache
        padded = np.zeros((len(w[i : i + 1024]), blocks * block), np.float32)
        padded[:, :k] = w[i : i + 1024]
        each = padded.reshape(len(padded), blocks, block)
        least = np.abs(each).max(2) / np.float32(MOST)
        bits = ((least.view(np.uint32) + np.uint32(0xFFFF)) >> 16).astype(BITS)
        scale = from_bfloat16(bits)[..., None]
        rounded = np.rint(each / np.where(scale == 0, np.float32(1), scale))
        q[i : i + 1024] = rounded.reshape(len(padded), -1)[:, :k]
        scales[i : i + 1024] = bits
    return Quantised(q, scales)


NEAREST = np.array([min(LEVELS, key=lambda level: abs(q - level)) for q in range(-MOST, MOST + 1)], np.int8)
# Candidate scales, as multiples of the scale that maps the largest element of a block to the end of LEVELS.
LEAST = 1e-36  # smaller scales count as 0
TRIED = tuple(sign * part for sign in (1, -1) for part in np.linspace(0.85, 1.3, 7, dtype=np.float32))


def inverse(scale: Array) -> Array:
    """Return 1 / scale, or 0 for scales below LEAST."""
    there = np.abs(scale) >= LEAST
    result: Array = np.where(there, np.float32(1) / np.where(there, scale, np.float32(1)), np.float32(0))
    return result


def nearest(w: Array, scale: Array) -> Array:
    """Return the level nearest to each element."""
    result: Array = NEAREST[np.clip(np.rint(w * inverse(scale)), -MOST, MOST).astype(np.int16) + MOST]
    return result


PLACES = np.zeros(256, np.uint8)
PLACES[np.array(LEVELS, np.int8).view(np.uint8)] = range(len(LEVELS))
_PAIRS = np.array([(low, high) for high in LEVELS for low in LEVELS], np.int8)


def to_nibbles(q: Array) -> Array:
    """Return indices of LEVELS, two columns per byte, the first in the lower half."""
    n, k = q.shape
    places = np.zeros((n, k + k % 2), np.uint8)
    places[:, :k] = PLACES[q.view(np.uint8)]
    nibbles: Array = places[:, ::2] | places[:, 1::2] << 4
    return nibbles


def from_nibbles(halves: Array, k: int) -> Array:
    """Return the levels of k columns."""
    return np.ascontiguousarray(_PAIRS[halves].reshape(len(halves), -1)[:, :k])


def restored(x: Quantised) -> Floats2d:
    w: Array = x.q * np.repeat(from_bfloat16(x.scales), BLOCKS[x.bits], axis=1)[:, : x.q.shape[1]]
    return w
