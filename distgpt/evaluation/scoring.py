"""The loss of many spans of text, the same on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from distgpt.comm.api import Comm
from distgpt.interrupts import Interrupted, PendingSignals, signal_of
from distgpt.kernels.api import Array, Work
from distgpt.model.model import Model
from distgpt.model.passes import Pass

# Tokens per forward pass; a GPU needs more of them to be busy.
AT_A_TIME, AT_A_TIME_QUEUED = 1 << 12, 1 << 15
SHORTEST = 32  # lengths are rounded up to this times a power of two: few shapes, little padding


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
        self._lose: Work | None = None

    def reserve(self, length: int, spans: int) -> None:
        """Allocate memory for batches of `spans` spans, or of as many as fit into one pass."""
        padded = self._padded(length)
        shape = min(max(1, self._most // padded), spans), padded
        if self._pass is not None and self._pass.shape == shape:
            return
        self._pass = self._lose = None  # its memory first
        self._pass = Pass(self.model, *shape, training=False)
        self._pass.expect_losses()
        self._host = np.zeros((2, *shape), np.int32)
        k = self.model.kernels
        self._tokens, self._targets = (k.integers(side.reshape(-1)) for side in self._host)
        work, tokens, targets = self._pass, self._tokens, self._targets
        self._lose = k.record(lambda: work.losses(tokens, targets))

    def sums(self, spans: Sequence[Span], advanced: Callable[[int, int], None] = _nobody) -> Array:
        """The summed loss of each span, float64 (n,). Collective.

        `advanced` is called with the number of spans that are done, and of tokens in the last ones.
        A signal on any rank ends it on all, as an Interrupted.
        """
        sums = np.zeros(len(spans))
        number = done = 0
        for length, places in self._groups(spans):
            self.reserve(length, len(places))
            each = len(self._host[0])
            for first in range(0, len(places), each):
                chosen = places[first : first + each]
                if number % self.comm.size == self.comm.rank:
                    sums[chosen] = self._score([spans[i] for i in chosen])
                number += 1
                done += len(chosen)
                advanced(done, sum(spans[i].count for i in chosen))
                if number % self.comm.size == 0:
                    self._stop_on_signal()
        self.comm.sum(sums)  # each place is zero on all ranks but one
        return sums

    def _stop_on_signal(self) -> None:
        """Collective."""
        if self._signals is not None and (code := self.comm.allreduce_max(self._signals.exit_code)):
            raise Interrupted(signal_of(code), shared=True)

    def _score(self, spans: list[Span]) -> list[float]:
        self._on_batch()
        self._host[:] = 0
        for span, tokens, targets in zip(spans, *self._host, strict=False):
            tokens[: len(span.ids) - 1] = span.ids[:-1]
            targets[: len(span.ids) - 1] = span.ids[1:]
        k = self.model.kernels
        assert self._pass is not None and self._lose is not None
        for device, host in zip((self._tokens, self._targets), self._host, strict=True):
            k.put(device, host.reshape(-1))
        self._lose()
        losses = k.to_host(self._pass.ends.all.losses).reshape(self._host[0].shape)
        return [span.total(row) for span, row in zip(spans, losses, strict=False)]

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
