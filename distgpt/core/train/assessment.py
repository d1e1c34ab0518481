"""Evaluation of a model: losses of token spans, identical for any number of ranks, and other metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from distgpt.core.base.interrupts import Interrupted, PendingSignals, signal_of
from distgpt.core.comm.agree import on_every_rank
from distgpt.core.comm.api import Comm
from distgpt.core.components import components
from distgpt.core.config import RunConfig
from distgpt.core.data.batches import Window
from distgpt.core.data.loading import Corpus, bits_per_byte, text_bytes
from distgpt.core.data.tokenizers import Tokenizer
from distgpt.core.model.model import Model
from distgpt.core.model.passes import ModelActivations, Pass
from distgpt.core.ops.api import Array, Work

# Tokens per forward pass; a GPU needs more to be fully used.
AT_A_TIME, AT_A_TIME_QUEUED = 1 << 12, 1 << 15
SHORTEST = 32  # lengths are rounded up to powers of two from this minimum, for few shapes and little padding


@dataclass(frozen=True, slots=True)
class Span:
    """A token sequence. The model predicts each token from index `first` ≥ 1 on.

    `loss_mask` (bool) marks the predicted tokens that count; by default all do.
    """

    ids: Array
    first: int = 1
    loss_mask: Array | None = None

    @property
    def count(self) -> int:
        return len(self.ids) - self.first if self.loss_mask is None else int(self.loss_mask.sum())

    def total(self, losses: Array) -> float:
        """Return the sum of the losses that count. `losses` has one per input token, for the next token."""
        own = losses[self.first - 1 : len(self.ids) - 1]
        return float((own if self.loss_mask is None else own[self.loss_mask]).sum(dtype=np.float64))


def _nobody(*about: object) -> None:
    return None


class Scorer:
    """Computes the losses of spans, bitwise identical for any number of ranks.

    Batches are the same for any number of ranks, and every sum has its own place in the result. All ranks
    must have the same number of threads, and GPUs need --deterministic.
    """

    def __init__(
        self,
        model: Model,
        comm: Comm,
        signals: PendingSignals | None = None,
        on_batch: Callable[[], None] = _nobody,
    ) -> None:
        """`signals` on any rank end the work on all. `on_batch` is called at the start of each batch."""
        self.model = model
        self.comm = comm
        self._signals = signals
        self._on_batch = on_batch
        usual = AT_A_TIME_QUEUED if model.kernels.capabilities.is_async else AT_A_TIME
        self._most = model.most_evaluated or usual
        self.work: Pass | None = None  # a pass of the reserved batch shape
        self._recorded: dict[str, Work] = {}

    def reserve(self, length: int, spans: int) -> None:
        """Allocate memory for batches of `spans` spans, or of as many as fit into one pass."""
        padded = self._padded(length)
        shape = min(max(1, self._most // padded), spans), padded
        if self.work is not None and self.work.shape == shape:
            return
        self.work = None  # free its memory first
        self.work = Pass(self.model, *shape, training=False)
        self.work.expect_losses()
        self._recorded = {}
        self._host = np.zeros((2, *shape), np.int32)
        k = self.model.kernels
        self.tokens, self._targets = (k.integers(side.reshape(-1)) for side in self._host)

    def sums(self, spans: Sequence[Span], advanced: Callable[[int, int], None] = _nobody) -> Array:
        """Return the summed loss of each span, float64 (n,). Collective.

        `advanced` is called with the number of completed spans, and of tokens in the last ones. A signal on
        any rank raises Interrupted on all.
        """
        sums = np.zeros(len(spans))

        def score(rows: list[list[int]]) -> None:
            sums[[i for i, *_ in rows]] = self._losses([spans[i] for i, *_ in rows])

        self.in_batches(spans, [[i] for i in range(len(spans))], score, advanced)
        self.comm.sum(sums)  # each element is nonzero on at most one rank
        return sums

    def in_batches(
        self,
        spans: Sequence[Span],
        rows: list[list[int]],
        score: Callable[[list[list[int]]], None],
        advanced: Callable[[int, int], None],
    ) -> None:
        """Call `score` with each batch, on one rank each. A row lists span indices. Collective."""
        number = done = 0
        for length, places in self._groups([spans[row[0]] for row in rows]):
            self.reserve(length, len(places))
            each = len(self._host[0])
            for first in range(0, len(places), each):
                chosen = [rows[place] for place in places[first : first + each]]
                if number % self.comm.size == self.comm.rank:
                    score(chosen)
                number += 1
                done += sum(map(len, chosen))
                advanced(done, sum(spans[i].count for row in chosen for i in row))
                if number % self.comm.size == 0 and self._signals is not None:
                    came = self.comm.allreduce_max(self._signals.exit_code)  # the signal of any rank
                    if came:
                        raise Interrupted(signal_of(came), shared=True)

    def _losses(self, spans: list[Span]) -> list[float]:
        self.put(spans)
        around = self.run("losses", lambda work: work.losses(self.tokens, self._targets))
        losses = self.model.kernels.to_host(around.losses).reshape(self._host[0].shape)
        return [span.total(row) for span, row in zip(spans, losses, strict=False)]

    def put(self, spans: list[Span]) -> None:
        """Copy the tokens and targets of these spans to the device."""
        self._on_batch()
        self._host[:] = 0
        for span, tokens, targets in zip(spans, *self._host, strict=False):
            tokens[: len(span.ids) - 1] = span.ids[:-1]
            targets[: len(span.ids) - 1] = span.ids[1:]
        for device, host in zip((self.tokens, self._targets), self._host, strict=True):
            self.model.kernels.put(device, host.reshape(-1))

    def run(self, name: str, what: Callable[[Pass], Any]) -> ModelActivations:
        """Record a function of the pass under this name once, and replay it."""
        work = self.work
        assert work is not None
        if name not in self._recorded:
            self._recorded[name] = self.model.kernels.record(partial(what, work))
        self._recorded[name]()
        return work.around.all

    def _groups(self, spans: Sequence[Span]) -> list[tuple[int, list[int]]]:
        """Group span indices by padded length, longest first; small groups join the next longer one."""
        by_length: dict[int, list[int]] = {}
        for i, span in enumerate(spans):
            by_length.setdefault(self._padded(len(span.ids) - 1), []).append(i)
        groups: list[tuple[int, list[int]]] = []
        few: list[int] = []
        longest = max(by_length, default=0)
        for length, places in sorted(by_length.items()):
            few = few + places
            if len(few) * length >= self._most or length == longest:
                groups.append((length, few))
                few = []
        return groups[::-1]  # the longest needs the most memory

    def _padded(self, length: int) -> int:
        power = 1 << (length - 1).bit_length()  # the next power of two
        return min(max(SHORTEST, power), self.model.config.seq_len)


class Progress(Protocol):
    """Display of an evaluation's progress. Called only on rank 0."""

    def noted(self, text: str) -> None: ...
    def began(self, total: int, done: int) -> None: ...
    def advanced(self, done: int, tokens: int) -> None: ...
    def close(self) -> None: ...


def with_progress(
    measure: Callable[..., Array], spans: list[Span], comm: Comm, progress: Progress | None
) -> Array:
    """Measure spans and show the progress. Collective."""
    if progress is None or comm.rank:
        return measure(spans)
    progress.began(len(spans), 0)
    try:
        return measure(spans, progress.advanced)
    finally:
        progress.close()


class Validation:
    """The loss on windows of held-out text. `is_text`: whether it has a unit in bytes.

    `count` is the number of predicted tokens. `held_out` is the number of all held-out tokens; the windows
    may omit some.
    """

    def __init__(self, windows: Sequence[Window], is_text: bool = True, held_out: int = 0) -> None:
        self.spans = [Span(window.ids, loss_mask=window.loss_mask) for window in windows]
        self.count = sum(span.count for span in self.spans)
        self.held_out = max(self.count, held_out)
        self._is_text = is_text
        self._bytes: int | None = None  # bytes of the predicted text, without document separators

    def measure(self, scorer: Scorer, progress: Progress | None = None) -> float:
        """Return the mean loss in nats. Collective."""
        return float(with_progress(scorer.sums, self.spans, scorer.comm, progress).sum()) / self.count

    def bits_per_byte(self, loss: float, tokenizer: Tokenizer) -> float | None:
        """Convert a loss to a unit comparable between tokenizers; None if the text has no bytes."""
        if not self._is_text:
            return None
        if self._bytes is None:
            ids = np.concatenate([self.spans[0].ids[:1], *(span.ids[1:] for span in self.spans)])
            self._bytes = text_bytes(ids, tokenizer) - text_bytes(ids[:1], tokenizer)
        return bits_per_byte(loss, self._bytes / self.count)


class Metric(Protocol):
    """An additional metric measured by evaluations."""

    def fields(self, scorer: Scorer) -> dict[str, float]:
        """Return fields for metrics.jsonl, complete only on rank 0. Collective."""


class MetricKind(Protocol):
    """A factory and formatter of a metric."""

    def __call__(self, comm: Comm, path: Path, tokenizer: Tokenizer, seq_len: int) -> Metric:
        """Load the metric's data from a file on every rank. Collective."""

    def words(self, metrics: dict[str, float]) -> str:
        """Format the metric's fields for the log."""


def load_validation(comm: Comm, run: RunConfig, corpus: Corpus) -> Validation | None:
    """Load the held-out text of a run, or return None. Collective."""
    if corpus.val is None:
        return None
    seq_len = run.model.seq_len
    windows = on_every_rank(comm, lambda: corpus.held_out_windows(seq_len, run.train.val_tokens))
    return Validation(windows, corpus.is_text, len(corpus.held_out) - 1 if corpus.is_text else 0)


def load_metrics(comm: Comm, run: RunConfig, corpus: Corpus) -> list[Metric]:
    """Load the additional metrics in a run's settings. Collective."""
    return [
        components().metric(name)(comm, Path(path), corpus.tokenizer, run.model.seq_len)
        for name, path in run.train.metrics.items()
    ]


class Assessment:
    """Validation, additional metrics, or both."""

    def __init__(
        self, scorer: Scorer, validation: Validation | None, metrics: Sequence[Metric], tokenizer: Tokenizer
    ) -> None:
        self.scorer = scorer
        self.validation = validation
        self._metrics = metrics
        self._tokenizer = tokenizer

    def measure(self) -> dict[str, float]:
        """Return fields for metrics.jsonl, complete only on rank 0. Collective."""
        result: dict[str, float] = {}
        if self.validation is not None:
            begun = time.perf_counter()
            loss, tokens = self.validation.measure(self.scorer), self.validation.count
            result |= {"val_loss": loss, "val_tokens": tokens, "val_s": time.perf_counter() - begun}
            if tokens < self.validation.held_out:
                result["held_out_tokens"] = self.validation.held_out
            if (bits := self.bits_per_byte(loss)) is not None:
                result["bits_per_byte"] = bits
        for metric in self._metrics:
            result |= metric.fields(self.scorer)
        return result

    def bits_per_byte(self, loss: float | None) -> float | None:
        """Convert a validation loss to bits per byte on rank 0; None on other ranks."""
        if self.validation is None or loss is None or self.scorer.comm.rank:
            return None
        return self.validation.bits_per_byte(loss, self._tokenizer)
