"""The KV cache, and attention over it.

The cache is packed as the B of matmuls, panel by panel: kᵀ (head, T) and v (T, head) of every layer, slot and
head. So a single new token and a chunk of a prompt read it in the same way.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import types

from distgpt.core.config import ModelConfig
from distgpt.core.cpu.compiling.jit import FORCED, by_types, inline, jit, put, zip_narrowed
from distgpt.core.cpu.fused.attention import normalise_head, pair, rstd_of
from distgpt.core.cpu.fused.softmax import EDGE, UNSEEN, softmax
from distgpt.core.cpu.matmul.assembled import tile
from distgpt.core.cpu.matmul.packing import COLUMNS, ROWS, aligned, zeros_as_used
from distgpt.core.ops.api import Array
from distgpt.inference.decoding.loops.operands import element


class Cache(NamedTuple):
    """(layers, slots, heads of k and v, panels, elements of a panel), float32, or bfloat16 as uint16."""

    keys: Array
    values: Array


class ThreadScratch(NamedTuple):
    """A thread's memory for a tile of queries."""

    q: Array  # (ROWS, head), in the cache's type
    scores: Array  # (ROWS, T)
    probs: Array  # (ROWS, T), in the cache's type
    sums: Array


def cache_of(config: ModelConfig, slots: int, dtype: str) -> Cache:
    keys, values = cache_shapes(config, slots, dtype)
    return Cache(zeros_as_used(keys, dtype), zeros_as_used(values, dtype))


def cache_shapes(config: ModelConfig, slots: int, dtype: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of keys and values, padded to whole panels of positions or channels."""
    pair = 2 if dtype == "uint16" else 1
    length, size = config.seq_len, config.head_size
    first = config.n_layer, slots, config.kv_heads
    keys = -(-length // COLUMNS), -(-size // pair) * pair * COLUMNS
    values = -(-size // COLUMNS), -(-length // pair) * pair * COLUMNS
    return (*first, *keys), (*first, *values)


def thread_scratch(config: ModelConfig, dtype: str) -> ThreadScratch:
    length = -(-config.seq_len // COLUMNS) * COLUMNS + EDGE + 32  # not a multiple of 4 KB
    return ThreadScratch(
        aligned((ROWS, -(-config.head_size // EDGE) * EDGE), dtype),
        aligned((ROWS, length), "float32"),
        aligned((ROWS, length), dtype),
        aligned((ROWS, 2), "float32"),
    )


@inline
def attend(threads, kind, i, weights, qkv, cache, feeds, only_wanted, y, own):
    """y ← attention in layer i to its window of the slot, for all feeds.

    A thread computes some heads of k and v with their heads of q. If `only_wanted`, only the last rows of
    each feed attend, but all rows add keys and values.
    """
    thread, n_threads = threads
    heads, size = kind.kv_heads, kind.head_size
    width, gains, window = kind.n_head * size, weights.head_gains[:, i : i + 1], weights.windows[i]
    units, span = feeds.shape[0] * heads, width // heads
    for unit in range(units * thread // n_threads, units * (thread + 1) // n_threads):
        feed, head = feeds[unit // heads], unit % heads
        row, count, slot, before = feed[0], feed[1], feed[2], feed[3]
        keys, values = cache.keys[i, slot, head], cache.values[i, slot, head]
        new, key = qkv[row : row + count], width + head * size
        _prepare(new, key, key + size, size, before, kind, weights, gains[1])
        append_keys_and_values(new, key, key + heads * size, size, keys, values, before)
        _prepare(new, head * span, (head + 1) * span, size, before, kind, weights, gains[0])
        for column in range(head * span, (head + 1) * span, size):
            for top in range(count - feed[4] if only_wanted else 0, count, ROWS):
                n = min(ROWS, count - top)
                seen, out = before + top + 1, y[row + top :]
                _attend(n, seen, window, new[top:], column, size, keys, values, out, own)


@inline
def _prepare(rows, first, last, size, before, kind, weights, gains):
    """Rotate and normalize the heads of q or k in columns first … last, of rows from position `before` on.

    `gains` is (1, head) or empty.
    """
    half = weights.cos.shape[1]
    for i in range(rows.shape[0]):
        for start in range(first, last, size):
            for g in range(gains.shape[0]):
                _scale_head(rows[i, start : start + size], gains[g], np.float32(kind.norm_eps))
            if half:
                c, s = weights.cos[before + i], weights.sin[before + i]
                left, right = rows[i, start : start + half], rows[i, start + half : start + size]
                for j in range(half):
                    a, b = left[j], right[j]
                    left[j] = a * c[j] - b * s[j]
                    right[j] = a * s[j] + b * c[j]
            if kind.qk_norm and not gains.shape[0]:
                normalise_head(rows[i, start : start + size], np.float32(kind.norm_eps))


@inline
def _scale_head(x, gain, eps):
    """x ← gain · x / rms(x)"""
    scale = rstd_of(x, eps)
    for j in range(x.shape[0]):
        x[j] = x[j] * scale * gain[j]


@inline
def _attend(n, seen, window, q, column, size, keys, values, y, own):
    """Attend with up to ROWS queries of one head; the first one attends to `seen` keys, its own included.

    Whole panels before its window are skipped, so that sums do not depend on the other rows.
    """
    begin = max(0, seen - window) // COLUMNS
    seen -= begin * COLUMNS
    stop = seen + n - 1
    scale = np.float32(1 / math.sqrt(size))
    for i in range(n):
        to, of = own.q[i], q[i, column : column + size]
        for j in range(size):
            put(to, j, of[j])
    for panel in range((stop + COLUMNS - 1) // COLUMNS):
        _tile(n, size, own.q, keys[begin + panel], own.scores[:, panel * COLUMNS :], COLUMNS)
    for i in range(n):
        own.scores[i, : max(0, seen + i - window)] = UNSEEN
        softmax(own.scores[i], own.probs[i], seen + i, seen + i, scale, own.sums[i])
        rest = own.probs[i]
        for j in range(seen + i, stop):
            put(rest, j, np.float32(0))
    for panel in range(values.shape[0]):
        left = panel * COLUMNS
        _tile(
            n,
            stop,
            own.probs,
            values[panel, begin * COLUMNS * COLUMNS :],
            y[:, column + left :],
            min(COLUMNS, size - left),
        )
    for i in range(n):
        to, share = y[i, column : column + size], np.float32(1) / own.sums[i, 1]
        for j in range(size):
            to[j] *= share


@inline
def _tile(rows, k, a, panel, c, columns):
    tile(rows, k, a, a.strides[0], 4, panel, c, c.strides[0], columns, panel, 0)


@by_types(**FORCED)
def append_keys_and_values(rows, k, v, size, keys, values, place):
    """Append keys and values to the cache from a position on, in compiled loops.

    They belong to new tokens of one head: columns k … and v … of `rows`.
    """

    def plain(rows, k, v, size, keys, values, place):
        for row in range(rows.shape[0]):
            at = place + row
            column, key = keys[at // COLUMNS, at % COLUMNS :], rows[row, k : k + size]
            for j in range(size):
                column[j * COLUMNS] = key[j]
            for panel in range(values.shape[0]):
                line, of = values[panel, at * COLUMNS :], rows[row, v + panel * COLUMNS : v + size]
                for j in range(min(COLUMNS, of.shape[0])):
                    line[j] = of[j]

    def in_pairs(rows, k, v, size, keys, values, place):
        zero = np.float32(0)
        for row in range(rows.shape[0]):
            at = place + row
            column, key = keys[at // COLUMNS].view(np.uint32)[at % COLUMNS :], rows[row, k : k + size]
            for j in range(size // 2):
                column[j * COLUMNS] = zip_narrowed(key[2 * j], key[2 * j + 1])
            if size % 2:
                column[size // 2 * COLUMNS] = zip_narrowed(key[size - 1], zero)
            for panel in range(values.shape[0]):
                line, of = (
                    values[panel].view(np.uint32)[at // 2 * COLUMNS :],
                    rows[row, v + panel * COLUMNS : v + size],
                )
                count = min(COLUMNS, of.shape[0])
                if at % 2 == 0 and row + 1 < rows.shape[0]:
                    after = rows[row + 1, v + panel * COLUMNS : v + size]
                    for j in range(count):
                        line[j] = zip_narrowed(of[j], after[j])
                elif at % 2 == 0:  # There is no second row yet. The old value of another sequence may be NaN.
                    for j in range(count):
                        line[j] = zip_narrowed(of[j], zero)
                elif row == 0:
                    halves = values[panel, at // 2 * COLUMNS * 2 + 1 :]
                    for j in range(count):
                        put(halves, 2 * j, of[j])

    return in_pairs if keys.dtype == types.uint16 else plain


def copy_slot(cache: Cache, source: int, target: int, length: int) -> None:
    """Copy the keys and values of the first positions, in whole panels and pairs."""
    panels, elements = -(-length // COLUMNS), -(-length // 2) * 2 * COLUMNS
    cache.keys[:, target, :, :panels] = cache.keys[:, source, :, :panels]
    cache.values[:, target, ..., :elements] = cache.values[:, source, ..., :elements]


@jit
def shift_cache(first, last, cache, slot, cos, sin, count, kept):
    """Drop the first `count` positions of a slot; `kept` move up. Heads first … last are of all layers.

    Keys are rotated back by `count` positions in float32 and rounded once; without angles, they only move.
    """
    heads, half = cache.keys.shape[2], cos.shape[1]
    for unit in range(first, last):
        keys = cache.keys[unit // heads, slot, unit % heads]
        for i in range(half):
            _rotate_back(keys, i, i + half, cos[count, i], sin[count, i], count, kept)
        for i in range(2 * half, keys.shape[1] // COLUMNS):
            for at in range(kept):
                _set(keys, at, i, element(keys, at + count, i))
        values = cache.values[unit // heads, slot, unit % heads]
        for at in range(kept):
            for j in range(values.shape[0] * COLUMNS):
                _set(values, j, at, element(values, j, at + count))


@inline
def _rotate_back(keys, i, j, c, s, count, kept):
    for at in range(kept):
        a, b = element(keys, at + count, i), element(keys, at + count, j)
        _set(keys, at, i, a * c + b * s)
        _set(keys, at, j, b * c - a * s)


@inline
def _set(w, column, k, value):
    """Set the element (column, k) of a packed matrix."""
    side_by_side = pair(w)
    index = (k // side_by_side * COLUMNS + column % COLUMNS) * side_by_side + k % side_by_side
    put(w[column // COLUMNS], index, value)
