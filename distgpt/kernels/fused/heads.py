"""Operands of attention's matmuls for one head: packed panels, pairs of rows, a worker's memory."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import types
from numba.extending import overload

from distgpt.kernels.api import Array
from distgpt.kernels.fused.blas import PLAIN, TRANSPOSED, gemm
from distgpt.kernels.fused.jit import FORCED, inline, zip_bits, zip_narrowed
from distgpt.kernels.fused.softmax import EDGE
from distgpt.kernels.matmul.assembled import tile, transpose
from distgpt.kernels.matmul.microkernel import ACCUMULATE
from distgpt.kernels.matmul.packing import COLUMNS, LANES, ROWS, aligned, packed

BLOCK = 4 * ROWS  # queries whose probabilities are kept for dk and dv


class Forward(NamedTuple):
    keys: Array  # kᵀ, packed
    values: Array  # v, packed
    scores: Array  # (ROWS, keys) in the wide type
    probs: Array  # (ROWS, keys), the A of p v
    out: Array  # (ROWS, head) in the wide type
    sums: Array  # the largest score of each row, and the sum of its exponentials


class Backward(NamedTuple):
    keys: Array  # kᵀ, packed
    values: Array  # vᵀ, packed
    plain_keys: Array  # k, packed
    queries: Array  # q, packed
    grads: Array  # dy, packed
    scores: Array  # (ROWS, keys) in the wide type
    dprobs: Array  # the same
    dscores: Array  # (ROWS, keys), the A of ds k
    pairs: Array  # p of a block; in bfloat16 two queries side by side: pᵀ is the A of pᵀ dy
    dpairs: Array  # ds in the same way
    words: Array  # the memory of pairs, where a pair is one number; a view made in a loop would cost more
    dwords: Array
    dkeys: Array  # (T, head) in the wide type
    dvalues: Array


def forward_scratch(seq_len: int, size: int, dtype: str, wide: str) -> Forward:
    length, columns = _row(seq_len), -(-size // COLUMNS) * COLUMNS
    return Forward(
        packed(size, seq_len, dtype),
        packed(seq_len, size, dtype),
        aligned((ROWS, length), wide),
        aligned((ROWS, length), dtype),
        aligned((ROWS, columns), wide),
        aligned((ROWS, 2), wide),
    )


def backward_scratch(seq_len: int, size: int, dtype: str, wide: str) -> Backward:
    length, columns = _row(seq_len), -(-size // COLUMNS) * COLUMNS
    pair = 2 if dtype == "uint16" else 1
    rows = -(-seq_len // ROWS) * ROWS
    pairs, dpairs = (aligned((BLOCK // pair, pair * length), dtype) for _ in range(2))
    words, dwords = (block.view(np.uint32) if pair == 2 else block for block in (pairs, dpairs))
    return Backward(
        keys=packed(size, seq_len, dtype),
        values=packed(size, seq_len, dtype),
        plain_keys=packed(seq_len, size, dtype),
        queries=packed(seq_len, size, dtype),
        grads=packed(seq_len, size, dtype),
        scores=aligned((ROWS, length), wide),
        dprobs=aligned((ROWS, length), wide),
        dscores=aligned((ROWS, length), dtype),
        pairs=pairs,
        dpairs=dpairs,
        words=words,
        dwords=dwords,
        dkeys=aligned((rows, columns), wide),
        dvalues=aligned((rows, columns), wide),
    )


def _row(seq_len: int) -> int:
    """Return the length of a row of scores: no multiple of 4 KB, or rows would share cache sets."""
    return -(-seq_len // EDGE) * EDGE + 32


@inline
def pack_head(out, x, row, seq_len, column, size):
    """out ← B (T, head): T rows from `row` on, `size` columns from `column` on."""
    for panel in range(out.shape[0]):
        start = panel * COLUMNS
        if start + COLUMNS <= size:
            pack_panel(out[panel], x, row, seq_len, column + start, COLUMNS)  # known to the compiler
        else:
            pack_panel(out[panel], x, row, seq_len, column + start, size - start)


@inline
def pack_head_transposed(out, x, row, seq_len, column, size):
    """out ← B (head, T), the transpose of what `pack_head` packs."""
    two = pair(x)
    squares = size // two // LANES if size % two == 0 and x.itemsize < 8 else 0
    for panel in range((seq_len + COLUMNS - 1) // COLUMNS):
        start = panel * COLUMNS
        to, count = out[panel], min(COLUMNS, seq_len - start)
        words = to.view(np.uint32)
        whole = (count + LANES - 1) // LANES * LANES  # further rows are no keys, and may hold anything
        if row + start + whole > x.shape[0]:
            whole -= LANES
        for j in range(0, whole, LANES):
            transpose(x[row + start + j, column:], x.strides[0], words[j:], 4 * COLUMNS, squares)
        for j in range(count):
            of = x[row + start + j, column : column + size]
            for k in range(squares * LANES * two if j < whole else 0, size):
                to[(k // two * COLUMNS + j) * two + k % two] = of[k]


def pair(x):
    """Return the number of k that lie side by side in this type, inside compiled loops."""
    raise NotImplementedError


def pack_panel(to, x, row, rows, column, count):
    """to ← these rows and columns of x, inside compiled loops; pairs of rows side by side."""
    raise NotImplementedError


def put_pair(block, i, first, second):
    """Rows i and i + 1 of a block ← these, rounded: side by side if the type is one of pairs."""
    raise NotImplementedError


def product(rows, k, a, transposed, b, c, columns, accumulate):
    """A tile of C ← [C +] A B inside compiled loops, of up to ROWS rows and COLUMNS columns.

    A begins at a[0, 0], or is aᵀ, in bfloat16 from pairs; b is a panel; C begins at c[0, 0].
    """
    raise NotImplementedError


@overload(pair, jit_options=FORCED)
def _pair(x):
    count = 2 if x.dtype == types.uint16 else 1

    def known(x):
        return count

    return known


@overload(pack_panel, jit_options=FORCED)
def _pack_panel(to, x, row, rows, column, count):
    def plain(to, x, row, rows, column, count):
        for t in range(rows):
            out, of = to[t * COLUMNS : t * COLUMNS + count], x[row + t, column : column + count]
            for j in range(count):
                out[j] = of[j]

    def zipped(to, x, row, rows, column, count):
        words = to.view(np.uint32)
        for t in range(rows // 2):
            at, out = row + 2 * t, words[t * COLUMNS : t * COLUMNS + count]
            first, second = x[at, column : column + count], x[at + 1, column : column + count]
            for j in range(count):
                out[j] = zip_bits(first[j], second[j])
        if rows % 2:
            out, of = words[rows // 2 * COLUMNS :], x[row + rows - 1, column : column + count]
            for j in range(count):
                out[j] = of[j]

    return zipped if to.dtype == types.uint16 else plain


@overload(put_pair, jit_options=FORCED)
def _put_pair(block, i, first, second):
    def apart(block, i, first, second):
        for k, of in ((i, first), (i + 1, second)):
            to = block[k, : of.shape[0]]
            for j in range(to.shape[0]):
                to[j] = of[j]

    def zipped(block, i, first, second):
        words = block[i // 2, : first.shape[0]]
        for j in range(words.shape[0]):
            words[j] = zip_narrowed(first[j], second[j])

    return zipped if block.dtype == types.uint32 else apart


@overload(product, jit_options=FORCED)
def _product(rows, k, a, transposed, b, c, columns, accumulate):
    def by_tile(rows, k, a, transposed, b, c, columns, accumulate):
        row = 4 if transposed else a.strides[0]
        step = a.strides[0] if transposed else 4
        tile(rows, k, a, row, step, b, c, c.strides[0], columns, b, ACCUMULATE if accumulate else 0)

    def by_blas(rows, k, a, transposed, b, c, columns, accumulate):
        order, beta = TRANSPOSED if transposed else PLAIN, 1.0 if accumulate else 0.0
        lda, ldc = a.strides[0] // a.itemsize, c.strides[0] // c.itemsize
        gemm(order, PLAIN, rows, columns, k, a, lda, b, COLUMNS, beta, c, ldc)

    return by_blas if a.dtype == types.float64 else by_tile
