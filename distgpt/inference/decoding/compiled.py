"""Slots on CPUs that decode with one compiled call per thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import NamedTuple

import numpy as np

from distgpt.core.config import ModelConfig
from distgpt.core.cpu.compiling.barrier import counters
from distgpt.core.cpu.compiling.jit import entry
from distgpt.core.cpu.graphs.calls import PackedArgs
from distgpt.core.cpu.graphs.launch import ParallelLaunch
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.cpu.pool import pool_of
from distgpt.core.generate.slots import CHUNK, Feed, SlotKind, TokensInSlots, check_drop, check_feeds
from distgpt.core.model.model import Model
from distgpt.core.ops.api import Array
from distgpt.core.ops.low_precision import BITS
from distgpt.inference.decoding.loops import decode
from distgpt.inference.decoding.loops.cached_attention import (
    cache_of,
    cache_shapes,
    copy_slot,
    shift_cache,
    thread_scratch,
)
from distgpt.inference.decoding.loops.operands import operand_rows
from distgpt.inference.decoding.loops.weights import Weights, checksums_of, packed_weights

ROWS, ROOM = 512, 12 << 20  # tokens of one call, and bytes of their rows; longer work is split
WORTHWHILE = 1 << 20  # elements of all weights; smaller models decode on one thread


class Packing(NamedTuple):
    """A model's packed weights."""

    weights: Weights
    rows: Callable[[int, int, str], Array] = operand_rows  # allocates the rows that multiply them
    checksums: Array | None = None  # checksums of the unpacked weights; None: the model never changes


def packing_of(model: Model) -> Packing:
    """Return a model's current weights, packed for decoding. CPUs only, any type except float64.

    Any code may write to the parameters, so checksums detect changes. Reading all parameters is much faster
    than packing them.
    """
    known = model.packing  # another thread may change the attribute
    before = known.checksums if isinstance(known, Packing) else None
    if isinstance(known, Packing) and before is None:
        return known
    checksums = checksums_of(model.params.flat, pool_of(model.kernels.threads))
    if isinstance(known, Packing) and before is not None and np.array_equal(before, checksums):
        return known
    known = model.packing = None  # free the old packing before the new one is allocated
    weights = packed_weights(model.config, model.params, model.positions.angles)
    model.packing = result = Packing(weights, checksums=checksums)
    return result


class CompiledSlots:
    """`count` sequences of at most the context's length, on CPUs, not in float64.

    Uses the weights as they are now. The cache is in bfloat16 unless the weights are float32.
    """

    is_exact, chunk = True, CHUNK

    def __init__(self, model: Model, count: int) -> None:
        kernels, config, packing = _kernels_of(model), model.config, packing_of(model)
        weights = packing.weights
        self.count, self.length, self.can_drop = count, config.seq_len, not config.has_position_vectors
        self._kind = decode.kind_of(config)
        self._tokens = TokensInSlots(count, self.length)
        cached = _cache_dtype(kernels)
        self.cache = cache_of(config, count, cached)
        rows = _rows(packing, config, most_rows(config, count))
        self._most = len(rows.s)
        layers = weights.qkv, weights.out, weights.gates, weights.fc, weights.proj
        elements = weights.head.size + sum(layer.w.size for layer in layers)
        self._angles = weights.cos, weights.sin
        self._pool = pool_of(kernels.threads if elements >= WORTHWHILE else 1)
        zeros = partial(np.zeros, dtype=np.int64)
        most = self._most
        self._inputs = decode.Inputs(zeros(most), feeds=zeros((most, 6)), wanted=zeros(most))
        self._counter = counters(1, self._pool.threads)[0]
        shared = self._kind, weights, rows, self.cache, self._inputs
        members = range(self._pool.threads)
        self._fixed = [
            PackedArgs(decode.Fixed(*shared, thread_scratch(config, cached), self._counter)) for _ in members
        ]
        none = np.empty((0, config.vocab_size), np.float32)
        threads = self._pool.threads
        self._call = entry(decode.decode, 0, 1, 0, 0, none, self._fixed[0])
        arguments = [(i, threads, 0, 0, none, fixed) for i, fixed in enumerate(self._fixed)]
        self._launch = (
            ParallelLaunch(self._pool, decode.decode, arguments, [self._counter]) if threads > 1 else None
        )

    def feed(self, work: Sequence[Feed]) -> Array:
        check_feeds(self, work)
        logits = np.empty((sum(each.wanted for each in work), self._kind.vocab_size), np.float32)
        done = 0
        for part in _parts(work, self._most):
            count = sum(each.wanted for each in part)
            self._walk(part, logits[done : done + count])
            done += count
        return logits

    def copy(self, source: int, target: int, length: int) -> None:
        self._tokens.copy(source, target, length)
        copy_slot(self.cache, source, target, length)

    def drop(self, slot: int, count: int, kept: int) -> None:
        check_drop(self, slot, count, kept)
        self._tokens.drop(slot, count, kept)
        layers, _, heads = self.cache.keys.shape[:3]
        self._pool.split_range(layers * heads, 1, shift_cache, self.cache, slot, *self._angles, count, kept)

    def _walk(self, part: Sequence[Feed], logits: Array) -> None:
        tokens: list[int] = []
        feeds: list[tuple[int, ...]] = []
        wanted: list[int] = []
        for each in part:
            before = self._tokens.before(each)
            feeds.append((len(tokens), len(each.tokens), each.slot, each.start, each.wanted, before))
            tokens.extend(each.tokens)
            wanted.extend(range(len(tokens) - each.wanted, len(tokens)))
        if min(tokens) < 0 or max(tokens) >= self._kind.vocab_size:
            raise ValueError(f"tokens must be at least 0 and less than {self._kind.vocab_size}")
        inputs = self._inputs
        inputs.tokens[: len(tokens)] = tokens
        inputs.feeds[: len(feeds)] = feeds
        inputs.wanted[: len(wanted)] = wanted
        if self._launch is None:
            self._call(0, 1, len(tokens), len(feeds), logits, self._fixed[0])
            return
        self._launch.put(2, len(tokens), len(feeds), logits)
        if self._launch.run():
            raise RuntimeError(f"{decode.decode} has failed")


def most_rows(config: ModelConfig, count: int) -> int:
    """Return how many rows fit in ROOM, but at least one per slot, so that one call decodes all slots."""
    row = 4 * (config.n_embd + config.qkv_width + config.attention_width + 2 * config.hidden)
    return min(ROWS, max(count, min(ROOM // row, config.seq_len)))


def _rows(packing: Packing, config: ModelConfig, count: int) -> decode.Rows:
    width, hidden, rows = config.n_embd, config.hidden, packing.rows
    form, last = packing.weights.qkv.w.dtype.name, packing.weights.head.dtype.name
    widest = max(width, config.attention_width)
    return decode.Rows(
        s=rows(count, width, "float32"),
        qkv=rows(count, config.qkv_width, "float32"),
        att=rows(count, widest, "float32"),
        pre=rows(count, hidden, "float32"),
        gates=rows(count, hidden, "float32"),
        a=rows(count, widest, form),
        h=rows(count, hidden, form),
        last=rows(count, width, last),
    )


def _parts(work: Sequence[Feed], most: int) -> Sequence[Sequence[Feed]]:
    """Split feeds into parts of at most `most` tokens."""
    total = sum(len(each.tokens) for each in work)
    if total <= most:
        return [work] if total else []
    parts: list[list[Feed]] = [[]]
    room = most
    for slot, start, tokens, wanted, *_ in work:
        done = 0
        while done < len(tokens):
            if not room:
                parts.append([])
                room = most
            piece = tokens[done : done + room]
            after = len(tokens) - done - len(piece)
            own = max(0, min(wanted - after, len(piece)))
            parts[-1].append(Feed(slot, start + done, piece, own))
            done += len(piece)
            room -= len(piece)
    return parts


def slot_bytes(model: Model) -> int:
    """Return the bytes of keys and values of one slot."""
    dtype = _cache_dtype(_kernels_of(model))
    return sum(map(prod, cache_shapes(model.config, 1, dtype))) * np.dtype(dtype).itemsize


COMPILED = SlotKind(CompiledSlots, slot_bytes)


def _cache_dtype(kernels: CpuKernels) -> str:
    """Return the type of keys and values, float32 or bfloat16 bits. Only float32 weights use float32."""
    is_whole = kernels.dtype == np.float32 and not kernels.capabilities.rounded
    return "float32" if is_whole else BITS.name


def _kernels_of(model: Model) -> CpuKernels:
    assert isinstance(model.kernels, CpuKernels)
    return model.kernels
