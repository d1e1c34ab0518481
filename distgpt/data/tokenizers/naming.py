"""Tokenizers by name: a kind, a model on the hub, or a file; and what one is, for people."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from distgpt.checked import parse_json
from distgpt.config import nearest
from distgpt.data import hub
from distgpt.data.tokenizers.bpe import GPT2_FINGERPRINT, checked_bpe, unreadable
from distgpt.data.tokenizers.foreign import from_foreign
from distgpt.data.tokenizers.learn import LEAST_PAIRS, learn_bpe
from distgpt.data.tokenizers.plain import (
    FORMAT,
    VERSION,
    BytesDecoder,
    ByteTokenizer,
    CharTokenizer,
    Ids,
    Tokenizer,
    WordTokenizer,
    checked_chat,
    checked_vocabulary,
    collect,
    encoded,
    fingerprint,
    id_dtype,
)
from distgpt.data.tokenizers.tokenizer_json import LibraryTokenizer
from distgpt.errors import DataError, UsageError, escape
from distgpt.files import read_small
from distgpt.formatting import count

__all__ = [
    "GPT2_FINGERPRINT",
    "KINDS",
    "Ids",
    "Tokenizer",
    "build_tokenizer",
    "describe",
    "fingerprint",
    "id_dtype",
    "learned_size",
    "load_tokenizer",
    "tokenizer_from_json",
]

KINDS = ("byte", "char", "word")  # what can be built from any text
LEARNED = "bpe:"  # and the entries of a BPE to learn
SAVED_KINDS = (*KINDS, "bpe", LibraryTokenizer.kind)
GPT2 = "openai-community/gpt2"
SAMPLE = "The harbour lay still; it's 1900, naïve café — done."


def build_tokenizer(name: str, text: str) -> Tokenizer:
    """A tokenizer of this kind with the vocabulary of `text`, or whatever `load_tokenizer` takes."""
    if name in ("char", "word"):
        encoded(text, "utf-8")
        return collect(name, [text])
    if size := learned_size(name):
        return learn_bpe([text], size, LEAST_PAIRS, "none")
    return load_tokenizer(name)


def learned_size(name: str) -> int:
    """Return the N of "bpe:N", a BPE of N entries to be learned from the text; 0 for other names."""
    size = name.removeprefix(LEARNED)
    return int(size) if name.startswith(LEARNED) and size.isdecimal() and len(size) < 10 else 0


def load_tokenizer(name: str) -> Tokenizer:
    """A tokenizer that needs no text: "byte", "gpt2", "hub:ORG/NAME", or the path of a file or directory."""
    if name == "byte":
        return ByteTokenizer()
    if name in KINDS or learned_size(name):
        raise UsageError(f"a tokenizer of kind {name!r} takes its vocabulary from a text")
    if name == "gpt2" or name.startswith(hub.PREFIX):
        return _from_hub(GPT2 if name == "gpt2" else name.removeprefix(hub.PREFIX))
    path = _find(name)
    if path is None:
        names = (*KINDS, "bpe:N", "gpt2", "hub:ORG/NAME", "PATH")
        raise UsageError(f"the tokenizer {name!r} is no kind and no file{nearest(name, names)}")
    document = _read_json(path)
    if isinstance(document, dict) and document.get("format") != FORMAT:
        foreign = from_foreign(document, path)
        if foreign is not None:
            return foreign
    return _from_document(document, str(path))


@lru_cache(2)  # a weights file is checked first and then read: large vocabularies take seconds
def tokenizer_from_json(text: str, source: str) -> Tokenizer:
    """Parse what `to_json` returned; `source` names it in errors."""
    return _from_document(_parsed(text, source), source)


def _parsed(text: str, source: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise DataError(f"{source} is not a saved tokenizer: it is not JSON ({error})") from None


def _from_document(document: Any, source: str) -> Tokenizer:
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise DataError(f"{source} is not a saved tokenizer: its format is not {FORMAT!r}")
    if document.get("version") != VERSION:
        raise DataError(
            f"{source} is a tokenizer of version {document.get('version')!r};"
            f" this distgpt reads version {VERSION}"
        )
    kind = document.get("kind")
    if kind not in SAVED_KINDS:
        known = ", ".join(SAVED_KINDS)
        raise DataError(f"{source} is a tokenizer of an unknown kind {kind!r}; known: {known}")
    tokenizer = _of_kind(kind, document, source)
    return tokenizer.with_chat(checked_chat(document.get("chat"), tokenizer.size, source))


def _of_kind(kind: str, document: dict[str, Any], source: str) -> Tokenizer:
    if kind == "byte":
        return ByteTokenizer()
    if kind == "bpe":
        return checked_bpe(
            document.get("vocabulary"), document.get("merges"), document.get("separator"), source
        )
    if kind == LibraryTokenizer.kind:
        inner = document.get("document")
        if not isinstance(inner, dict) or not isinstance(inner.get("model"), dict):
            raise DataError(f"{source}: the tokenizer has no document with a model")
        return LibraryTokenizer(inner, source)
    vocabulary = checked_vocabulary(document.get("vocabulary"), kind, source)
    return CharTokenizer(vocabulary) if kind == "char" else WordTokenizer(vocabulary)


def _from_hub(repository: str) -> Tokenizer:
    path = hub.download_tokenizer(repository)
    tokenizer = from_foreign(_read_json(path), path)
    if tokenizer is None:
        raise DataError(f"{path} of {repository} is not a tokenizer")
    return tokenizer


def _find(name: str) -> Path | None:
    """The JSON file behind a path: itself, or the one in a directory. None if nothing is there."""
    path = Path(name)
    try:
        path.stat()
        if not path.is_dir():
            return path
        whole, vocab, merges = (path / file for file in hub.TOKENIZER_FILES)
        if whole.is_file():
            return whole
        if vocab.is_file() and merges.is_file():
            return vocab
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise unreadable(name, error) from None
    raise DataError(f"{name} holds no tokenizer: neither tokenizer.json nor vocab.json with merges.txt")


def _read_json(path: Path) -> Any:
    try:
        return _parsed(read_small(path).decode(), str(path))
    except UnicodeDecodeError as error:
        raise unreadable(str(path), error) from None


def describe(tokenizer: Tokenizer, text: str | None) -> Iterator[str]:
    """Say what a tokenizer is and how it splits a text, or a sample if that can be encoded."""
    yield f"tokenizer    {tokenizer.describe()}"
    separator = tokenizer.separator
    between = "none" if separator is None else f"{separator} {escape(tokenizer.decode([separator]))}"
    yield f"separator    {between}"
    yield f"fingerprint  {fingerprint(tokenizer)}"
    sample = SAMPLE if text is None else text
    try:
        ids = tokenizer.encode(sample).tolist()
    except DataError:
        if text is None:
            return
        raise
    size = len(sample.encode())
    rate = f", {size / len(ids):.2f} bytes per token" if ids else ""
    yield f"sample       {count(size, 'byte')} in {count(len(ids), 'token')}{rate}"
    yield f"pieces       {'│'.join(_piece(tokenizer, token_id) for token_id in ids)}"
    yield f"ids          {' '.join(map(str, ids))}"


def _piece(tokenizer: Tokenizer, token_id: int) -> str:
    """The text of one id on one line; bytes that are no whole character as \\xNN."""
    if isinstance(tokenizer, BytesDecoder):
        return escape(tokenizer.pieces[token_id].decode("utf-8", "backslashreplace"))
    return escape(tokenizer.decode([token_id]))
