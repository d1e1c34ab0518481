"""Matmul from tiles: which tile comes when, so that what is read again is still in a cache."""

from __future__ import annotations

from typing import Any

import numpy as np

from distgpt.kernels.fused.jit import inline, jit
from distgpt.kernels.matmul.assembled import prefetch, tile
from distgpt.kernels.matmul.microkernel import BIAS
from distgpt.kernels.matmul.packing import (
    COLUMNS,
    LINE,
    ROWS,
    pack_plain,
    pack_rows_transposed,
    pack_transposed,
)

GROUP_BYTES = 256 << 10  # panels of B that all rows of A go past before the next ones: part of the L2 cache
ROWS_BYTES = 512 << 10  # rows of a packed A that all panels of B go past: half of the L2 cache


@jit
def forward(
    top: int, bottom: int, first: int, last: int, y: Any, x: Any, w: Any, bias: Any, panels: Any
) -> None:
    """Rows top … bottom, columns first … last, of y ← x wᵀ [+ bias]; `first` begins a panel.

    `panels` is scratch memory. While some panels are at work, the rows of w for the next ones are fetched.
    """
    group, k, columns = panels.shape[0], x.shape[1], w.shape[0]
    strips = (bottom - top + ROWS - 1) // ROWS
    for start in range(first, last, group * COLUMNS):
        stop = min(start + group * COLUMNS, last)
        pack_transposed(start, stop, panels, w)
        coming = w[stop : min(stop + group * COLUMNS, last)].reshape(-1)
        share = (coming.shape[0] + strips - 1) // strips
        for number in range(strips):
            at = top + number * ROWS
            for line in range(number * share, min((number + 1) * share, coming.shape[0]), LINE // w.itemsize):
                prefetch(coming[line:], 0, 1)
            _strip(min(ROWS, bottom - at), k, x, at, panels, start, stop, y, columns, bias)


@jit
def backward(first: int, last: int, dx: Any, dy: Any, w: Any, panels: Any) -> None:
    """Rows first … last of dx ← dy w; `panels` is scratch memory."""
    group, (k, columns) = panels.shape[0], w.shape
    strips = (last - first + ROWS - 1) // ROWS
    for start in range(0, columns, group * COLUMNS):
        stop = min(start + group * COLUMNS, columns)
        pack_plain(start, stop, panels, w)
        share = (k + strips - 1) // strips
        for number in range(strips):
            at, row = first + number * ROWS, number * share
            for column in range(stop, min(stop + group * COLUMNS, columns), LINE // w.itemsize):
                prefetch(w[row:, column:], w.strides[0], max(0, min(share, k - row)))
            _strip(min(ROWS, last - at), k, dy, at, panels, start, stop, dx, columns, None)


def columns_at_once(k: int, dtype: Any) -> int:
    """For how many columns of B `forward` and `backward` want scratch memory."""
    return max(1, GROUP_BYTES // (k * int(np.dtype(dtype).itemsize) * COLUMNS)) * COLUMNS


@inline
def _strip(
    rows: Any,
    k: Any,
    a: Any,
    at: Any,
    panels: Any,
    start: Any,
    stop: Any,
    c: Any,
    columns: Any,
    bias: Any,
) -> None:
    """Rows of A from `at` on, one tile of them, against the panels of columns start … stop."""
    row, ldc = a.strides[0], c.strides[0]
    for column in range(start, stop, COLUMNS):
        panel = panels[(column - start) // COLUMNS]
        count, out = min(COLUMNS, columns - column), c[at:, column:]
        if bias is None:
            tile(rows, k, a[at:], row, 4, panel, out, ldc, count, panel, 0)
        else:
            tile(rows, k, a[at:], row, 4, panel, out, ldc, count, bias[column:], BIAS)


@jit
def products(
    first: int,
    last: int,
    begin: int,
    end: int,
    c: Any,
    x: Any,
    y: Any,
    a: Any,
    b: Any,
    accumulate: int,
) -> None:
    """Rows first … last, columns begin … end, of C ← [C +] xᵀ y; a and b are scratch for them, packed."""
    pack_plain(begin, end, b, y)
    k, columns, most, ldc = x.shape[0], y.shape[1], a.shape[0] * ROWS, c.strides[0]
    for top in range(first, last, most):
        bottom = min(top + most, last)
        pack_rows_transposed(top, bottom, a, x)
        for column in range(begin, end, COLUMNS):
            panel = b[(column - begin) // COLUMNS]
            for at in range(top, bottom, ROWS):
                rows, packed = min(ROWS, bottom - at), a[(at - top) // ROWS]
                out, count = c[at:, column:], min(COLUMNS, columns - column)
                tile(rows, k, packed, 4, 4 * ROWS, panel, out, ldc, count, panel, accumulate)


def rows_at_once(k: int, dtype: Any) -> int:
    """For how many rows of A `products` wants scratch memory."""
    return max(1, ROWS_BYTES // (k * int(np.dtype(dtype).itemsize) * ROWS)) * ROWS
