"""Character and word tokenizers, whose vocabulary is collected from the training text."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

import numpy as np

from distgpt.core.base.errors import DataError
from distgpt.core.data.tokenizers import (
    UNKNOWN,
    Ids,
    Streamer,
    Tokenizer,
    TokenizerKind,
    encoded,
    id_dtype,
    text_size,
)


class _VocabularyTokenizer(Tokenizer):
    """The base of CharTokenizer and WordTokenizer. An id is an index in a list of strings."""

    def __init__(self, vocabulary: Sequence[str]) -> None:
        self.vocabulary = tuple(vocabulary)
        self.size = len(self.vocabulary)

    def streamer(self) -> Streamer:
        return _PieceStreamer(self.vocabulary, spaced=str)  # no spacing

    def text_size(self, ids: Sequence[int]) -> int:
        return len(ids) + text_size(self.vocabulary, ids)  # words have blanks between them

    def contents(self) -> dict[str, object]:
        return {"vocabulary": self.vocabulary}

    def _refuse(self, thing: str, first: str, position: int, distinct: int) -> NoReturn:
        raise DataError(
            f"the {thing} {first!r} at position {position} is not in the vocabulary"
            f" ({distinct} distinct missing in total); only text like the training text can be encoded"
        )


class CharTokenizer(_VocabularyTokenizer):
    """One id per distinct character (code point)."""

    kind = "char"

    def __init__(self, vocabulary: Sequence[str]) -> None:
        super().__init__(vocabulary)
        codes = [ord(character) for character in self.vocabulary]
        # One entry per code up to the largest, and one for all higher codes.
        self._id_of_code = np.full(max(codes, default=-1) + 2, -1, np.int32)
        self._id_of_code[codes] = np.arange(self.size)

    def encode(self, text: str) -> Ids:
        codes = np.frombuffer(encoded(text, "utf-32-le"), np.uint32)
        ids = self._id_of_code[np.minimum(codes, len(self._id_of_code) - 1)]
        unknown = np.flatnonzero(ids < 0)
        if unknown.size:
            first = int(unknown[0])
            self._refuse("character", text[first], first, np.unique(codes[unknown]).size)
        return ids.astype(id_dtype(self.size))


# A line break; letters and digits with inner apostrophes; or one mark. Other whitespace only separates.
WORD = re.compile(r"\n|[^\W_]+(?:['’][^\W_]+)*|[^\w\s]|_")


class WordTokenizer(_VocabularyTokenizer):
    """One id per distinct word, punctuation mark or line break.

    Whitespace is normalized: encoding drops it, and decoding writes one space between tokens, except where
    typography has none (see `_Typesetter`). So `encode(decode(ids))` always equals `ids`, but
    `decode(encode(text))` equals `text` only for text with the usual spacing.
    """

    kind = "word"

    def __init__(self, vocabulary: Sequence[str]) -> None:
        super().__init__(vocabulary)
        self._id_of_word = {word: i for i, word in enumerate(self.vocabulary)}

    def encode(self, text: str) -> Ids:
        encoded(text, "utf-8")
        words = WORD.findall(text)
        if unknown := set(words) - self._id_of_word.keys():
            first = next(match for match in WORD.finditer(text) if match[0] in unknown)
            self._refuse("word", first[0], first.start(), len(unknown))
        return np.fromiter(map(self._id_of_word.__getitem__, words), id_dtype(self.size), len(words))

    def streamer(self) -> Streamer:
        return _PieceStreamer(self.vocabulary, _Typesetter().spaced)


class _PieceStreamer:
    """Decodes each id to an entry of the vocabulary, spaced by `spaced`."""

    def __init__(self, vocabulary: Sequence[str], spaced: Callable[[str], str]) -> None:
        self._vocabulary, self._spaced = vocabulary, spaced

    def feed(self, token_id: int) -> str:
        known = 0 <= token_id < len(self._vocabulary)
        return self._spaced(self._vocabulary[token_id] if known else UNKNOWN)

    def flush(self) -> str:
        return ""

    def copy(self) -> _PieceStreamer:
        return _PieceStreamer(self._vocabulary, copy.deepcopy(self._spaced))  # copies its bound object


class _Typesetter:
    """Appends tokens, with or without a space between them.

    Two words never touch, and a quote mark touches a word on at most one side. Otherwise it would become an
    apostrophe in a longer word. With these two rules, the text always splits into the same tokens.
    """

    CLOSING = frozenset(".,;:!?…)]}”’»%")
    OPENING = frozenset("([{“‘«¿¡")
    STRAIGHT_QUOTES = frozenset("\"'")  # alternately opening and closing, reset on every line
    INNER = frozenset("-–—/")  # no spaces on either side after a word

    def __init__(self) -> None:
        self._touches_next = True
        self._after_word = False
        self._open_quotes: set[str] = set()

    def spaced(self, token: str) -> str:
        """Return the token, after a space if needed."""
        touches_last, touches_next = self._sides(token)
        space = "" if touches_last or self._touches_next else " "
        self._touches_next = touches_next
        self._after_word = token[-1].isalnum()
        return space + token

    def _sides(self, token: str) -> tuple[bool, bool]:
        """Return whether the token touches the previous token, and the next one."""
        if token == "\n":
            self._open_quotes.clear()
            return True, True
        if token in self.STRAIGHT_QUOTES:
            if token == "'" and self._after_word and token not in self._open_quotes:
                return True, False  # the keepers' lamp
            self._open_quotes ^= {token}
            opens = token in self._open_quotes
            return not opens, opens
        if token in self.INNER and self._after_word:
            return True, True
        return token in self.CLOSING, token in self.OPENING


def collect(kind: str, texts: Iterable[str]) -> CharTokenizer | WordTokenizer:
    """Build the tokenizer of all characters ("char") or words ("word") in `texts`, sorted."""
    result: set[str] = set()
    for text in texts:
        result.update(text if kind == "char" else WORD.findall(text))
    return CharTokenizer(sorted(result)) if kind == "char" else WordTokenizer(sorted(result))


def checked_vocabulary(vocabulary: object, kind: str, source: str) -> list[str]:
    """Return the vocabulary of a saved character or word tokenizer. Raises a DataError if invalid."""
    if not isinstance(vocabulary, list) or not vocabulary:
        raise DataError(f"{source}: the tokenizer's vocabulary must be a non-empty list of strings")
    for entry in vocabulary:
        fits = isinstance(entry, str) and (len(entry) == 1 if kind == "char" else WORD.fullmatch(entry))
        if not fits or any("\ud800" <= character <= "\udfff" for character in entry):
            raise DataError(f"{source}: the vocabulary's entry {entry!r} is not one {kind}")
    refuse_repeated(vocabulary, source)
    return vocabulary


def refuse_repeated(vocabulary: Sequence[str], source: str) -> None:
    commonest, times = Counter(vocabulary).most_common(1)[0] if vocabulary else ("", 0)
    if times > 1:
        raise DataError(f"{source}: the vocabulary lists {commonest!r:.80} {times} times")


def _row(kind: str, make: Callable[[list[str]], Tokenizer]) -> TokenizerKind:
    return TokenizerKind(
        kind,
        learn=lambda argument, texts, are_documents: collect(kind, texts),
        from_json=lambda document, source: make(checked_vocabulary(document.get("vocabulary"), kind, source)),
        means=lambda argument, tokenizer: tokenizer.kind == kind,
    )


CHARACTERS, WORDS = _row("char", CharTokenizer), _row("word", WordTokenizer)
