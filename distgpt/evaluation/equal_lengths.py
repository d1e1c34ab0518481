"""The mean loss over many sequences of different lengths, in batches of equal length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike

from distgpt.errors import DataError
from distgpt.memory import Array
from distgpt.model import Model
from distgpt.passes import Pass


def mean_loss(model: Model, sequences: Sequence[ArrayLike], most_tokens: int = 1 << 14) -> float:
    """The mean cross-entropy over all predictions: of every token of every sequence but its first.

    A batch holds at most `most_tokens` predictions, or one sequence. Waits once, at the end.
    """
    k = model.kernels
    tokens, lengths = _checked(model, sequences)
    count = len(tokens) - len(lengths)
    total, part = k.wide_zeros(1), k.wide_zeros(1)
    work: Pass | None = None
    for batch in equal_lengths(tokens, lengths, most_tokens):
        inputs, targets = (k.integers(side.reshape(-1)) for side in (batch[:, :-1], batch[:, 1:]))
        shape = (len(batch), batch.shape[1] - 1)
        if work is None or work.shape != shape:
            work = Pass(model, *shape, training=False)
        work.loss(part, inputs, targets)
        k.sum(total, part, inputs.size / count, accumulate=True)
    return float(k.to_host(total)[0])


def equal_lengths(tokens: Array, lengths: Array, most_tokens: int) -> Iterator[Array]:
    """Batches (n, T + 1) of sequences that lie one after the other in `tokens`; shorter ones come first."""
    starts = np.cumsum(lengths) - lengths
    for length in np.unique(lengths):
        at = starts[lengths == length, None] + np.arange(length)
        most = max(1, most_tokens // (int(length) - 1))
        for first in range(0, len(at), most):
            yield tokens[at[first : first + most]]


def _checked(model: Model, sequences: Sequence[ArrayLike]) -> tuple[Array, Array]:
    """All tokens in a row, and how many of them each sequence has."""
    lengths = np.fromiter((np.size(sequence) for sequence in sequences), np.int64)
    if not len(lengths):
        raise DataError("there are no sequences to evaluate")
    longest, limit, vocab = lengths.max(), model.config.seq_len, model.config.vocab_size
    if lengths.min() < 2:
        raise DataError(
            f"sequence {lengths.argmin()} has {lengths.min()} tokens: a loss takes two at the least"
        )
    if longest > limit + 1:
        raise DataError(
            f"sequence {lengths.argmax()} has {longest} tokens: a context of {limit} predicts in {limit + 1}"
        )
    tokens = np.concatenate([np.asarray(sequence).reshape(-1) for sequence in sequences])
    if tokens.dtype.kind not in "iu":
        raise DataError(f"tokens must be integers, not {tokens.dtype}")
    if tokens.min() < 0 or tokens.max() >= vocab:
        raise DataError(f"tokens must lie in [0, {vocab})")
    return tokens, lengths
