"""How matrices are rounded to int8, in plain NumPy.

Symmetric: w ≈ q · scale, q in -127 … 127, with one scale for each block of k of a row. A scale is a bfloat16,
rounded up, so that the largest element of a block still fits.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from distgpt.kernels.api import Array
from distgpt.kernels.fused.bits import to_float32
from distgpt.kernels.matmul.int8 import BLOCK

MOST = 127


class Quantised(NamedTuple):
    """A matrix (n, k): q int8 (n, k), scales (n, blocks of k), bits of bfloat16."""

    q: Array
    scales: Array


def quantise(w: Array) -> Quantised:
    """The nearest int8 of a float32 matrix."""
    n, k = w.shape
    blocks = -(-k // BLOCK)
    q, scales = np.empty((n, k), np.int8), np.empty((n, blocks), np.uint16)
    for i in range(0, n, 1024):  # a part that stays in a cache
        padded = np.zeros((len(w[i : i + 1024]), blocks * BLOCK), np.float32)
        padded[:, :k] = w[i : i + 1024]
        each = padded.reshape(len(padded), blocks, BLOCK)
        least = np.abs(each).max(2) / np.float32(MOST)
        bits = ((least.view(np.uint32) + np.uint32(0xFFFF)) >> 16).astype(np.uint16)
        scale = to_float32(bits)[..., None]
        rounded = np.rint(each / np.where(scale == 0, np.float32(1), scale))
        q[i : i + 1024] = rounded.reshape(len(padded), -1)[:, :k]
        scales[i : i + 1024] = bits
    return Quantised(q, scales)


def restored(x: Quantised) -> Array:
    """The float32 matrix that these stand for."""
    return x.q * np.repeat(to_float32(x.scales), BLOCK, axis=1)[:, : x.q.shape[1]]
