"""What all tokenizers share: their interface, the type of ids, and the way back from bytes to text."""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from distgpt.errors import DataError

FORMAT = "distgpt-tokenizer"
VERSION = 1
UNKNOWN = "\ufffd"  # what an id decodes to when the model has more rows than the tokenizer has entries

Ids = NDArray[np.integer[Any]]


class Streamer(Protocol):
    """Decodes ids one at a time. All that was fed and flushed, concatenated, equals `decode` of the ids."""

    def feed(self, token_id: int) -> str:
        """The text that is certain once this id is known; may be empty."""

    def flush(self) -> str:
        """What was held back, now that no more ids come."""


class Tokenizer(Protocol):
    """Ids run from 0 to size - 1. Decoding never fails: any other id becomes U+FFFD.

    `separator` is the id of the token that stands between documents, where there is one. No text encodes
    to it, not even its own.
    """

    kind: str
    size: int
    separator: int | None

    def encode(self, text: str) -> Ids:
        """uint16 where that suffices, else uint32. DataError names what is not in the vocabulary."""

    def decode(self, ids: Sequence[int] | Ids) -> str: ...

    def streamer(self) -> Streamer:
        """A fresh decoder. To continue a prompt, feed it the prompt's ids first and drop what they give."""

    def describe(self) -> str:
        """A few words for people."""

    def to_json(self) -> str:
        """The same text for equal tokenizers."""


class BytesDecoder:
    """Decoding where an id stands for some bytes of UTF-8, which need not be whole characters."""

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


def saved(kind: str, **contents: Any) -> str:
    """The text that a tokenizer is kept as."""
    return json.dumps({"format": FORMAT, "version": VERSION, "kind": kind, **contents})


def fingerprint(tokenizer: Tokenizer) -> str:
    """Equal for tokenizers that encode and decode alike: the SHA-256 of what they are saved as."""
    return hashlib.sha256(tokenizer.to_json().encode()).hexdigest()


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
