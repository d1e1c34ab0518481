"""What a matmul of the walk multiplies: rows in the form that packed weights want, and tiles of them.

The form is that of the weights: float32, or bfloat16 as uint16.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import overload

from distgpt.kernels.fused.jit import FORCED, get, put
from distgpt.kernels.matmul.assembled import tile
from distgpt.kernels.matmul.packing import COLUMNS

LONGEST = 1024  # steps of k whose part of a panel, 128 KB, stays in the L2 cache while rows go past


def lay(to: Any, x: Any, first: Any, last: Any) -> None:
    """Elements first … last of a row of factors ← those of x; `first` begins a unit of columns."""
    raise NotImplementedError


def element(w: Any, column: Any, k: Any) -> Any:
    """An element of a packed matrix, by its column and its k."""
    raise NotImplementedError


def multiply(
    rows: Any, begin: Any, end: Any, a: Any, panel: Any, c: Any, columns: Any, bias: Any, flags: Any
) -> None:
    """C's columns at a panel ← [C +] the product over k from `begin` to `end` [+ bias]."""
    raise NotImplementedError


def stretch(w: Any) -> Any:
    """The longest stretch of k that is summed at once."""
    raise NotImplementedError


@overload(lay, jit_options=FORCED)
def _lay(to: Any, x: Any, first: Any, last: Any) -> Any:
    def rounded(to: Any, x: Any, first: Any, last: Any) -> None:
        out, of = to[first:last], x[first:last]
        for j in range(of.shape[0]):
            put(out, j, of[j])

    return rounded


@overload(element, jit_options=FORCED)
def _element(w: Any, column: Any, k: Any) -> Any:
    pair = 2 if w.dtype == types.uint16 else 1

    def plain(w: Any, column: Any, k: Any) -> Any:
        panel, j = w[column // COLUMNS], column % COLUMNS
        return get(panel, (k // pair * COLUMNS + j) * pair + k % pair)

    return plain


@overload(stretch, jit_options=FORCED)
def _stretch(w: Any) -> Any:
    longest = LONGEST * 4 // w.dtype.bitwidth * 8

    def known(w: Any) -> Any:
        return longest

    return known


@overload(multiply, jit_options=FORCED)
def _multiply(
    rows: Any, begin: Any, end: Any, a: Any, panel: Any, c: Any, columns: Any, bias: Any, flags: Any
) -> Any:
    def by_tile(
        rows: Any, begin: Any, end: Any, a: Any, panel: Any, c: Any, columns: Any, bias: Any, flags: Any
    ) -> None:
        own, out = a[:, begin:], panel[begin * COLUMNS :]
        tile(rows, end - begin, own, a.strides[0], 4, out, c, c.strides[0], columns, bias, flags)

    return by_tile
