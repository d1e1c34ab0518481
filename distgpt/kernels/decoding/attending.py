"""Attention of new tokens in the walk, and the cache of keys and values it reads.

The cache holds keys and values as the B of matmuls, packed panel by panel as they come: kᵀ (head, T) and
v (T, head) of every layer, lane and head. So one new token and a whole chunk read it alike.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import types
from numba.extending import overload

from distgpt.config import ModelConfig
from distgpt.kernels.api import Array
from distgpt.kernels.fused.jit import FORCED, inline, put
from distgpt.kernels.fused.softmax import EDGE, softmax
from distgpt.kernels.matmul.assembled import tile
from distgpt.kernels.matmul.packing import COLUMNS, ROWS, aligned


class Cache(NamedTuple):
    """(layers, lanes, heads, panels, elements of a panel) of float32, or of bfloat16 as uint16."""

    keys: Array
    values: Array


class Own(NamedTuple):
    """A thread's memory for a tile of queries."""

    q: Array  # (ROWS, head), as the cache has it
    scores: Array  # (ROWS, T)
    probs: Array  # (ROWS, T), as the cache has it
    sums: Array


def cache_of(config: ModelConfig, lanes: int, dtype: str) -> Cache:
    keys, values = cache_shapes(config, lanes, dtype)
    return Cache(aligned(keys, dtype), aligned(values, dtype))


def cache_shapes(config: ModelConfig, lanes: int, dtype: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of keys and of values, whole panels of positions or channels."""
    pair = 2 if dtype == "uint16" else 1
    length, size = config.seq_len, config.head_size
    first = config.n_layer, lanes, config.n_head
    keys = -(-length // COLUMNS), -(-size // pair) * pair * COLUMNS
    values = -(-size // COLUMNS), -(-length // pair) * pair * COLUMNS
    return (*first, *keys), (*first, *values)


def own_memory(config: ModelConfig, dtype: str) -> Own:
    length = -(-config.seq_len // COLUMNS) * COLUMNS + EDGE + 32  # not a multiple of 4 KB
    return Own(
        aligned((ROWS, -(-config.head_size // EDGE) * EDGE), dtype),
        aligned((ROWS, length), "float32"),
        aligned((ROWS, length), dtype),
        aligned((ROWS, 2), "float32"),
    )


@inline
def attend(
    crew: Any, kind: Any, i: Any, weights: Any, qkv: Any, cache: Any, feeds: Any, y: Any, own: Any
) -> None:
    """A member's heads of all feeds, one after the other: y ← attention in layer i, in all the lane has."""
    member, members = crew
    heads, width = kind.heads, kind.width
    units, size = feeds.shape[0] * heads, width // heads
    for unit in range(units * member // members, units * (member + 1) // members):
        feed, head = feeds[unit // heads], unit % heads
        row, count, lane, before = feed[0], feed[1], feed[2], feed[3]
        keys, values = cache.keys[i, lane, head], cache.values[i, lane, head]
        new = qkv[row : row + count]
        for j in range(count):
            _rotate(new[j], weights.cos, weights.sin, before + j, width, head, size)
            _remember(new[j], keys, values, before + j, width, head, size)
        for top in range(0, count, ROWS):
            n = min(ROWS, count - top)
            out = y[row + top :, head * size : (head + 1) * size]
            _attend(n, before + top + 1, new[top:, head * size : (head + 1) * size], keys, values, out, own)


@inline
def _rotate(row: Any, cos: Any, sin: Any, place: Any, width: Any, head: Any, size: Any) -> None:
    half = cos.shape[1]
    if half:
        c, s = cos[place], sin[place]
        for start in range(head * size, 2 * width, width):  # in q and in k
            left, right = row[start : start + half], row[start + half : start + size]
            for j in range(half):
                a, b = left[j], right[j]
                left[j] = a * c[j] - b * s[j]
                right[j] = a * s[j] + b * c[j]


@inline
def _remember(row: Any, keys: Any, values: Any, place: Any, width: Any, head: Any, size: Any) -> None:
    """The key and the value of one head of a new token, where the tiles look for them."""
    two = beside(keys)
    key, value = row[width + head * size :], row[2 * width + head * size :]
    column = keys[place // COLUMNS, place % COLUMNS * two :]
    for j in range(size):
        put(column, j // two * COLUMNS * two + j % two, key[j])
    for panel in range(values.shape[0]):
        line = values[panel, place // two * COLUMNS * two + place % two :]
        of = value[panel * COLUMNS : min((panel + 1) * COLUMNS, size)]
        for j in range(of.shape[0]):
            put(line, j * two, of[j])
        if two == 2 and place % 2 == 0:  # no partner yet: what another sequence left may be NaN
            for j in range(of.shape[0]):
                put(line, j * two + 1, np.float32(0))


@inline
def _attend(n: Any, seen: Any, q: Any, keys: Any, values: Any, y: Any, own: Any) -> None:
    """Up to ROWS queries, the first of which sees `seen` keys and each next one more."""
    size, stop = y.shape[1], seen + n - 1
    scale = np.float32(1 / math.sqrt(size))
    queries = as_cached(q, n, size, own.q)
    for panel in range((stop + COLUMNS - 1) // COLUMNS):
        _tile(n, size, queries, keys[panel], own.scores[:, panel * COLUMNS :], COLUMNS)
    for i in range(n):
        softmax(own.scores[i], own.probs[i], seen + i, seen + i, scale, own.sums[i])
        rest = own.probs[i]
        for j in range(seen + i, stop):
            put(rest, j, np.float32(0))
    for panel in range(values.shape[0]):
        left = panel * COLUMNS
        _tile(n, stop, own.probs, values[panel], y[:, left:], min(COLUMNS, size - left))
    for i in range(n):
        share = np.float32(1) / own.sums[i, 1]
        for j in range(size):
            y[i, j] *= share


@inline
def _tile(rows: Any, k: Any, a: Any, panel: Any, c: Any, columns: Any) -> None:
    tile(rows, k, a, a.strides[0], 4, panel, c, c.strides[0], columns, panel, 0)


def beside(keys: Any) -> Any:
    """How many k lie side by side in this type, inside compiled loops."""
    raise NotImplementedError


def as_cached(q: Any, rows: Any, size: Any, memory: Any) -> Any:
    """Queries in the type of the cache, inside compiled loops: themselves, or rounded copies."""
    raise NotImplementedError


@overload(beside, jit_options=FORCED)
def _beside(keys: Any) -> Any:
    count = 2 if keys.dtype == types.uint16 else 1

    def known(keys: Any) -> Any:
        return count

    return known


@overload(as_cached, jit_options=FORCED)
def _as_cached(q: Any, rows: Any, size: Any, memory: Any) -> Any:
    def themselves(q: Any, rows: Any, size: Any, memory: Any) -> Any:
        return q

    def rounded(q: Any, rows: Any, size: Any, memory: Any) -> Any:
        for i in range(rows):
            for j in range(size):
                put(memory[i], j, q[i, j])
        return memory

    return rounded if memory.dtype == types.uint16 else themselves
