"""Tokenizers by name: a kind, a model on the hub, or a file."""

from __future__ import annotations

import json
from typing import Any

from distgpt.config import nearest
from distgpt.data.tokenizers import bpe, bpe_files, plain
from distgpt.data.tokenizers.api import (
    FORMAT,
    VERSION,
    Ids,
    Streamer,
    Tokenizer,
    encoded,
    fingerprint,
    id_dtype,
)
from distgpt.data.tokenizers.bpe import GPT2_FINGERPRINT
from distgpt.data.tokenizers.plain import WORD, ByteTokenizer, CharTokenizer, WordTokenizer
from distgpt.errors import DataError, UsageError

__all__ = [
    "GPT2_FINGERPRINT",
    "KINDS",
    "WORD",
    "Ids",
    "Streamer",
    "Tokenizer",
    "build_tokenizer",
    "fingerprint",
    "id_dtype",
    "load_tokenizer",
    "tokenizer_from_json",
]

KINDS = ("byte", "char", "word")  # what can be built from any text
SAVED_KINDS = (*KINDS, "bpe")


def build_tokenizer(word_or_path: str, text: str) -> Tokenizer:
    """A tokenizer of this kind with the vocabulary of `text`, or whatever `load_tokenizer` takes."""
    if word_or_path in ("char", "word"):
        encoded(text, "utf-8")
        return plain.knowing(word_or_path, [text])
    return load_tokenizer(word_or_path)


def load_tokenizer(word_or_path: str) -> Tokenizer:
    """A tokenizer that needs no text: "byte", "gpt2", "hub:ORG/NAME", or the path of a file or directory."""
    if word_or_path == "byte":
        return ByteTokenizer()
    if word_or_path in KINDS:
        raise UsageError(f"a tokenizer of kind {word_or_path!r} takes its vocabulary from a text")
    if (repository := bpe_files.hub_repository(word_or_path)) is not None:
        return bpe_files.from_hub(repository)
    path = bpe_files.find(word_or_path)
    if path is None:
        words = (*KINDS, "gpt2", "hub:ORG/NAME", "PATH")
        raise UsageError(
            f"the tokenizer {word_or_path!r} is no kind and no file{nearest(word_or_path, words)}"
        )
    document = bpe_files.read_json(path)
    if isinstance(document, dict) and document.get("format") != FORMAT:
        foreign = bpe_files.from_foreign(document, path)
        if foreign is not None:
            return foreign
    return _from_document(document, str(path))


def tokenizer_from_json(text: str, source: str) -> Tokenizer:
    """The tokenizer whose `to_json` gave this text; `source` names it in errors."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        raise DataError(f"{source} is not a saved tokenizer: it is not JSON") from None
    return _from_document(document, source)


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
    if kind == "byte":
        return ByteTokenizer()
    if kind == "bpe":
        return bpe.checked(
            document.get("vocabulary"), document.get("merges"), document.get("separator"), source
        )
    vocabulary = plain.checked(document.get("vocabulary"), kind, source)
    return CharTokenizer(vocabulary) if kind == "char" else WordTokenizer(vocabulary)
