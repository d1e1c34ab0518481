"""Packed matrices, in the order in which microkernels read them: panels, k after k, bfloat16 in pairs of k.

A packed matrix is an array (panels, elements of a panel), aligned to cache lines. After an odd number of k it
is zero; after the last column it may hold any values.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np

from distgpt.core.cpu.compiling.jit import inline, jit
from distgpt.core.cpu.compiling.processor import shape
from distgpt.core.cpu.matmul.assembled import PACKED_K, strip, transpose
from distgpt.core.ops.api import Array, DType

ROWS, COLUMNS, LANES = shape().rows, shape().columns, shape().lanes
DEPTH = 64  # rows packed before the next ones: their cache lines hold the columns of multiple panels
LINE = 64


def packed(k: int, columns: int, dtype: DType) -> Array:
    """Make memory for a packed matrix (k, columns), bfloat16 as uint16."""
    pair = 2 if np.dtype(dtype) == np.uint16 else 1
    panels = -(-columns // COLUMNS)
    elements = -(-k // pair) * pair * COLUMNS
    return aligned((panels, elements), dtype)


def aligned(shape: tuple[int, ...], dtype: DType) -> Array:
    """Make zeros aligned to a cache line."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + LINE, np.ubyte)
    start = -raw.ctypes.data % LINE
    return raw[start : start + size].view(dtype).reshape(shape)


def zeros_as_used(shape: tuple[int, ...], dtype: DType) -> Array:
    """Make zeros that take memory page by page as they are written, for arrays that may stay partly empty.

    NumPy requests huge pages, in which the first written byte allocates 2 MB.
    """
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    try:
        memory = mmap.mmap(-1, max(1, size), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        raise MemoryError(f"{size:,} bytes") from None
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.ubyte, size).view(dtype).reshape(shape)


@jit
def pack_transposed(first, last, out, w, begin, end):
    """Pack columns first … last, k from `begin` to `end`, of B (k, n) = wᵀ, for x wᵀ."""
    width = end - begin
    words = w.itemsize * width // 4  # a pair, or a float32, is one 32-bit word
    for start in range(first, last, COLUMNS):
        to = out[(start - first) // COLUMNS]
        count = min(COLUMNS, last - start)
        _no_partner(to, width, COLUMNS)
        whole = count // LANES * LANES if w.itemsize * width % 4 == 0 else 0
        for j in range(0, whole, LANES):
            transpose(w[start + j, begin:], w.strides[0], to.view(np.uint32)[j:], 4 * COLUMNS, words // LANES)
        done = words // LANES * LANES * 4 // w.itemsize
        for j in range(count):
            wj = w[start + j, begin:end]
            for k in range(done if j < whole else 0, width):
                if w.itemsize == 4:
                    to[k * COLUMNS + j] = wj[k]
                else:
                    to[(k // 2 * COLUMNS + j) * 2 + k % 2] = wj[k]


@jit
def pack_plain(first, last, out, w):
    """Pack columns first … last of B (k, n) = w, for dy w."""
    _pack_columns(first, last, out, w, COLUMNS)


@jit
def pack_rows_transposed(first, last, out, w):
    """Pack rows first … last of A (rows, k) = wᵀ, with w (k, rows), for dyᵀ x."""
    _pack_columns(first, last, out, w, ROWS)


@inline
def _pack_columns(first, last, out, w, width):
    """Pack panels of `width` columns, DEPTH rows of all panels at a time."""
    depth = w.shape[0]
    for top in range(0, depth, DEPTH):
        bottom = min(top + DEPTH, depth)
        for start in range(first, last, width):
            to = out[(start - first) // width]
            if bottom == depth:
                _no_partner(to, depth, width)
            copy_columns(to[top * width :], w, top, bottom, start, min(width, last - start), width)


@inline
def _no_partner(to, k, width):
    """Write zeros after the last k of an odd number of bfloat16."""
    if to.itemsize == 2 and k % 2:
        to[(k - 1) * width : (k + 1) * width] = 0


@inline
def copy_columns(to, w, top, bottom, start, count, width):
    """to ← `count` columns of w from `start` on, in rows of `width`; bfloat16 interleaves two rows.

    Move whole vectors if possible, starting with the last ones of all rows. Their excess is overwritten by
    the next row, or ends in the slack after the last row.
    """
    words = to.view(np.uint32)
    left = top
    if count == width and start + (width + LANES - 1) // LANES * LANES <= w.shape[1]:
        for j in range((width - 1) // LANES * LANES, -1, -LANES):
            strip(w[top:, start + j :], w.strides[0], words[j:], 4 * width, bottom - top)
        left = bottom - (bottom - top) % (4 // w.itemsize)
    for k in range(left, bottom):
        for j in range(count):
            if w.itemsize == 4:
                to[(k - top) * width + j] = w[k, start + j]
            else:
                to[((k - top) // 2 * width + j) * 2 + (k - top) % 2] = w[k, start + j]


def packed_rows(rows: int, k: int, dtype: DType) -> Array:
    """Make memory for a packed A (rows, k): tiles of ROWS rows, k after k, bfloat16 in pairs of k."""
    pair = 2 if np.dtype(dtype) == np.uint16 else 1
    whole = -(-k // PACKED_K) * PACKED_K  # k reordered at a time
    words = -(-whole // pair) * ROWS + LANES  # plus slack
    return aligned((-(-rows // ROWS), -(-words // LANES) * LANES * pair), dtype)
