"""New tokens of many sequences through all layers, in one compiled call of each thread.

A phase splits rows, columns or heads over the threads, which wait for each other before the next one. A row
is computed in
the same way whatever the number of rows and of threads, so that nothing depends on who shares a batch.
"""

from __future__ import annotations

import platform
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from distgpt.core.config import ModelConfig
from distgpt.core.cpu.compiling.jit import inline, jit, unpack_args
from distgpt.core.cpu.decoding.cached_attention import Cache, ThreadScratch, attend
from distgpt.core.cpu.decoding.operands import UNIT, element, most_rows, multiply, put_row, stretch
from distgpt.core.cpu.decoding.variants import (
    FC,
    GATES,
    OUT,
    PROJ,
    QKV,
    Variants,
    add_columns,
    read_hidden,
    read_row,
)
from distgpt.core.cpu.decoding.weights import Weights
from distgpt.core.cpu.fused.activations import NUMBERS, activate_in_place
from distgpt.core.cpu.matmul.microkernel import ACCUMULATE, BIAS
from distgpt.core.cpu.matmul.packing import COLUMNS, LINE, aligned
from distgpt.core.ops.api import Array

GROUP = 2  # panels that all rows go past before the next ones
ADD = BIAS | ACCUMULATE


class Kind(NamedTuple):
    """The architecture, as far as the decoder depends on it."""

    width: int
    heads: int
    kv_heads: int
    size: int  # of a head
    qkv: int  # the width of queries, keys and values side by side
    hidden: int
    vocab: int
    centred: bool  # layer norm, not RMS norm
    act: int
    gated: bool
    embed_norm: bool
    final_norm: bool
    eps: float
    qk_norm: bool


class Rows(NamedTuple):
    """Memory for a number of rows. The factors `a`, `h` and `last` are in the form of the weights."""

    s: Array  # the residual stream (N, C)
    qkv: Array
    att: Array  # attention's output (N, H·head), before that a norm's
    pre: Array  # the activation's input, and output
    gates: Array
    a: Array  # a norm's output, or attention's
    h: Array  # the activation's output
    last: Array  # the last norm's output; the output layer may have another form than the rest


class Inputs(NamedTuple):
    """Memory for a call's input. A feed: its first row, rows, lane, tokens before them, rows scored."""

    tokens: Array
    feeds: Array  # int64 (F, 5)
    scored: Array  # the rows to score
    variants: Array  # (2, N): those of all rows, and of the rows to score; 0: the model itself


class Fixed(NamedTuple):
    """Arguments that all calls of a thread have in common."""

    kind: Kind
    weights: Weights
    variants: Variants
    rows: Rows
    cache: Cache
    inputs: Inputs
    own: ThreadScratch  # scratch memory of this thread
    counter: Array


def kind_of(config: ModelConfig) -> Kind:
    return Kind(
        config.n_embd,
        config.n_head,
        config.kv_heads,
        config.head_size,
        config.qkv_width,
        config.hidden,
        config.vocab_size,
        config.centred,
        NUMBERS[config.mlp],
        config.gated,
        config.embed_norm,
        config.final_norm,
        config.norm_eps,
        config.qk_norm,
    )


@jit
def decode(thread, n_threads, tokens, feeds, scores, packed):
    """Compute one thread's part of this many tokens and feeds; scores are (rows scored, V).

    `packed` has the thread's `Fixed`, whose counter begins at 0.
    """
    fixed: Any = unpack_args(packed)
    kind, weights, variants, rows, cache, inputs, own, counter = fixed
    work = Inputs(inputs.tokens[:tokens], inputs.feeds[:feeds], inputs.scored[: len(scores)], inputs.variants)
    threads, n, layers = (thread, n_threads), len(work.tokens), weights.qkv.w.shape[0]
    which = work.variants[0, :n]
    s, width, heads, arrivals = rows.s, kind.width, kind.heads * kind.size, 0
    first, last = part(threads, n)
    _embed(first, last, kind, weights, s, work)
    for i in range(layers):
        if i:
            arrivals = _wait_for_all(counter, arrivals, n_threads)
        _normed(first, last, kind, weights.norms[2 * i], s, rows, variants, QKV, which, i)
        arrivals = _wait_for_all(counter, arrivals, n_threads)
        _linear(threads, n, width, kind.qkv, rows.a, weights.qkv, i, rows.qkv, BIAS, (variants, QKV, which))
        if weights.values.shape[0] and (layers - 1 - i) % 2 == 0:  # as ModelConfig.value_layers says
            _add_values(threads, kind, weights.values[i // 2], work.tokens, rows.qkv)
        arrivals = _wait_for_all(counter, arrivals, n_threads)
        ends = i + 1 == layers  # rows that are not scored only need keys and values there
        attend(threads, kind, i, weights, rows.qkv, cache, work.feeds, ends, rows.att, own)
        arrivals = _wait_for_all(counter, arrivals, n_threads)
        if ends:
            n = len(scores)
            which = work.variants[1, :n]
            first, last = part(threads, n)
            if thread == 0:
                _to_the_front(s, work.scored, width)
        _attended(first, last, heads, rows, work.scored, ends, variants, which, i)
        arrivals = _wait_for_all(counter, arrivals, n_threads)
        _linear(threads, n, heads, width, rows.a, weights.out, i, s, ADD, (variants, OUT, which))
        arrivals = _wait_for_all(counter, arrivals, n_threads)
        _normed(first, last, kind, weights.norms[2 * i + 1], s, rows, variants, FC, which, i)
        arrivals = _wait_for_all(counter, arrivals, n_threads)
        _expand(threads, n, kind, weights, rows, variants, which, i)
        arrivals = _wait_for_all(counter, arrivals, n_threads)
        if read_hidden(variants):
            _read_rows(first, last, rows.pre, variants, PROJ, which, i)
            arrivals = _wait_for_all(counter, arrivals, n_threads)
        _linear(threads, n, kind.hidden, width, rows.h, weights.proj, i, s, ADD, (variants, PROJ, which))
    arrivals = _wait_for_all(counter, arrivals, n_threads)
    for row in range(first, last):
        _last_norm(kind, weights.norms[2 * layers + 1], s[row, :width], rows.att[row, :width], rows.last[row])
    arrivals = _wait_for_all(counter, arrivals, n_threads)
    _columns(threads, n, width, kind.vocab, rows.last, weights.head, scores, rows.s[0], 0)


@inline
def _wait_for_all(counter, arrivals, n_threads):
    """Wait for all threads; return the number of arrivals so far."""
    if n_threads > 1:
        barrier(counter, arrivals + n_threads)
    return arrivals + n_threads


@inline
def part(threads, count):
    """Return a thread's stretch of range(count)."""
    thread, n_threads = threads
    return count * thread // n_threads, count * (thread + 1) // n_threads


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
def _expand(threads, n, kind, weights, rows, variants, which, i):
    """A thread's columns of an MLP's first half: fc, gates, activation."""
    width, hidden = kind.width, kind.hidden
    _linear(threads, n, width, hidden, rows.a, weights.fc, i, rows.pre, BIAS, (variants, FC, which), UNIT)
    if kind.gated:
        own = variants, GATES, which
        _linear(threads, n, width, hidden, rows.a, weights.gates, i, rows.gates, BIAS, own, UNIT)
    _activate(threads, n, kind, rows)


@inline
def _normed(first, last, kind, norm, s, rows, variants, place, which, i):
    """Rows first … last of the factors ← the norm of s, by way of memory that attention uses later."""
    for row in range(first, last):
        normed = rows.att[row, : kind.width]
        norm_row(kind, norm, s[row, : kind.width], normed)
        put_row(rows.a[row], normed, 0, kind.width)
        read_row(variants, place, i, row, which[row], rows.att[row:])


@inline
def _attended(first, last, width, rows, scored, ends, variants, which, i):
    """Rows first … last of the factors ← what attention gave; of the last layer for rows that are scored."""
    for row in range(first, last):
        at = scored[row] if ends else row
        put_row(rows.a[row], rows.att[at], 0, width)
        read_row(variants, OUT, i, row, which[row], rows.att[at:])


@inline
def _read_rows(first, last, x, variants, place, which, i):
    for row in range(first, last):
        read_row(variants, place, i, row, which[row], x[row:])


@inline
def _to_the_front(s, rows, width):
    """The first rows of s ← `rows` of it, which ascend."""
    for i in range(rows.shape[0]):
        if rows[i] > i:
            to, of = s[i], s[rows[i]]
            for j in range(width):
                to[j] = of[j]


@inline
def _last_norm(kind, norm, x, y, a):
    if kind.final_norm:
        norm_row(kind, norm, x, y)
        put_row(a, y, 0, x.shape[0])
    else:
        put_row(a, x, 0, x.shape[0])


@inline
def _linear(threads, n, k, columns, a, layer, i, c, flags, own, unit=COLUMNS):
    """A thread's columns of a layer, in each row those of its own variant: `which` of them."""
    _columns(threads, n, k, columns, a, layer.w[i], c, layer.bias[i], flags, unit)
    variants, place, which = own
    begin, end = _own_columns(threads, columns, unit)
    add_columns(variants, place, i, which, begin, end, c)


@inline
def _columns(threads, n, k, columns, a, w, c, bias, flags, unit=COLUMNS):
    """A thread's columns of c ← [c +] a wᵀ [+ bias], a few panels past all rows, k in stretches."""
    begin, end = _own_columns(threads, columns, unit)
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
def _add_values(threads, kind, values, tokens, qkv):
    """A thread's columns of v += the value embedding of each token."""
    begin, end = _own_columns(threads, kind.qkv, COLUMNS)
    before = kind.qkv - kind.kv_heads * kind.size
    for row in range(tokens.shape[0]):
        for column in range(max(begin, before), end):
            qkv[row, column] += element(values, tokens[row], column - before)


@inline
def _own_columns(threads, columns, unit):
    first, last = part(threads, (columns + unit - 1) // unit)
    return first * unit, min(last * unit, columns)


@inline
def _activate(threads, n, kind, rows):
    """A thread's columns of h ← act(pre), in whole units, so that each is computed in the same way."""
    begin, end = _own_columns(threads, kind.hidden, UNIT)
    for row in range(n):
        for left in range(begin, end, UNIT):
            x = rows.pre[row, left : left + UNIT]
            activate_in_place(kind.act, x, rows.gates[row, left : left + UNIT], UNIT)
            put_row(rows.h[row], rows.pre[row], left, min(left + UNIT, end))


@inline
def norm_row(kind, norm, x, y):
    """y ← (x - mean) / std · gain + bias; RMS norm has no mean."""
    width, gain, bias = x.shape[0], norm[0], norm[1]
    share, mean, square = np.float32(1 / width), np.float32(0), np.float32(0)
    if kind.centred:
        for j in range(width):
            mean += x[j]
        mean *= share
    for j in range(width):
        square += (x[j] - mean) * (x[j] - mean)
    scale = np.float32(1) / np.sqrt(square * share + np.float32(kind.eps))
    for j in range(width):
        y[j] = (x[j] - mean) * scale * gain[j] + bias[j]


# -- a barrier inside compiled calls: threads count themselves in, and spin until all are there

SPINS = 2_000  # looks at the counter, some 30 µs, before a thread yields its core

_I64 = ir.IntType(64)
_X86: tuple[str, list[ir.Constant]] = ("llvm.x86.sse2.pause", [])
_ARM = ("llvm.aarch64.hint", [ir.IntType(32)(1)])
PAUSES = {"x86_64": _X86, "amd64": _X86, "aarch64": _ARM, "arm64": _ARM}
_yield_core = types.ExternalFunction("sched_yield", types.int32())


def counter() -> Array:
    """Make a counter of arrivals, alone in its cache line; it must be 0 when a call begins."""
    return aligned((LINE // 8,), "int64")


@inline
def barrier(counter, arrivals):
    """Arrive, and return when `arrivals` threads have, since the call began."""
    _arrive(counter)
    spins = 0
    while _arrived(counter) < arrivals:
        spins += 1
        if spins < SPINS:
            _pause()
        else:
            _yield_core()


def _first(context, builder, signature, values):
    array = context.make_array(signature.args[0])(context, builder, values[0])
    return cgutils.gep_inbounds(builder, array.data, 0)


@intrinsic
def _arrive(context, counter=None):
    def generate(context, builder, signature, values):
        builder.atomic_rmw("add", _first(context, builder, signature, values), _I64(1), "acq_rel")
        return context.get_dummy_value()

    return types.none(counter), generate


@intrinsic
def _arrived(context, counter=None):
    def generate(context, builder, signature, values):
        return builder.load_atomic(_first(context, builder, signature, values), "acquire", 8)

    return types.int64(counter), generate


@intrinsic
def _pause(context):
    """Tell the core that this loop waits; nothing on unknown processors."""

    def generate(context, builder, signature, values):
        name, arguments = PAUSES.get(platform.machine().lower(), ("", []))
        if name:
            kinds = [value.type for value in arguments]
            function = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(ir.VoidType(), kinds), name
            )
            builder.call(function, arguments)
        return context.get_dummy_value()

    return types.none(), generate
