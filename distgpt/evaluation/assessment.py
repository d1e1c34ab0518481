"""What a model is measured by, while it trains and afterwards: its loss on held-out text, and HellaSwag."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from distgpt.comm.api import Comm
from distgpt.data.batches import Tokens
from distgpt.data.tokenizers.naming import Tokenizer
from distgpt.evaluation.hellaswag import HellaSwag
from distgpt.evaluation.scoring import Scorer, Span
from distgpt.model.model import Model


@dataclass(frozen=True, slots=True)
class Held:
    """The mean loss in nats over so many predicted tokens."""

    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf


class Validation:
    """The first `most` held-out tokens (0: all), in the same windows every time, each predicted once.

    Windows are as long as the context.
    """

    def __init__(self, tokens: Tokens, seq_len: int, most: int = 0) -> None:
        end = min(most + 1, len(tokens)) if most else len(tokens)
        starts = range(0, end - 1, seq_len)
        self.spans = [Span(tokens.read(start, min(start + seq_len + 1, end))) for start in starts]
        self.count = end - 1

    def measure(self, scorer: Scorer) -> Held:
        """Collective."""
        return Held(float(scorer.sums(self.spans).sum()) / self.count, self.count)

    def bytes_predicted(self, tokenizer: Tokenizer) -> int:
        """The length of the predicted text in UTF-8, without separators between documents."""
        ids = np.concatenate([self.spans[0].ids[:1], *(span.ids[1:] for span in self.spans)])
        first, all_of_it = (
            len(tokenizer.decode(some[some != tokenizer.separator]).encode()) for some in (ids[:1], ids)
        )
        return all_of_it - first


class Assessment:
    """Validation, HellaSwag or both; false without either."""

    def __init__(
        self, model: Model, comm: Comm, validation: Validation | None, hellaswag: HellaSwag | None
    ) -> None:
        self.validation, self.hellaswag = validation, hellaswag
        self.scorer = Scorer(model, comm)

    def __bool__(self) -> bool:
        return self.validation is not None or self.hellaswag is not None

    def measure(self) -> dict[str, Any]:
        """Return the fields of a line of metrics.jsonl. Collective."""
        found: dict[str, Any] = {}
        if self.validation is not None:
            begun = time.perf_counter()
            held = self.validation.measure(self.scorer)
            seconds = time.perf_counter() - begun
            found |= {"val_loss": held.loss, "val_tokens": held.tokens, "val_s": seconds}
        if self.hellaswag is not None:
            accuracy = self.hellaswag.measure(self.scorer)
            found |= {"hellaswag": accuracy.per_token, "hellaswag_examples": accuracy.examples}
        return found
