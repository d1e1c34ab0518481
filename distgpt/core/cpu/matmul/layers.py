"""The matmuls of linear layers, split over threads: by our own microkernels or by the BLAS."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from distgpt.core.cpu.compiling.processor import processor
from distgpt.core.cpu.matmul import blas, blocked, packing
from distgpt.core.cpu.matmul.bands import bands
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
    """Matmuls of float32, or of bfloat16 as uint16. Threads share C in cells: see bands.py."""

    words = "own kernels"

    def __init__(self, pool: Pool, dtype: DType) -> None:
        self._pool = pool
        self._dtype = np.dtype(dtype).name
        self._memory = WorkerMemory(pool)

    def forward(self, y: Floats2d, x: Floats2d, w: Floats2d, bias: Floats1d | None) -> None:
        self._split(blocked.forward, len(w), y, x, w, bias)

    def backward(self, dx: Floats2d, dy: Floats2d, w: Floats2d) -> None:
        """dx ← dy w"""
        self._split(blocked.backward, w.shape[1], dx, dy, w)

    def _split(
        self,
        loop: Callable[..., None],
        width: int,
        c: Floats2d,
        a: Floats2d,
        w: Floats2d,
        *bias: Floats1d | None,
    ) -> None:
        """Let workers compute cells of C (…, width)."""
        cut = bands(len(a), width, self._pool.threads)

        def part(first: int, last: int) -> None:
            rows, columns = cut.cell(first, last, len(a), width)
            # The next power of two, so that prompts of many lengths share their scratch memory.
            count = 1 << (rows[1] - rows[0] - 1).bit_length()
            own = self._memory.scratch(blocked.scratch, self._dtype, count, a.shape[1], rows_conflict(a))
            self._pool.call(loop, *rows, *columns, c, a, w, *map(self._in_float32, bias), own)

        self._pool.split_range(cut.cells, 1, part)

    def _in_float32(self, bias: Floats1d | None) -> Floats1d | None:
        """Return a bias as tiles add it, in this worker's memory."""
        if bias is None or bias.dtype != BITS:
            return bias
        wide = self._memory.scratch(np.empty, len(bias), "float32")
        self._pool.call(blocked.widen, wide, bias)
        return wide

    def backward_weights(self, dw: Wide2d, dy: Floats2d, x: Floats2d, accumulate: bool) -> None:
        """dw ← [dw +] dyᵀ x; each worker packs the columns of dy and of x that its cell of dw reads."""
        outputs, inputs = dw.shape
        if inputs <= packing.COLUMNS < outputs:
            self._turned_weights(dw, dy, x, accumulate)
            return
        is_thin = outputs <= packing.COLUMNS
        cut = bands(outputs, inputs, self._pool.threads, packs_rows=True)

        def part(first: int, last: int) -> None:
            (top, bottom), (begin, end) = cut.cell(first, last, outputs, inputs)
            own = self._memory.scratch(blocked.product_scratch, self._dtype, len(x), end - begin, is_thin)
            self._pool.call(blocked.products, top, bottom, begin, end, dw, dy, x, own, int(accumulate))

        self._pool.split_range(cut.cells, 1, part)

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
