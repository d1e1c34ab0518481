"""One measurement of `distgpt bench forward`: the mean loss of a preset over names, timed.

Names differ in length: they are evaluated in batches of equal length, which ranks and threads divide up.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from distgpt.comm.agree import gather_ints
from distgpt.comm.api import Comm
from distgpt.comm.cores import peak_memory
from distgpt.config.presets import preset
from distgpt.errors import DataError
from distgpt.kernels.api import Array, Kernels, Work
from distgpt.measure.published import ONE_AT_A_TIME
from distgpt.measure.timing import timed
from distgpt.model.layers import Block
from distgpt.model.model import Model
from distgpt.model.passes import Pass
from distgpt.stages import Stage

SEED = 1  # of the weights
BOUNDARY = 0  # at both ends of a name; 1 … 26 for the letters
ORDER = 11  # the seed that shuffles the names: the file is sorted by alphabet
ROWS = 1 << 10  # fewer take longer to start, the activations of more leave the caches
MOST_ROWS_ON_GPU = 1 << 18
ONE = 1  # token: a batch then holds a single sequence


@dataclass(frozen=True, slots=True)
class Job:
    """What to measure. `threads` 0: the stage's share of the cores."""

    preset: str
    method: str
    names: int
    dtype: str = "float32"
    threads: int = 0
    repeats: int = 5
    patience: float = 60.0


class ShortSequences(Protocol):
    """A faster way to sum the losses of sequences that are short enough."""

    def begin(self, tokens: Array, lengths: Array) -> None:
        """Prepare for `sum` over these sequences, with the weights as they are now."""

    def sum(self, worker: int, share: Array) -> tuple[float, Array]:
        """Return the sum over a worker's short sequences, and the indices of the others."""


def measure(
    job: Job, stage: Stage, short_sequences: Callable[[Model], ShortSequences | None] = lambda model: None
) -> dict[str, Any]:
    """Return seconds by rank 0's clock, the loss and memory. Collective."""
    kernels, comm = stage.kernels(job.dtype), stage.comm
    model = initialised(job.preset, kernels)
    every = sequences(job.names)
    one_by_one = job.method in ONE_AT_A_TIME
    rows, short = (ONE, None) if one_by_one else (rows_at_once(model, stage), short_sequences(model))
    mean_loss = MeanLoss(model, rows, short)

    def work(names: int) -> float:
        return mean_loss(every.first(names), comm)

    def agreed(seconds: float) -> float:
        return comm.allreduce_max(int(seconds * 1e9)) / 1e9

    found = timed(work, job.names, job.repeats, job.patience, agreed)
    found["peak_memory"] = gather_ints(comm, peak_memory())
    if stage.device is not None:
        found["peak_gpu_memory"] = gather_ints(comm, int(stage.device.taken()))
    return found | {"ranks": comm.size, "threads": kernels.threads}


def initialised(name: str, kernels: Kernels) -> Model:
    """The preset's model with the weights that every method computes with."""
    model = Model(preset(name).model, kernels)
    model.initialise(SEED)
    return model


def sequences(names: int) -> Sequences:
    return Sequences.of([tokens_of(name) for name in bundled_names(names)])


def rows_at_once(model: Model, stage: Stage) -> int:
    """Return the predictions in a batch: on a GPU as many as fit into half of its free memory."""
    if stage.device is None:
        return ROWS
    c, k = model.config, model.kernels
    elements = sum(Block.activations(c).values()) + 4 * c.n_embd  # one layer's, and what is around it
    wide = 8 * (c.n_head + 13)  # statistics and tokens, of 8 bytes at most
    free = (stage.free_memory()[0] - k.logits_bytes) // 2
    return max(1, min(MOST_ROWS_ON_GPU, free // (elements * int(k.dtype.itemsize) + wide)))


def tokens_of(name: str) -> list[int]:
    return [BOUNDARY, *(ord(letter) - ord("a") + 1 for letter in name), BOUNDARY]


def bundled_names(count: int) -> list[str]:
    """That many of the bundled names, the same in every run; from the start again when they run out."""
    from distgpt.data.loading import bundled

    names = bundled("data", "names.txt").read_text().split()
    random.Random(ORDER).shuffle(names)
    return [names[i % len(names)] for i in range(count)]


# -- the mean loss over sequences of different lengths


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

    def first(self, count: int) -> Sequences:
        lengths = self.lengths[:count]
        return Sequences(self.tokens[: lengths.sum()], lengths)

    @property
    def predictions(self) -> int:
        return len(self.tokens) - len(self.lengths)


class MeanLoss:
    """The mean cross-entropy over all predictions: of every token of every sequence but its first.

    A batch holds at most `most_tokens` predictions, or one sequence. Every worker has batches of its own, so
    that nobody waits for anybody before the end. Memory is kept from call to call. Where there is `short`,
    batches are for the sequences that are too long for it.
    """

    def __init__(self, model: Model, most_tokens: int = 1 << 14, short: ShortSequences | None = None) -> None:
        self.model, self._most, self._short = model, most_tokens, short
        self._workers: list[_Worker] = []

    def __call__(self, sequences: Sequences | Sequence[ArrayLike], comm: Comm | None = None) -> float:
        """Collective where there is a communicator: each rank takes an equal part of the predictions."""
        every = sequences if isinstance(sequences, Sequences) else Sequences.of(sequences)
        _check(self.model, every)
        k, (rank, size) = self.model.kernels, (comm.rank, comm.size) if comm is not None else (0, 1)
        shares = _shares(every.lengths, size * k.threads)[rank * k.threads : (rank + 1) * k.threads]
        workers, found = [self._worker(i) for i in range(len(shares))], np.zeros(1)
        short, sums = self._short, np.zeros(len(shares))
        if short is not None:
            short.begin(every.tokens, every.lengths)

        def work(i: int) -> None:
            rest = shares[i]
            if short is not None:
                sums[i], rest = short.sum(i, rest)
            workers[i].sum(list(equal_lengths(every, self._most, rest)))

        k.each(work, len(shares))
        found[0] = sums.sum()
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
    """One worker's sum of losses, with memory for its largest batch and recorded work for each shape."""

    def __init__(self, model: Model) -> None:
        self._model, self._k = model, model.kernels
        self.total, self._mean = self._k.wide_zeros(1), self._k.wide_zeros(1)
        self._largest: Pass | None = None
        self._recorded: dict[tuple[int, int], tuple[Array, Array, Work]] = {}

    def sum(self, batches: Sequence[Array]) -> None:
        """total ← the sum of the losses of all predictions in these batches."""
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
        """Memory for that many rows, which this worker alone computes."""
        if self._largest is None or self._largest.n_rows < n_seq * seq_len:
            self._recorded.clear()
            self._largest = None  # its memory first
            self._largest = Pass(self._model, n_seq, seq_len, training=False, workers=1)
            self._largest.expect_losses()


def equal_lengths(sequences: Sequences, most_tokens: int, own: Array) -> Iterator[Array]:
    """Yield batches (n, T + 1), shorter ones first, of the sequences whose indices are in `own`.

    Sequences of one length are cut into batches of nearly the same size.
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

    Every part has few lengths, and about as many predictions as the others.
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
