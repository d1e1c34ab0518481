"""The loss over what is held out: the same windows every time, each token predicted once."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from distgpt.data.batches import Tokens
from distgpt.data.tokenizers.naming import Tokenizer
from distgpt.evaluation.scoring import Scorer, Span


@dataclass(frozen=True, slots=True)
class Held:
    """What was predicted, and how well: `loss` is the mean in nats."""

    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf


class Validation:
    """The first `most` tokens (0: all), in windows as long as the context."""

    def __init__(self, tokens: Tokens, seq_len: int, most: int = 0) -> None:
        end = min(most + 1, len(tokens)) if most else len(tokens)
        starts = range(0, end - 1, seq_len)
        self.spans = [Span(tokens.read(start, min(start + seq_len + 1, end))) for start in starts]
        self.count = end - 1

    def measure(self, scorer: Scorer) -> Held:
        """Collective."""
        return Held(float(scorer.sums(self.spans).sum()) / self.count, self.count)

    def bytes_predicted(self, tokenizer: Tokenizer) -> int:
        """How long the predicted text is, in UTF-8; a separator between documents is no text."""
        ids = np.concatenate([self.spans[0].ids[:1], *(span.ids[1:] for span in self.spans)])
        first, all_of_it = (
            len(tokenizer.decode(some[some != tokenizer.separator]).encode()) for some in (ids[:1], ids)
        )
        return all_of_it - first
