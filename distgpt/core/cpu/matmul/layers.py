"""The matmuls of linear layers, split over threads: by our own microkernels or by the BLAS."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from distgpt.core.cpu.compiling.processor import processor
from distgpt.core.cpu.matmul import blas, blocked, packing
from distgpt.core.cpu.matmul.blocked import rows_conflict
from distgpt.core.cpu.pool import COLUMNS, ROWS, Pool, WorkerMemory
from distgpt.core.ops.api import Array, DType, Floats1d, Floats2d, Wide2d
from distgpt.core.ops.low_precision import BITS, from_bfloat16


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
            self._pool.ranges(len(w), COLUMNS, blas.linear_columns, y, x, w, bias)
        else:
            self._pool.ranges(len(x), ROWS, blas.linear, y, x, w, bias)

    def backward(self, dx: Floats2d, dy: Floats2d, w: Floats2d) -> None:
        self._pool.ranges(len(dx), ROWS, blas.linear_backward, dx, dy, w)

    def backward_weights(self, dw: Wide2d, dy: Floats2d, x: Floats2d, accumulate: bool) -> None:
        self._pool.ranges(dy.shape[1], COLUMNS, blas.linear_backward_weights, dw, dy, x, accumulate)


class OwnMatmuls:
    """Matmuls of float32, or of bfloat16 as uint16. Splits the longer side."""

    words = "own kernels"

    def __init__(self, pool: Pool, dtype: DType) -> None:
        self._pool, self._dtype = pool, np.dtype(dtype).name
        self._memory = WorkerMemory(pool)

    def forward(self, y: Floats2d, x: Floats2d, w: Floats2d, bias: Floats1d | None) -> None:
        if bias is not None and bias.dtype == BITS:
            bias = from_bfloat16(bias)
        self._cut(blocked.forward, len(x) < len(w), len(w), y, x, w, bias)

    def backward(self, dx: Floats2d, dy: Floats2d, w: Floats2d) -> None:
        """dx ← dy w"""
        width = w.shape[1]
        self._cut(blocked.backward, len(dx) < len(w) and self._share_panels(width), width, dx, dy, w)

    def _cut(
        self,
        loop: Callable[..., None],
        by_columns: bool,
        width: int,
        c: Floats2d,
        a: Floats2d,
        *of: Array | None,
    ) -> None:
        """Let workers compute rows of C (…, width), or columns."""

        def part(first: int, last: int) -> None:
            rows, columns = ((0, len(a)), (first, last)) if by_columns else ((first, last), (0, width))
            count = _up(rows[1] - rows[0])
            own = self._memory.of(blocked.scratch, self._dtype, count, a.shape[1], rows_conflict(a))
            loop(*rows, *columns, c, a, *of, own)

        total, grain = (width, packing.COLUMNS) if by_columns else (len(a), packing.ROWS)
        self._pool.ranges(total, grain, part)

    def _share_panels(self, columns: int) -> bool:
        """Return whether threads that take panels get about the same: then nobody packs another's."""
        panels, threads = -(-columns // packing.COLUMNS), self._pool.threads
        return 8 * threads * -(-panels // threads) <= 9 * panels

    def backward_weights(self, dw: Wide2d, dy: Floats2d, x: Floats2d, accumulate: bool) -> None:
        """dw ← [dw +] dyᵀ x; each worker packs the shorter side, and its part of the longer one."""
        outputs, inputs = dw.shape
        if inputs <= packing.COLUMNS < outputs:
            self._turned_weights(dw, dy, x, accumulate)
            return
        by_rows, is_thin = outputs >= inputs, outputs <= packing.COLUMNS

        def part(first: int, last: int) -> None:
            top, bottom = (first, last) if by_rows else (0, outputs)
            begin, end = (0, inputs) if by_rows else (first, last)
            own = self._memory.of(blocked.product_scratch, self._dtype, len(x), end - begin, is_thin)
            blocked.products(top, bottom, begin, end, dw, dy, x, own, int(accumulate))

        grain = packing.ROWS if by_rows else packing.COLUMNS
        self._pool.ranges(max(outputs, inputs), grain, part)

    def _turned_weights(self, dw: Wide2d, dy: Floats2d, x: Floats2d, accumulate: bool) -> None:
        """dw ← [dw +] (xᵀ dy)ᵀ: for few inputs, where packing dy as rows would take longer than the sums."""
        outputs, inputs = dw.shape

        def part(first: int, last: int) -> None:
            own = self._memory.of(blocked.product_scratch, self._dtype, len(x), last - first, True)
            sums = self._memory.of(np.empty, (inputs, outputs), "float32")
            blocked.products(0, inputs, first, last, sums, x, dy, own, 0)
            turned = sums[:, first:last].T
            dw[first:last] = dw[first:last] + turned if accumulate else turned

        self._pool.ranges(outputs, packing.COLUMNS, part)


def _up(rows: int) -> int:
    """Return the next power of two, so that prompts of many lengths share their scratch memory."""
    return 1 << (rows - 1).bit_length()


# The processors, by LLVM's names, on which our own kernels multiply float32 faster than the BLAS: a Zen 4 by
# 1.045 times. On a Zen 3, Zen 5, Cascade Lake and Emerald Rapids they are not (performance.md).
OWN_IS_FASTER = frozenset({"znver4"})


def matmuls_for(pool: Pool, dtype: np.dtype, matmul: str) -> Matmuls:
    """Return the requested matmuls for a type; float64 is for the BLAS alone."""
    if matmul == "auto":
        matmul = "own" if processor()[0] in OWN_IS_FASTER else "blas"
    return OwnMatmuls(pool, dtype) if dtype == np.float32 and matmul == "own" else BlasMatmuls(pool)
