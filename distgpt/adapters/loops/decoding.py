"""Adapters beside packed weights, as `Variants` of the decoder: of each row its own, in float32.

c ← c + scale · B (A x) takes two steps, as x comes by rows and c by columns: `reduce_row` and `add_columns`.
Row by row, so that nothing depends on who shares a batch.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from distgpt.core.cpu.compiling.jit import inline
from distgpt.core.cpu.matmul.microkernel import ACCUMULATE
from distgpt.core.cpu.matmul.packing import COLUMNS, aligned, pack_transposed
from distgpt.core.ops.api import Array
from distgpt.decoding.loops.operands import multiply, operand_rows
from distgpt.decoding.loops.variants import FC, GATES, OUT, PROJ, QKV


class Adapters(NamedTuple):
    """A and scale · B of every adapter and layer: (adapters, layers, panels, elements of a panel).

    Ranks are filled up with zeros. `mlp_a` has the rows of A for `fc`, and below them those for `gates`.
    """

    qkv_a: Array
    out_a: Array
    mlp_a: Array
    proj_a: Array
    qkv_b: Array
    out_b: Array
    fc_b: Array
    gates_b: Array
    proj_b: Array

    inner: Array = np.zeros((0, 0), np.float32)  # A x of each row (N, rank)

    @property
    def highest(self) -> int:
        return len(self.qkv_a)

    def for_rows(self, count: int) -> Adapters:
        rank = max(int(a.shape[2]) for a in self[:4]) * COLUMNS  # the most elements of an A x, whole panels
        return self._replace(inner=operand_rows(count, rank, "float32"))

    @staticmethod
    def read_hidden(variants):
        return True

    @staticmethod
    def read_row(variants, place, layer, row, variant, x):
        inner = variants.inner[row:]
        if place == QKV:
            reduce_row(inner, variant, variants.qkv_a, layer, x)
        elif place == OUT:
            reduce_row(inner, variant, variants.out_a, layer, x)
        elif place == FC:
            reduce_row(inner, variant, variants.mlp_a, layer, x)
        elif place == PROJ:
            reduce_row(inner, variant, variants.proj_a, layer, x)

    @staticmethod
    def add_columns(variants, place, layer, which, begin, end, c):
        inner = variants.inner
        if place == QKV:
            add_columns(begin, end, c, inner, which, variants.qkv_b, layer)
        elif place == OUT:
            add_columns(begin, end, c, inner, which, variants.out_b, layer)
        elif place == FC:
            add_columns(begin, end, c, inner, which, variants.fc_b, layer)
        elif place == GATES:  # whose rows of A stand below those of FC
            behind = inner[:, variants.fc_b.shape[3] // COLUMNS :]
            add_columns(begin, end, c, behind, which, variants.gates_b, layer)
        elif place == PROJ:
            add_columns(begin, end, c, inner, which, variants.proj_b, layer)


def packed_factors(w: Array) -> Array:
    """Pack matrices w (adapters, layers, columns, k): what x wᵀ is made with."""
    adapters, layers, columns, k = w.shape
    found = aligned((adapters, layers, -(-columns // COLUMNS), k * COLUMNS), "float32")
    found[...] = 0
    for to, of in zip(found, w, strict=True):
        for i in range(layers):
            pack_transposed(0, columns, to[i], of[i], 0, k)
    return found


@inline
def reduce_row(inner, which, a, i, x):
    """inner (1, rank) ← A x (1, k) in layer i by the adapter `which`, which counts from 1; 0: none."""
    if which:
        panels = a[which - 1, i]
        for p in range(panels.shape[0]):
            panel, to = panels[p], inner[:, p * COLUMNS :]
            multiply(1, 0, panel.shape[0] // COLUMNS, x, panel, to, COLUMNS, panel, 0)


@inline
def add_columns(begin, end, c, inner, which, b, i):
    """Columns begin … end of c ← c + scale · B inner in layer i, by the adapter of each row."""
    rank = b.shape[3] // COLUMNS
    for n in range(which.shape[0] if rank else 0):
        for column in range(begin, end if which[n] else begin, COLUMNS):
            panel, to = b[which[n] - 1, i, column // COLUMNS], c[n:, column:]
            multiply(1, 0, rank, inner[n:], panel, to, min(COLUMNS, end - column), panel, ACCUMULATE)
