"""The loss of many spans of text, to the bit the same on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from distgpt.comm.api import Comm
from distgpt.memory import Array
from distgpt.model import Model
from distgpt.passes import Pass

# Tokens that go through the model at a time; a GPU needs more of them to be busy.
AT_A_TIME, AT_A_TIME_QUEUED = 1 << 12, 1 << 15
SHORTEST = 32  # lengths are rounded up to this times a power of two: few shapes, little padding


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens of which those from `first` on are to be predicted, each from all before it; 1 ≤ first."""

    ids: Array
    first: int = 1

    @property
    def count(self) -> int:
        return len(self.ids) - self.first


class Scorer:
    """Batches are cut the same way whoever computes them, and every sum has its own place in the result."""

    def __init__(self, model: Model, comm: Comm) -> None:
        self.model, self.comm = model, comm
        self._most = AT_A_TIME_QUEUED if model.kernels.queued else AT_A_TIME
        self._pass: Pass | None = None

    def reserve(self, length: int) -> None:
        """Make the memory for spans of so many predictions."""
        padded = self._padded(length)
        rows = max(1, self._most // padded)
        if self._pass is None or (self._pass.n_rows, self._pass.seq_len) != (rows * padded, padded):
            self._pass = None  # its memory first
            self._pass = Pass(self.model, rows, padded, training=False)

    def sums(self, spans: Sequence[Span]) -> Array:
        """The summed loss of each span, float64 (n,). Collective."""
        sums = np.zeros(len(spans))
        for number, chosen in enumerate(self._batches(spans)):
            if number % self.comm.size == self.comm.rank:
                self._score([spans[i] for i in chosen], chosen, sums)
        self.comm.sum(sums)  # each place is zero on all ranks but one
        return sums

    def _score(self, spans: list[Span], places: list[int], sums: Array) -> None:
        self.reserve(max(len(span.ids) for span in spans) - 1)
        work = self._pass
        assert work is not None
        tokens, targets = np.zeros((2, work.n_rows // work.seq_len, work.seq_len), np.int32)
        for row, span in enumerate(spans):
            tokens[row, : len(span.ids) - 1] = span.ids[:-1]
            targets[row, : len(span.ids) - 1] = span.ids[1:]
        k = self.model.kernels
        losses = k.to_host(work.losses(k.integers(tokens.reshape(-1)), k.integers(targets.reshape(-1))))
        for place, span, row in zip(places, spans, losses.reshape(tokens.shape), strict=False):
            sums[place] = row[span.first - 1 : len(span.ids) - 1].sum(dtype=np.float64)

    def _batches(self, spans: Sequence[Span]) -> Iterator[list[int]]:
        """Places of spans that are padded to one length, longest first."""
        by_length: dict[int, list[int]] = {}
        for i, span in enumerate(spans):
            by_length.setdefault(self._padded(len(span.ids) - 1), []).append(i)
        for length in sorted(by_length, reverse=True):
            each = max(1, self._most // length)
            places = by_length[length]
            yield from (places[i : i + each] for i in range(0, len(places), each))

    def _padded(self, length: int) -> int:
        padded = SHORTEST
        while padded < length:
            padded *= 2
        return min(padded, self.model.config.seq_len)
