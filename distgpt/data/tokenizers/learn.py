"""Learning a vocabulary from texts: merges by counting pairs, or all characters or words there are."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator

from distgpt.data.tokenizers import bpe
from distgpt.data.tokenizers.plain import Tokenizer, collect
from distgpt.errors import DataError, UsageError

SMALLEST = 256
LEAST_PAIRS = 2  # how often two tokens follow each other that become one, if nobody says
# Merging takes time with the square of a piece's length. No word is that long; what has no blanks is cut.
LONGEST_PIECE = 256  # characters
_LONG = re.compile(rf"\S{{{LONGEST_PIECE}}}|\s{{{LONGEST_PIECE}}}")


def learn_bpe(texts: Iterable[str], size: int, min_frequency: int, separator: str) -> bpe.BpeTokenizer:
    """Learn a BPE of `size` entries, the separator ("first", "last" or "none") included.

    It has fewer if no more pairs occur `min_frequency` times. Equal texts give equal tokenizers. Only the
    distinct pieces of the texts are held in memory.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    has_separator = separator != "none"
    if not SMALLEST + has_separator <= size <= bpe.LARGEST:
        bytes_and = " and the separator" if has_separator else ""
        raise UsageError(
            f"a BPE has at least {SMALLEST + has_separator} entries, the bytes{bytes_and},"
            f" and at most {bpe.LARGEST:,}"
        )
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=size - has_separator,
        min_frequency=min_frequency,
        initial_alphabet=list(bpe.symbols()),
        show_progress=False,
    )
    _interruptible(lambda: library.train_from_iterator(_short_pieces(_not_empty(texts)), trainer))
    learned = json.loads(library.to_str())["model"]
    vocabulary = sorted(learned["vocab"], key=learned["vocab"].__getitem__)
    token_id = {"last": len(vocabulary), "first": 0, "none": None}[separator]
    if token_id is not None:
        vocabulary.insert(token_id, bpe.SEPARATOR)
    return bpe.checked_bpe(vocabulary, learned["merges"], token_id, "the learned tokenizer")


def _short_pieces(texts: Iterable[str]) -> Iterator[str]:
    """The texts, cut where no piece of theirs would end for a long time."""
    for text in texts:
        start = 0
        for found in _LONG.finditer(text):
            yield text[start : found.end()]
            start = found.end()
        yield text[start:]


def _interruptible(work: Callable[[], None]) -> None:
    """Work in another thread: the library does not react to Ctrl-C, the main thread does."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


def learn_entries(kind: str, texts: Iterable[str]) -> Tokenizer:
    """The tokenizer of all characters ("char") or words ("word") of the texts; there must be some."""
    return collect(kind, _not_empty(texts))


def _not_empty(texts: Iterable[str]) -> Iterator[str]:
    empty = True
    for text in texts:
        empty = empty and not text
        yield text
    if empty:
        raise DataError("there is no text to learn from")
