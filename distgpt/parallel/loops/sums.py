"""Add results of ranks, or of parts of a batch, in a fixed order. Round data to send."""

from __future__ import annotations

from distgpt.core.cpu.compiling.jit import get, inline, jit
from distgpt.core.cpu.fused.flat import dithered
from distgpt.core.cpu.fused.rowwise import add_to
from distgpt.core.ops.api import PIECE


@inline
def copy_to(out, x):
    for i in range(out.shape[0]):
        out[i] = x[i]


@inline
def add_neighbours(rows, start, stop):
    """Columns start … stop of row 0 ← Σ over rows, neighbors first. Overwrites the other rows."""
    stride = 1
    while stride < rows.shape[0]:
        for rank in range(0, rows.shape[0] - stride, 2 * stride):
            add_to(rows[rank, start:stop], rows[rank + stride, start:stop])
        stride *= 2


@jit
def dither(first, last, out, x, index, key):
    """Elements first … last of out, bfloat16 ← x, which starts at `index` of a larger array."""
    oi, xi = out[first:last], x[first:last]
    for i in range(oi.shape[0]):
        oi[i] = dithered(xi[i], index + first + i, key)


@jit
def widen(first, last, out, x):
    """Elements first … last of out ← x, bfloat16."""
    oi, xi = out[first:last], x[first:last]
    for i in range(oi.shape[0]):
        oi[i] = get(xi, i)


@jit
def join(first, last, out, x, branches):
    """Elements first … last of out ← x + Σ over rows of branches, in order; out may be x."""
    for start in range(first, last, PIECE):
        stop = min(start + PIECE, last)
        oi = out[start:stop]
        copy_to(oi, x[start:stop])
        for branch in range(branches.shape[0]):
            add_to(oi, branches[branch, start:stop])


@jit
def add_tree(first, last, total, parts):
    """Elements first … last of total ← Σ over rows of parts, neighbors first. Overwrites parts."""
    for start in range(first, last, PIECE):
        stop = min(start + PIECE, last)
        add_neighbours(parts, start, stop)
        copy_to(total[start:stop], parts[0, start:stop])


@jit
def add_parts(first, last, total, parts):
    """Elements first … last of total ← Σ over rows of parts, in order."""
    for start in range(first, last, PIECE):
        stop = min(start + PIECE, last)
        ti = total[start:stop]
        pi = parts[0, start:stop]
        for i in range(ti.shape[0]):
            ti[i] = get(pi, i)
        for rank in range(1, parts.shape[0]):
            add_to(ti, parts[rank, start:stop])


@jit
def add_rows(first, last, rows, by_twos, low, high):
    """Columns first … last of row 0 ← Σ over rows, in order or neighbors first; rows low … ← row 0.

    Works in pieces, so that a piece of all rows is still cached when it is written. Neighbors' sums
    overwrite rows.
    """
    for start in range(first, last, PIECE):
        stop = min(start + PIECE, last)
        if by_twos:
            add_neighbours(rows, start, stop)
        else:
            for rank in range(1, rows.shape[0]):
                add_to(rows[0, start:stop], rows[rank, start:stop])
        for rank in range(low, high):
            copy_to(rows[rank, start:stop], rows[0, start:stop])


@jit
def copy_rows(first, last, rows, own):
    """Columns first … last of all rows ← columns of the row `own`."""
    for start in range(first, last, PIECE):
        stop = min(start + PIECE, last)
        for rank in range(rows.shape[0]):
            if rank != own:
                copy_to(rows[rank, start:stop], rows[own, start:stop])
