"""The forward-pass study's fast path: losses of many short sequences by one compiled call of each worker.

A block of sequences goes through all layers at a time. It is small, so what a layer writes is in a cache when
the next one reads it. Sequences of a block are equally long, and attention has one in each lane of a vector
(attention_short.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import attention_short
import numpy as np
from attention_short import SHORT, ShortScratch, attend_short
from mean_loss import MeanLoss, Sequences
from numpy.typing import ArrayLike

from distgpt.core.comm.api import Comm
from distgpt.core.config import ModelConfig
from distgpt.core.cpu.compiling.jit import inline, jit
from distgpt.core.cpu.fused.activations import gelu_row, relu_row, swiglu_row
from distgpt.core.cpu.fused.attention import rotate
from distgpt.core.cpu.fused.softmax import softmax
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.cpu.matmul.assembled import tile
from distgpt.core.cpu.matmul.microkernel import ACCUMULATE, BIAS
from distgpt.core.cpu.matmul.packing import COLUMNS, LANES, ROWS, aligned
from distgpt.core.model.model import Model
from distgpt.core.ops.api import Array
from distgpt.inference.decoding.loops.decode import kind_of, norm_row
from distgpt.inference.decoding.loops.operands import UNIT
from distgpt.inference.decoding.loops.weights import packed_weights

BLOCK = 2 * LANES  # sequences; attention computes all of them, also where there are fewer
STRIP = 2 * ROWS  # rows that go through a norm and the layers behind it
MOST_BYTES = 1 << 20  # of the matrices of a layer, or of the head: every strip reads them from a cache


def short_sequences(model: Model) -> ShortSequences | None:
    """Return the fast path of a model; None where its kernels or sizes have none."""
    plain = type(model.kernels) is CpuKernels  # not those whose matrices are in int8
    return ShortSequences(model) if plain and fits(model.config, model.kernels.dtype) else None


class ShortLoss(MeanLoss):
    """The mean loss with the fast path, where the model has one."""

    def __init__(self, model: Model, most_tokens: int) -> None:
        super().__init__(model, most_tokens)
        self._fast = short_sequences(model)

    def __call__(self, sequences: Sequences | Sequence[ArrayLike], comm: Comm | None = None) -> float:
        every = sequences if isinstance(sequences, Sequences) else Sequences.of(sequences)
        if self._fast is not None:
            self._fast.begin(every.tokens, every.lengths)
        return super().__call__(every, comm)

    def sum_apart(self, worker: int, share: Array) -> tuple[float, Array]:
        return (0.0, share) if self._fast is None else self._fast.sum(worker, share)


class ShortSequences:
    """Sums the losses of sequences that are short enough."""

    def __init__(self, model: Model) -> None:
        self._model, self._kind = model, kind_of(model.config)
        self._most = longest(model.config) + 1  # tokens of a sequence
        self._memory = [memory_of(model.config) for _ in range(model.kernels.threads)]

    def begin(self, tokens: Array, lengths: Array) -> None:
        """Prepare for `sum` over these sequences, with the weights as they are now."""
        model = self._model
        packed = packed_weights(model.config, model.params, model.positions.angles)
        self._weights = packed._replace(embedding=model.params["wte"])  # row by row
        self._tokens, self._lengths, self._starts = tokens, lengths, np.cumsum(lengths) - lengths

    def sum(self, worker: int, share: Array) -> tuple[float, Array]:
        """Return the sum over a worker's short sequences, and the others. `share` is sorted by length."""
        cut = int(np.searchsorted(self._lengths[share], self._most, side="right"))
        own, memory = share[:cut], self._memory[worker]
        starts, lengths = self._starts[own], self._lengths[own]
        total = sum_losses(self._kind, self._weights, self._tokens, starts, lengths, memory)
        return total, share[cut:]


class Memory(NamedTuple):
    """A worker's memory for a block."""

    s: Array  # the residual stream (rows, C)
    qkv: Array
    att: Array
    a: Array  # of a strip: a norm's output
    pre: Array  # of a strip: what the activation gets
    gates: Array
    act: Array  # of a strip: what it gives
    logits: Array  # of a strip
    probs: Array  # of a row
    found: Array  # the largest logit of a row, and the sum of exponentials
    own: ShortScratch


def fits(config: ModelConfig, dtype: Any) -> bool:
    """Return whether a model's short sequences are computed like this."""
    columns = max(4 * config.n_embd + 3 * config.hidden, config.vocab_size)
    return 4 * config.n_embd * columns <= MOST_BYTES and attention_short.fits(
        LANES, 1, config.head_size, dtype
    )


def longest(config: ModelConfig) -> int:
    """Return the inputs (tokens without the last one) of the longest sequence that is computed like this."""
    return max(t for t in range(1, SHORT + 1) if attention_short.fits(LANES, t, config.head_size, np.float32))


def memory_of(config: ModelConfig) -> Memory:
    def rows(count: int, width: int) -> Array:
        return aligned((count, -(-width // UNIT) * UNIT), "float32")

    width, many = config.n_embd, BLOCK * longest(config)
    return Memory(
        s=rows(many, width),
        qkv=aligned((many, config.qkv_width), "float32"),
        att=aligned((many, width), "float32"),
        a=rows(STRIP, width),
        pre=rows(STRIP, config.hidden),
        gates=rows(STRIP, config.hidden),
        act=rows(STRIP, config.hidden),
        logits=rows(STRIP, config.vocab_size),
        probs=rows(1, config.vocab_size),
        found=rows(1, 2),
        own=attention_short.scratch(config.head_size),
    )


@jit
def sum_losses(kind, weights, tokens, starts, lengths, m):
    """Sum over all predictions in sequences that lie in `tokens`, in order of their lengths."""
    total, first = 0.0, 0
    while first < len(starts):
        last = first + 1
        while last < min(first + BLOCK, len(starts)) and lengths[last] == lengths[first]:
            last += 1
        total += _block(kind, weights, tokens, starts[first:last], lengths[first] - 1, m)
        first = last
    return total


@inline
def _block(kind, weights, tokens, starts, seq_len, m):
    rows, width, layers = len(starts) * seq_len, kind.width, weights.qkv.w.shape[0]
    _embed(kind, weights, tokens, starts, seq_len, m.s)
    for i in range(layers):
        for top in range(0, rows, STRIP):
            n, s = min(STRIP, rows - top), m.s[top:]
            _norms(n, kind, weights.norms[2 * i], s, m.a)
            _linear(n, width, kind.qkv, m.a, weights.qkv, i, m.qkv[top:], BIAS)
        if weights.cos.shape[1]:
            for row in range(rows):
                position = row % seq_len
                heads = kind.heads + kind.kv_heads
                rotate(m.qkv[row], weights.cos[position], weights.sin[position], heads, np.float32(1))
        for first in range(0, len(starts), LANES):
            attend_short(first * seq_len, m.att, None, m.qkv, seq_len, kind.heads, m.own)
        for top in range(0, rows, STRIP):
            n, s = min(STRIP, rows - top), m.s[top:]
            _linear(n, width, width, m.att[top:], weights.out, i, s, BIAS | ACCUMULATE)
            _norms(n, kind, weights.norms[2 * i + 1], s, m.a)
            _linear(n, width, kind.hidden, m.a, weights.fc, i, m.pre, BIAS)
            if kind.act == 2:
                _linear(n, width, kind.hidden, m.a, weights.gates, i, m.gates, BIAS)
            for row in range(n):
                _activate(kind, m.act[row], m.pre[row, : kind.hidden], m.gates[row, : kind.hidden])
            _linear(n, kind.hidden, width, m.act, weights.proj, i, s, BIAS | ACCUMULATE)
    return _losses(kind, weights, tokens, starts, seq_len, m)


@inline
def _embed(kind, weights, tokens, starts, seq_len, s):
    for q in range(len(starts)):
        for t in range(seq_len):
            x, token = s[q * seq_len + t, : kind.width], tokens[starts[q] + t]
            of = weights.embedding[token]
            added = weights.places[min(t, weights.places.shape[0] - 1)]
            for j in range(x.shape[0]):
                x[j] = of[j] + added[j]
            if kind.embed_norm:
                norm_row(kind, weights.norms[weights.norms.shape[0] - 2], x, x)


@inline
def _norms(n, kind, norm, s, a):
    for row in range(n):
        norm_row(kind, norm, s[row, : kind.width], a[row, : kind.width])


@inline
def _linear(n, k, columns, a, layer, i, c, flags):
    _columns(n, k, columns, a, layer.w[i], c, layer.bias[i], flags)


@inline
def _columns(n, k, columns, a, w, c, bias, flags):
    """c ← [c +] a wᵀ [+ bias] of a strip."""
    for left in range(0, columns, COLUMNS):
        panel, there, added = w[left // COLUMNS], min(COLUMNS, columns - left), bias[left:]
        for top in range(0, n, ROWS):
            own, out = a[top:], c[top:, left:]
            tile(
                min(ROWS, n - top), k, own, a.strides[0], 4, panel, out, c.strides[0], there, added, flags
            )  # fmt: skip


@inline
def _activate(kind, y, x, gate):
    if kind.act == 0:
        gelu_row(y, x)
    elif kind.act == 1:
        relu_row(y, x)
    else:
        swiglu_row(y[: x.shape[0]], x, gate)


@inline
def _losses(kind, weights, tokens, starts, seq_len, m):
    """The sum over the block."""
    total, rows, width = 0.0, len(starts) * seq_len, kind.width
    for top in range(0, rows, STRIP):
        n, x = min(STRIP, rows - top), m.s[top:]
        if kind.final_norm:
            _norms(n, kind, weights.norms[weights.norms.shape[0] - 1], x, m.a)
            x = m.a
        _columns(n, width, kind.vocab, x, weights.head, m.logits, m.logits[0], 0)
        for i in range(n):
            row = top + i
            target = tokens[starts[row // seq_len] + row % seq_len + 1]
            scores, found = m.logits[i], m.found[0]
            softmax(scores, m.probs[0], kind.vocab, kind.vocab, np.float32(1), found)
            total += found[0] + np.log(found[1]) - scores[target]
    return total
