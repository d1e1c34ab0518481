"""The matmuls of linear layers, split over threads: our own microkernels or the BLAS."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from distgpt.core.cpu.compiling.processor import processor
from distgpt.core.cpu.matmul import blas, blocked, packing
from distgpt.core.cpu.matmul.blocked import copies_rows
from distgpt.core.cpu.pool import COLUMNS, ROWS, Pool, WorkerMemory
from distgpt.core.ops.api import DType, Floats1d, Floats2d, Wide2d
from distgpt.core.ops.low_precision import BITS


class BlasMatmuls:
    """Matmuls in float32 or float64. Threads split the longer side, because each packs the shorter side."""

    words = "BLAS"  # name for messages

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def forward(self, y: Floats2d, x: Floats2d, w: Floats2d, bias: Floats1d | None) -> None:
        """y ← x wᵀ + bias"""
        if len(x) < len(w):
            self._pool.split_range(len(w), COLUMNS, blas.linear_columns, y, x, w, bias)
        else:
            self._pool.split_range(len(x), ROWS, blas.linear, y, x, w, bias)

    def backward(self, dx: Floats2d, dy: Floats2d, w: Floats2d) -> None:
        """dx ← dy w"""
        self._pool.split_range(len(dx), ROWS, blas.linear_backward, dx, dy, w)

    def backward_weights(self, dw: Wide2d, dy: Floats2d, x: Floats2d, accumulate: bool) -> None:
        """dw ← [dw +] dyᵀ x"""
        self._pool.split_range(dy.shape[1], COLUMNS, blas.linear_backward_weights, dw, dy, x, accumulate)


# Cost of packing, in tiles: a panel of B as PANEL tiles that read it, a strip of A, only packed in
# `products`, as STRIP tiles. Counted on a Zen 4 in bfloat16.
PANEL, STRIP = 2, 1
KEPT = 256  # cached choices: prompts have many lengths

Range = tuple[int, int]


class Bands(NamedTuple):
    """A split of C = A B over threads: numbers of bands of rows and of columns. Cells count row by row.

    Every worker packs the data that its cell reads. With bands of rows only, each packs all of B and, with
    many threads, uses it for few rows. With cells each packs a part. An element of C is the same sum for any
    split.
    """

    rows: int
    columns: int

    @property
    def cells(self) -> int:
        return self.rows * self.columns

    def cell(self, first: int, last: int, rows: int, columns: int) -> tuple[Range, Range]:
        """Return the rows and columns of one cell of C (rows, columns), or of all cells."""
        if last - first == self.cells:
            return (0, rows), (0, columns)
        assert last - first == 1, "a thread has one cell, or computes the whole matmul"
        band, column = divmod(first, self.columns)
        return Pool.part_of(band, self.rows, rows, packing.ROWS), Pool.part_of(
            column, self.columns, columns, packing.COLUMNS
        )


@lru_cache(KEPT)
def bands(rows: int, columns: int, threads: int, packs_rows: bool = False) -> Bands:
    """Return the bands with the shortest time of the slowest thread. `packs_rows`: A is also packed."""
    strips, panels = max(1, -(-rows // packing.ROWS)), max(1, -(-columns // packing.COLUMNS))

    def time(cut: Bands) -> int:
        high, wide = -(-strips // cut.rows), -(-panels // cut.columns)
        return high * wide + PANEL * wide + (STRIP * high if packs_rows else 0)

    # Prefer fewer bands of columns on a tie, so that fewer threads read A.
    return min((Bands(min(threads // n, strips), n) for n in range(1, min(threads, panels) + 1)), key=time)


class OwnMatmuls:
    """Matmuls in float32, or in bfloat16 as uint16. Threads split C into cells; see `Bands`."""

    words = "own kernels"

    def __init__(self, pool: Pool, dtype: DType) -> None:
        self._pool = pool
        self._dtype = np.dtype(dtype).name
        self._memory = WorkerMemory(pool)

    def forward(self, y: Floats2d, x: Floats2d, w: Floats2d, bias: Floats1d | None) -> None:
        self._split(blocked.forward, len(w), y, x, w, bias)

    def backward(self, dx: Floats2d, dy: Floats2d, w: Floats2d) -> None:
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
        """Compute C (…, width), split into cells."""
        cut = bands(len(a), width, self._pool.threads)

        def part(first: int, last: int) -> None:
            rows, columns = cut.cell(first, last, len(a), width)
            # Round up to a power of two so that prompts of similar lengths share scratch memory.
            count = 1 << (rows[1] - rows[0] - 1).bit_length()
            own = self._memory.scratch(blocked.scratch, self._dtype, count, a.shape[1], copies_rows(a))
            self._pool.call(loop, *rows, *columns, c, a, w, *map(self._in_float32, bias), own)

        self._pool.split_range(cut.cells, 1, part)

    def _in_float32(self, bias: Floats1d | None) -> Floats1d | None:
        """Return a bias in float32, as tiles require, in this worker's memory."""
        if bias is None or bias.dtype != BITS:
            return bias
        wide = self._memory.scratch(np.empty, len(bias), "float32")
        self._pool.call(blocked.widen, wide, bias)
        return wide

    def backward_weights(self, dw: Wide2d, dy: Floats2d, x: Floats2d, accumulate: bool) -> None:
        """dw ← [dw +] dyᵀ x. Each worker packs the columns of dy and x that its cell of dw reads."""
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
        """dw ← [dw +] (xᵀ dy)ᵀ, for few inputs: packing dy as rows would take longer than the sums."""
        outputs, inputs = dw.shape

        def part(first: int, last: int) -> None:
            own = self._memory.scratch(blocked.product_scratch, self._dtype, len(x), last - first, True)
            sums = self._memory.scratch(np.empty, (inputs, outputs), "float32")
            self._pool.call(blocked.products, 0, inputs, first, last, sums, x, dy, own, 0)
            self._pool.call(blocked.turn, first, last, dw, sums, accumulate)

        self._pool.split_range(outputs, packing.COLUMNS, part)


Matmuls = BlasMatmuls | OwnMatmuls

# Processors, by their LLVM names, on which our own float32 kernels are faster than the BLAS: 1.045x on a Zen
# 4. They are not on a Zen 3, Zen 5, Cascade Lake or Emerald Rapids (performance.md).
OWN_IS_FASTER = frozenset({"znver4"})


def matmuls_for(pool: Pool, dtype: np.dtype, matmul: str) -> Matmuls:
    """Return the requested matmuls for a type. Only the BLAS computes float64."""
    if matmul == "auto":
        matmul = "own" if processor()[0] in OWN_IS_FASTER else "blas"
    return OwnMatmuls(pool, dtype) if dtype == np.float32 and matmul == "own" else BlasMatmuls(pool)
