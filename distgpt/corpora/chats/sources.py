"""Rows of chats from files: JSON lines, a JSON list, CSV, TSV, or texts, each of which is a row."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from json import JSONDecodeError
from pathlib import Path
from typing import Any

from distgpt.core.base.checked import LARGEST_JSON, parse_json
from distgpt.core.base.errors import DataError, escape
from distgpt.core.data.textfile import CONVERT
from distgpt.corpora.prepare.documents import LINES, TEXT, Input, Offset, find_inputs, kind_of, opened, pieces

LIST, TABLE = "list", "table"
KINDS = {
    ".jsonl": LINES,
    ".jsonl.gz": LINES,
    ".json": LIST,
    ".csv": TABLE,
    ".tsv": TABLE,
    ".txt": TEXT,
    ".md": TEXT,
    ".txt.gz": TEXT,
}
EXAMPLE = '{"prompt": "Who are you?", "completion": "A model."}'


def rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield (place, row) from a file, or from all files in a directory.

    From a directory with chats, texts are not read. A named file without a known suffix has JSON lines. A
    DataError names the file and the first invalid line.
    """
    sources = find_inputs((path,), endings=KINDS)
    if any(source.kind != TEXT for source in sources):
        sources = [source for source in sources if source.kind != TEXT or source.path == path]
    for source in sources:
        kind = kind_of(source.name, KINDS) or LINES
        is_empty = kind != TEXT
        for row in _READERS[kind](replace(source, kind=kind)):
            yield row
            is_empty = False
        if is_empty:
            raise DataError(f"{source.path} has no rows")


def _lines(source: Input) -> Iterator[tuple[str, Any]]:
    for piece in pieces([source], "", Offset(), LARGEST_JSON):
        for number, line in enumerate(piece.data, piece.place.line + 1):
            if line.strip():
                where = f"{source.path}, line {number}"
                yield where, _parsed(line, where)


def _parsed(line: bytes | str, where: str) -> Any:
    try:
        return parse_json(line)
    except ValueError as error:
        begins = line.lstrip()[:1] in (b"{", b"[", "{", "[")
        plain = f"not JSON, such as {EXAMPLE}; to train on plain text, name it .txt or .md"
        raise DataError(
            f"{where}: {error if begins or not isinstance(error, JSONDecodeError) else plain}"
        ) from None


def _whole(source: Input) -> str:
    with opened(source) as (stream, _):
        try:
            return stream.read().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise DataError(f"{source.path} is not UTF-8 text (byte {error.start}); {CONVERT}") from None


def _list(source: Input) -> Iterator[tuple[str, Any]]:
    """Yield the items of a list, such as ShareGPT's, one at a time: parsed JSON takes much memory."""
    text, decoder, number = _whole(source), json.JSONDecoder(), 0
    at = _next(text, 0)
    if text[at : at + 1] != "[":  # JSON lines in a .json file
        yield from _lines(replace(source, kind=LINES))
        return
    at = _next(text, at + 1)
    while text[at : at + 1] != "]":
        number += 1
        where = f"{source.path}, item {number}"
        try:
            end = decoder.raw_decode(text, at)[1]
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: not JSON: {error}") from None
        yield where, _parsed(text[at:end], where)
        at = _next(text, end)
        has_comma = text[at : at + 1] == ","
        at = _next(text, at + has_comma)
        if has_comma == (text[at : at + 1] == "]"):
            raise DataError(f"{where}: must be followed by a comma and an item, or by the end of the list")
    if _next(text, at + 1) < len(text):
        raise DataError(f"{source.path}: text follows the list")


def _next(text: str, at: int) -> int:
    """Return the position of the next character that is not blank."""
    while text[at : at + 1] in (" ", "\t", "\r", "\n"):
        at += 1
    return at


def _table(source: Input) -> Iterator[tuple[str, Any]]:
    """Yield rows by column name. A .csv file whose first line has more semicolons than commas uses these."""
    text, is_tsv = _whole(source), source.name.lower().endswith(".tsv")
    first = text.partition("\n")[0]
    mark = "\t" if is_tsv else ";" if first.count(";") > first.count(",") else ","
    csv.field_size_limit(LARGEST_JSON)
    lines = io.StringIO(text, newline="")
    table = csv.DictReader(lines, delimiter=mark, skipinitialspace=True, strict=not is_tsv)
    try:
        table.fieldnames = columns = [name.strip() for name in table.fieldnames or ()]
        if len({*columns}) < len(columns):
            raise DataError(f"{source.path}: two columns have the same name")
        for row in table:
            where = f"{source.path}, line {table.line_num}"
            if None in row or None in row.values():
                raise DataError(f"{where}: must have an entry for each of {len(columns)} columns")
            yield where, {name: entry.strip() for name, entry in row.items()}
    except csv.Error as error:
        raise DataError(f"{source.path}, line {table.reader.line_num}: {escape(str(error))}") from None


def _text(source: Input) -> Iterator[tuple[str, Any]]:
    if text := _whole(source).replace("\r\n", "\n").strip():
        yield str(source.path), {"text": text}


_READERS = {LINES: _lines, LIST: _list, TABLE: _table, TEXT: _text}
