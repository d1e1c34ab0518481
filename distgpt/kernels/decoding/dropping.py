"""The window moves on: a lane's first positions go, those behind them move to the front of its cache."""

from __future__ import annotations

from distgpt.kernels.fused.heads import pair
from distgpt.kernels.fused.jit import get, inline, jit, put
from distgpt.kernels.matmul.packing import COLUMNS


@jit
def drop(first, last, cache, lane, cos, sin, count, kept):
    """Of heads first … last, layer by layer: positions 0 … kept ← those from `count` on.

    Keys are rotated back by `count` positions in float32, and rounded once; without angles they only move.
    """
    heads, half = cache.keys.shape[2], cos.shape[1]
    for unit in range(first, last):
        keys = cache.keys[unit // heads, lane, unit % heads]
        for i in range(half):
            _rotate_back(keys, i, i + half, cos[count, i], sin[count, i], count, kept)
        for i in range(2 * half, keys.shape[1] // COLUMNS):
            for at in range(kept):
                _set(keys, at, i, _at(keys, at + count, i))
        values = cache.values[unit // heads, lane, unit % heads]
        for at in range(kept):
            for j in range(values.shape[0] * COLUMNS):
                _set(values, j, at, _at(values, j, at + count))


@inline
def _rotate_back(keys, i, j, c, s, count, kept):
    for at in range(kept):
        a, b = _at(keys, at + count, i), _at(keys, at + count, j)
        _set(keys, at, i, a * c + b * s)
        _set(keys, at, j, b * c - a * s)


@inline
def _at(w, column, k):
    """An element of a packed matrix, by its column and its k."""
    return get(w[column // COLUMNS], _place(w, column, k))


@inline
def _set(w, column, k, value):
    put(w[column // COLUMNS], _place(w, column, k), value)


@inline
def _place(w, column, k):
    side_by_side = pair(w)
    return (k // side_by_side * COLUMNS + column % COLUMNS) * side_by_side + k % side_by_side
