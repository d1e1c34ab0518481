"""Lanes on the vocabulary of operations: the reference, for every architecture, on CPUs and GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod

import numpy as np

from distgpt.core.config import ModelConfig
from distgpt.core.generate.lanes import Feed, check_drop
from distgpt.core.model.model import Model
from distgpt.core.model.packing import angles_of
from distgpt.core.model.passes import Pass
from distgpt.core.ops.api import Angles, Array, Work

KEPT = 16  # rows up to which the views of a pass are kept: drafts come again and again


class UncompiledLanes:
    """A pass of its own for each feed, one after the other: so a sequence cannot depend on another's.

    Scores have the kernels' wide type, which is float64 where they compute in it. A lane's memory is made
    when it is first used.
    """

    is_exact = False

    def __init__(self, model: Model, count: int) -> None:
        self.model, self.count, self.length = model, count, model.config.seq_len
        self.can_drop = not model.config.has_position_vectors
        k = model.kernels
        self._caches: list[Array | None] = [None] * count
        self._one = Pass(model, 1, 1, training=False)
        self._most = self._one  # the pass with the most rows so far
        self._shorter: dict[int, Pass] = {}
        self._token, self._start = k.integers([0]), k.integers([0])
        self._decoded = k.zeros(count, model.config.padded_vocab)  # a row for each lane's next token
        self._scores = k.zeros(1, model.config.padded_vocab)
        self._next: dict[int, Work] = {}

    def feed(self, work: Sequence[Feed]) -> Array:
        """The scores, as `Lanes` says."""
        assert not any(each.variant for each in work), "only compiled lanes have variants"
        k, rows = self.model.kernels, sum(each.scored for each in work if not _decodes(each))
        if rows > len(self._scores):
            self._scores = k.zeros(rows, self.model.config.padded_vocab)
        end = 0
        for each in work:
            if _decodes(each):
                self._decode(each)
            else:
                self._prefill(each, self._scores[end : end + each.scored])
                end += each.scored
        return self._gathered(work, rows)

    def copy(self, source: int, target: int, length: int) -> None:
        """On GPUs all of the lane goes by way of the host: their arrays know no strided copies."""
        k, old, new = self.model.kernels, self._cache(source), self._cache(target)
        if k.capabilities.is_async:
            k.put(new, k.to_host(old))
        else:
            new[..., :length, :] = old[..., :length, :]

    def drop(self, lane: int, count: int, kept: int) -> None:
        """Done on the host, for GPUs too: it happens once in half a context."""
        check_drop(self, lane, count, kept)
        k, cache = self.model.kernels, self._cache(lane)
        angles = angles_of(self.model.positions)
        turn = None if angles is None else Angles(*(k.to_host(table[count : count + 1]) for table in angles))
        whole = np.array(k.to_host(cache))
        drop_first(whole, turn, count, kept)
        k.put(cache, whole)

    def _decode(self, one: Feed) -> None:
        """The usual case: a token, and the scores after it. Recorded once for each lane."""
        k, lane = self.model.kernels, one.lane
        k.put(self._start, np.array([one.start]))
        k.put(self._token, np.array(one.tokens))
        if lane not in self._next:
            out, cache = self._decoded[lane : lane + 1], self._cache(lane)
            self._next[lane] = k.record(partial(self._run, self._one, self._token, cache, out))
        self._next[lane]()

    def _prefill(self, some: Feed, out: Array) -> None:
        k = self.model.kernels
        k.put(self._start, np.array([some.start]))
        self._run(self._pass_for(len(some.tokens)), k.integers(some.tokens), self._cache(some.lane), out)

    def _run(self, work: Pass, tokens: Array, cache: Array, out: Array) -> None:
        hidden = work.hidden(tokens, cache, self._start)
        if len(out):
            work.scores(out, hidden[len(hidden) - len(out) :])

    def _pass_for(self, count: int) -> Pass:
        if count > self._most.n_rows:
            self._most = Pass(self.model, 1, count, training=False)
            self._shorter.clear()
        if count == self._most.n_rows:
            return self._most
        found = self._shorter.get(count) or self._most.reshaped(1, count)
        if count <= KEPT:
            self._shorter[count] = found
        return found

    def _cache(self, lane: int) -> Array:
        cache = self._caches[lane]
        if cache is None:
            cache = self._caches[lane] = self.model.kernels.zeros(*_shape(self.model.config))
        return cache

    def _gathered(self, work: Sequence[Feed], rows: int) -> Array:
        """The rows of scores on the host, without padding."""
        k, vocab, end = self.model.kernels, self.model.config.vocab_size, 0
        lanes = [each.lane for each in work if _decodes(each)]
        decoded = k.to_host(self._decoded[min(lanes) : max(lanes) + 1]) if lanes else None
        none = np.zeros((0, vocab), np.float32)
        others, found = k.to_host(self._scores[:rows]) if rows else none, [none]
        for each in work:
            if decoded is not None and _decodes(each):
                row = each.lane - min(lanes)
                found.append(decoded[row : row + 1, :vocab])
            else:
                found.append(others[end : end + each.scored, :vocab])
                end += each.scored
        return np.concatenate(found)


def drop_first(cache: Array, turn: Angles | None, count: int, kept: int) -> None:
    """cache (layers, 2, …, T, head): positions 0 … kept ← those from `count` on, keys turned back."""
    found = cache[..., count : count + kept, :].copy()
    if turn is not None:
        left, right = np.split(found[:, 0], 2, axis=-1)
        found[:, 0] = np.concatenate(
            (left * turn.cos + right * turn.sin, right * turn.cos - left * turn.sin), axis=-1
        )
    cache[..., :kept, :] = found


def _shape(config: ModelConfig) -> tuple[int, ...]:
    """Return the shape of a lane's keys and values."""
    return config.n_layer, 2, 1, config.kv_heads, config.seq_len, config.head_size


def lane_bytes(model: Model) -> int:
    """Memory of one lane: its keys and values, and the scores of its next token."""
    elements = prod(_shape(model.config)) + model.config.padded_vocab
    return elements * int(model.kernels.dtype.itemsize)


def _decodes(each: Feed) -> bool:
    return len(each.tokens) == 1 and each.scored == 1
