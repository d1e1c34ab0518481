"""The matmuls of linear layers, split over threads: by our own microkernels, or by the BLAS."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from distgpt.kernels.api import Array
from distgpt.kernels.fused import linear
from distgpt.kernels.low_precision import BITS, from_bfloat16
from distgpt.kernels.matmul import blocked, packing
from distgpt.kernels.matmul.blocked import in_the_way
from distgpt.kernels.pool import COLUMNS, ROWS, Pool, WorkerMemory


class Matmuls(Protocol):
    """The three matmuls of a linear layer; `words` name for people what computes them."""

    @property
    def words(self) -> str: ...

    def forward(self, y: Array, x: Array, w: Array, bias: Array | None) -> None:
        """y ← x wᵀ + bias"""

    def backward(self, dx: Array, dy: Array, w: Array) -> None:
        """dx ← dy w"""

    def backward_weights(self, dw: Array, dy: Array, x: Array, accumulate: bool) -> None:
        """dw ← [dw +] dyᵀ x"""


class BlasMatmuls:
    """Matmuls of float32 or float64. Splits the longer side: every worker packs the shorter one."""

    words = "BLAS"

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def forward(self, y: Array, x: Array, w: Array, bias: Array | None) -> None:
        if len(x) < len(w):
            self._pool.ranges(len(w), COLUMNS, linear.linear_columns, y, x, w, bias)
        else:
            self._pool.ranges(len(x), ROWS, linear.linear, y, x, w, bias)

    def backward(self, dx: Array, dy: Array, w: Array) -> None:
        self._pool.ranges(len(dx), ROWS, linear.linear_backward, dx, dy, w)

    def backward_weights(self, dw: Array, dy: Array, x: Array, accumulate: bool) -> None:
        self._pool.ranges(dy.shape[1], COLUMNS, linear.linear_backward_weights, dw, dy, x, accumulate)


class OwnMatmuls:
    """Matmuls of float32, or of bfloat16 as uint16. Splits the longer side."""

    words = "own kernels"

    def __init__(self, pool: Pool, dtype: Any) -> None:
        self._pool, self._dtype = pool, np.dtype(dtype).name
        self._memory = WorkerMemory(pool)

    def forward(self, y: Array, x: Array, w: Array, bias: Array | None) -> None:
        if bias is not None and bias.dtype == BITS:
            bias = from_bfloat16(bias)
        columns = len(x) < len(w)

        def part(first: int, last: int) -> None:
            rows, panels = ((0, len(x)), (first, last)) if columns else ((first, last), (0, len(w)))
            own = self._memory.of(
                blocked.scratch, self._dtype, _up(rows[1] - rows[0]), x.shape[1], in_the_way(x)
            )
            blocked.forward(*rows, *panels, y, x, w, bias, own)

        self._pool.ranges(len(w) if columns else len(x), packing.COLUMNS if columns else packing.ROWS, part)

    def backward(self, dx: Array, dy: Array, w: Array) -> None:
        """dx ← dy w"""

        def part(first: int, last: int) -> None:
            own = self._memory.of(blocked.scratch, self._dtype, _up(last - first), len(w), in_the_way(dy))
            blocked.backward(first, last, dx, dy, w, own)

        self._pool.ranges(len(dx), packing.ROWS, part)

    def backward_weights(self, dw: Array, dy: Array, x: Array, accumulate: bool) -> None:
        """dw ← [dw +] dyᵀ x; each worker packs the shorter side, and its part of the longer one."""
        outputs, inputs = dw.shape
        by_rows = outputs >= inputs

        def part(first: int, last: int) -> None:
            top, bottom = (first, last) if by_rows else (0, outputs)
            begin, end = (0, inputs) if by_rows else (first, last)
            own = self._memory.of(blocked.product_scratch, self._dtype, len(x), end - begin)
            blocked.products(top, bottom, begin, end, dw, dy, x, own, int(accumulate))

        grain = packing.ROWS if by_rows else packing.COLUMNS
        self._pool.ranges(max(outputs, inputs), grain, part)


def _up(rows: int) -> int:
    """Return the next power of two, so that prompts of many lengths share their scratch memory."""
    return 1 << (rows - 1).bit_length()
