"""Pieces of input to token ids, with what is to be known about them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distgpt.data.prepare.documents import parts
from distgpt.data.prepare.pieces import Piece, Place
from distgpt.data.tokenizers.api import Ids, Tokenizer, id_dtype
from distgpt.data.tokenizers.naming import tokenizer_from_json
from distgpt.errors import DataError, UsageError

AUTO, NONE = "auto", "none"
ESCAPES = {"\\n": "\n", "\\t": "\t"}  # which a shell does not make easy


@dataclass(frozen=True, slots=True)
class Separator:
    """`ids` stand before each document; where they only separate, not before the first one."""

    ids: tuple[int, ...]
    only_between: bool


@dataclass(frozen=True, slots=True)
class Counts:
    documents: int = 0
    text_bytes: int = 0
    replaced: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.documents + other.documents,
            self.text_bytes + other.text_bytes,
            self.replaced + other.replaced,
        )


@dataclass(frozen=True, slots=True)
class Encoded:
    """The ids of one piece, a separator before each document that begins in it."""

    place: Place
    next: Place
    consumed: int
    ids: Ids
    counts: Counts


class Encoder:
    """Made anew in each worker, from what can be sent to it."""

    def __init__(self, tokenizer: str, separator: tuple[int, ...], field: str) -> None:
        self._tokenizer = tokenizer_from_json(tokenizer, "the tokenizer")
        self._separator: Ids = np.array(separator, id_dtype(self._tokenizer.size))
        self._field = field

    def __call__(self, piece: Piece) -> Encoded:
        ids: list[Ids] = [self._separator[:0]]
        counts = Counts()
        for part in parts(piece, self._field):
            if part.begins:
                ids.append(self._separator)
            try:
                ids.append(self._tokenizer.encode(part.text))
            except DataError as error:
                raise DataError(f"{piece.source}: {error}") from None
            counts += Counts(part.begins, len(part.text.encode()), part.replaced)
        return Encoded(piece.place, piece.next, piece.consumed, np.concatenate(ids), counts)


def find_separator(choice: str, tokenizer: Tokenizer) -> Separator:
    """auto: the tokenizer's own token before each document, else a line break between them, where it can."""
    if choice == NONE:
        return Separator((), only_between=True)
    if choice == AUTO and tokenizer.separator is not None:
        return Separator((tokenizer.separator,), only_between=False)
    text = "\n" if choice == AUTO else choice
    for spelled, meant in ESCAPES.items():
        text = text.replace(spelled, meant)
    try:
        ids = tokenizer.encode(text)
    except DataError as error:
        if choice == AUTO:
            return Separator((), only_between=True)
        raise UsageError(f"--separator {choice!r}: {error}") from None
    return Separator(tuple(ids.tolist()), only_between=True)
