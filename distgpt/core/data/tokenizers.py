"""Tokenizers: the base class, the byte tokenizer, and loading by name or file.

For other tokenizers in corpora/tokenizers, see `Components.tokenizer`.
"""

from __future__ import annotations

import codecs
import copy
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from distgpt.core.base.checked import Json, JsonObject, checked, parse_json
from distgpt.core.base.errors import DataError, UsageError, did_you_mean
from distgpt.core.base.files import read_small
from distgpt.core.components import EXTENDED, components

BYTE = "byte"
AUTO = "auto"  # the tokenizer of an existing model or of the shards; otherwise bytes
SAVED = "tokenizer.json"  # a tokenizer's file name in a directory
TOKENIZER_FORMAT = "distgpt-tokenizer"
TOKENIZER_VERSION = 1
LONGEST_TEMPLATE = 1 << 18  # characters
UNKNOWN = "\ufffd"  # stands for ids beyond the vocabulary; a model may have more rows

Ids = NDArray[np.integer]


class Streamer(Protocol):
    """Decoder of one id at a time. The concatenated results equal `decode` of all ids."""

    def feed(self, token_id: int) -> str:
        """Return the text that later ids cannot change; may be empty."""

    def flush(self) -> str:
        """Return the remaining text after the last id."""

    def copy(self) -> Self:
        """Return a copy with the same state, so that a prompt is decoded only once for multiple samples."""


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A Jinja template that formats a chat as text, as transformers models include.

    `tokens` maps the template's names, such as bos_token, to the tokens' spelling. `ends` are the ids that
    end an answer. A template is an untrusted program; corpora/chats/ runs it.
    """

    source: str
    tokens: dict[str, str]
    ends: tuple[int, ...]


class Tokenizer(ABC):
    """Base class. Ids are 0 to size - 1. Decoding never fails: invalid ids become U+FFFD.

    `separator` is the id of the token between documents, or None. No text encodes to it, not even its own
    spelling. `first` are the ids at the start of a prompt.
    """

    kind: str
    size: int
    separator: int | None = None
    first: tuple[int, ...] = ()
    chat: ChatTemplate | None = None

    @property
    def specials(self) -> Mapping[str, int]:
        """Return the tokens that no text encodes to, by their spelling."""
        return {} if self.separator is None else {self.decode([self.separator]): self.separator}

    @property
    def ends(self) -> tuple[int, ...]:
        own = () if self.separator is None else (self.separator,)
        return own + (self.chat.ends if self.chat else ())

    def with_chat(self, chat: ChatTemplate | None) -> Self:
        """Return a copy with another chat template."""
        other = copy.copy(self)
        other.chat = chat
        return other

    @abstractmethod
    def encode(self, text: str) -> Ids:
        """Encode text as uint16, or as uint32 if the vocabulary requires it.

        A DataError names the first part of the text that is not in the vocabulary.
        """

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a prompt."""
        return [*self.first, *self.encode(text).tolist()]

    @abstractmethod
    def streamer(self) -> Streamer: ...

    def streamer_behind(self, prompt: Sequence[int]) -> Streamer:
        """Return a decoder for the continuation of a prompt."""
        streamer = self.streamer()
        for token in prompt:
            streamer.feed(token)
        return streamer

    @abstractmethod
    def text_size(self, ids: Sequence[int]) -> int:
        """Return an upper bound of the decoded length in characters, because entries may be long."""

    def decode(self, ids: Sequence[int] | Ids) -> str:
        streamer = self.streamer()
        return "".join(map(streamer.feed, np.asarray(ids).tolist())) + streamer.flush()

    def describe(self) -> str:
        return f"{self.kind}, {self.size:,} entries"

    def contents(self) -> dict[str, object]:
        """Return the saved fields other than the kind."""
        return {}

    def to_json(self, with_chat: bool = True) -> str:
        """Return the saved form. Equal tokenizers have equal saved forms."""
        head = {"format": TOKENIZER_FORMAT, "version": TOKENIZER_VERSION, "kind": self.kind}
        chat = {"chat": asdict(self.chat)} if self.chat and with_chat else {}
        return json.dumps({**head, **self.contents(), **chat})


class BytesDecoder(Tokenizer):
    """Base class of tokenizers whose ids are UTF-8 bytes, not always whole characters."""

    # 0xFF never occurs in UTF-8, so it decodes to exactly one U+FFFD.
    FOREIGN = b"\xff"

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces

    def decode(self, ids: Sequence[int] | Ids) -> str:
        pieces, size = self.pieces, len(self.pieces)
        result = [pieces[i] if 0 <= i < size else self.FOREIGN for i in np.asarray(ids).tolist()]
        return b"".join(result).decode("utf-8", "replace")

    def streamer(self) -> Streamer:
        return BytesStreamer(self.pieces)

    def text_size(self, ids: Sequence[int]) -> int:
        return text_size(self.pieces, ids)


def text_size(entries: Sequence[bytes] | Sequence[str], ids: Sequence[int]) -> int:
    return sum(len(entries[i]) if 0 <= i < len(entries) else 1 for i in ids)


class BytesStreamer:
    """Decoder that buffers incomplete characters."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        known = 0 <= token_id < len(self._pieces)
        return self._decoder.decode(self._pieces[token_id] if known else BytesDecoder.FOREIGN)

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)

    def copy(self) -> Self:
        other = copy.copy(self)
        other._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        other._decoder.setstate(self._decoder.getstate())
        return other


def fingerprint(tokenizer: Tokenizer) -> str:
    """Return the SHA-256 of the saved JSON. Tokenizers that encode and decode identically have equal ones."""
    return hashlib.sha256(tokenizer.to_json(with_chat=False).encode()).hexdigest()


def id_dtype(size: int) -> type[np.uint16] | type[np.uint32]:
    """Return the smaller dtype that holds every id below `size`."""
    return np.uint16 if size <= 1 << 16 else np.uint32


def encoded(text: str, encoding: str) -> bytes:
    try:
        return text.encode(encoding)
    except UnicodeEncodeError as error:
        raise DataError(
            f"the text is not valid UTF-8: {text[error.start]!r} at position {error.start}"
        ) from None


class ByteTokenizer(BytesDecoder):
    """The 256 bytes of UTF-8. Encodes every text and needs no vocabulary."""

    kind = BYTE
    size = 256

    def __init__(self) -> None:
        super().__init__([bytes((byte,)) for byte in range(self.size)])

    def encode(self, text: str) -> Ids:
        return np.frombuffer(encoded(text, "utf-8"), np.uint8).astype(id_dtype(self.size))


@dataclass(frozen=True, slots=True)
class TokenizerKind:
    """Ways to create a tokenizer of one kind; None means unsupported.

    The kind is found by name in a saved form. If it has a spelling, also by `--tokenizer NAME` or
    `--tokenizer NAME:ARGUMENT`. `argument` below is "" if omitted.
    """

    spelling: str = ""  # the spelling of --tokenizer, for help and messages
    accepts: Callable[[str], bool] = lambda argument: not argument
    from_name: Callable[[str], Tokenizer] | None = None  # (argument)
    # (argument, documents, whether separators may be needed between them)
    learn: Callable[[str, Iterable[str], bool], Tokenizer] | None = None
    from_json: Callable[[JsonObject, str], Tokenizer] | None = None  # (saved form, its source in errors)
    # (path, its JSON or None for a directory): a tokenizer in a third-party format; None: another kind
    from_file: Callable[[Path, Json], Tokenizer | None] | None = None
    # (argument, tokenizer): whether the name can mean it. None: only loading the name shows that.
    means: Callable[[str, Tokenizer], bool] | None = None


BYTES = TokenizerKind(
    BYTE,
    from_name=lambda argument: ByteTokenizer(),
    from_json=lambda document, source: ByteTokenizer(),
    means=lambda argument, tokenizer: tokenizer.kind == BYTE,
)


def tokenizer_kinds() -> Iterator[tuple[str, TokenizerKind]]:
    for name in components().tokenizers:
        if kind := components().tokenizer(name):
            yield name, kind


def find_kind(name: str) -> tuple[TokenizerKind | None, str]:
    """Return the kind and argument of `--tokenizer NAME`; None if NAME may be a path."""
    key, _, argument = name.partition(":")
    kind = components().tokenizer(key)
    if kind is None or not kind.spelling or not kind.accepts(argument):
        return None, ""
    return kind, argument


def load_tokenizer(name: str, text: str | None = None) -> Tokenizer:
    """Return a tokenizer by the name of its kind, or the path of a file or directory.

    A kind that is trained learns its vocabulary from `text`.
    """
    kind, argument = find_kind(name)
    if kind is None:
        return _from_path(name)
    if text is not None and kind.learn is not None:
        encoded(text, "utf-8")  # fail early: training takes long
        return kind.learn(argument, [text], False)
    if kind.from_name is None:
        raise UsageError(f"a tokenizer of kind {name!r} requires training text for its vocabulary")
    return kind.from_name(argument)


def can_mean(name: str, tokenizer: Tokenizer) -> bool:
    """Return whether `--tokenizer NAME` can mean this tokenizer. Load NAME if its kind cannot decide."""
    if name == AUTO:
        return True
    kind, argument = find_kind(name)
    if kind is not None and kind.means is not None:
        return kind.means(argument, tokenizer)
    return fingerprint(load_tokenizer(name)) == fingerprint(tokenizer)


@lru_cache(2)  # A weights file is checked first and read later, and large vocabularies take seconds.
def tokenizer_from_json(text: str, source: str) -> Tokenizer:
    """Parse the result of `to_json`; `source` names it in errors."""
    return _from_document(parsed(text, source), source)


def parsed(text: str, source: str) -> Json:
    """Parse the JSON of a saved tokenizer. A DataError names `source`."""
    try:
        return parse_json(text)
    except ValueError as error:
        raise DataError(f"{source} is not a saved tokenizer: not JSON ({error})") from None


def _from_document(document: Json, source: str) -> Tokenizer:
    if not isinstance(document, dict) or document.get("format") != TOKENIZER_FORMAT:
        raise DataError(f"{source} is not a saved tokenizer: the format is not {TOKENIZER_FORMAT!r}")
    if document.get("version") != TOKENIZER_VERSION:
        raise DataError(
            f"{source} has tokenizer version {document.get('version')!r};"
            f" this distgpt reads version {TOKENIZER_VERSION}"
        )
    name = document.get("kind")
    kind = components().tokenizer(name) if isinstance(name, str) else None
    if kind is None or kind.from_json is None:
        known = ", ".join(each for each, row in tokenizer_kinds() if row.from_json)
        raise DataError(f"{source} has a tokenizer of unknown kind {name!r}; known: {known}; {EXTENDED}")
    tokenizer = kind.from_json(document, source)
    chat = document.get("chat")
    return tokenizer if chat is None else tokenizer.with_chat(checked_chat(chat, tokenizer.size, source))


def checked_chat(value: object, size: int, source: str) -> ChatTemplate:
    """Return the chat template in a tokenizer's file, or raise a DataError. `size` is the vocabulary size."""
    try:
        chat: ChatTemplate = checked(ChatTemplate, value, ("chat",))
    except ValueError as error:
        raise DataError(f"{source}: {error}") from None
    if len(chat.source) > LONGEST_TEMPLATE:
        raise DataError(f"{source}: the chat template is longer than {LONGEST_TEMPLATE:,} characters")
    if not all(0 <= token < size for token in chat.ends):
        raise DataError(f"{source}: the chat's end token {max(chat.ends)} is not in the vocabulary")
    return chat


def _from_path(name: str) -> Tokenizer:
    """Load a file or a directory's tokenizer.json, in distgpt's format or a third-party one."""
    path = Path(name)
    try:
        if path.is_dir() and (path / SAVED).is_file():
            path = path / SAVED
        path.stat()
    except FileNotFoundError:
        names = (*(row.spelling for _, row in tokenizer_kinds() if row.spelling), "PATH")
        raise UsageError(
            f"the tokenizer {name!r} is not a kind or a file{did_you_mean(name, names)}"
        ) from None
    except (OSError, ValueError) as error:
        raise unreadable(name, error) from None
    document = None if path.is_dir() else read_json(path)
    if isinstance(document, dict) and document.get("format") == TOKENIZER_FORMAT:
        return _from_document(document, str(path))
    for _, kind in tokenizer_kinds():
        result = kind.from_file(path, document) if kind.from_file else None
        if result is not None:
            return result
    if path.is_dir():
        raise DataError(f"{name} contains no {SAVED}")
    return _from_document(document, str(path))  # raises the error


def read_json(path: Path) -> Json:
    """Return the JSON in a file, or raise a DataError."""
    try:
        return parsed(read_small(path).decode(), str(path))
    except UnicodeDecodeError as error:
        raise unreadable(str(path), error) from None


def unreadable(name: str, error: OSError | ValueError) -> DataError:
    """Return the error for an unreadable tokenizer file."""
    reason = getattr(error, "strerror", None) or error
    return DataError(f"cannot read {name!r} as a saved tokenizer: {reason}")
