"""The base of all tokenizers, and those that need no training: by byte, by character, by word."""

from __future__ import annotations

import codecs
import copy
import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from distgpt.core.base.errors import DataError

FORMAT = "distgpt-tokenizer"
VERSION = 1
UNKNOWN = "\ufffd"  # what an id beyond the vocabulary decodes to; a model may have more rows than that

Ids = NDArray[np.integer[Any]]


class Streamer(Protocol):
    """Decodes ids one at a time. The texts returned, concatenated, equal `decode` of the ids."""

    def feed(self, token_id: int) -> str:
        """Return the text that is certain once this id is known; may be empty."""

    def flush(self) -> str:
        """Return what was held back, as no more ids come."""

    def copy(self) -> Self:
        """Return another decoder that knows the same ids: so a prompt is decoded once for many samples."""


class Extra(Protocol):
    """Something that comes with a tokenizer and is saved with it, under a name of its own."""

    @property
    def ends(self) -> tuple[int, ...]:
        """Return ids behind which nothing of the same text comes."""

    def saved(self) -> dict[str, Any]:
        """Return what the tokenizer's file keeps of it."""


class Tokenizer(ABC):
    """Ids run from 0 to size - 1. Decoding never fails: any other id becomes U+FFFD.

    `separator` is the id of the token that stands between documents, where there is one. No text encodes
    to it, not even its own. `first` are the ids that a prompt begins with.
    """

    kind: str
    size: int
    separator: int | None = None
    first: tuple[int, ...] = ()
    extras: Mapping[str, Extra] = MappingProxyType({})

    @property
    def specials(self) -> Mapping[str, int]:
        """Return the tokens that no text encodes to, by how they are spelled."""
        return {} if self.separator is None else {self.decode([self.separator]): self.separator}

    @property
    def ends(self) -> tuple[int, ...]:
        """Return the ids behind which nothing of the same text comes."""
        own = () if self.separator is None else (self.separator,)
        return own + tuple(end for extra in self.extras.values() for end in extra.ends)

    def with_extras(self, extras: Mapping[str, Extra]) -> Self:
        """Return the same tokenizer with others."""
        other = copy.copy(self)
        other.extras = extras
        return other

    @abstractmethod
    def encode(self, text: str) -> Ids:
        """uint16 where that suffices, else uint32. DataError names what is not in the vocabulary."""

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a text that a model is to continue."""
        return [*self.first, *self.encode(text).tolist()]

    def encode_parts(self, parts: Sequence[str | int]) -> tuple[Ids, Ids]:
        """Return the ids of texts between tokens that are given as ids, and where each ends.

        Places count the characters of the whole, in which tokens are spelled out.
        """
        ids: list[Any] = [np.empty(0, id_dtype(self.size))]
        ends: list[Any] = [np.empty(0, np.int64)]
        at = 0
        for part in parts:
            text = part if isinstance(part, str) else self.decode([part])
            found = self.encode(part) if isinstance(part, str) else np.array([part], ids[0].dtype)
            inside = self._ends_in(text, found) if isinstance(part, str) else [len(text)]
            ids.append(found)
            ends.append(at + np.asarray(inside, np.int64))
            at += len(text)
        return np.concatenate(ids), np.concatenate(ends)

    @abstractmethod
    def _ends_in(self, text: str, ids: Ids) -> Any:
        """Return where each id of a text ends in it, in characters."""

    @abstractmethod
    def streamer(self) -> Streamer:
        """A new decoder."""

    def streamer_behind(self, prompt: Sequence[int]) -> Streamer:
        """Return a decoder for what continues a prompt."""
        streamer = self.streamer()
        for token in prompt:
            streamer.feed(token)
        return streamer

    @abstractmethod
    def text_size(self, ids: Sequence[int]) -> int:
        """Return a bound on the characters of a text before there is one: entries may be long."""

    def decode(self, ids: Sequence[int] | Ids) -> str:
        streamer = self.streamer()
        return "".join(map(streamer.feed, np.asarray(ids).tolist())) + streamer.flush()

    def describe(self) -> str:
        """A short description for people."""
        return f"{self.kind}, {self.size:,} entries"

    def contents(self) -> dict[str, Any]:
        """Return what is saved besides the kind."""
        return {}

    def to_json(self, with_extras: bool = True) -> str:
        """Return the saved form: equal tokenizers give equal texts."""
        extras = {name: extra.saved() for name, extra in self.extras.items() if with_extras}
        head = {"format": FORMAT, "version": VERSION, "kind": self.kind}
        return json.dumps({**head, **self.contents(), **extras})


class BytesDecoder(Tokenizer):
    """Decoding where an id stands for some bytes of UTF-8, not always whole characters."""

    # 0xFF occurs nowhere in UTF-8, so it decodes to exactly one U+FFFD.
    FOREIGN = b"\xff"

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces

    def decode(self, ids: Sequence[int] | Ids) -> str:
        pieces, size = self.pieces, len(self.pieces)
        found = [pieces[i] if 0 <= i < size else self.FOREIGN for i in np.asarray(ids).tolist()]
        return b"".join(found).decode("utf-8", "replace")

    def streamer(self) -> Streamer:
        return _BytesStreamer(self.pieces)

    def text_size(self, ids: Sequence[int]) -> int:
        return _text_size(self.pieces, ids)

    def _ends_in(self, text: str, ids: Ids) -> Any:
        """Count characters that have begun: an id may be a part of one."""
        begun = np.cumsum(np.frombuffer(text.encode(), np.uint8) & 0xC0 != 0x80)
        return begun[np.cumsum([len(self.pieces[i]) for i in ids.tolist()], dtype=np.int64) - 1]


def _text_size(entries: Sequence[bytes] | Sequence[str], ids: Sequence[int]) -> int:
    return sum(len(entries[i]) if 0 <= i < len(entries) else 1 for i in ids)


class _BytesStreamer:
    """Holds back the first bytes of a character until its last one comes."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        known = 0 <= token_id < len(self._pieces)
        return self._decoder.decode(self._pieces[token_id] if known else BytesDecoder.FOREIGN)

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)

    def copy(self) -> _BytesStreamer:
        other = _BytesStreamer(self._pieces)
        other._decoder.setstate(self._decoder.getstate())
        return other


def fingerprint(tokenizer: Tokenizer) -> str:
    """The SHA-256 of the saved JSON: equal for tokenizers that encode and decode alike."""
    return hashlib.sha256(tokenizer.to_json(with_extras=False).encode()).hexdigest()


def id_dtype(size: int) -> type[np.uint16] | type[np.uint32]:
    """The smaller of two types that holds every id below `size`."""
    return np.uint16 if size <= 1 << 16 else np.uint32


def encoded(text: str, encoding: str) -> bytes:
    try:
        return text.encode(encoding)
    except UnicodeEncodeError as error:
        raise DataError(
            f"the text is not valid UTF-8: {text[error.start]!r} at position {error.start}"
        ) from None


class ByteTokenizer(BytesDecoder):
    """The 256 bytes of UTF-8: encodes every text, needs no vocabulary."""

    kind = "byte"
    size = 256

    def __init__(self) -> None:
        super().__init__([bytes((byte,)) for byte in range(self.size)])

    def encode(self, text: str) -> Ids:
        return np.frombuffer(encoded(text, "utf-8"), np.uint8).astype(id_dtype(self.size))


class _VocabularyTokenizer(Tokenizer):
    """The base of CharTokenizer and WordTokenizer: an id is an index in a list of strings."""

    def __init__(self, vocabulary: Sequence[str]) -> None:
        self.vocabulary = tuple(vocabulary)
        self.size = len(self.vocabulary)

    def streamer(self) -> Streamer:
        return _PieceStreamer(self.vocabulary, place=str)  # every piece as it is

    def text_size(self, ids: Sequence[int]) -> int:
        return len(ids) + _text_size(self.vocabulary, ids)  # words have blanks between

    def contents(self) -> dict[str, Any]:
        return {"vocabulary": self.vocabulary}

    def _refuse(self, thing: str, first: str, position: int, distinct: int) -> NoReturn:
        raise DataError(
            f"the {thing} {first!r} at position {position} is not in the vocabulary"
            f" ({distinct} distinct missing in all); only what is in the training text can be encoded"
        )


class CharTokenizer(_VocabularyTokenizer):
    """One id per distinct character (code point)."""

    kind = "char"

    def __init__(self, vocabulary: Sequence[str]) -> None:
        super().__init__(vocabulary)
        codes = [ord(character) for character in self.vocabulary]
        # One entry per code up to the largest, and one more that stands for all above it.
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

    def _ends_in(self, text: str, ids: Ids) -> Any:
        return range(1, len(text) + 1)


# A line break; letters and digits with inner apostrophes; or one mark. Other whitespace only separates.
WORD = re.compile(r"\n|[^\W_]+(?:['’][^\W_]+)*|[^\w\s]|_")


class WordTokenizer(_VocabularyTokenizer):
    """One id per distinct word, punctuation mark or line break.

    Runs of whitespace are normalised: encoding drops them, and decoding writes one space between tokens
    except where typography has none (see `_Typesetter`). So `encode(decode(ids))` equals `ids` for all
    ids, while `decode(encode(text))` equals `text` only where the text is spaced in the usual way.
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

    def _ends_in(self, text: str, ids: Ids) -> Any:
        return [found.end() for found in WORD.finditer(text)]

    def streamer(self) -> Streamer:
        return _PieceStreamer(self.vocabulary, _Typesetter().place)


class _PieceStreamer:
    """Decodes each id to an entry of the vocabulary, spaced by `place`."""

    def __init__(self, vocabulary: Sequence[str], place: Callable[[str], str]) -> None:
        self._vocabulary, self._place = vocabulary, place

    def feed(self, token_id: int) -> str:
        known = 0 <= token_id < len(self._vocabulary)
        return self._place(self._vocabulary[token_id] if known else UNKNOWN)

    def flush(self) -> str:
        return ""

    def copy(self) -> _PieceStreamer:
        return _PieceStreamer(self._vocabulary, copy.deepcopy(self._place))  # with what it is bound to


class _Typesetter:
    """Puts each token after the last one, with or without a space between.

    Two words never touch, and a quote mark touches a word on one side at most (or it would become the
    apostrophe of one longer word): with these two rules the text always splits into the same tokens.
    """

    CLOSING = frozenset(".,;:!?…)]}”’»%")
    OPENING = frozenset("([{“‘«¿¡")
    STRAIGHT_QUOTES = frozenset("\"'")  # opening and closing in turn, anew on every line
    INNER = frozenset("-–—/")  # no spaces at all when they follow a word

    def __init__(self) -> None:
        self._touches_next = True
        self._after_word = False
        self._open_quotes: set[str] = set()

    def place(self, token: str) -> str:
        touches_last, touches_next = self._sides(token)
        space = "" if touches_last or self._touches_next else " "
        self._touches_next = touches_next
        self._after_word = token[-1].isalnum()
        return space + token

    def _sides(self, token: str) -> tuple[bool, bool]:
        """Return if the token touches what is before it, and what comes after it."""
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
    """Build the tokenizer of all characters ("char") or words ("word") of the texts, sorted."""
    found: set[str] = set()
    for text in texts:
        found.update(text if kind == "char" else WORD.findall(text))
    return CharTokenizer(sorted(found)) if kind == "char" else WordTokenizer(sorted(found))


def checked_vocabulary(vocabulary: Any, kind: str, source: str) -> list[str]:
    """The vocabulary of a saved tokenizer of characters or words, or a DataError."""
    if not isinstance(vocabulary, list) or not vocabulary:
        raise DataError(f"{source}: the tokenizer's vocabulary must be a list of strings, and not empty")
    for entry in vocabulary:
        fits = isinstance(entry, str) and (len(entry) == 1 if kind == "char" else WORD.fullmatch(entry))
        if not fits or any("\ud800" <= character <= "\udfff" for character in entry):
            raise DataError(f"{source}: the vocabulary's entry {entry!r} is not one {kind}")
    refuse_repeated(vocabulary, source)
    return vocabulary


def refuse_repeated(vocabulary: Sequence[str], source: str) -> None:
    """Raise a DataError if a vocabulary has an entry twice."""
    commonest, times = Counter(vocabulary).most_common(1)[0] if vocabulary else ("", 0)
    if times > 1:
        raise DataError(f"{source}: the vocabulary lists {commonest!r:.80} {times} times")


def unreadable(name: str, error: OSError | ValueError) -> DataError:
    """Return the error for a file of a tokenizer that cannot be read."""
    reason = getattr(error, "strerror", None) or error
    return DataError(f"{name!r} cannot be read as a saved tokenizer: {reason}")
