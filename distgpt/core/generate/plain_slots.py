"""Default slots, built on kernel operations, for every architecture on CPUs and GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from distgpt.core.generate.slots import CHUNK, Feed, SlotKind, TokensInSlots, check_drop
from distgpt.core.model.model import Model
from distgpt.core.model.passes import Pass, cache_shape
from distgpt.core.ops.api import Array

KEPT = 16  # maximum rows of cached passes, because drafts repeat


class PlainSlots:
    """Slots that run a separate pass for each feed, so that sequences are independent.

    Logits have the kernels' accumulation dtype, which may be float64. A slot's memory is allocated on first
    use.
    """

    chunk = CHUNK
    is_exact = False  # matmuls with few rows sum in another order than with many

    def __init__(self, model: Model, count: int) -> None:
        self.model = model
        self.count, self.length = count, model.config.seq_len
        self.can_drop = not model.config.has_position_vectors
        self._tokens = TokensInSlots(count, self.length)
        self._caches: list[Array | None] = [None] * count
        self._longest = Pass(model, 1, 1, training=False)
        self._shorter: dict[int, Pass] = {}  # number of rows → a view of the longest pass
        self._logits = model.kernels.zeros(1, model.config.padded_vocab)

    def feed(self, work: Sequence[Feed]) -> Array:
        k, config = self.model.kernels, self.model.config
        rows = sum(each.wanted for each in work)
        if rows > len(self._logits):
            self._logits = k.zeros(rows, config.padded_vocab)
        end = 0
        for each in work:
            one = self._pass_for(len(each.tokens))
            start, before = k.integers([each.start]), k.integers([self._tokens.before(each)])
            hidden = one.forward(k.integers(each.tokens), self._cache(each.slot), start, before=before)
            if each.wanted:
                out = self._logits[end : end + each.wanted]
                one.logits(out, hidden[len(hidden) - each.wanted :])
                end += each.wanted
        if not rows:
            return np.zeros((0, config.vocab_size), np.float32)
        return np.array(k.to_host(self._logits[:rows])[:, : config.vocab_size])

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy cached tokens. On GPUs through the host, because their arrays have no strided copies."""
        self._tokens.copy(source, target, length)
        k = self.model.kernels
        old, new = self._cache(source), self._cache(target)
        if k.capabilities.is_async:
            k.put(new, k.to_host(old))
        else:
            new[..., :length, :] = old[..., :length, :]

    def drop(self, slot: int, count: int, kept: int) -> None:
        check_drop(self, slot, count, kept)
        self._tokens.drop(slot, count, kept)
        self.model.kernels.move_cached(self._cache(slot), 0, 0, count, kept, self.model.positions.angles)

    def _pass_for(self, count: int) -> Pass:
        if count > self._longest.n_rows:
            self._longest = Pass(self.model, 1, count, training=False)
            self._shorter.clear()
        if count == self._longest.n_rows:
            return self._longest
        result = self._shorter.get(count) or self._longest.reshaped(1, count)
        if count <= KEPT:
            self._shorter[count] = result
        return result

    def _cache(self, slot: int) -> Array:
        cache = self._caches[slot]
        if cache is None:
            cache = self._caches[slot] = self.model.kernels.zeros(*cache_shape(self.model.config))
        return cache


def slot_bytes(model: Model) -> int:
    """Return the bytes of a slot's keys and values and the logits of its next token."""
    elements = prod(cache_shape(model.config)) + model.config.padded_vocab
    return elements * int(model.kernels.dtype.itemsize)


PLAIN = SlotKind(PlainSlots, slot_bytes)
