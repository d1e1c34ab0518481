"""The matmuls of linear layers, split over threads: by our own microkernels or by the BLAS."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from distgpt.core.cpu.compiling.processor import processor
from distgpt.core.cpu.matmul import blas, blocked, packing
from distgpt.core.cpu.matmul.blocked import rows_conflict
from distgpt.core.cpu.pool import COLUMNS, ROWS, Pool, WorkerMemory
from distgpt.core.ops.api import DType, Floats1d, Floats2d, Wide2d
from distgpt.core.ops.low_precision import BITS


class Matmuls(Protocol):
    """The three matmuls of a linear layer; `words` name for people what computes them."""

    @property
    def words(self) -> str: ...

    def forward(self, y: Floats2d, x: Floats2d, w: Floats2d, bias: Floats1d | None) -> None:
        """y ← x wᵀ + bias"""

    def backward(self, dx: Floats2d, dy: Floats2d, w: Floats2d) -> None:
        """dx ← dy w"""

    def backward_weights(self, dw: Wide2d, dy: Floats2d, x: Floats2d, accumulate: bool) -> None:
        """dw ← [dw +] dyᵀ x"""


class BlasMatmuls:
    """Matmuls of float32 or float64. Splits the longer side: every worker packs the shorter one."""

    words = "BLAS"

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def forward(self, y: Floats2d, x: Floats2d, w: Floats2d, bias: Floats1d | None) -> None:
        if len(x) < len(w):
            self._pool.split_range(len(w), COLUMNS, blas.linear_columns, y, x, w, bias)
        else:
            self._pool.split_range(len(x), ROWS, blas.linear, y, x, w, bias)

    def backward(self, dx: Floats2d, dy: Floats2d, w: Floats2d) -> None:
        self._pool.split_range(len(dx), ROWS, blas.linear_backward, dx, dy, w)

    def backward_weights(self, dw: Wide2d, dy: Floats2d, x: Floats2d, accumulate: bool) -> None:
        self._pool.split_range(dy.shape[1], COLUMNS, blas.linear_backward_weights, dw, dy, x, accumulate)


class OwnMatmuls:
    """Matmuls of float32, or of bfloat16 as uint16. Splits the longer side."""

    words = "own kernels"

    def __init__(self, pool: Pool, dtype: DType) -> None:
        self._pool = pool
        self._dtype = np.dtype(dtype).name
        self._memory = WorkerMemory(pool)

    def forward(self, y: Floats2d, x: Floats2d, w: Floats2d, bias: Floats1d | None) -> None:
        self._split(blocked.forward, len(x) < len(w), len(w), y, x, w, bias)

    def backward(self, dx: Floats2d, dy: Floats2d, w: Floats2d) -> None:
        """dx ← dy w"""
        width = w.shape[1]
        self._split(blocked.backward, len(dx) < len(w) and self._share_panels(width), width, dx, dy, w)

    def _split(
        self,
        loop: Callable[..., None],
        by_columns: bool,
        width: int,
        c: Floats2d,
        a: Floats2d,
        w: Floats2d,
        *bias: Floats1d | None,
    ) -> None:
        """Let workers compute rows of C (…, width), or columns."""

        def part(first: int, last: int) -> None:
            rows, columns = ((0, len(a)), (first, last)) if by_columns else ((first, last), (0, width))
            # The next power of two, so that prompts of many lengths share their scratch memory.
            count = 1 << (rows[1] - rows[0] - 1).bit_length()
            own = self._memory.scratch(blocked.scratch, self._dtype, count, a.shape[1], rows_conflict(a))
            self._pool.call(loop, *rows, *columns, c, a, w, *map(self._in_float32, bias), own)

        total, grain = (width, packing.COLUMNS) if by_columns else (len(a), packing.ROWS)
        self._pool.split_range(total, grain, part)

    def _in_float32(self, bias: Floats1d | None) -> Floats1d | None:
        """Return a bias as tiles add it, in this worker's memory."""
        if bias is None or bias.dtype != BITS:
            return bias
        wide = self._memory.scratch(np.empty, len(bias), "float32")
        self._pool.call(blocked.widen, wide, bias)
        return wide

    def _share_panels(self, columns: int) -> bool:
        """Return whether threads that take panels get at most an eighth more than the mean.

        Then each packs its own panels alone. Otherwise they share out rows, and each packs all of w.
        """
        panels = -(-columns // packing.COLUMNS)
        threads = self._pool.threads
        return 8 * threads * -(-panels // threads) <= 9 * panels

    def backward_weights(self, dw: Wide2d, dy: Floats2d, x: Floats2d, accumulate: bool) -> None:
        """dw ← [dw +] dyᵀ x; each worker packs the shorter side, and its part of the longer one."""
        outputs, inputs = dw.shape
        if inputs <= packing.COLUMNS < outputs:
            self._turned_weights(dw, dy, x, accumulate)
            return
        by_rows = outputs >= inputs
        is_thin = outputs <= packing.COLUMNS

        def part(first: int, last: int) -> None:
            top, bottom = (first, last) if by_rows else (0, outputs)
            begin, end = (0, inputs) if by_rows else (first, last)
            own = self._memory.scratch(blocked.product_scratch, self._dtype, len(x), end - begin, is_thin)
            self._pool.call(blocked.products, top, bottom, begin, end, dw, dy, x, own, int(accumulate))

        grain = packing.ROWS if by_rows else packing.COLUMNS
        self._pool.split_range(max(outputs, inputs), grain, part)

    def _turned_weights(self, dw: Wide2d, dy: Floats2d, x: Floats2d, accumulate: bool) -> None:
        """dw ← [dw +] (xᵀ dy)ᵀ: for few inputs, where packing dy as rows would take longer than the sums."""
        outputs, inputs = dw.shape

        def part(first: int, last: int) -> None:
            own = self._memory.scratch(blocked.product_scratch, self._dtype, len(x), last - first, True)
            sums = self._memory.scratch(np.empty, (inputs, outputs), "float32")
            self._pool.call(blocked.products, 0, inputs, first, last, sums, x, dy, own, 0)
            self._pool.call(blocked.turn, first, last, dw, sums, accumulate)

        self._pool.split_range(outputs, packing.COLUMNS, part)


# The processors, by LLVM's names, on which our own kernels multiply float32 faster than the BLAS: a Zen 4 by
# 1.045 times. On a Zen 3, Zen 5, Cascade Lake and Emerald Rapids they are not (performance.md).
OWN_IS_FASTER = frozenset({"znver4"})


def matmuls_for(pool: Pool, dtype: np.dtype, matmul: str) -> Matmuls:
    """Return the requested matmuls for a type; float64 is for the BLAS alone."""
    if matmul == "auto":
        matmul = "own" if processor()[0] in OWN_IS_FASTER else "blas"
    return OwnMatmuls(pool, dtype) if dtype == np.float32 and matmul == "own" else BlasMatmuls(pool)
