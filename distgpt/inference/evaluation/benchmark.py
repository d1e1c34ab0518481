"""A benchmark's questions as spans of tokens, and how often a model finds the right answer likeliest.

Answers are judged by the loss of their tokens, and by whether each is the likeliest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from distgpt.core.base.errors import DataError
from distgpt.core.comm.agree import on_root, shared
from distgpt.core.comm.api import Comm
from distgpt.core.data.tokenizers import Tokenizer
from distgpt.core.ops.api import Array
from distgpt.core.train.assessment import Progress, Scorer, Span, with_progress
from distgpt.inference.evaluation.questions import Question, read_questions

NORMALISED = ("hellaswag", "arc_easy", "arc_challenge", "piqa")  # whose choices differ in length
SHOWN = ("acc", "acc_norm")
AT_ONCE = 128  # predictions whose logits of all tokens are computed at once


KEYS = ("acc", "examples")  # that every benchmark has
OTHER_KEYS = dict.fromkeys(NORMALISED, "acc_norm") | {"lambada": "perplexity", "mmlu": "subjects"}


class Benchmark:
    """The questions as tokens. `spans` has all choices of all questions, one after the other."""

    def __init__(self, questions: list[Question], tokenizer: Tokenizer, seq_len: int) -> None:
        self.questions, self.spans = questions, list[Span]()
        for number, question in enumerate(questions, 1):
            try:
                self.spans += _spans(question, tokenizer, seq_len)
            except DataError as error:
                raise DataError(f"question {number}: {error}") from None

    def measure(self, scorer: Scorer, progress: Progress | None = None) -> dict[str, Any]:
        """Return fractions of right answers, by their names in lm-eval. Collective.

        `acc` is by the summed loss; where a word is to be guessed, by greedy decoding. `acc_norm` is by the
        loss per character. `perplexity` is of the words to guess. `subjects` have an `acc` each. `loss` is
        the sum of all choices' losses.
        """
        found = with_progress(partial(likelihoods, scorer), self.spans, scorer.comm, progress)
        end, right, topics = 0, [], dict[str, list[int]]()
        for place, (choices, answer, topic) in enumerate(self.questions):
            losses, greedy = found[end : end + len(choices)].T
            end += len(choices)
            lengths = [len(text) - 1 for _, text in choices]  # without the space
            acc = greedy[0] == 1 if len(choices) == 1 else losses.argmin() == answer
            right.append((acc, (losses / lengths).argmin() == answer))
            topics.setdefault(topic, []).append(place)
        fractions, total = np.array(right, float), float(found[:, 0].sum())
        (acc, acc_norm), mean = fractions.mean(0).tolist(), total / len(found)
        return {
            "acc": acc,
            "examples": len(right),
            "acc_norm": acc_norm,
            "perplexity": math.exp(mean) if mean < 700 else None,
            "subjects": {topic: float(fractions[places, 0].mean()) for topic, places in topics.items()},
            "loss": total,
        }


class HellaSwag:
    """A metric: the fraction of right answers, measured while a model is trained."""

    def __init__(self, comm: Comm, path: Path, tokenizer: Tokenizer, seq_len: int) -> None:
        self._benchmark = load_benchmark(comm, "hellaswag", path, tokenizer, seq_len)

    def fields(self, scorer: Scorer) -> dict[str, Any]:
        result = self._benchmark.measure(scorer)
        return {"hellaswag": result["acc_norm"], "hellaswag_examples": result["examples"]}

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


def likelihoods(
    scorer: Scorer, spans: Sequence[Span], advanced: Callable[[int, int], None] = lambda done, tokens: None
) -> Array:
    """Return the summed loss of each span, and 1 where all of its tokens are the likeliest: (n, 2).

    Collective. Only predicted tokens are scored. Spans that differ only in their last token share a sequence.
    """
    found = np.zeros((len(spans), 2))
    together: dict[bytes, list[int]] = {}
    for i, span in enumerate(spans):
        together.setdefault(np.asarray(span.ids[:-1], np.int32).tobytes(), []).append(i)

    k, config = scorer.model.kernels, scorer.model.config
    inputs, outputs = k.zeros(AT_ONCE, config.n_embd), k.zeros(AT_ONCE, config.padded_vocab)

    def score(rows: list[list[int]]) -> None:
        scored = _of_sequences(scorer, [[spans[i] for i in row] for row in rows], inputs, outputs)
        found[[i for row in rows for i in row]] = scored

    scorer.in_batches(spans, list(together.values()), score, advanced)
    scorer.comm.sum(found)  # each place is zero on all ranks but one
    return found


def _of_sequences(scorer: Scorer, rows: list[list[Span]], inputs: Array, outputs: Array) -> Array:
    """Return the loss of each span and whether it is the likeliest (n, 2); a row's spans share its tokens."""
    scorer.put([row[0] for row in rows])
    around = scorer.run("hidden", lambda work: work.forward(scorer.tokens))
    k, work = scorer.model.kernels, scorer.work
    assert work is not None
    hidden = k.to_host(around.hidden).reshape(*work.shape, -1)
    spans = [(i, span) for i, row in enumerate(rows) for span in row]
    states = np.concatenate([hidden[i, span.first - 1 : len(span.ids) - 1] for i, span in spans])
    targets = np.concatenate([span.ids[span.first :] for _, span in spans])
    each = np.empty((len(states), 2))  # the loss of each target, and whether none is likelier
    for start in range(0, len(states), AT_ONCE):
        some = slice(start, min(start + AT_ONCE, len(states)))
        count = some.stop - start
        k.put(inputs[:count], states[some])
        work.logits(outputs[:count], inputs[:count])
        logits = k.to_host(outputs[:count])[:, : scorer.model.config.vocab_size]
        top = logits.max(1)
        hit = logits[np.arange(count), targets[some]]
        total = np.exp(logits - top[:, None]).sum(1, dtype=np.float64)
        each[some, 0] = np.log(total) + top - hit
        each[some, 1] = hit == top
    starts = np.cumsum([0, *(span.count for _, span in spans[:-1])])
    sums = np.add.reduceat(each[:, 0], starts)
    return np.stack([sums, np.minimum.reduceat(each[:, 1], starts)], axis=1)
