"""Matmul from tiles: which tile comes when, so that what is read again is still in a cache."""

from __future__ import annotations

from typing import Any

from distgpt.kernels.fused.jit import inline, jit
from distgpt.kernels.matmul.assembled import tile
from distgpt.kernels.matmul.microkernel import BIAS
from distgpt.kernels.matmul.packing import COLUMNS, ROWS

GROUP_BYTES = 256 << 10  # panels of B that all rows of A go past before the next ones: part of the L2 cache


@jit
def multiply(first: int, last: int, c: Any, a: Any, b: Any, columns: int, bias: Any, accumulate: int) -> None:
    """Rows first … last of C ← [C +] A B [+ bias]; A (rows, k) row by row, B packed."""
    _, k = a.shape
    row, step = a.strides[0], 4
    group = max(1, GROUP_BYTES // (b.shape[1] * b.itemsize))
    for begin in range(0, b.shape[0], group):
        end = min(begin + group, b.shape[0])
        for top in range(first, last, ROWS):
            rows = min(ROWS, last - top)
            strip(rows, k, a[top:], row, step, b, begin, end, c[top:], columns, bias, accumulate)


@jit
def multiply_tiles(
    first: int, last: int, c: Any, a: Any, k: int, b: Any, columns: int, bias: Any, accumulate: int
) -> None:
    """The same for rows in tiles first … last of a packed A (see packing.py)."""
    group = max(1, GROUP_BYTES // (b.shape[1] * b.itemsize))
    for begin in range(0, b.shape[0], group):
        end = min(begin + group, b.shape[0])
        for number in range(first, last):
            top = number * ROWS
            rows = min(ROWS, c.shape[0] - top)
            strip(rows, k, a[number], 4, 4 * ROWS, b, begin, end, c[top:], columns, bias, accumulate)


@inline
def strip(
    rows: Any,
    k: Any,
    a: Any,
    row: Any,
    step: Any,
    b: Any,
    begin: Any,
    end: Any,
    c: Any,
    columns: Any,
    bias: Any,
    accumulate: Any,
) -> None:
    """A tile's rows against panels begin … end of B."""
    ldc = c.strides[0]
    for panel in range(begin, end):
        start = panel * COLUMNS
        count, out = min(COLUMNS, columns - start), c[:, start:]
        if bias is None:
            tile(rows, k, a, row, step, b[panel], out, ldc, count, b[panel], accumulate)
        else:
            tile(rows, k, a, row, step, b[panel], out, ldc, count, bias[start:], accumulate | BIAS)
