"""Matmuls from tiles, in an order that reuses data while it is in a cache.

A long k is split into ranges so that a panel of B stays in the L2 cache. If C is float32, the ranges are
summed in C; otherwise, in scratch memory.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import types

from distgpt.core.cpu.compiling.jit import FORCED, by_types, get, inline, jit, put
from distgpt.core.cpu.compiling.processor import shape
from distgpt.core.cpu.matmul.assembled import WORDS_BYTES, prefetch, rearranged_rows, tile, words
from distgpt.core.cpu.matmul.microkernel import ACCUMULATE, BIAS
from distgpt.core.cpu.matmul.packing import (
    COLUMNS,
    LINE,
    ROWS,
    aligned,
    pack_plain,
    pack_rows_transposed,
    pack_transposed,
    packed,
    packed_rows,
)
from distgpt.core.ops.api import Array, DType

# Sizes tuned on a Zen 4, which has 1 MB of L2 cache. Panels of at most 128 KB made the head's backward pass
# 9% faster. Sizes from 32 to 192 KB are within 3%, unless they split k more often (performance.md).
_USES_AMX = shape().amx
PANEL_BYTES = (256 if _USES_AMX else 128) << 10  # per panel, for one range of k
GROUP_BYTES = 256 << 10  # panels that all rows of A pass before the next group: part of the L2 cache
CUT_GROUP_BYTES = 512 << 10  # the same if k is split and A is too long to stay in a cache
ROWS_BYTES = 512 << 10  # rows of a packed A that all panels pass: half of the L2 cache
# The same for a copied A, and panels of a group then, to copy its rows less often. With AMX, A is always
# copied, and sizes were tuned on an Emerald Rapids, which has 2 MB of L2 cache.
COPIED_ROWS_BYTES, COPIED_GROUP_BYTES = (64 << 10, 1 << 20) if _USES_AMX else (512 << 10, 1536 << 10)
THIN = 128  # k per range in products with few rows


class Scratch(NamedTuple):
    """A worker's memory for `forward` and `backward`."""

    panels: Array  # packed panels of B
    rows: Array  # copies of rows of A; empty if rows are read in place
    sums: Array  # float32 sums of C


def scratch(dtype: DType, rows: int, k: int, copied: bool) -> Scratch:
    """Make the memory for `rows` rows of A (rows, k)."""
    item = np.dtype(dtype).itemsize
    depth = _depth(k, item)
    group = COPIED_GROUP_BYTES if copied else CUT_GROUP_BYTES if depth < k else GROUP_BYTES
    columns = max(1, group // (depth * item * COLUMNS)) * COLUMNS
    most = max(1, COPIED_ROWS_BYTES // (depth * item * ROWS)) * ROWS if copied else 0
    sums = (rows, columns) if item == 2 and depth < k else (0, 0)
    panels = packed(depth, columns, dtype)
    copies = aligned((most, depth + LINE), dtype)
    return Scratch(panels, copies, aligned(sums, "float32"))


def copies_rows(a: Array) -> bool:
    """Return whether copying rows of A pays: with AMX, or if the rows compete for the same sets of a cache.

    They do in an L1 cache with 4 KB per way: at k = 3,072 in float32, copying is 1.28x as fast.
    """
    return bool(a.strides[0] % 4096 == 0 or (_USES_AMX and a.itemsize == 2))


def _depth(k: int, item: int) -> int:
    """Return the k per range: even parts in whole cache lines, with panels that are small enough."""
    parts = -(-k * item * COLUMNS // PANEL_BYTES)
    return k if parts == 1 else -(-k // (parts * LINE)) * LINE


@jit
def forward(top, bottom, first, last, y, x, w, bias, scratch):
    """Rows top … bottom, columns first … last, of y ← x wᵀ [+ bias]. `first` must start a panel."""
    _by_groups(top, bottom, first, last, y, x, w, x.shape[1], True, bias, scratch)


@jit
def backward(top, bottom, first, last, dx, dy, w, scratch):
    """Rows top … bottom, columns first … last, of dx ← dy w. `first` must start a panel."""
    _by_groups(top, bottom, first, last, dx, dy, w, w.shape[0], False, None, scratch)


@inline
def _by_groups(top, bottom, first, last, c, a, w, k, transposed, bias, scratch):
    """Rows top … bottom, columns first … last, of C ← A B [+ bias]. B is w or its transpose."""
    width = scratch.panels.shape[0] * COLUMNS
    depth = scratch.panels.shape[1] // COLUMNS
    for start in range(first, last, width):
        stop = min(start + width, last)
        out = c[top:bottom, start:stop]
        sums = scratch.sums[: bottom - top, : stop - start]
        for begin in range(0, k, depth):
            end = min(begin + depth, k)
            if transposed:
                pack_transposed(start, stop, scratch.panels, w, begin, end)
            else:
                pack_plain(start, stop, scratch.panels, w[begin:end])
            if end < k:
                columns = (start, stop)
                ks = (end, min(end + depth, k))
            else:
                columns = (stop, min(stop + width, last))
                ks = (0, min(depth, k))
            coming = (columns, ks) if transposed else (ks, columns)
            rows = a[top:bottom, begin:end]
            if depth >= k:
                flags = 0 if bias is None else BIAS
                _past_panels(out, rows, bias, start, flags, scratch, w, coming)
            else:
                flags = ACCUMULATE if begin else (0 if bias is None else BIAS)
                _past_panels(summed(out, sums), rows, bias, start, flags, scratch, w, coming)
        if depth < k:
            finish(out, sums)


@inline
def _past_panels(c, a, bias, start, flags, scratch, w, coming):
    """C ← [C +] A times all panels [+ bias from `start` on], while prefetching `coming`, a part of w."""
    (rows, k) = a.shape
    columns = c.shape[1]
    most = scratch.rows.shape[0]
    panels = (columns + COLUMNS - 1) // COLUMNS
    if most == 0:
        strips = (rows + ROWS - 1) // ROWS
        for strip in range(strips):
            _fetch(w, coming, strip, strips)
            own, out = a[strip * ROWS :], c[strip * ROWS :]
            for panel in range(panels):
                _one(min(ROWS, rows - strip * ROWS), k, own, panel, out, bias, start, flags, scratch)
        return
    blocks = (rows + most - 1) // most
    for block in range(blocks):
        count = min(most, rows - block * most)
        _copy(scratch.rows, a[block * most :], count)
        for panel in range(panels):
            _fetch(w, coming, block * panels + panel, blocks * panels)
            for at in range(0, count, ROWS):
                own = scratch.rows[at:]
                out = c[block * most + at :]
                _one(min(ROWS, count - at), k, own, panel, out, bias, start, flags, scratch)


@inline
def _one(rows, k, a, panel, c, bias, start, flags, scratch):
    """Compute the tile of C's first rows at a panel."""
    column = panel * COLUMNS
    added = scratch.sums.reshape(-1) if bias is None else bias[start + column :]
    count = min(COLUMNS, c.shape[1] - column)
    out = c[:, column:]
    tile(rows, k, a, a.strides[0], 4, scratch.panels[panel], out, c.strides[0], count, added, flags)


@inline
def _copy(to, a, count):
    whole = a.shape[1] * a.itemsize // WORDS_BYTES
    for r in range(count):
        row, of = to[r], a[r]
        words(of, row, whole)
        for j in range(whole * WORDS_BYTES // a.itemsize, a.shape[1]):
            row[j] = of[j]


@inline
def _fetch(w, rectangle, part, parts):
    """Prefetch one of `parts` parts of a rectangle of w."""
    (top, bottom), (left, right) = rectangle
    share = (bottom - top + parts - 1) // parts
    lines = ((right - left) * w.itemsize + LINE - 1) // LINE
    for row in range(top + part * share, min(top + (part + 1) * share, bottom)):
        prefetch(w[row, left:], LINE, lines)


@by_types(**FORCED)
def summed(c, sums):
    """Return the array that sums multiple ranges of k: C if it is float32."""

    def itself(c, sums):
        return c

    def beside(c, sums):
        return sums

    return beside if c.dtype == types.uint16 else itself


@by_types(**FORCED)
def finish(c, sums):
    """C ← the sums, rounded, unless they are already in C."""

    def nothing(c, sums):
        pass

    def rounded(c, sums):
        rows, columns = c.shape
        for i in range(rows):
            to, of = c[i], sums[i]
            for j in range(columns):
                put(to, j, of[j])

    return rounded if c.dtype == types.uint16 else nothing


class ProductScratch(NamedTuple):
    """A worker's memory for `products`."""

    rows: Array  # packed rows of A
    panels: Array  # packed panels of B


def product_scratch(dtype: DType, k: int, columns: int, is_thin: bool) -> ProductScratch:
    """Make the memory for B (k, columns). `is_thin`: A has few rows, so packing B is the bottleneck."""
    item = np.dtype(dtype).itemsize
    depth = min(k, THIN) if is_thin else _depth(k, item)
    rows = max(1, ROWS_BYTES // (depth * item * ROWS)) * ROWS
    return ProductScratch(packed_rows(rows, depth, dtype), packed(depth, columns, dtype))


@jit
def products(first, last, begin, end, c, x, y, scratch, accumulate):
    """Rows first … last, columns from `begin` to `end`, of C ← [C +] xᵀ y. A thin product prefetches y."""
    k = x.shape[0]
    columns = y.shape[1]
    ldc = c.strides[0]
    depth = scratch.panels.shape[1] // COLUMNS
    most = scratch.rows.shape[0] * ROWS
    for low in range(0, k, depth):
        high = min(low + depth, k)
        flags = ACCUMULATE if low else accumulate
        pack_plain(begin, end, scratch.panels, y[low:high])
        panels = (end - begin + COLUMNS - 1) // COLUMNS
        # Prefetch only for thin products: otherwise, it would evict data in use.
        coming = (high, min(high + depth, k) if depth <= THIN else high), (begin, end)
        for top in range(first, last, most):
            bottom = min(top + most, last)
            pack_rows_transposed(top, bottom, scratch.rows, x[low:high])
            row = rearranged_rows(scratch.rows, (bottom - top + ROWS - 1) // ROWS, high - low)
            for number in range(panels):
                _fetch(y, coming, number, panels)
                column = begin + number * COLUMNS
                panel = scratch.panels[number]
                count = min(COLUMNS, columns - column)
                for at in range(top, bottom, ROWS):
                    rows = min(ROWS, bottom - at)
                    own = scratch.rows[(at - top) // ROWS]
                    out = c[at:, column:]
                    tile(rows, high - low, own, row, 4 * ROWS, panel, out, ldc, count, panel, flags)


@jit
def widen(to, bits):
    for i in range(bits.shape[0]):
        to[i] = get(bits, i)


@jit
def turn(first, last, to, of, accumulate):
    """Rows first … last of a matrix ← [itself +] the transpose of another."""
    for i in range(first, last):
        for j in range(to.shape[1]):
            to[i, j] = to[i, j] + of[j, i] if accumulate else of[j, i]
