"""Attention on bfloat16: heads are widened to float32 one by one, where the loops for float32 take them."""

from __future__ import annotations

from typing import Any

from distgpt.kernels.fused.attention import _attend, _attend_one
from distgpt.kernels.fused.jit import get, jit, put


@jit
def widen_heads(out: Any, qkv: Any, row: int, column: int, width: int) -> None:
    """out (T, 3 head) ← q, k and v of one head, whose first columns in qkv are `column` and `width` more."""
    size = out.shape[1] // 3
    for i in range(out.shape[0]):
        for part in range(3):
            start = part * width + column
            oi, qi = out[i, part * size : (part + 1) * size], qkv[row + i, start : start + size]
            for j in range(size):
                oi[j] = get(qi, j)


@jit
def narrow_heads(qkv: Any, wide: Any, row: int, column: int, width: int) -> None:
    """The way back."""
    size = wide.shape[1] // 3
    for i in range(wide.shape[0]):
        for part in range(3):
            start = part * width + column
            wi, qi = wide[i, part * size : (part + 1) * size], qkv[row + i, start : start + size]
            for j in range(size):
                put(qi, j, wi[j])


@jit
def widen(out: Any, x: Any, row: int, column: int) -> None:
    """out ← the part of x that begins at this row and column."""
    for i in range(out.shape[0]):
        oi, xi = out[i], x[row + i, column : column + out.shape[1]]
        for j in range(oi.shape[0]):
            oi[j] = get(xi, j)


@jit
def narrow(x: Any, wide: Any, row: int, column: int) -> None:
    for i in range(wide.shape[0]):
        wi, xi = wide[i], x[row + i, column : column + wide.shape[1]]
        for j in range(wi.shape[0]):
            put(xi, j, wi[j])


@jit
def attend_new(y: Any, q: Any, keys: Any, values: Any, start: int, scores: Any) -> None:
    """Rows of float32, the first at position `start`, of one head against all keys up to their own."""
    new, size = q.shape
    if new == 1:
        _attend_one(q[0], keys, values, y[0], scores[0])
    else:
        block = scores.shape[0]
        flat_q, flat_y = q.reshape(-1), y.reshape(-1)
        for begin in range(0, new, block):
            n, seen = min(block, new - begin), start + begin + 1
            qb, yb = flat_q[begin * size :], flat_y[begin * size :]
            _attend(n, size, seen, qb, size, keys, values, size, yb, size, None, scores)


@jit
def add(first: int, last: int, y: Any, a: Any, b: Any) -> None:
    """Elements first … last of flat arrays."""
    yi, ai, bi = y[first:last], a[first:last], b[first:last]
    for i in range(yi.shape[0]):
        put(yi, i, get(ai, i) + get(bi, i))


@jit
def sum_rows(first: int, last: int, db: Any, dy: Any, accumulate: bool) -> None:
    """Columns first … last of db ← Σ dy."""
    if not accumulate:
        for j in range(first, last):
            db[j] = 0
    for i in range(dy.shape[0]):
        dyi = dy[i]
        for j in range(first, last):
            db[j] += get(dyi, j)
