"""Adapters beside packed weights: of each row its own, added to what a layer computes, in float32.

c ← c + scale · B (A x) takes two steps, as x comes by rows and c by columns: `reduce_row` and `add_columns`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from distgpt.kernels.api import Array
from distgpt.kernels.fused.jit import inline


class Adapters(NamedTuple):
    """Of every adapter and layer A (rank, k) and scale · Bᵀ (rank, columns). Ranks are filled up with zeros.

    `mlp` has the rows of A for `fc`, and below them those for `gates`.
    """

    qkv_a: Array  # (adapters, layers, rank, k)
    out_a: Array
    mlp_a: Array
    proj_a: Array
    qkv_b: Array  # (adapters, layers, rank, columns)
    out_b: Array
    fc_b: Array
    gates_b: Array
    proj_b: Array

    @property
    def rank(self) -> int:
        """Return the most elements of an A x."""
        return max(int(a.shape[2]) for a in self[:4])


def no_adapters() -> Adapters:
    return Adapters(*(np.zeros((0, 0, 0, 0), np.float32) for _ in Adapters._fields))


@inline
def reduce_row(inner, which, a, i, x):
    """inner ← A x in layer i by the adapter `which`, which counts from 1; 0: none."""
    if which:
        for r in range(a.shape[2]):
            row, total = a[which - 1, i, r], np.float32(0)
            for j in range(row.shape[0]):
                total += row[j] * x[j]
            inner[r] = total


@inline
def add_columns(begin, end, c, inner, which, b, i):
    """Columns begin … end of c ← c + scale · B inner in layer i, by the adapter of each row."""
    for n in range(which.shape[0]):
        if which[n]:
            to = c[n, begin:end]
            for r in range(b.shape[2]):
                factor, row = inner[n, r], b[which[n] - 1, i, r, begin:end]
                for j in range(to.shape[0]):
                    to[j] += factor * row[j]
