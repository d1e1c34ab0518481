"""Documents out of files: decoded, with one kind of line breaks, never all in memory at once."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from distgpt.data.prepare.inputs import LINES, find_inputs
from distgpt.data.prepare.pieces import Piece, Place, pieces
from distgpt.errors import DataError

_REPLACEMENT = "\ufffd"
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Part:
    """A document, or of a long text the part in one piece. `replaced` counts what could not be decoded."""

    text: str
    begins: bool
    replaced: int


def documents(paths: Sequence[Path], field: str) -> Iterator[str]:
    """The documents in these files and folders; of a long text its parts, one after the other."""
    for piece in pieces(find_inputs(paths), field, Place()):
        for part in parts(piece, field):
            yield part.text


def parts(piece: Piece, field: str) -> Iterator[Part]:
    """The documents of a piece that are not empty."""
    for number, data in enumerate(piece.data, start=1):
        text, replaced = _decoded(data)
        if piece.kind == LINES:
            if not text.strip():
                continue
            text, broken = _member(text, field, f"{piece.source}, line {piece.place.line + number}")
            replaced += broken
        text = text.replace("\r\n", "\n")
        if text:
            yield Part(text, piece.begins, replaced)


def _decoded(data: bytes) -> tuple[str, int]:
    """U+FFFD stands for what is not UTF-8, and is counted."""
    try:
        return data.decode("utf-8"), 0
    except UnicodeDecodeError:
        text = data.decode("utf-8", "replace")
        return text, text.count(_REPLACEMENT) - data.count(_REPLACEMENT.encode())


def _member(line: str, field: str, where: str) -> tuple[str, int]:
    """The text in a line of JSON; halves of surrogate pairs, which JSON can spell, are replaced as well."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        raise DataError(f"{where}: not JSON: {line.strip()!r:.60}") from None
    if not isinstance(found, dict) or not isinstance(found.get(field), str):
        there = f"; it has {', '.join(map(repr, found))}" if isinstance(found, dict) else ""
        raise DataError(f"{where}: not an object with a text under {field!r:.80}{there:.120}")
    return _SURROGATE.subn(_REPLACEMENT, found[field])
