"""A tokenizer's vocabulary out of texts: merges learned by counting, or all characters or words there are."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from distgpt.data.prepare.documents import documents
from distgpt.data.text import resolve_data
from distgpt.data.tokenizers import bpe
from distgpt.data.tokenizers.api import Tokenizer
from distgpt.data.tokenizers.plain import knowing
from distgpt.errors import DataError, UsageError
from distgpt.files import atomic_file

SMALLEST = 256


@dataclass(frozen=True)
class Learning:
    """What to learn. Only a BPE has a size, a minimal frequency and a separator."""

    kind: str
    size: int | None = None
    min_frequency: int | None = None
    separator: str | None = None

    def __post_init__(self) -> None:
        if self.kind == "bpe" and self.size is None:
            raise UsageError("--vocab-size says how many entries the BPE is to have; GPT-2's has 50257")
        if self.kind != "bpe" and (self.size or self.min_frequency or self.separator):
            raise UsageError(
                f"a vocabulary of kind {self.kind!r} holds all that stands in the texts:"
                " --vocab-size, --min-frequency and --separator are for --kind bpe"
            )


def learn_file(inputs: Iterable[str], field: str, out: Path, wanted: Learning) -> str:
    """Learn from these texts and save the result in a new file; says what it is."""
    if out.exists():
        raise UsageError(f"{out} exists already; give another name, or remove it first")
    if not out.parent.is_dir():
        raise UsageError(f"{out} cannot be written: there is no directory {out.parent}")
    texts = documents([resolve_data(word) for word in inputs], field)
    if wanted.kind == "bpe":
        assert wanted.size is not None
        frequency, separator = wanted.min_frequency or 2, wanted.separator or "last"
        learned: Tokenizer = learn_bpe(texts, wanted.size, frequency, separator)
    else:
        learned = collect(wanted.kind, texts)
    with atomic_file(out) as file:
        file.write(learned.to_json().encode())
    fewer = wanted.size and learned.size < wanted.size
    return f"{out}: {learned.describe()}{'; no more pairs are frequent enough' if fewer else ''}"


def learn_bpe(texts: Iterable[str], size: int, min_frequency: int, separator: str) -> bpe.BpeTokenizer:
    """Up to `size` entries, the separator ("first", "last" or "none") included.

    Fewer if no more pairs stand `min_frequency` times in the texts. Equal texts give equal tokenizers. In
    memory lie the distinct pieces of the texts, not the texts.
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
    _interruptible(lambda: library.train_from_iterator(_not_empty(texts), trainer))
    learned = json.loads(library.to_str())["model"]
    vocabulary = sorted(learned["vocab"], key=learned["vocab"].__getitem__)
    token_id = {"last": len(vocabulary), "first": 0, "none": None}[separator]
    if token_id is not None:
        vocabulary.insert(token_id, bpe.SEPARATOR)
    return bpe.checked(vocabulary, learned["merges"], token_id, "the learned tokenizer")


def _interruptible(work: Callable[[], None]) -> None:
    """The library does not look for Ctrl-C; the main thread does, while another one works."""
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


def collect(kind: str, texts: Iterable[str]) -> Tokenizer:
    """All characters ("char") or words ("word") of the texts, sorted."""
    return knowing(kind, _not_empty(texts))


def _not_empty(texts: Iterable[str]) -> Iterator[str]:
    empty = True
    for text in texts:
        empty = empty and not text
        yield text
    if empty:
        raise DataError("there is no text to learn from")
