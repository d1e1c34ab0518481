"""Causal attention without the T × T matrix, by tiles of queries; rotary positions.

A unit of work is one query head of one sequence. Backward and with a cache, it is one key/value head with all
its query heads. q and dy are read in place, and their matmul operands are packed once. Probabilities are
rounded to the type of qkv for the matmuls; sums are wide. `mask` is an `AttentionMask` with a window, and `s`
is the worker's scratch memory.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import types

from distgpt.core.cpu.compiling.jit import (
    FORCED,
    by_types,
    exp,
    get,
    inline,
    jit,
    number,
    put,
    zip_bits,
    zip_narrowed,
)
from distgpt.core.cpu.fused.softmax import EDGE, UNSEEN, softmax
from distgpt.core.cpu.matmul.assembled import pairs_in_rows, tile, transpose
from distgpt.core.cpu.matmul.blas import PLAIN, TRANSPOSED, gemm
from distgpt.core.cpu.matmul.microkernel import ACCUMULATE
from distgpt.core.cpu.matmul.packing import COLUMNS, LANES, ROWS, aligned, packed
from distgpt.core.ops.api import QK_SCALE, Array

BLOCK = 4 * ROWS  # queries whose probabilities are kept for dk and dv
FEW = 4  # maximum number of new rows for which a cache is read in place, without packing


class Forward(NamedTuple):
    keys: Array  # kᵀ, packed
    values: Array  # v, packed
    scores: Array  # (ROWS, keys) in the wide type
    probs: Array  # (ROWS, keys), A of p v
    out: Array  # (ROWS, head) in the wide type
    sums: Array  # (ROWS, 2), maximum score and sum of exponentials of each row


class Backward(NamedTuple):
    keys: Array  # kᵀ, packed
    values: Array  # vᵀ, packed
    plain_keys: Array  # k, packed
    queries: Array  # q, packed
    grads: Array  # dy, packed
    scores: Array  # (ROWS, keys) in the wide type
    dprobs: Array  # (ROWS, keys) in the wide type
    dscores: Array  # (ROWS, keys), A of ds k
    pairs: Array  # p of a block; in bfloat16, two queries interleaved: pᵀ is A of pᵀ dy
    dpairs: Array  # ds in the same layout
    words: Array  # view of `pairs` with one number per pair; creating it in a loop would be slower
    dwords: Array
    turned: Array  # (ROWS, BLOCK), pᵀ or dsᵀ by rows, for tiles that require it
    dkeys: Array  # (T, head) in the wide type
    dvalues: Array


def forward_scratch(seq_len: int, size: int, dtype: str, wide: str) -> Forward:
    length = _row(seq_len)
    columns = -(-size // COLUMNS) * COLUMNS
    return Forward(
        packed(size, seq_len, dtype),
        packed(seq_len, size, dtype),
        aligned((ROWS, length), wide),
        aligned((ROWS, length), dtype),
        aligned((ROWS, columns), wide),
        aligned((ROWS, 2), wide),
    )


def backward_scratch(seq_len: int, size: int, dtype: str, wide: str) -> Backward:
    length = _row(seq_len)
    columns = -(-size // COLUMNS) * COLUMNS
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
        turned=aligned((ROWS, BLOCK), dtype),
        dkeys=aligned((rows, columns), wide),
        dvalues=aligned((rows, columns), wide),
    )


def _row(seq_len: int) -> int:
    """Return the length of a row of scores: not a multiple of 4 KB, or rows would share cache sets."""
    return -(-seq_len // EDGE) * EDGE + 32


@jit
def attention(first, last, y, lse, qkv, mask, s):
    seq_len = mask.seq_len
    width, n_head = y.shape[1], lse.shape[1]
    size = width // n_head
    kv_width = (qkv.shape[1] - width) // 2
    group = width // kv_width  # query heads per key/value head
    for unit in range(first, last):
        row, head = unit // n_head * seq_len, unit % n_head
        column = head * size
        if unit == first or head % group == 0:
            key = width + head // group * size
            pack_head_transposed(s.keys, qkv, row, seq_len, key, size)
            pack_head(s.values, qkv, row, seq_len, key + kv_width, size)
        for begin in range(0, seq_len, ROWS):
            n = min(ROWS, seq_len - begin)
            key = first_key(mask, row, begin) // COLUMNS * COLUMNS
            _attend(n, begin + 1, key, y, lse, head, qkv, row + begin, column, size, mask, s)


@inline
def first_key(mask, row, query):
    """Return the first key visible to a query (and to later ones) in the sequence that starts at `row`."""
    return max(0, query + 1 - reach(mask.positions, mask.window, row + query))


@inline
def reach(positions, window, row):
    """Return the maximum number of keys that a row sees, itself included."""
    return window if positions is None else min(window, positions[row] + 1)


@inline
def hide(scores, mask, row, seen):
    """Mask the scores before a row's document and window. The row sees `seen` keys, itself the last."""
    scores[: max(0, seen - reach(mask.positions, mask.window, row))] = UNSEEN


@inline
def _attend(n, seen, key, y, lse, head, qkv, row, column, size, mask, s):
    """Compute attention for up to ROWS queries from `row` on. The first sees `seen` keys, each next one more.

    Keys before `key`, the start of a panel, are skipped.
    """
    seen -= key
    stop = seen + n - 1
    scale = number(s.out, 1.0 / math.sqrt(size))
    _against(n, size, qkv[row:, column:], s.keys[key // COLUMNS :], stop, s.scores)
    for i in range(n):
        hide(s.scores[i], mask, row + i, seen + i)
        softmax(s.scores[i], s.probs[i], seen + i, stop, scale, s.sums[i])
        if lse is not None:
            lse[row + i, head] = s.sums[i, 0] * scale + np.log(s.sums[i, 1])
    _against(n, stop, s.probs, s.values[:, key * COLUMNS :], size, s.out)
    for i in range(n):
        out = y[row + i, column : column + size]
        of = s.out[i, :size]
        share = number(s.out, 1) / s.sums[i, 1]
        for j in range(of.shape[0]):
            put(out, j, of[j] * share)


@inline
def _against(rows, k, a, b, columns, c):
    """C ← A B for whole panels of columns, in scratch memory."""
    for panel in range((columns + COLUMNS - 1) // COLUMNS):
        product(rows, k, a, False, b[panel], c[:, panel * COLUMNS :], COLUMNS, False)


@inline
def _padded(row, stop):
    """Return the end of loops over a row of scores, rounded up to whole vectors except in float64."""
    return stop if row.itemsize == 8 else (stop + EDGE - 1) // EDGE * EDGE


@jit
def attention_backward(first, last, dqkv, dy, y, lse, qkv, mask, s):
    seq_len = mask.seq_len
    width, n_head = y.shape[1], lse.shape[1]
    size = width // n_head
    arrays = (dqkv, dy, y, lse, qkv, mask)
    kv_width = (qkv.shape[1] - width) // 2
    kv_heads, group = kv_width // size, width // kv_width
    for unit in range(first, last):
        row, kv_head = unit // kv_heads * seq_len, unit % kv_heads
        k = width + kv_head * size  # column of the head in k
        v = k + kv_width
        pack_head_transposed(s.keys, qkv, row, seq_len, k, size)
        pack_head_transposed(s.values, qkv, row, seq_len, v, size)
        pack_head(s.plain_keys, qkv, row, seq_len, k, size)
        for head in range(kv_head * group, (kv_head + 1) * group):
            pack_head(s.queries, qkv, row, seq_len, head * size, size)
            pack_head(s.grads, dy, row, seq_len, head * size, size)
            for begin in range(0, seq_len, BLOCK):
                seen = first_key(mask, row, begin) // ROWS * ROWS
                end = min(begin + BLOCK, seq_len)
                key = seen // COLUMNS * COLUMNS  # start of a panel
                for start in range(begin, end, ROWS):
                    n = min(ROWS, end - start)
                    _query_gradients(n, start, start - begin, key, arrays, row, head, size, s)
                _key_gradients(begin, end, seen, key, head > kv_head * group, s)
        _write(dqkv, row, seq_len, k, size, s.dkeys)
        _write(dqkv, row, seq_len, v, size, s.dvalues)


@inline
def _query_gradients(n, start, line, key, arrays, row, head, size, s):
    """Compute dq of up to ROWS queries from `start` on. Write p and ds to the block's rows from `line` on.

    Scores start at `key`.
    """
    dqkv, dy, y, lse, qkv, mask = arrays
    seen = start + 1 - key
    stop = start + n - key
    top = row + start
    q = head * size
    _against(n, size, qkv[top:, q:], s.keys[key // COLUMNS :], stop, s.scores)
    _against(n, size, dy[top:, q:], s.values[key // COLUMNS :], stop, s.dprobs)
    scale = number(s.dkeys, 1.0 / math.sqrt(size))
    end = _padded(s.scores, stop)
    for i in range(n):
        delta = _dot(y[top + i, q : q + size], dy[top + i, q : q + size])
        hide(s.scores[i], mask, top + i, seen + i)
        s.scores[i, seen + i : end] = UNSEEN
        _softmax_backward(s.scores[i, :end], s.dprobs[i, :end], scale, delta, lse[top + i, head])
    _round_rows(n, line, end, s)
    for panel in range((size + COLUMNS - 1) // COLUMNS):
        at = panel * COLUMNS
        columns = min(COLUMNS, size - at)
        keys = s.plain_keys[panel, key * COLUMNS :]
        product(n, stop, s.dscores, False, keys, dqkv[top:, q + at :], columns, False)


@inline
def _round_rows(n, line, end, s):
    """Round p and ds to matmul operands: both transposed in the block, and ds also by rows."""
    for i in range(0, n, 2):
        put_pair(s.words, line + i, s.scores[i, :end], s.scores[i + 1, :end])
        put_pair(s.dwords, line + i, s.dprobs[i, :end], s.dprobs[i + 1, :end])
    for i in range(n):
        to, of = s.dscores[i, :end], s.dprobs[i, :end]
        for j in range(end):
            put(to, j, of[j])


@inline
def _softmax_backward(p, g, scale, delta, lse):
    """p, scores ← exp(scale · p - lse); g, gradients of p ← gradients of the scores."""
    for j in range(p.shape[0]):
        e = exp(p[j] * scale - lse)
        p[j] = e
        g[j] = e * (g[j] - delta) * scale


@inline
def _key_gradients(begin, end, seen, key, onto, s):
    """Accumulate the gradients of keys from `seen` on over some queries: dv += pᵀ dy; dk += dsᵀ q.

    Columns of p and ds start at `key`. Unless `onto`, sums of keys from `begin` on are overwritten.
    """
    two = pair(s.pairs)
    for start in range(seen, end, ROWS):
        n = min(ROWS, end - start)
        query = max(begin, start)
        again = onto or start < begin
        line = (query - begin) // two
        k = end - query
        p, ds = s.pairs[line:, (start - key) * two :], s.dpairs[line:, (start - key) * two :]
        _add_key_gradient(n, k, p, query, s.grads, s.dvalues[start:], again, s)
        _add_key_gradient(n, k, ds, query, s.queries, s.dkeys[start:], again, s)


@inline
def _add_key_gradient(n, k, pairs, query, panels, out, again, s):
    """Add p (or ds) times `panels` to n rows of `out`, for k queries from `query` on."""
    is_turned = pairs_in_rows(pairs, s.turned, k)  # once for all panels
    for panel in range(panels.shape[0]):
        b, c = panels[panel, query * COLUMNS :], out[:, panel * COLUMNS :]
        if is_turned:
            product(n, k, s.turned, False, b, c, COLUMNS, again)
        else:
            product(n, k, pairs, True, b, c, COLUMNS, again)


@inline
def _write(out, row, seq_len, column, size, x):
    for i in range(seq_len):
        oi = out[row + i, column : column + size]
        xi = x[i, :size]
        for j in range(xi.shape[0]):
            put(oi, j, xi[j])


@jit
def attention_cached(first, last, y, cache, qkv, starts_and_slots, mask, s):
    """Attend from new rows of each sequence to its cached keys. starts_and_slots is (2, sequences)."""
    width, n_seq, kv_heads, size = y.shape[1], starts_and_slots.shape[1], cache.shape[2], cache.shape[4]
    new = y.shape[0] // n_seq
    kv_width = kv_heads * size
    for unit in range(first, last):
        seq, kv_head = unit // kv_heads, unit % kv_heads
        start = starts_and_slots[0, seq]
        slot = starts_and_slots[1, seq]
        span = width // kv_heads
        if slot < 0:
            y[seq * new : (seq + 1) * new, kv_head * span : (kv_head + 1) * span] = 0
            continue
        keys, values = cache[0, slot, kv_head], cache[1, slot, kv_head]
        for i in range(new):
            row = qkv[seq * new + i, width + kv_head * size :]
            key = keys[start + i]
            value = values[start + i]
            for j in range(size):
                key[j] = row[j]
                value[j] = row[kv_width + j]
        if new > FEW:
            pack_head_transposed(s.keys, keys, 0, start + new, 0, size)
            pack_head(s.values, values, 0, start + new, 0, size)
        for column in range(kv_head * span, (kv_head + 1) * span, size):  # query heads
            stop = column + size
            for i in range(new if new <= FEW else 0):
                q, out = qkv[seq * new + i, column:stop], y[seq * new + i, column:stop]
                seen = slice(first_key(mask, 0, start + i), start + i + 1)
                _attend_one(q, keys[seen], values[seen], out, s)
            for begin in range(0, new if new > FEW else 0, ROWS):
                n = min(ROWS, new - begin)
                row = seq * new + begin
                key = first_key(mask, 0, start + begin) // COLUMNS * COLUMNS
                _attend(n, start + begin + 1, key, y, None, 0, qkv, row, column, size, mask, s)


@inline
def _attend_one(q, keys, values, out, s):
    """Compute attention for one query. This is too little work for a matmul, so keys are read in place."""
    seen, size = keys.shape
    scores = s.scores[0]
    probs = s.scores[1]
    total_out = s.out[0, : keys.shape[1]]
    for t in range(seen):
        scores[t] = _dot(q, keys[t])
    softmax(scores, probs, seen, seen, number(scores, 1.0 / math.sqrt(size)), s.sums[0])
    total_out[:] = 0
    for t in range(seen):
        p, value = probs[t], values[t]
        for j in range(size):
            total_out[j] += p * get(value, j)
    share = number(scores, 1) / s.sums[0, 1]
    for j in range(size):
        put(out, j, total_out[j] * share)


@inline
def _dot(a, b):
    total = number(a, 0)
    for j in range(a.shape[0]):
        total += get(a, j) * get(b, j)
    return total


@jit
def rope(first, last, qkv, cos, sin, heads, inverse):
    """Rotate rows first … last of the q and k parts of qkv in place."""
    seq_len = cos.shape[0]
    sign = number(qkv, -1) if inverse else number(qkv, 1)
    for i in range(first, last):
        rotate(qkv[i], cos[i % seq_len], sin[i % seq_len], heads, sign)


@jit
def qk_norm(first, last, qkv, rstd, size, eps):
    """Rows first … last of `Kernels.qk_norm`."""
    for i in range(first, last):
        for head in range(rstd.shape[1]):
            x = qkv[i, size * head : size * (head + 1)]
            rstd[i, head] = normalise_head(x, number(qkv, eps))


@inline
def normalise_head(x, eps):
    """x ← QK_SCALE · x / rms(x). Return 1 / rms(x)."""
    rstd = rstd_of(x, eps)
    factor = number(x, QK_SCALE) * rstd
    for j in range(x.shape[0]):
        put(x, j, get(x, j) * factor)
    return rstd


@inline
def rstd_of(x, eps):
    total = number(x, 0)
    for j in range(x.shape[0]):
        total += get(x, j) * get(x, j)
    return number(x, 1) / np.sqrt(total / number(x, x.shape[0]) + eps)


@jit
def qk_norm_backward(first, last, dqkv, qkv, rstd, size):
    """Rows first … last of `Kernels.qk_norm_backward`."""
    share = number(qkv, 1 / (QK_SCALE * QK_SCALE * size))
    for i in range(first, last):
        for head in range(rstd.shape[1]):
            x, dx = qkv[i, size * head : size * (head + 1)], dqkv[i, size * head : size * (head + 1)]
            along = number(qkv, 0)
            factor = number(qkv, QK_SCALE) * rstd[i, head]
            for j in range(size):
                along += get(x, j) * get(dx, j)
            along *= share
            for j in range(size):
                put(dx, j, factor * (get(dx, j) - get(x, j) * along))


@inline
def _query_heads(qkv, rstd, size):
    """Return the number of query heads: rstd counts heads of q and k; qkv also counts heads of v."""
    return 2 * rstd.shape[1] - qkv.shape[1] // size


@jit
def qk_norm_gain(first, last, qkv, xhat, rstd, gain, eps):
    """Rows first … last of `Kernels.qk_norm_gain`."""
    size = gain.shape[0] // 2
    queries = _query_heads(qkv, rstd, size)
    for i in range(first, last):
        for head in range(rstd.shape[1]):
            x, to = qkv[i, size * head : size * (head + 1)], xhat[i, size * head : size * (head + 1)]
            w = gain[:size] if head < queries else gain[size:]
            scale = rstd_of(x, number(x, eps))
            rstd[i, head] = scale
            for j in range(size):
                normed = get(x, j) * scale
                put(to, j, normed)
                put(x, j, normed * get(w, j))


@jit
def qk_norm_gain_backward(first, last, dqkv, dgain, xhat, rstd, gain):
    """Rows first … last of `Kernels.qk_norm_gain_backward`."""
    size = gain.shape[0] // 2
    queries = _query_heads(dqkv, rstd, size)
    share = number(dqkv, 1 / size)
    for i in range(first, last):
        dgain[i] = 0
        for head in range(rstd.shape[1]):
            dx, x = dqkv[i, size * head : size * (head + 1)], xhat[i, size * head : size * (head + 1)]
            w = gain[:size] if head < queries else gain[size:]
            dw = dgain[i, :size] if head < queries else dgain[i, size:]
            along = number(dqkv, 0)
            scale = rstd[i, head]
            for j in range(size):
                dw[j] += get(dx, j) * get(x, j)
                along += get(dx, j) * get(w, j) * get(x, j)
            along *= share
            for j in range(size):
                put(dx, j, scale * (get(dx, j) * get(w, j) - get(x, j) * along))


@inline
def rotate(row, c, s, heads, sign):
    half = c.shape[0]
    for head in range(heads):
        left = row[2 * half * head : 2 * half * head + half]
        right = row[2 * half * head + half : 2 * half * (head + 1)]
        for j in range(half):
            a, b, turn = get(left, j), get(right, j), sign * s[j]
            put(left, j, a * c[j] - b * turn)
            put(right, j, a * turn + b * c[j])


# -- operands of the matmuls of one head: packed panels, pairs of rows


@inline
def pack_head(out, x, row, seq_len, column, size):
    """out ← B (T, head): T rows from `row` on, `size` columns from `column` on."""
    for panel in range(out.shape[0]):
        start = panel * COLUMNS
        if start + COLUMNS <= size:
            pack_panel(out[panel], x, row, seq_len, column + start, COLUMNS)  # constant for the compiler
        else:
            pack_panel(out[panel], x, row, seq_len, column + start, size - start)


@inline
def pack_head_transposed(out, x, row, seq_len, column, size):
    """out ← B (head, T), the transpose of `pack_head`'s output."""
    two = pair(x)
    squares = size // two // LANES if size % two == 0 and x.itemsize < 8 else 0
    for panel in range((seq_len + COLUMNS - 1) // COLUMNS):
        start = panel * COLUMNS
        to = out[panel]
        count = min(COLUMNS, seq_len - start)
        words = to.view(np.uint32)
        whole = (count + LANES - 1) // LANES * LANES  # rows after the keys may hold any values
        if row + start + whole > x.shape[0]:
            whole -= LANES
        for j in range(0, whole, LANES):
            transpose(x[row + start + j, column:], x.strides[0], words[j:], 4 * COLUMNS, squares)
        for j in range(count):
            of = x[row + start + j, column : column + size]
            for k in range(squares * LANES * two if j < whole else 0, size):
                to[(k // two * COLUMNS + j) * two + k % two] = of[k]


@by_types(**FORCED)
def pair(x):
    """Return the number of k that this type interleaves, for use in compiled loops."""
    count = 2 if x.dtype == types.uint16 else 1

    def known(x):
        return count

    return known


@by_types(**FORCED)
def pack_panel(to, x, row, rows, column, count):
    """to ← these rows and columns of x, in compiled loops; bfloat16 interleaves pairs of rows."""

    def plain(to, x, row, rows, column, count):
        for t in range(rows):
            out = to[t * COLUMNS : t * COLUMNS + count]
            of = x[row + t, column : column + count]
            for j in range(count):
                out[j] = of[j]

    def zipped(to, x, row, rows, column, count):
        words = to.view(np.uint32)
        for t in range(rows // 2):
            at = row + 2 * t
            out = words[t * COLUMNS : t * COLUMNS + count]
            first, second = x[at, column : column + count], x[at + 1, column : column + count]
            for j in range(count):
                out[j] = zip_bits(first[j], second[j])
        if rows % 2:
            out = words[rows // 2 * COLUMNS :]
            of = x[row + rows - 1, column : column + count]
            for j in range(count):
                out[j] = of[j]

    return zipped if to.dtype == types.uint16 else plain


@by_types(**FORCED)
def put_pair(block, i, first, second):
    """Rows i and i + 1 of a block ← first, second, rounded; interleaved if the type holds pairs."""

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


@by_types(**FORCED)
def product(rows, k, a, transposed, b, c, columns, accumulate):
    """Compute a tile C ← [C +] A B in compiled loops, of up to ROWS rows and COLUMNS columns.

    A starts at a[0, 0]; if `transposed`, it is aᵀ (in bfloat16, of pairs). b is a panel. C starts at c[0, 0].
    """

    def by_tile(rows, k, a, transposed, b, c, columns, accumulate):
        row = 4 if transposed else a.strides[0]
        step = a.strides[0] if transposed else 4
        tile(rows, k, a, row, step, b, c, c.strides[0], columns, b, ACCUMULATE if accumulate else 0)

    def by_blas(rows, k, a, transposed, b, c, columns, accumulate):
        order = TRANSPOSED if transposed else PLAIN
        beta = 1.0 if accumulate else 0.0
        lda, ldc = a.strides[0] // a.itemsize, c.strides[0] // c.itemsize
        gemm(order, PLAIN, rows, columns, k, a, lda, b, COLUMNS, beta, c, ldc)

    return by_blas if a.dtype == types.float64 else by_tile
