"""Marks of memory: numbers that differ once any of its bytes do."""

from __future__ import annotations

import numpy as np

from distgpt.kernels.api import Array
from distgpt.kernels.fused.jit import jit
from distgpt.kernels.pool import Pool

PIECE = 1 << 16  # words of 8 bytes that have marks of their own
LANES = 32  # marks of a piece: so many chains, which vectorize
FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd: no two numbers have the same product
HALF = np.uint64(32)


def marks_of(x: Array, pool: Pool) -> Array:
    """Of a flat array of whole words. One word that changes always shows, more but for a chance of 2^-64."""
    words = x.view(np.uint64)
    marks = np.zeros((-(-len(words) // PIECE), LANES), np.uint64)
    pool.ranges(len(marks), 1, _mark, marks, words)
    return marks


@jit
def _mark(first, last, marks, words):
    """The marks of pieces first … last: a step for each word, of which none loses anything."""
    for piece in range(first, last):
        mine, end = marks[piece], min((piece + 1) * PIECE, len(words))
        for left in range(piece * PIECE, end, LANES):
            some = words[left : min(left + LANES, end)]
            for lane in range(len(some)):
                mixed = (mine[lane] ^ some[lane]) * FACTOR
                mine[lane] = mixed ^ (mixed >> HALF)
