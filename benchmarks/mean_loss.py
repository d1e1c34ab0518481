"""The mean loss over sequences of many lengths, in batches of equal length that threads and ranks share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import ArrayLike

from distgpt.core.comm.api import Comm
from distgpt.core.model.model import Model
from distgpt.core.model.passes import Pass
from distgpt.core.ops.api import Array, Work


@dataclass(frozen=True, slots=True)
class Sequences:
    """Concatenated sequences of tokens, and their lengths."""

    tokens: Array
    lengths: Array

    @classmethod
    def of(cls, sequences: Sequence[ArrayLike]) -> Sequences:
        arrays = [np.asarray(sequence).reshape(-1) for sequence in sequences]
        return cls(np.concatenate(arrays), np.array([len(array) for array in arrays]))

    def first(self, count: int) -> Sequences:
        lengths = self.lengths[:count]
        return Sequences(self.tokens[: lengths.sum()], lengths)

    @property
    def predictions(self) -> int:
        return len(self.tokens) - len(self.lengths)


class MeanLoss:
    """The mean cross-entropy over all tokens except the first of each sequence.

    A batch has at most `most_tokens` predictions, or one sequence. Workers have separate batches, so
    they synchronize only at the end. Memory is reused between calls.
    """

    def __init__(self, model: Model, most_tokens: int = 1 << 14) -> None:
        self.model, self._most = model, most_tokens
        self._workers: list[_Worker] = []

    def __call__(self, sequences: Sequences | Sequence[ArrayLike], comm: Comm | None = None) -> float:
        """Return the mean loss. Collective with a communicator: the ranks have equal shares."""
        every = sequences if isinstance(sequences, Sequences) else Sequences.of(sequences)
        k, (rank, size) = self.model.kernels, (comm.rank, comm.size) if comm is not None else (0, 1)
        shares = _shares(every.lengths, size * k.threads)[rank * k.threads : (rank + 1) * k.threads]
        workers, found = [self._worker(i) for i in range(len(shares))], np.zeros(1)

        def work(i: int) -> None:
            workers[i].sum(list(equal_lengths(every, self._most, shares[i])))

        k.each(work, len(shares))
        for worker in workers:
            found += k.to_host(worker.total)
        if comm is not None:
            comm.sum(found)
        return float(found[0]) / every.predictions

    def _worker(self, number: int) -> _Worker:
        while len(self._workers) <= number:
            self._workers.append(_Worker(self.model))
        return self._workers[number]


class _Worker:
    """A worker's sum of losses, memory for its largest batch, and captured work for each shape."""

    def __init__(self, model: Model) -> None:
        self._model, self._k = model, model.kernels
        self.total, self._mean = self._k.accum_zeros(1), self._k.accum_zeros(1)
        self._largest: Pass | None = None
        self._recorded: dict[tuple[int, int], tuple[Array, Array, Work]] = {}

    def sum(self, batches: Sequence[Array]) -> None:
        self._k.zero(self.total)
        shapes = [(len(batch), batch.shape[1] - 1) for batch in batches]
        if shapes:
            self._reserve(*max(shapes, key=prod))
        for batch, shape in zip(batches, shapes, strict=True):
            if shape not in self._recorded:
                self._recorded[shape] = self._work(shape)
            inputs, targets, work = self._recorded[shape]
            self._k.put(inputs, batch[:, :-1].reshape(-1))
            self._k.put(targets, batch[:, 1:].reshape(-1))
            work()

    def _work(self, shape: tuple[int, int]) -> tuple[Array, Array, Work]:
        assert self._largest is not None
        same = self._largest.shape == shape
        losses = self._largest if same else self._largest.reshaped(*shape)
        inputs, targets = (self._k.integers(np.zeros(prod(shape))) for _ in range(2))

        def work() -> None:
            losses.loss(self._mean, inputs, targets)
            self._k.sum(self.total, self._mean, prod(shape), accumulate=True)

        return inputs, targets, self._k.record(work)

    def _reserve(self, n_seq: int, seq_len: int) -> None:
        if self._largest is None or self._largest.n_rows < n_seq * seq_len:
            self._recorded.clear()
            self._largest = None  # reserve before recording
            self._largest = Pass(self._model, n_seq, seq_len, training=False, workers=1)
            self._largest.expect_losses()


def equal_lengths(sequences: Sequences, most_tokens: int, own: Array) -> Iterator[Array]:
    """Yield batches (n, T + 1) of the sequences with indices in `own`, shorter ones first.

    Batches of sequences of one length have nearly equal sizes.
    """
    starts = np.cumsum(sequences.lengths) - sequences.lengths
    starts, lengths = starts[own], sequences.lengths[own]
    for length in np.unique(lengths):
        at = starts[lengths == length, None] + np.arange(length)
        most = max(1, most_tokens // (int(length) - 1))
        for offsets in np.array_split(at, -(-len(at) // most)):
            yield sequences.tokens[offsets]


def _shares(lengths: Array, count: int) -> list[Array]:
    """Divide the indices of all sequences, sorted by length, into `count` parts.

    Parts have few lengths and about the same number of predictions.
    """
    order = np.argsort(lengths, kind="stable")
    ends = np.cumsum(lengths[order] - 1)
    return np.split(order, np.searchsorted(ends, ends[-1] * np.arange(1, count) / count, side="right"))
