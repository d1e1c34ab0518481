"""A benchmark's questions as spans of tokens, and how often a model finds the right answer likeliest."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from distgpt.core.base.errors import DataError
from distgpt.core.comm.agree import on_root, shared
from distgpt.core.comm.api import Comm
from distgpt.core.data.tokenizers import Tokenizer
from distgpt.core.train.assessment import Progress, Scorer, Span, with_progress
from distgpt.inference.evaluation.likelihoods import likelihoods
from distgpt.inference.evaluation.questions import Question, read_questions

NORMALISED = ("hellaswag", "arc_easy", "arc_challenge", "piqa")  # whose choices differ in length
SHOWN = ("acc", "acc_norm")


@dataclass(frozen=True, slots=True)
class Result:
    """Fractions of right answers, by their names in lm-eval.

    `acc` is by the summed loss; where a word is to be guessed, by greedy decoding. `acc_norm` is by the loss
    per character. `perplexity` is that of the words to guess. `topics` have an `acc` each.
    """

    examples: int
    acc: float
    acc_norm: float
    perplexity: float
    loss: float  # of all choices, summed
    topics: dict[str, float]

    def published(self, name: str) -> dict[str, Any]:
        """Return what people give of this benchmark."""
        found: dict[str, Any] = {"acc": self.acc, "examples": self.examples}
        if name in NORMALISED:
            found["acc_norm"] = self.acc_norm
        if name == "lambada":
            found["perplexity"] = self.perplexity if math.isfinite(self.perplexity) else None
        return found | ({"subjects": self.topics} if self.topics else {})


class Benchmark:
    """The questions as tokens. `spans` has all choices of all questions, one after the other."""

    def __init__(self, questions: list[Question], tokenizer: Tokenizer, seq_len: int) -> None:
        self.questions, self.spans = questions, list[Span]()
        for number, question in enumerate(questions, 1):
            try:
                self.spans += _spans(question, tokenizer, seq_len)
            except DataError as error:
                raise DataError(f"question {number}: {error}") from None

    def measure(self, scorer: Scorer, progress: Progress | None = None) -> Result:
        """Return the result. Collective."""
        found = with_progress(partial(likelihoods, scorer), self.spans, scorer.comm, progress)
        end, right, topics = 0, [], dict[str, list[int]]()
        for place, (choices, answer, topic) in enumerate(self.questions):
            losses, greedy = found[end : end + len(choices)].T
            end += len(choices)
            lengths = [len(text) - 1 for _, text in choices]  # without the space
            alone = len(choices) == 1
            acc = greedy[0] == 1 if alone else losses.argmin() == answer
            right.append((acc, (losses / lengths).argmin() == answer))
            topics.setdefault(topic, []).append(place)
        fractions, total = np.array(right, float), float(found[:, 0].sum())
        (acc, acc_norm), mean = fractions.mean(0).tolist(), total / len(found)
        return Result(
            examples=len(right),
            acc=acc,
            acc_norm=acc_norm,
            perplexity=math.exp(mean) if mean < 700 else math.inf,
            loss=total,
            topics={topic: float(fractions[places, 0].mean()) for topic, places in topics.items() if topic},
        )


class HellaSwag:
    """A metric: the fraction of right answers, measured while a model is trained."""

    def __init__(self, comm: Comm, path: Path, tokenizer: Tokenizer, seq_len: int) -> None:
        self._benchmark = load_benchmark(comm, "hellaswag", path, tokenizer, seq_len)

    def fields(self, scorer: Scorer) -> dict[str, Any]:
        result = self._benchmark.measure(scorer)
        return {"hellaswag": result.acc_norm, "hellaswag_examples": result.examples}

    @staticmethod
    def words(metrics: dict[str, float]) -> str:
        return f"HellaSwag {metrics['hellaswag']:.1%} of {metrics['hellaswag_examples']:,}"


def load_benchmark(comm: Comm, name: str, path: Path, tokenizer: Tokenizer, seq_len: int) -> Benchmark:
    """Rank 0 reads the files, and every rank makes the same tokens of them. Collective."""
    questions: list[Any] = on_root(comm, lambda: read_questions(name, path))
    try:
        return Benchmark([Question(*each) for each in questions], tokenizer, seq_len)
    except DataError as error:
        raise shared(DataError(f"{path}, {error}")) from None


def _spans(question: Question, tokenizer: Tokenizer, seq_len: int) -> list[Span]:
    """A span for each choice. A context that is too long for it loses its beginning."""
    starts: dict[str, int] = {}
    spans = []
    for context, text in question.choices:
        start = context.rstrip()  # blanks belong to the token behind them
        if start not in starts:
            starts[start] = len(tokenizer.encode_prompt(start))
        whole = np.array(tokenizer.encode_prompt(context + text))
        first = starts[start]
        if not 0 < first < len(whole):
            raise DataError("a beginning or what follows it gives no tokens")
        gone = max(0, len(whole) - seq_len - 1)
        spans.append(Span(whole[gone:], max(1, first - gone)))
    return spans
