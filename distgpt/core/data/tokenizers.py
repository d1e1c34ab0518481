"""Tokenizers by the name of their kind, from their saved form, or from a file.

Each kind is a row of a table. Plain ones stand here, others are handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Protocol

from distgpt.core.base.checked import Json, JsonObject, parse_json
from distgpt.core.base.errors import DataError, UsageError, nearest
from distgpt.core.base.files import read_small
from distgpt.core.base.tables import Table
from distgpt.core.data.collected import CharTokenizer, WordTokenizer, checked_vocabulary, collect
from distgpt.core.data.plain import (
    TOKENIZER_FORMAT,
    TOKENIZER_VERSION,
    ByteTokenizer,
    Extra,
    Ids,
    Tokenizer,
    encoded,
    fingerprint,
    id_dtype,
)

__all__ = [
    "Ids",
    "Tokenizer",
    "TokenizerKind",
    "build_tokenizer",
    "fingerprint",
    "id_dtype",
    "load_tokenizer",
    "tokenizer_from_json",
]

SAVED = "tokenizer.json"  # the name of a tokenizer's file in a folder


@dataclass(frozen=True, slots=True)
class TokenizerKind:
    """A row of the table of tokenizers: the ways to get one of a kind. None: it has no such way.

    The row is found by the kind in a saved form, and by `--tokenizer NAME` or `--tokenizer NAME:ARGUMENT`
    where it has a spelling. `argument` below is "" where none is given.
    """

    spelling: str = ""  # of --tokenizer, for people
    accepts: Callable[[str], bool] = lambda argument: not argument
    from_name: Callable[[str], Tokenizer] | None = None  # (argument)
    # (argument, texts, whether these are documents, between which a separator may stand)
    learn: Callable[[str, Iterable[str], bool], Tokenizer] | None = None
    from_json: Callable[[JsonObject, str], Tokenizer] | None = None  # (saved form, its source in errors)
    # (path, its JSON or None for a folder): a tokenizer in another program's file; None: of another kind
    from_file: Callable[[Path, Json], Tokenizer | None] | None = None
    # (argument, tokenizer): whether the name can mean it. None: the name has to be loaded to know that.
    means: Callable[[str, Tokenizer], bool] | None = None


def _is_of_kind(kind: str, argument: str, tokenizer: Tokenizer) -> bool:
    return tokenizer.kind == kind


def _collected(kind: str, make: Callable[[list[str]], Tokenizer]) -> TokenizerKind:
    """Return the row of a kind whose vocabulary is collected from a text."""
    return TokenizerKind(
        kind,
        learn=lambda argument, texts, are_documents: collect(kind, texts),
        from_json=lambda document, source: make(checked_vocabulary(document.get("vocabulary"), kind, source)),
        means=partial(_is_of_kind, kind),
    )


TOKENIZERS = Table(
    "tokenizers",
    "a tokenizer of kind",
    {
        "byte": TokenizerKind(
            "byte",
            from_name=lambda argument: ByteTokenizer(),
            from_json=lambda document, source: ByteTokenizer(),
            means=partial(_is_of_kind, "byte"),
        ),
        "char": _collected("char", CharTokenizer),
        "word": _collected("word", WordTokenizer),
    },
)


class ExtraKind(Protocol):
    """A row of the table of extras, by their names in a tokenizer's saved form."""

    def __call__(self, value: Json, size: int, source: str) -> Extra:
        """Return the extra that was saved with a tokenizer of `size` entries, or raise a DataError."""


EXTRAS: Table[ExtraKind] = Table("extras", "what a tokenizer has besides", {})


def find_kind(name: str) -> tuple[TokenizerKind | None, str]:
    """Return the row that `--tokenizer NAME` means, and its argument; no row where NAME may be a path."""
    key, _, argument = name.partition(":")
    kind = TOKENIZERS.get(key)
    if kind is None or not kind.spelling or not kind.accepts(argument):
        return None, ""
    return kind, argument


def build_tokenizer(name: str, text: str) -> Tokenizer:
    """Return a tokenizer of this kind with the vocabulary of `text`, or what `load_tokenizer` returns."""
    kind, argument = find_kind(name)
    if kind is None or kind.learn is None:
        return load_tokenizer(name)
    encoded(text, "utf-8")
    return kind.learn(argument, [text], False)


def load_tokenizer(name: str) -> Tokenizer:
    """Return a tokenizer that needs no text: by the name of its kind, or the path of a file or folder."""
    kind, argument = find_kind(name)
    if kind is None:
        return _from_path(name)
    if kind.from_name is None:
        raise UsageError(f"a tokenizer of kind {name!r} takes its vocabulary from a text")
    return kind.from_name(argument)


def can_mean(name: str, tokenizer: Tokenizer) -> bool:
    """Return whether `--tokenizer NAME` can mean this tokenizer. Load it where its kind does not tell."""
    kind, argument = find_kind(name)
    if kind is not None and kind.means is not None:
        return kind.means(argument, tokenizer)
    return fingerprint(load_tokenizer(name)) == fingerprint(tokenizer)


@lru_cache(2)  # a weights file is checked first and then read: large vocabularies take seconds
def tokenizer_from_json(text: str, source: str) -> Tokenizer:
    """Parse what `to_json` returned; `source` names it in errors."""
    return _from_document(parsed(text, source), source)


def parsed(text: str, source: str) -> Json:
    """Return the JSON of a saved tokenizer, or raise a DataError that names `source`."""
    try:
        return parse_json(text)
    except ValueError as error:
        raise DataError(f"{source} is not a saved tokenizer: it is not JSON ({error})") from None


def _from_document(document: Json, source: str) -> Tokenizer:
    if not isinstance(document, dict) or document.get("format") != TOKENIZER_FORMAT:
        raise DataError(f"{source} is not a saved tokenizer: its format is not {TOKENIZER_FORMAT!r}")
    if document.get("version") != TOKENIZER_VERSION:
        raise DataError(
            f"{source} is a tokenizer of version {document.get('version')!r};"
            f" this distgpt reads version {TOKENIZER_VERSION}"
        )
    name = document.get("kind")
    kind = TOKENIZERS.get(name) if isinstance(name, str) else None
    if kind is None or kind.from_json is None:
        known = ", ".join(each for each, row in TOKENIZERS.rows() if row.from_json)
        raise DataError(f"{source} is a tokenizer of an unknown kind {name!r}; known: {known}")
    tokenizer = kind.from_json(document, source)
    found = {each: document[each] for each in EXTRAS if document.get(each) is not None}
    if not found:
        return tokenizer
    extras = {each: EXTRAS[each](value, tokenizer.size, source) for each, value in found.items()}
    return tokenizer.with_extras(extras)


def _from_path(name: str) -> Tokenizer:
    """Return the tokenizer in a file or in a folder's tokenizer.json, in our format or another program's."""
    path = Path(name)
    try:
        if path.is_dir() and (path / SAVED).is_file():
            path = path / SAVED
        path.stat()
    except FileNotFoundError:
        names = (*(row.spelling for _, row in TOKENIZERS.rows() if row.spelling), "PATH")
        raise UsageError(f"the tokenizer {name!r} is no kind and no file{nearest(name, names)}") from None
    except (OSError, ValueError) as error:
        raise unreadable(name, error) from None
    document = None if path.is_dir() else read_json(path)
    if isinstance(document, dict) and document.get("format") == TOKENIZER_FORMAT:
        return _from_document(document, str(path))
    for _, kind in TOKENIZERS.rows():
        found = kind.from_file(path, document) if kind.from_file else None
        if found is not None:
            return found
    if path.is_dir():
        raise DataError(f"{name} holds no {SAVED}")
    if missing := TOKENIZERS.missing():  # it might have read the file
        raise missing
    return _from_document(document, str(path))  # which says why not


def read_json(path: Path) -> Json:
    """Return the JSON in a file, or raise a DataError."""
    try:
        return parsed(read_small(path).decode(), str(path))
    except UnicodeDecodeError as error:
        raise unreadable(str(path), error) from None


def unreadable(name: str, error: OSError | ValueError) -> DataError:
    """Return the error for a file of a tokenizer that cannot be read."""
    reason = getattr(error, "strerror", None) or error
    return DataError(f"{name!r} cannot be read as a saved tokenizer: {reason}")
