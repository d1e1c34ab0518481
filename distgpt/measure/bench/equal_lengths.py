"""The mean loss over many sequences of different lengths, in batches of equal length, shared by the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import ArrayLike

from distgpt.comm.api import Comm
from distgpt.errors import DataError
from distgpt.kernels.api import Array
from distgpt.model.model import Model
from distgpt.model.passes import Pass


@dataclass(frozen=True, slots=True)
class Sequences:
    """Sequences of tokens, one after the other, and the length of each."""

    tokens: Array
    lengths: Array

    @classmethod
    def of(cls, sequences: Sequence[ArrayLike]) -> Sequences:
        if not len(sequences):
            raise DataError("there are no sequences to evaluate")
        arrays = [np.asarray(sequence).reshape(-1) for sequence in sequences]
        return cls(np.concatenate(arrays), np.array([len(array) for array in arrays]))


class MeanLoss:
    """The mean cross-entropy over all predictions: of every token of every sequence but its first.

    A batch holds at most `most_tokens` predictions, or one sequence. Every worker has batches of its own, so
    that nobody waits for anybody before the end. Memory is kept from call to call.
    """

    def __init__(self, model: Model, most_tokens: int = 1 << 14) -> None:
        self.model, self._most = model, most_tokens
        self._passes: dict[int, Pass] = {}  # of each worker, the largest so far

    def __call__(self, sequences: Sequences | Sequence[ArrayLike], comm: Comm | None = None) -> float:
        """Collective where there is a communicator: each rank takes an equal part of the predictions."""
        every = sequences if isinstance(sequences, Sequences) else Sequences.of(sequences)
        _check(self.model, every)
        k, (rank, size) = self.model.kernels, (comm.rank, comm.size) if comm is not None else (0, 1)
        shares = _shares(every.lengths, size * k.threads)[rank * k.threads : (rank + 1) * k.threads]
        totals = [k.wide_zeros(1) for _ in shares]

        def part(i: int) -> None:
            self._sum(totals[i], i, list(equal_lengths(every, self._most, shares[i])))

        k.each(part, len(shares))
        found = np.zeros(1)
        for total in totals:
            found += k.to_host(total)
        if comm is not None:
            comm.sum(found)
        return float(found[0]) / (len(every.tokens) - len(every.lengths))

    def _sum(self, total: Array, worker: int, batches: Sequence[Array]) -> None:
        """total ← the sum of the losses of all predictions in these batches."""
        if not batches:
            return
        k, mean = self.model.kernels, self.model.kernels.wide_zeros(1)
        shapes = [(len(batch), batch.shape[1] - 1) for batch in batches]
        largest = work = self._pass(worker, *max(shapes, key=prod))
        for batch, shape in zip(batches, shapes, strict=True):
            inputs, targets = (k.integers(side.reshape(-1)) for side in (batch[:, :-1], batch[:, 1:]))
            if work.shape != shape:
                work = largest.reshaped(*shape)
            work.loss(mean, inputs, targets)
            k.sum(total, mean, inputs.size, accumulate=True)

    def _pass(self, worker: int, n_seq: int, seq_len: int) -> Pass:
        """One with room for that many rows, computed by this worker alone."""
        kept = self._passes.get(worker)
        if kept is None or kept.n_rows < n_seq * seq_len:
            self._passes.pop(worker, None)  # its memory first
            kept = Pass(self.model, n_seq, seq_len, training=False, workers=1)
            kept.expect_losses()
            self._passes[worker] = kept
        return kept


def equal_lengths(sequences: Sequences, most_tokens: int, own: Array) -> Iterator[Array]:
    """Batches (n, T + 1), shorter ones first, of the sequences whose places are in `own`.

    Those of one length are cut into batches of nearly the same size.
    """
    starts = np.cumsum(sequences.lengths) - sequences.lengths
    starts, lengths = starts[own], sequences.lengths[own]
    for length in np.unique(lengths):
        at = starts[lengths == length, None] + np.arange(length)
        most = max(1, most_tokens // (int(length) - 1))
        for places in np.array_split(at, -(-len(at) // most)):
            yield sequences.tokens[places]


def _shares(lengths: Array, count: int) -> list[Array]:
    """Places of sequences, in `count` stretches of the order of their lengths: each meets few lengths.

    Each has about as many predictions.
    """
    order = np.argsort(lengths, kind="stable")
    ends = np.cumsum(lengths[order] - 1)
    return np.split(order, np.searchsorted(ends, ends[-1] * np.arange(1, count) / count, side="right"))


def _check(model: Model, sequences: Sequences) -> None:
    tokens, lengths = sequences.tokens, sequences.lengths
    longest, limit, vocab = lengths.max(), model.config.seq_len, model.config.vocab_size
    if lengths.min() < 2:
        raise DataError(
            f"sequence {lengths.argmin()} has {lengths.min()} tokens: a loss takes two at the least"
        )
    if longest > limit + 1:
        raise DataError(
            f"sequence {lengths.argmax()} has {longest} tokens: a context of {limit} predicts in {limit + 1}"
        )
    if tokens.dtype.kind not in "iu":
        raise DataError(f"tokens must be integers, not {tokens.dtype}")
    if tokens.min() < 0 or tokens.max() >= vocab:
        raise DataError(f"tokens must lie in [0, {vocab})")
