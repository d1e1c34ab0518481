"""The quality of a model in training: its loss on held-out text, in bits per byte too, and other metrics."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from distgpt.core.base.interrupts import PendingSignals
from distgpt.core.base.tables import Table
from distgpt.core.comm.api import Comm
from distgpt.core.data.batches import Batches, Window
from distgpt.core.data.loading import Corpus
from distgpt.core.data.plain import BytesDecoder
from distgpt.core.data.tokenizers import Tokenizer
from distgpt.core.model.model import Model
from distgpt.core.ops.api import Array
from distgpt.core.train.scoring import Progress, Scorer, Span, with_progress

SAMPLED = 1 << 20  # tokens of a text that say how many bytes its tokens have
DECODED = 1 << 17  # of those, where each token has to be decoded


@dataclass(frozen=True, slots=True)
class HeldOutLoss:
    """The mean loss in nats over this many predicted tokens."""

    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf


class Validation:
    """The loss on windows of held-out text, the same every time. `is_text`: it has a unit in bytes."""

    def __init__(self, windows: Sequence[Window], is_text: bool = True) -> None:
        self.spans = [Span(window.ids, learned=window.learned) for window in windows]
        self.count = sum(span.count for span in self.spans)
        self._is_text = is_text
        self._bytes: int | None = None

    def measure(self, scorer: Scorer, progress: Progress | None = None) -> HeldOutLoss:
        """Return the loss. Collective."""
        total = float(with_progress(scorer.sums, self.spans, scorer.comm, progress).sum())
        return HeldOutLoss(total / self.count, self.count)

    def bits_per_byte(self, loss: float, tokenizer: Tokenizer) -> float | None:
        """Return a loss in a unit that other tokenizers share; None where the text has no bytes."""
        if not self._is_text:
            return None
        if self._bytes is None:
            self._bytes = self._bytes_predicted(tokenizer)
        return bits_per_byte(loss, self._bytes / self.count)

    def _bytes_predicted(self, tokenizer: Tokenizer) -> int:
        """Return the length of the predicted text in UTF-8, without separators between documents."""
        ids = np.concatenate([self.spans[0].ids[:1], *(span.ids[1:] for span in self.spans)])
        return text_bytes(ids, tokenizer) - text_bytes(ids[:1], tokenizer)


class Metric(Protocol):
    """Something else that evaluations measure."""

    def fields(self, scorer: Scorer) -> dict[str, Any]:
        """Return fields of a line of metrics.jsonl, which rank 0 has all of. Collective."""


class MetricKind(Protocol):
    """A row of the table of metrics."""

    def __call__(self, comm: Comm, path: Path, tokenizer: Tokenizer, seq_len: int) -> Metric:
        """Load what is measured from a file, on every rank. Collective."""


METRICS: Table[MetricKind] = Table("metrics", "a metric", {})


class Assessment:
    """Validation and other metrics; false without any."""

    def __init__(
        self,
        model: Model,
        comm: Comm,
        validation: Validation | None,
        metrics: Sequence[Metric],
        tokenizer: Tokenizer,
        signals: PendingSignals,
        on_batch: Callable[[], None],
    ) -> None:
        self.validation, self._metrics, self._tokenizer = validation, metrics, tokenizer
        self.scorer = Scorer(model, comm, signals, on_batch)

    def __bool__(self) -> bool:
        return self.validation is not None or bool(self._metrics)

    def measure(self) -> dict[str, Any]:
        """Return the fields of a line of metrics.jsonl, which rank 0 has all of. Collective."""
        found: dict[str, Any] = {}
        if self.validation is not None:
            begun = time.perf_counter()
            held = self.validation.measure(self.scorer)
            seconds = time.perf_counter() - begun
            found |= {"val_loss": held.loss, "val_tokens": held.tokens, "val_s": seconds}
            if (bits := self.bits_per_byte(held.loss)) is not None:
                found["bits_per_byte"] = bits
        for metric in self._metrics:
            found |= metric.fields(self.scorer)
        return found

    def bits_per_byte(self, loss: float | None) -> float | None:
        """Return a validation loss in bits per byte on rank 0, None on others."""
        if self.validation is None or loss is None or self.scorer.comm.rank:
            return None
        return self.validation.bits_per_byte(loss, self._tokenizer)


def text_bytes(ids: Array, tokenizer: Tokenizer) -> int:
    """Return the length of these tokens' text in UTF-8, without separators between documents."""
    ids = ids[ids != tokenizer.separator]
    if isinstance(tokenizer, BytesDecoder):  # whose ids may hold parts of characters
        lengths = np.array([len(piece) for piece in tokenizer.pieces])
        return int(lengths[ids].sum())
    return len(tokenizer.decode(ids).encode())


def bytes_per_token(corpus: Corpus, batches: Batches) -> float | None:
    """Return how many bytes a token of the training text has; None where it has none."""
    if not corpus.is_text:
        return None
    ids, tokenizer = batches.sample(SAMPLED), corpus.tokenizer
    if not isinstance(tokenizer, BytesDecoder):
        ids = ids[:DECODED]
    return text_bytes(ids, tokenizer) / len(ids) or None


def bits_per_byte(loss: float | None, bytes_per_token: float | None) -> float | None:
    """Return a loss in nats per token in bits per byte; None where either is unknown."""
    if loss is None or not bytes_per_token:
        return None
    return loss / math.log(2) / bytes_per_token
