"""BPE, learned from texts by counting pairs: `--tokenizer bpe:N`, and how it is read again."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator

from distgpt.core.base.checked import JsonObject
from distgpt.core.base.errors import DataError, UsageError
from distgpt.core.data.tokenizers import Tokenizer, TokenizerKind
from distgpt.corpora.tokenizers import bpe

LEARNED = "bpe:"  # and the entries of a BPE to learn
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
    _interruptible(lambda: library.train_from_iterator(_short_pieces(not_empty(texts)), trainer))
    learned = json.loads(library.to_str())["model"]
    vocabulary = sorted(learned["vocab"], key=learned["vocab"].__getitem__)
    token_id = {"last": len(vocabulary), "first": 0, "none": None}[separator]
    if token_id is not None:
        vocabulary.insert(token_id, bpe.SEPARATOR)
    return bpe.checked_bpe(vocabulary, learned["merges"], token_id, "the learned tokenizer")


def _short_pieces(texts: Iterable[str]) -> Iterator[str]:
    """Yield the texts, cut where no piece of theirs would end for a long time."""
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


def not_empty(texts: Iterable[str]) -> Iterator[str]:
    """Yield the texts; a DataError where there is nothing in them."""
    empty = True
    for text in texts:
        empty = empty and not text
        yield text
    if empty:
        raise DataError("there is no text to learn from")


def learned_size(name: str) -> int:
    """Return the N of "bpe:N", a BPE of N entries to be learned from the text; 0 for other names."""
    size = name.removeprefix(LEARNED)
    return int(size) if name.startswith(LEARNED) and size.isdecimal() and len(size) < 10 else 0


def _learn(argument: str, texts: Iterable[str], are_documents: bool) -> Tokenizer:
    """Learn from texts. Only between documents stands a separator."""
    return learn_bpe(texts, int(argument), LEAST_PAIRS, "last" if are_documents else "none")


def _from_json(document: JsonObject, source: str) -> Tokenizer:
    vocabulary, merges = document.get("vocabulary"), document.get("merges")
    return bpe.checked_bpe(vocabulary, merges, document.get("separator"), source)


def _can_mean(argument: str, tokenizer: Tokenizer) -> bool:
    """Fewer entries than requested are learned where a text has too few pairs."""
    return tokenizer.kind == "bpe" and tokenizer.size <= int(argument)


BPE = TokenizerKind(
    "bpe:N",
    accepts=lambda argument: learned_size(LEARNED + argument) > 0,
    learn=_learn,
    from_json=_from_json,
    means=_can_mean,
)
