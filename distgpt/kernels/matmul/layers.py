"""The matmuls of linear layers, by microkernels of our own, split over a crew of threads."""

from __future__ import annotations

from typing import Any

import numpy as np

from distgpt.kernels.api import Array
from distgpt.kernels.matmul import blocked, packing
from distgpt.kernels.pool import Pool


class OwnMatmuls:
    """Of arrays of float32, or of bfloat16 as uint16."""

    def __init__(self, pool: Pool, dtype: Any) -> None:
        self._pool, self._dtype = pool, np.dtype(dtype).name
        self._scratch: dict[tuple[Any, ...], Any] = {}

    def forward(self, y: Array, x: Array, w: Array, bias: Array | None) -> None:
        """y ← x wᵀ + bias, the bias in float32; split along the longer side."""
        columns = len(x) < len(w)

        def part(first: int, last: int) -> None:
            rows, panels = ((0, len(x)), (first, last)) if columns else ((first, last), (0, len(w)))
            blocked.forward(*rows, *panels, y, x, w, bias, self._panels(x.shape[1]))

        self._pool.ranges(len(w) if columns else len(x), packing.COLUMNS if columns else packing.ROWS, part)

    def backward(self, dx: Array, dy: Array, w: Array) -> None:
        """dx ← dy w"""

        def part(first: int, last: int) -> None:
            blocked.backward(first, last, dx, dy, w, self._panels(len(w)))

        self._pool.ranges(len(dx), packing.ROWS, part)

    def backward_weights(self, dw: Array, dy: Array, x: Array, accumulate: bool) -> None:
        """dw ← [dw +] dyᵀ x; each worker packs the shorter side, and its part of the longer one."""
        outputs, inputs = dw.shape
        by_rows = outputs >= inputs

        def part(first: int, last: int) -> None:
            top, bottom = (first, last) if by_rows else (0, outputs)
            begin, end = (0, inputs) if by_rows else (first, last)
            a, b = self._products(len(x), inputs)
            blocked.products(top, bottom, begin, end, dw, dy, x, a, b, int(accumulate))

        grain = packing.ROWS if by_rows else packing.COLUMNS
        self._pool.ranges(max(outputs, inputs), grain, part)

    def _panels(self, k: int) -> Array:
        """This worker's memory for the panels of B (k, …) that are worked on."""
        key = (self._pool.member, k)
        if key not in self._scratch:
            self._scratch[key] = packing.packed(k, blocked.columns_at_once(k, self._dtype), self._dtype)
        return self._scratch[key]

    def _products(self, k: int, columns: int) -> tuple[Array, Array]:
        """This worker's memory for some packed rows of A (rows, k), and for B (k, columns)."""
        key = (self._pool.member, k, columns)
        if key not in self._scratch:
            rows = blocked.rows_at_once(k, self._dtype)
            made = packing.packed_rows(rows, k, self._dtype), packing.packed(k, columns, self._dtype)
            self._scratch[key] = made
        found: tuple[Array, Array] = self._scratch[key]
        return found
