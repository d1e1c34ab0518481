"""The loss of many spans of text, and if they are the likeliest; the same on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from distgpt.core.base.interrupts import Interrupted, PendingSignals, signal_of
from distgpt.core.comm.api import Comm
from distgpt.core.model.model import Model
from distgpt.core.model.passes import Ends, Pass
from distgpt.core.ops.api import Array, Work

# Tokens per forward pass; a GPU needs more of them to be busy.
AT_A_TIME, AT_A_TIME_QUEUED = 1 << 12, 1 << 15
SHORTEST = 32  # lengths are rounded up to this times a power of two: few shapes, little padding
SCORED = 128  # predictions whose scores of all tokens are computed at once


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens, of which those from `first` ≥ 1 on are predicted, each from all before it.

    Of these, `learned` (bool) has those that count, where not all do.
    """

    ids: Array
    first: int = 1
    learned: Array | None = None

    @property
    def count(self) -> int:
        return len(self.ids) - self.first if self.learned is None else int(self.learned.sum())

    def total(self, losses: Array) -> float:
        """Return the summed loss, of those of the tokens after each."""
        own = losses[self.first - 1 : len(self.ids) - 1]
        return float((own if self.learned is None else own[self.learned]).sum(dtype=np.float64))


def _nobody(*about: object) -> None:
    return None


class Scorer:
    """Scores spans with the same bits on any number of ranks.

    Batches are cut the same way for any number of ranks, and every sum has its own place in the result. All
    ranks must have the same number of threads, and GPUs need --deterministic.
    """

    def __init__(
        self,
        model: Model,
        comm: Comm,
        signals: PendingSignals | None = None,
        on_batch: Callable[[], None] = _nobody,
    ) -> None:
        """`signals` on any rank end the work on all. `on_batch` is called as each batch begins."""
        self.model, self.comm, self._signals, self._on_batch = model, comm, signals, on_batch
        self._most = AT_A_TIME_QUEUED if model.kernels.capabilities.is_async else AT_A_TIME
        self._pass: Pass | None = None
        self._recorded: dict[str, Work] = {}

    def reserve(self, length: int, spans: int) -> None:
        """Allocate memory for batches of `spans` spans, or of as many as fit into one pass."""
        padded = self._padded(length)
        shape = min(max(1, self._most // padded), spans), padded
        if self._pass is not None and self._pass.shape == shape:
            return
        self._pass, config = None, self.model.config  # its memory first
        self._pass = Pass(self.model, *shape, training=False)
        self._pass.expect_losses()
        self._recorded = {}
        self._host = np.zeros((2, *shape), np.int32)
        k = self.model.kernels
        self._tokens, self._targets = (k.integers(side.reshape(-1)) for side in self._host)
        self._hidden, self._scores = k.zeros(SCORED, config.n_embd), k.zeros(SCORED, config.padded_vocab)

    def sums(self, spans: Sequence[Span], advanced: Callable[[int, int], None] = _nobody) -> Array:
        """The summed loss of each span, float64 (n,). Collective.

        `advanced` is called with the number of spans that are done, and of tokens in the last ones.
        A signal on any rank ends it on all, as an Interrupted.
        """
        sums = np.zeros(len(spans))

        def score(rows: list[list[int]]) -> None:
            sums[[i for i, *_ in rows]] = self._losses([spans[i] for i, *_ in rows])

        self._in_batches(spans, [[i] for i in range(len(spans))], score, advanced)
        self.comm.sum(sums)  # each place is zero on all ranks but one
        return sums

    def likelihoods(self, spans: Sequence[Span], advanced: Callable[[int, int], None] = _nobody) -> Array:
        """The summed loss of each span, and 1 where every token of it is the likeliest: (n, 2). Collective.

        Only predicted tokens are scored, and spans that differ in their last token alone share a sequence.
        """
        found = np.zeros((len(spans), 2))
        together: dict[bytes, list[int]] = {}
        for i, span in enumerate(spans):
            together.setdefault(np.asarray(span.ids[:-1], np.int32).tobytes(), []).append(i)

        def score(rows: list[list[int]]) -> None:
            found[[i for row in rows for i in row]] = self._likelihoods([[spans[i] for i in r] for r in rows])

        self._in_batches(spans, list(together.values()), score, advanced)
        self.comm.sum(found)
        return found

    def _in_batches(
        self,
        spans: Sequence[Span],
        rows: list[list[int]],
        score: Callable[[list[list[int]]], None],
        advanced: Callable[[int, int], None],
    ) -> None:
        """Call `score` with each batch, on one rank each. A row has the indices of its spans. Collective."""
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
                if number % self.comm.size == 0:
                    self._stop_on_signal()

    def _stop_on_signal(self) -> None:
        """Collective."""
        if self._signals is not None and (code := self.comm.allreduce_max(self._signals.exit_code)):
            raise Interrupted(signal_of(code), shared=True)

    def _losses(self, spans: list[Span]) -> list[float]:
        self._put(spans)
        ends = self._run("losses", lambda work: work.losses(self._tokens, self._targets))
        losses = self.model.kernels.to_host(ends.losses).reshape(self._host[0].shape)
        return [span.total(row) for span, row in zip(spans, losses, strict=False)]

    def _likelihoods(self, rows: list[list[Span]]) -> Array:
        """The loss of each span and whether it is the likeliest (n, 2); those of a row share their tokens."""
        self._put([row[0] for row in rows])
        ends = self._run("hidden", lambda work: work.hidden(self._tokens))
        hidden = self.model.kernels.to_host(ends.hidden).reshape(*self._host[0].shape, -1)
        spans = [(i, span) for i, row in enumerate(rows) for span in row]
        states = np.concatenate([hidden[i, span.first - 1 : len(span.ids) - 1] for i, span in spans])
        targets = np.concatenate([span.ids[span.first :] for _, span in spans])
        each = np.concatenate(
            [
                self._of_states(states[start : start + SCORED], targets[start : start + SCORED])
                for start in range(0, len(states), SCORED)
            ]
        )
        starts = np.cumsum([0, *(span.count for _, span in spans[:-1])])
        sums = np.add.reduceat(each[:, 0], starts)
        return np.stack([sums, np.minimum.reduceat(each[:, 1], starts)], axis=1)

    def _of_states(self, states: Array, targets: Array) -> Array:
        """The loss of each target behind its state, and whether none is likelier (n, 2)."""
        k, count = self.model.kernels, len(states)
        assert self._pass is not None
        k.put(self._hidden[:count], states)
        k.precisely(partial(self._pass.scores, self._scores[:count], self._hidden[:count]))
        scores = k.to_host(self._scores[:count])[:, : self.model.config.vocab_size]
        top = scores.max(1)
        hit = scores[np.arange(count), targets]
        total = np.exp(scores - top[:, None]).sum(1, dtype=np.float64)
        return np.stack([np.log(total) + top - hit, hit == top], axis=1)

    def _put(self, spans: list[Span]) -> None:
        """Tell the pass the tokens and targets of its sequences."""
        self._on_batch()
        self._host[:] = 0
        for span, tokens, targets in zip(spans, *self._host, strict=False):
            tokens[: len(span.ids) - 1] = span.ids[:-1]
            targets[: len(span.ids) - 1] = span.ids[1:]
        for device, host in zip((self._tokens, self._targets), self._host, strict=True):
            self.model.kernels.put(device, host.reshape(-1))

    def _run(self, name: str, what: Callable[[Pass], object]) -> Ends:
        """Do something with the pass, recorded under this name."""
        work = self._pass
        assert work is not None
        if name not in self._recorded:

            def compute() -> None:
                what(work)

            self._recorded[name] = self.model.kernels.record(compute)
        self.model.kernels.precisely(self._recorded[name])
        return work.ends.all

    def _groups(self, spans: Sequence[Span]) -> list[tuple[int, list[int]]]:
        """Indices of spans by padded length, longest first; too few for a batch join longer ones."""
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
        return groups[::-1]  # the longest takes most memory

    def _padded(self, length: int) -> int:
        padded = SHORTEST
        while padded < length:
            padded *= 2
        return min(padded, self.model.config.seq_len)


class Progress(Protocol):
    """Shows how far a measurement has come. Called on rank 0 alone."""

    def noted(self, text: str) -> None: ...
    def began(self, total: int, done: int) -> None: ...
    def advanced(self, done: int, tokens: int) -> None: ...
    def close(self) -> None: ...


def with_progress(
    measure: Callable[..., Array], spans: list[Span], comm: Comm, progress: Progress | None
) -> Array:
    """Return what a Scorer measures of these spans, and show how far that has come. Collective."""
    if progress is None or comm.rank:
        return measure(spans)
    progress.began(len(spans), 0)
    try:
        return measure(spans, progress.advanced)
    finally:
        progress.close()
