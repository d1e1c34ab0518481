"""New tokens of many sequences through all layers: what each thread of a crew computes in one compiled call.

A phase splits rows, columns or heads over the threads, which meet before the next one. A row is computed in
the same way whatever the number of rows and of threads, so that nothing depends on who shares a batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from distgpt.config import ModelConfig
from distgpt.kernels.api import Array
from distgpt.kernels.decoding.attending import Cache, Own, attend
from distgpt.kernels.decoding.factors import UNIT, element, lay, most_rows, multiply, stretch
from distgpt.kernels.decoding.meeting import meet
from distgpt.kernels.decoding.norms import norm_row
from distgpt.kernels.decoding.weights import Weights
from distgpt.kernels.fused.frozen import thaw
from distgpt.kernels.fused.jit import inline, jit
from distgpt.kernels.fused.linear import CUBIC, LINEAR, gelu_of, silu_of
from distgpt.kernels.matmul.microkernel import ACCUMULATE, BIAS
from distgpt.kernels.matmul.packing import COLUMNS

GROUP = 2  # panels that all rows go past before the next ones
ACTIVATIONS = {"gelu": 0, "relu": 1, "swiglu": 2}


class Kind(NamedTuple):
    """What of the architecture the walk asks for."""

    width: int
    heads: int
    hidden: int
    vocab: int
    centred: bool  # layer norm, not RMS norm
    act: int
    embed_norm: bool
    final_norm: bool
    eps: float


class Rows(NamedTuple):
    """Memory for so many rows. The factors `a` and `h` are in the form of the weights."""

    s: Array  # the residual stream (N, C)
    qkv: Array
    att: Array
    pre: Array  # what the activation gets, and gives
    gates: Array
    a: Array  # a norm's output, or attention's: what layers of C inputs read
    h: Array  # the activation's output


class Asked(NamedTuple):
    """Memory for what a call computes. A feed: its first row, rows, lane, tokens before them, rows scored."""

    tokens: Array
    feeds: Array  # int64 (F, 5)
    scored: Array  # the rows whose scores are wanted


class Fixed(NamedTuple):
    """What a thread's calls have in common."""

    kind: Kind
    weights: Weights
    rows: Rows
    cache: Cache
    asked: Asked
    own: Own  # scratch memory of this thread
    counter: Array


def kind_of(config: ModelConfig) -> Kind:
    return Kind(
        config.n_embd,
        config.n_head,
        config.hidden,
        config.vocab_size,
        config.norm == "layernorm",
        ACTIVATIONS[config.mlp],
        config.embed_norm,
        config.final_norm,
        config.norm_eps,
    )


@jit
def walk(member, members, tokens, feeds, scores, frozen):
    """The part of one thread of `members` in so many tokens and feeds; scores are (rows asked for, V).

    `frozen` has its `Fixed`, whose counter begins at 0.
    """
    fixed: Any = thaw(frozen)
    kind, weights, rows, cache, asked, own, counter = fixed
    work = Asked(asked.tokens[:tokens], asked.feeds[:feeds], asked.scored[: len(scores)])
    crew, n, layers = (member, members), len(work.tokens), weights.qkv.w.shape[0]
    s, width, met = rows.s, kind.width, 0
    first, last = part(crew, n)
    _embed(first, last, kind, weights, s, work)
    for i in range(layers):
        if i:
            met = _meet(counter, met, members)
        _normed(first, last, kind, weights.norms[2 * i], s, rows)
        met = _meet(counter, met, members)
        _linear(crew, n, width, 3 * width, rows.a, weights.qkv, i, rows.qkv, BIAS)
        met = _meet(counter, met, members)
        ends = i + 1 == layers  # of rows whose scores nobody wants, only keys and values are left to do
        attend(crew, kind, i, weights, rows.qkv, cache, work.feeds, ends, rows.att, own)
        met = _meet(counter, met, members)
        if ends:
            n = len(scores)
            first, last = part(crew, n)
            if member == 0:
                _to_the_front(s, work.scored, width)
        for row in range(first, last):
            lay(rows.a[row], rows.att[work.scored[row] if ends else row], 0, width)
        met = _meet(counter, met, members)
        _linear(crew, n, width, width, rows.a, weights.out, i, s, BIAS | ACCUMULATE)
        met = _meet(counter, met, members)
        _normed(first, last, kind, weights.norms[2 * i + 1], s, rows)
        met = _meet(counter, met, members)
        _linear(crew, n, width, kind.hidden, rows.a, weights.fc, i, rows.pre, BIAS)
        if kind.act == 2:
            _linear(crew, n, width, kind.hidden, rows.a, weights.gates, i, rows.gates, BIAS)
        _activate(crew, n, kind, rows)
        met = _meet(counter, met, members)
        _linear(crew, n, kind.hidden, width, rows.h, weights.proj, i, s, BIAS | ACCUMULATE)
    met = _meet(counter, met, members)
    for row in range(first, last):
        _last_norm(kind, weights.norms[2 * layers + 1], s[row, :width], rows.att[row, :width], rows.a[row])
    met = _meet(counter, met, members)
    _columns(crew, n, width, kind.vocab, rows.a, weights.head, scores, rows.s[0], 0)


@inline
def _meet(counter, met, members):
    """How many have met by now, in all."""
    if members > 1:
        meet(counter, met + members)
    return met + members


@inline
def part(crew, count):
    """A member's stretch of range(count)."""
    member, members = crew
    return count * member // members, count * (member + 1) // members


@inline
def _embed(first, last, kind, weights, s, work):
    for f in range(work.feeds.shape[0]):
        start, count, before = work.feeds[f, 0], work.feeds[f, 1], work.feeds[f, 3]
        for row in range(max(first, start), min(last, start + count)):
            x, token, place = s[row, : kind.width], work.tokens[row], before + row - start
            added = weights.places[min(place, weights.places.shape[0] - 1)]
            for j in range(x.shape[0]):
                x[j] = element(weights.embedding, token, j) + added[j]
            if kind.embed_norm:
                norm_row(kind, weights.norms[weights.norms.shape[0] - 2], x, x)


@inline
def _normed(first, last, kind, norm, s, rows):
    """These rows of factors ← the norm of s, by way of memory that attention uses later."""
    for row in range(first, last):
        normed = rows.att[row, : kind.width]
        norm_row(kind, norm, s[row, : kind.width], normed)
        lay(rows.a[row], normed, 0, kind.width)


@inline
def _to_the_front(s, rows, width):
    """The first rows of s ← these, in ascending order."""
    for i in range(rows.shape[0]):
        if rows[i] > i:
            to, of = s[i], s[rows[i]]
            for j in range(width):
                to[j] = of[j]


@inline
def _last_norm(kind, norm, x, y, a):
    if kind.final_norm:
        norm_row(kind, norm, x, y)
        lay(a, y, 0, x.shape[0])
    else:
        lay(a, x, 0, x.shape[0])


@inline
def _linear(crew, n, k, columns, a, layer, i, c, flags):
    _columns(crew, n, k, columns, a, layer.w[i], c, layer.bias[i], flags)


@inline
def _columns(crew, n, k, columns, a, w, c, bias, flags):
    """A member's columns of c ← [c +] a wᵀ [+ bias], a few panels past all rows, k in stretches."""
    begin, end = _own_columns(crew, columns)
    longest, most = stretch(w), most_rows(w)
    strips = (n + most - 1) // most  # of rows, about as many in each
    group = COLUMNS if strips <= 1 else GROUP * COLUMNS
    for left in range(begin, end, group):
        right = min(left + group, end)
        for low in range(0, k, longest):
            high, how = min(low + longest, k), flags if low == 0 else ACCUMULATE
            for strip in range(strips):
                top, bottom = part((strip, strips), n)
                for column in range(left, right, COLUMNS):
                    panel, there = w[column // COLUMNS], min(COLUMNS, columns - column)
                    out, added = c[top:, column:], bias[column:]
                    multiply(bottom - top, low, high, a[top:], panel, out, there, added, how)


@inline
def _own_columns(crew, columns):
    first, last = part(crew, (columns + UNIT - 1) // UNIT)
    return first * UNIT, min(last * UNIT, columns)


@inline
def _activate(crew, n, kind, rows):
    """A member's columns of h ← act(pre), in whole units, so that each is computed in the same way."""
    begin, end = _own_columns(crew, kind.hidden)
    for row in range(n):
        for left in range(begin, end, UNIT):
            x = rows.pre[row, left : left + UNIT]
            if kind.act == 0:  # in place: rows of fused/linear.py under two names for one array stay scalar
                _gelu(x)
            elif kind.act == 1:
                for j in range(UNIT):
                    x[j] = np.float32(0) if x[j] < np.float32(0) else x[j]
            else:
                _silu(x, rows.gates[row, left : left + UNIT])
            lay(rows.h[row], rows.pre[row], left, min(left + UNIT, end))


@inline
def _gelu(x):
    one, linear, cubic = np.float32(1), np.float32(LINEAR), np.float32(CUBIC)
    for j in range(UNIT):
        x[j] = gelu_of(x[j], one, linear, cubic)


@inline
def _silu(x, gate):
    one = np.float32(1)
    for j in range(UNIT):
        x[j] = silu_of(x[j], one) * gate[j]
