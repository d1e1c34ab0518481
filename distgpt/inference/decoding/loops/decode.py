"""One pass of new tokens through all layers, in one compiled call per thread.

Each phase splits rows, columns or heads over the threads, with a barrier between phases. A row is computed in
the same way for any number of rows and threads, so results do not depend on the other sequences in a batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from distgpt.core.config import ModelConfig
from distgpt.core.cpu.compiling.barrier import wait_for_all
from distgpt.core.cpu.compiling.jit import inline, jit
from distgpt.core.cpu.fused.activations import NUMBERS, activate_in_place
from distgpt.core.cpu.graphs.loops import unpack_args
from distgpt.core.cpu.matmul.microkernel import ACCUMULATE, BIAS
from distgpt.core.cpu.matmul.packing import COLUMNS
from distgpt.core.ops.api import Array
from distgpt.inference.decoding.loops.cached_attention import Cache, ThreadScratch, attend
from distgpt.inference.decoding.loops.operands import UNIT, at_once, element, multiply, put_row
from distgpt.inference.decoding.loops.weights import Weights

GROUP = 2  # panels that all rows use before the next panels
ADD = BIAS | ACCUMULATE


class Kind(NamedTuple):
    """The architecture: the attributes of `ModelConfig` that the decoder needs, and `act`."""

    n_embd: int
    n_head: int
    kv_heads: int
    head_size: int
    qkv_width: int
    hidden: int
    vocab_size: int
    centred: bool
    gated: bool
    embed_norm: bool
    final_norm: bool
    norm_eps: float
    norm_groups: int
    qk_norm: bool
    act: int  # one of NUMBERS


class Rows(NamedTuple):
    """Memory for rows. The factors `a`, `h` and `last` are in the format of the weights."""

    s: Array  # the residual stream (N, C)
    qkv: Array
    att: Array  # attention's output (N, H·head), and temporary memory of norms
    pre: Array  # input and output of the activation
    gates: Array
    a: Array  # output of a norm or of attention
    h: Array  # output of the activation
    last: Array  # output of the last norm; the output layer may have a different format


class Inputs(NamedTuple):
    """Memory for a call's input.

    A feed has (first row, rows, slot, number of earlier tokens, rows with logits, last earlier token).
    """

    tokens: Array
    feeds: Array  # int64 (F, 6)
    wanted: Array  # rows whose logits are needed


class Fixed(NamedTuple):
    """Arguments that are the same in all calls of a thread."""

    kind: Kind
    weights: Weights
    rows: Rows
    cache: Cache
    inputs: Inputs
    own: ThreadScratch  # scratch memory of this thread
    counter: Array


def kind_of(config: ModelConfig) -> Kind:
    named = {name: getattr(config, name) for name in Kind._fields[:-1]}
    return Kind(**named, act=NUMBERS[config.mlp])


@jit
def decode(thread, n_threads, tokens, feeds, logits, packed):
    """Compute one thread's part of these tokens and feeds; logits are (rows with logits, V).

    `packed` has the thread's `Fixed`; its counter must start at 0.
    """
    fixed: Any = unpack_args(packed)
    kind, weights, rows, cache, inputs, own, counter = fixed
    work = Inputs(inputs.tokens[:tokens], inputs.feeds[:feeds], inputs.wanted[: len(logits)])
    threads, n, layers = (thread, n_threads), len(work.tokens), weights.qkv.w.shape[0]
    s, width, heads, arrivals = rows.s, kind.n_embd, kind.n_head * kind.head_size, 0
    first, last = part(threads, n)
    _embed(first, last, kind, weights, s, work)
    for i in range(layers):
        if i:
            arrivals = wait_for_all(counter, arrivals, n_threads)
        _normed(first, last, kind, weights.norms[2 * i], s, rows.att, rows.a)
        arrivals = wait_for_all(counter, arrivals, n_threads)
        _linear(threads, n, kind.qkv_width, rows.a, weights.qkv, i, rows.qkv, BIAS)
        if weights.values.shape[0] and (layers - 1 - i) % 2 == 0:  # see ModelConfig.value_layers
            _add_values(threads, kind, weights.values[i // 2], work.tokens, rows.qkv)
        arrivals = wait_for_all(counter, arrivals, n_threads)
        ends = i + 1 == layers  # the last layer computes only keys and values of rows without logits
        attend(threads, kind, i, weights, rows.qkv, cache, work.feeds, ends, rows.att, own)
        arrivals = wait_for_all(counter, arrivals, n_threads)
        if ends:
            n = len(logits)
            first, last = part(threads, n)
            if thread == 0:
                _to_the_front(s, work.wanted, width)
        _attended(first, last, heads, rows, work.wanted, ends)
        arrivals = wait_for_all(counter, arrivals, n_threads)
        _linear(threads, n, width, rows.a, weights.out, i, s, ADD)
        arrivals = wait_for_all(counter, arrivals, n_threads)
        _normed(first, last, kind, weights.norms[2 * i + 1], s, rows.att, rows.a)
        arrivals = wait_for_all(counter, arrivals, n_threads)
        _expand(threads, n, kind, weights, rows, i)
        arrivals = wait_for_all(counter, arrivals, n_threads)
        _linear(threads, n, width, rows.h, weights.proj, i, s, ADD)
    arrivals = wait_for_all(counter, arrivals, n_threads)
    if kind.final_norm:
        _normed(first, last, kind, weights.norms[2 * layers + 1], s, rows.att, rows.last)
    else:
        for row in range(first, last):
            put_row(rows.last[row], s[row], 0, width)
    arrivals = wait_for_all(counter, arrivals, n_threads)
    head, inputs = weights.head, weights.head_inputs
    _columns(threads, n, kind.vocab_size, rows.last, head, inputs, logits, rows.s[0], 0)


@inline
def part(threads, count):
    """Return a thread's part of range(count)."""
    thread, n_threads = threads
    return count * thread // n_threads, count * (thread + 1) // n_threads


@inline
def _embed(first, last, kind, weights, s, work):
    for f in range(work.feeds.shape[0]):
        start, count, before = work.feeds[f, 0], work.feeds[f, 1], work.feeds[f, 3]
        for row in range(max(first, start), min(last, start + count)):
            x, token, place = s[row, : kind.n_embd], work.tokens[row], before + row - start
            added = weights.places[min(place, weights.places.shape[0] - 1)]
            for j in range(x.shape[0]):
                x[j] = element(weights.embedding, token, j) + added[j]
            if weights.previous.shape[0]:
                token = work.tokens[row - 1] if row > start else work.feeds[f, 5]
                for j in range(x.shape[0]):
                    x[j] += element(weights.previous, token, j)
            if kind.embed_norm:
                norm_row(kind, weights.norms[weights.norms.shape[0] - 2], x, x)


@inline
def _expand(threads, n, kind, weights, rows, i):
    """Compute a thread's columns of the first half of an MLP: fc, gates, activation."""
    hidden = kind.hidden
    _linear(threads, n, hidden, rows.a, weights.fc, i, rows.pre, BIAS, UNIT)
    if kind.gated:
        _linear(threads, n, hidden, rows.a, weights.gates, i, rows.gates, BIAS, UNIT)
    _activate(threads, n, kind, rows)


@inline
def _normed(first, last, kind, norm, s, between, to):
    """Rows first … last of `to` ← the norm of s. `between` is attention's memory, unused during norms."""
    for row in range(first, last):
        normed = between[row, : kind.n_embd]
        norm_row(kind, norm, s[row, : kind.n_embd], normed)
        put_row(to[row], normed, 0, kind.n_embd)


@inline
def _attended(first, last, width, rows, wanted, ends):
    """Rows first … last of `a` ← attention's output; in the last layer, only rows with logits."""
    for row in range(first, last):
        at = wanted[row] if ends else row
        put_row(rows.a[row], rows.att[at], 0, width)


@inline
def _to_the_front(s, rows, width):
    """The first rows of s ← its rows `rows`, which must ascend."""
    for i in range(rows.shape[0]):
        if rows[i] > i:
            to, of = s[i], s[rows[i]]
            for j in range(width):
                to[j] = of[j]


@inline
def _linear(threads, n, columns, a, layer, i, c, flags, unit=COLUMNS):
    _columns(threads, n, columns, a, layer.w[i], layer.inputs, c, layer.bias[i], flags, unit)


@inline
def _columns(threads, n, columns, a, w, inputs, c, bias, flags, unit=COLUMNS):
    """A thread's columns of c ← [c +] a wᵀ [+ bias], a few panels at a time for all rows, k in parts."""
    begin, end = _own_columns(threads, columns, unit)
    longest, most = at_once(w)
    strips = (n + most - 1) // most  # groups of about the same number of rows
    group = COLUMNS if strips <= 1 else GROUP * COLUMNS
    for left in range(begin, end, group):
        right = min(left + group, end)
        one, other = inputs[left // COLUMNS], inputs[(right - 1) // COLUMNS]
        start, k = min(one[0], other[0]), max(one[1], other[1])
        for low in range(start, k, longest):
            high, how = min(low + longest, k), flags if low == start else ACCUMULATE
            for strip in range(strips):
                top, bottom = part((strip, strips), n)
                for column in range(left, right, COLUMNS):
                    panel, there = w[column // COLUMNS], min(COLUMNS, columns - column)
                    out, added = c[top:, column:], bias[column:]
                    multiply(bottom - top, low, high, a[top:], panel, out, there, added, how)


@inline
def _add_values(threads, kind, values, tokens, qkv):
    """A thread's columns of v += the value embedding of each token."""
    begin, end = _own_columns(threads, kind.qkv_width, COLUMNS)
    before = kind.qkv_width - kind.kv_heads * kind.head_size
    for row in range(tokens.shape[0]):
        for column in range(max(begin, before), end):
            qkv[row, column] += element(values, tokens[row], column - before)


@inline
def _own_columns(threads, columns, unit):
    first, last = part(threads, (columns + unit - 1) // unit)
    return first * unit, min(last * unit, columns)


@inline
def _activate(threads, n, kind, rows):
    """A thread's columns of h ← act(pre), in whole units, so that all are computed in the same way."""
    begin, end = _own_columns(threads, kind.hidden, UNIT)
    for row in range(n):
        for left in range(begin, end, UNIT):
            x = rows.pre[row, left : left + UNIT]
            activate_in_place(kind.act, x, rows.gates[row, left : left + UNIT], UNIT)
            put_row(rows.h[row], rows.pre[row], left, min(left + UNIT, end))


@inline
def norm_row(kind, norm, x, y):
    """y ← (x - mean) / std · gain + bias for each group of channels; RMS norm has no mean."""
    width = x.shape[0] // kind.norm_groups
    for at in range(0, x.shape[0], width):
        end = at + width
        _norm_group(kind, norm[0, at:end], norm[1, at:end], x[at:end], y[at:end])


@inline
def _norm_group(kind, gain, bias, x, y):
    width = x.shape[0]
    share, mean, square = np.float32(1 / width), np.float32(0), np.float32(0)
    if kind.centred:
        for j in range(width):
            mean += x[j]
        mean *= share
    for j in range(width):
        square += (x[j] - mean) * (x[j] - mean)
    scale = np.float32(1) / np.sqrt(square * share + np.float32(kind.norm_eps))
    for j in range(width):
        y[j] = (x[j] - mean) * scale * gain[j] + bias[j]
