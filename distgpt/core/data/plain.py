"""The base of all tokenizers, and the one that needs no vocabulary: by byte."""

from __future__ import annotations

import codecs
import copy
import hashlib
import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from distgpt.core.base.errors import DataError

TOKENIZER_FORMAT = "distgpt-tokenizer"
TOKENIZER_VERSION = 1
UNKNOWN = "\ufffd"  # an id beyond the vocabulary decodes to this; a model may have more rows than that

Ids = NDArray[np.integer]
Ends = Sequence[int] | NDArray[np.integer]  # positions in a text, in characters


class Streamer(Protocol):
    """Decodes ids one at a time. The texts returned, concatenated, equal `decode` of the ids."""

    def feed(self, token_id: int) -> str:
        """Return the text that no later id can change any more; may be empty."""

    def flush(self) -> str:
        """Return the text that was held back, as no more ids come."""

    def copy(self) -> Self:
        """Return another decoder that knows the same ids: so a prompt is decoded once for many samples."""


class Extra(Protocol):
    """An object that comes with a tokenizer and is saved with it, under a name of its own."""

    @property
    def ends(self) -> tuple[int, ...]:
        """Return ids that end a text."""

    def saved(self) -> dict[str, object]:
        """Return its saved form, as JSON in the tokenizer's file."""


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
        """Return the ids that end a text."""
        own = () if self.separator is None else (self.separator,)
        return own + tuple(end for extra in self.extras.values() for end in extra.ends)

    def with_extras(self, extras: Mapping[str, Extra]) -> Self:
        """Return the same tokenizer with other extras."""
        other = copy.copy(self)
        other.extras = extras
        return other

    @abstractmethod
    def encode(self, text: str) -> Ids:
        """Return the ids of a text: uint16 where that suffices, else uint32.

        A DataError names the first part of the text that is not in the vocabulary.
        """

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a text that a model is to continue."""
        return [*self.first, *self.encode(text).tolist()]

    def encode_parts(self, parts: Sequence[str | int]) -> tuple[Ids, Ids]:
        """Return the ids of texts between tokens that are given as ids, and the position where each ends.

        Positions count the characters of the whole, in which tokens are spelled out.
        """
        dtype = id_dtype(self.size)
        ids: list[Ids] = [np.empty(0, dtype)]
        ends: list[Ids] = [np.empty(0, np.int64)]
        begin = 0
        for part in parts:
            if isinstance(part, str):
                text, found = part, self.encode(part)
                inside = self._ends_in(text, found)
            else:
                text, found = self.decode([part]), np.array([part], dtype)
                inside = [len(text)]
            ids.append(found)
            ends.append(begin + np.asarray(inside, np.int64))
            begin += len(text)
        return np.concatenate(ids), np.concatenate(ends)

    @abstractmethod
    def _ends_in(self, text: str, ids: Ids) -> Ends:
        """Return where each id of a text ends in it, in characters."""

    @abstractmethod
    def streamer(self) -> Streamer:
        """Return a new decoder."""

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
        """Return a short description for people."""
        return f"{self.kind}, {self.size:,} entries"

    def contents(self) -> dict[str, object]:
        """Return the saved form besides the kind."""
        return {}

    def to_json(self, with_extras: bool = True) -> str:
        """Return the saved form: equal tokenizers give equal texts."""
        extras = {name: extra.saved() for name, extra in self.extras.items() if with_extras}
        head = {"format": TOKENIZER_FORMAT, "version": TOKENIZER_VERSION, "kind": self.kind}
        return json.dumps({**head, **self.contents(), **extras})


class BytesDecoder(Tokenizer):
    """The base of tokenizers whose ids stand for bytes of UTF-8, not always for whole characters."""

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
        return text_size(self.pieces, ids)

    def _ends_in(self, text: str, ids: Ids) -> Ends:
        """Count characters that have begun: an id may be a part of one."""
        begun = np.cumsum(np.frombuffer(text.encode(), np.uint8) & 0xC0 != 0x80)
        return begun[np.cumsum([len(self.pieces[i]) for i in ids.tolist()], dtype=np.int64) - 1]


def text_size(entries: Sequence[bytes] | Sequence[str], ids: Sequence[int]) -> int:
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
    """Return the SHA-256 of the saved JSON: equal for tokenizers that encode and decode alike."""
    return hashlib.sha256(tokenizer.to_json(with_extras=False).encode()).hexdigest()


def id_dtype(size: int) -> type[np.uint16] | type[np.uint32]:
    """Return the smaller of two types that holds every id below `size`."""
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


def refuse_repeated(vocabulary: Sequence[str], source: str) -> None:
    """Raise a DataError if a vocabulary has an entry twice."""
    commonest, times = Counter(vocabulary).most_common(1)[0] if vocabulary else ("", 0)
    if times > 1:
        raise DataError(f"{source}: the vocabulary lists {commonest!r:.80} {times} times")
