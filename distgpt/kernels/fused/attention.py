"""Causal attention without the T × T matrix: blocks of queries against all keys so far; rotary positions.

A unit of work is one head of one sequence. q, k and v are read in place inside qkv, row length 3C.
`scratch` is (2, BLOCK, T): scores or probabilities, and their gradients.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from distgpt.kernels.fused.blas import PLAIN, TRANSPOSED, gemm
from distgpt.kernels.fused.jit import exp, get, inline, jit, largest, number, put

BLOCK = 64


@jit
def attention(first: int, last: int, y: Any, lse: Any, qkv: Any, seq_len: int, scratch: Any) -> None:
    width, n_head = y.shape[1], lse.shape[1]
    size, wide = width // n_head, 3 * width
    flat_qkv, flat_y = qkv.reshape(-1), y.reshape(-1)
    for unit in range(first, last):
        row, head = unit // n_head * seq_len, unit % n_head
        q = flat_qkv[row * wide + head * size :]
        k, v = q[width:], q[2 * width :]
        out = flat_y[row * width + head * size :]
        for begin in range(0, seq_len, BLOCK):
            n = min(BLOCK, seq_len - begin)
            log_sums = lse[row + begin : row + begin + n, head]
            qb, yb = q[begin * wide :], out[begin * width :]
            _attend(n, size, begin + 1, qb, wide, k, v, wide, yb, width, log_sums, scratch[0])


@inline
def _attend(
    n: int,
    size: int,
    seen: int,
    q: Any,
    ldq: int,
    k: Any,
    v: Any,
    ldk: int,
    out: Any,
    ldo: int,
    log_sums: Any,
    scores: Any,
) -> None:
    """n queries of one head, the first of which sees `seen` keys and each next one more."""
    stop, length = seen + n - 1, scores.shape[1]
    scale = 1.0 / math.sqrt(size)
    gemm(PLAIN, TRANSPOSED, n, stop, size, q, ldq, k, ldk, 0.0, scores, length)
    for i in range(n):
        log_sum = _softmax(scores[i, :stop], seen + i, scale)
        if log_sums is not None:
            log_sums[i] = log_sum
    gemm(PLAIN, PLAIN, n, size, stop, scores, length, v, ldk, 0.0, out, ldo)


@jit
def attention_backward(
    first: int, last: int, dqkv: Any, dy: Any, y: Any, lse: Any, qkv: Any, seq_len: int, scratch: Any
) -> None:
    width, n_head = y.shape[1], lse.shape[1]
    size, wide = width // n_head, 3 * width
    flat_qkv, flat_dqkv, flat_dy = qkv.reshape(-1), dqkv.reshape(-1), dy.reshape(-1)
    real = y.dtype.type
    probs, grads = scratch[0], scratch[1]
    scale = real(1.0 / math.sqrt(size))
    for unit in range(first, last):
        row, head = unit // n_head * seq_len, unit % n_head
        origin = row * wide + head * size
        q, dq = flat_qkv[origin:], flat_dqkv[origin:]
        k, v, dk, dv = q[width:], q[2 * width :], dq[width:], dq[2 * width :]
        dout = flat_dy[row * width + head * size :]
        # From the last block of queries to the first: the first matmul written covers all of dk and dv.
        for begin in range((seq_len - 1) // BLOCK * BLOCK, -1, -BLOCK):
            end = min(begin + BLOCK, seq_len)
            n = end - begin
            beta = 0.0 if end == seq_len else 1.0
            qb, db = q[begin * wide :], dout[begin * width :]
            gemm(PLAIN, TRANSPOSED, n, end, size, qb, wide, k, wide, 0.0, probs, seq_len)
            gemm(PLAIN, TRANSPOSED, n, end, size, db, width, v, wide, 0.0, grads, seq_len)
            for i in range(n):
                at = row + begin + i
                delta = _dot(y[at, head * size : (head + 1) * size], dy[at, head * size : (head + 1) * size])
                _softmax_backward(probs[i, :end], grads[i, :end], begin + i + 1, lse[at, head], scale, delta)
            gemm(TRANSPOSED, PLAIN, end, size, n, probs, seq_len, db, width, beta, dv, wide)
            gemm(TRANSPOSED, PLAIN, end, size, n, grads, seq_len, qb, wide, beta, dk, wide)
            gemm(PLAIN, PLAIN, n, size, end, grads, seq_len, k, wide, 0.0, dq[begin * wide :], wide)


@jit
def attention_cached(first: int, last: int, y: Any, cache: Any, qkv: Any, start: int, scratch: Any) -> None:
    """New rows of each sequence, from position `start` on, against all keys up to their own."""
    width, n_seq, n_head, size = y.shape[1], cache.shape[1], cache.shape[2], cache.shape[4]
    new = y.shape[0] // n_seq
    flat_qkv, flat_y = qkv.reshape(-1), y.reshape(-1)
    for unit in range(first, last):
        seq, column = unit // n_head, unit % n_head * size
        keys, values = cache[0, seq, unit % n_head], cache[1, seq, unit % n_head]
        for i in range(new):
            row = qkv[seq * new + i]
            keys[start + i, :] = row[width + column : width + column + size]
            values[start + i, :] = row[2 * width + column : 2 * width + column + size]
        q, out = flat_qkv[seq * new * 3 * width + column :], flat_y[seq * new * width + column :]
        if new == 1:
            _attend_one(q[:size], keys[: start + 1], values[: start + 1], out[:size], scratch[0, 0])
        else:
            for begin in range(0, new, BLOCK):
                n, seen, wide = min(BLOCK, new - begin), start + begin + 1, 3 * width
                qb, yb = q[begin * wide :], out[begin * width :]
                _attend(n, size, seen, qb, wide, keys, values, size, yb, width, None, scratch[0])


@inline
def _attend_one(q: Any, keys: Any, values: Any, out: Any, scores: Any) -> None:
    """A single query: too little work for a matmul."""
    seen, size = keys.shape
    for t in range(seen):
        scores[t] = _dot(q, keys[t])
    _softmax(scores[:seen], seen, 1.0 / math.sqrt(size))
    out[:] = q.dtype.type(0)
    for t in range(seen):
        p, value = scores[t], values[t]
        for j in range(size):
            out[j] += p * value[j]


@inline
def _dot(a: Any, b: Any) -> Any:
    total = a.dtype.type(0)
    for j in range(a.shape[0]):
        total += a[j] * b[j]
    return total


@inline
def _softmax(row: Any, seen: int, scale: float) -> Any:
    """row[:seen] ← softmax(scale · row[:seen]), the rest ← 0; gives the log of the denominator."""
    real = row.dtype.type
    factor = real(scale)
    top = largest(row[:seen])
    total = real(0)
    for j in range(seen):
        e = exp((row[j] - top) * factor)
        row[j] = e
        total += e
    share = real(1) / total
    for j in range(seen):
        row[j] *= share
    row[seen:] = real(0)
    return top * factor + np.log(total)


@inline
def _softmax_backward(p: Any, g: Any, seen: int, lse: Any, scale: Any, delta: Any) -> None:
    """From scores to probabilities in p, from their gradients to the scores' gradients in g."""
    real = p.dtype.type
    for j in range(seen):
        e = exp(p[j] * scale - lse)
        p[j] = e
        g[j] = e * (g[j] - delta) * scale
    p[seen:] = real(0)
    g[seen:] = real(0)


@jit
def rope(first: int, last: int, qkv: Any, cos: Any, sin: Any, n_head: int, inverse: bool) -> None:
    """Rows first … last, in place on the q and k parts of qkv."""
    seq_len, half = cos.shape
    sign = number(qkv, -1) if inverse else number(qkv, 1)
    for i in range(first, last):
        row = qkv[i]
        c, s = cos[i % seq_len], sin[i % seq_len]
        for head in range(2 * n_head):
            left = row[2 * half * head : 2 * half * head + half]
            right = row[2 * half * head + half : 2 * half * (head + 1)]
            for j in range(half):
                a, b, turn = get(left, j), get(right, j), sign * s[j]
                put(left, j, a * c[j] - b * turn)
                put(right, j, a * turn + b * c[j])
