"""HellaSwag: which of four endings of a text the model finds likeliest, per token.

The file has a JSON object on each line: "ctx", the beginning; "endings", its four continuations; "label",
the number of the right one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from distgpt.comm.agree import on_root, shared
from distgpt.comm.api import Comm
from distgpt.data.loading import read_text
from distgpt.data.tokenizers.naming import Ids, Tokenizer
from distgpt.errors import DataError
from distgpt.evaluation.scoring import Scorer, Span

ENDINGS = 4


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Fractions of right answers by loss per token, and by summed loss, which favours short endings."""

    per_token: float
    plain: float
    examples: int


class HellaSwag:
    """The examples as tokens; `spans` holds four for each."""

    def __init__(self, spans: list[Span], labels: list[int]) -> None:
        self.spans, self.labels = spans, np.array(labels)

    def measure(self, scorer: Scorer) -> Accuracy:
        """Collective."""
        sums = scorer.sums(self.spans).reshape(-1, ENDINGS)
        counts = np.array([span.count for span in self.spans]).reshape(-1, ENDINGS)
        right = [(scores.argmin(1) == self.labels).mean() for scores in (sums / counts, sums)]
        return Accuracy(float(right[0]), float(right[1]), len(self.labels))


def load_hellaswag(comm: Comm, path: Path, tokenizer: Tokenizer, seq_len: int) -> HellaSwag:
    """Rank 0 reads the file, and every rank parses its text alike. Collective."""
    text = on_root(comm, lambda: read_text(path))
    try:
        return parse_hellaswag(text, path, tokenizer, seq_len)
    except DataError as error:
        raise shared(error) from None


def parse_hellaswag(text: str, path: Path, tokenizer: Tokenizer, seq_len: int) -> HellaSwag:
    """Parse the text of a file. A context that is too long for an ending loses its beginning."""
    spans: list[Span] = []
    labels: list[int] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        context, endings, label = _example(line, f"{path}, line {number}")
        try:
            begun = tokenizer.encode(context)
            spans += (_span(begun, tokenizer.encode(" " + ending), seq_len) for ending in endings)
        except DataError as error:
            raise DataError(f"{path}, line {number}: {error}") from None
        labels.append(label)
    if not labels:
        raise DataError(f"{path} holds no examples")
    return HellaSwag(spans, labels)


def _span(begun: Ids, ending: Ids, seq_len: int) -> Span:
    if not len(begun) or not len(ending):
        raise DataError("a context or an ending gives no tokens")
    ending = ending[:seq_len]
    begun = begun[max(0, len(begun) + len(ending) - seq_len - 1) :]
    return Span(np.concatenate([begun, ending]), len(begun))


def _example(line: str, where: str) -> tuple[str, list[str], int]:
    try:
        said = json.loads(line)
        context, endings, label = said["ctx"], said["endings"], said["label"]
        label = int(label)
    except (ValueError, RecursionError, KeyError, TypeError):
        raise DataError(f"{where}: no JSON object with ctx, endings and label") from None
    texts = [context, *endings] if isinstance(endings, list) else []
    if len(texts) != ENDINGS + 1 or not all(isinstance(text, str) and text for text in texts):
        raise DataError(f"{where}: ctx and its {ENDINGS} endings must be texts, none of them empty")
    if not 0 <= label < ENDINGS:
        raise DataError(f"{where}: label is {label}, there are {ENDINGS} endings")
    return context, endings, label
