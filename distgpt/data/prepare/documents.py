"""Documents out of files, never all in memory at once: inputs are cut into pieces, pieces into documents.

A piece is about a megabyte, which can be tokenized on its own, in any thread. A long text is cut where
GPT-2's rule for splitting words cannot notice: before a blank that follows something else. Only a text
without such a place for a whole megabyte is cut between any two characters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from distgpt.data.prepare.inputs import LINES, ROWS, TEXT, Input, Stream, find_inputs, opened
from distgpt.errors import DataError, UsageError, printable

PIECE = 1 << 20  # bytes; a piece ends at the next good place
LIMIT = 2 * PIECE  # where a piece of a text ends at the latest
LONGEST_LINE = 1 << 28
_ROWS_AT_ONCE = 64
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_BEFORE_BLANK = re.compile(rb"[^ \t\n\r\x0b\x0c\x1c-\x1f][ \t\n\r]")
_REPLACEMENT = "\ufffd"
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a piece begins: number of the input, bytes (of a table rows) into it, lines before."""

    input: int = 0
    offset: int = 0
    line: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """Some of one input: part of a text, whole lines, or one document per entry of `data`.

    `place` is where it begins, `next` where the one after it begins; `consumed` counts the bytes of
    all files up to its end. `begins` says that a text's first part is here.
    """

    source: str
    kind: str
    data: tuple[bytes, ...]
    place: Place
    next: Place
    consumed: int
    begins: bool = True

    def size(self) -> int:
        return sum(map(len, self.data))


@dataclass(frozen=True, slots=True)
class Part:
    """A document, or the part of a long text in one piece. `replaced` counts what could not be decoded."""

    text: str
    begins: bool
    replaced: int


def documents(paths: Sequence[Path], field: str) -> Iterator[str]:
    """The documents in these files and folders, a long text in several parts."""
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


def pieces(inputs: Sequence[Input], field: str, start: Place) -> Iterator[Piece]:
    """Cut the inputs from a place on that some piece has as its `place` or `next`."""
    cut = {TEXT: _text, LINES: _lines}
    before = sum(source.bytes for source in inputs[: start.input])
    for number in range(start.input, len(inputs)):
        source = inputs[number]
        place = start if number == start.input else Place(number)
        if source.kind == ROWS:
            yield from _rows(source, field, place, before)
        else:
            with opened(source) as stream:
                yield from cut[source.kind](source, stream, place, before)
        before += source.bytes


def _text(source: Input, stream: Stream, place: Place, before: int) -> Iterator[Piece]:
    stream.seek(place.offset)
    offset, begins = place.offset, place.offset == 0
    data = stream.read(LIMIT)
    while data:
        length = _good_length(data)
        after = Place(place.input, offset + length)
        part = data[:length].removeprefix(_BYTE_ORDER_MARK) if begins else data[:length]
        here = Place(place.input, offset)
        consumed = stream.consumed() * after.offset // (offset + len(data))
        yield Piece(source.name, TEXT, (part,), here, after, before + consumed, begins)
        offset, begins = after.offset, False
        data = data[length:] + stream.read(length)


def _good_length(data: bytes) -> int:
    """How many of the next bytes of a text, `LIMIT` or all that are left, make a piece."""
    if len(data) <= PIECE:
        return len(data)
    for found in _BEFORE_BLANK.finditer(data, PIECE - 1):
        cut = found.end() - 1
        last = data[max(0, cut - 4) : cut].decode("utf-8", "replace")[-1]
        if not last.isspace():
            return cut
    return _between_characters(data) if len(data) >= LIMIT else len(data)


def _between_characters(data: bytes) -> int:
    """The last place that is in no character, and in no line break either."""
    for cut in range(len(data) - 1, len(data) - 5, -1):
        if data[cut] & 0xC0 != 0x80 and data[cut - 1 : cut + 1] != b"\r\n":
            return cut
    return len(data)


def _lines(source: Input, stream: Stream, place: Place, before: int) -> Iterator[Piece]:
    stream.seek(place.offset)
    while data := _some_lines(source, stream, place):
        size = sum(map(len, data))
        after = Place(place.input, place.offset + size, place.line + len(data))
        if place.offset == 0:
            data[0] = data[0].removeprefix(_BYTE_ORDER_MARK)
        yield Piece(source.name, LINES, tuple(data), place, after, before + stream.consumed())
        place = after


def _some_lines(source: Input, stream: Stream, place: Place) -> list[bytes]:
    lines: list[bytes] = []
    size = 0
    while size < PIECE and (line := stream.readline(LONGEST_LINE + 1)):
        if len(line) > LONGEST_LINE:
            raise DataError(
                f"{source.path}: line {place.line + len(lines) + 1} is longer than {LONGEST_LINE >> 20} MB"
            )
        lines.append(line)
        size += len(line)
    return lines


def _rows(source: Input, field: str, place: Place, before: int) -> Iterator[Piece]:
    total, rows = _table(source, field, place.offset)
    waiting: list[bytes] = []
    size = 0
    start = at = place.offset

    def piece() -> Piece:
        consumed = before + source.bytes * at // total
        return Piece(
            *(source.name, ROWS, tuple(waiting)),
            *(Place(place.input, start), Place(place.input, at), consumed),
        )

    for text in rows:
        at += 1
        if text is None:
            raise DataError(f"{source.path}: row {at} has no {field!r}")
        waiting.append(text)
        size += len(text)
        if size >= PIECE:
            yield piece()
            waiting, size, start = [], 0, at
    if waiting:
        yield piece()


def _table(source: Input, field: str, skip: int) -> tuple[int, Iterator[bytes | None]]:
    """The number of rows in a Parquet file, and one column of them from the row `skip` on."""
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise UsageError(f"reading {source.path} needs pyarrow: pip install 'distgpt[parquet]'") from None
    try:
        file = parquet.ParquetFile(source.path, pre_buffer=False)
        _check_column(file.schema_arrow, field, source, arrow.types)
    except (arrow.ArrowException, OSError) as error:
        raise _damaged_table(source, error) from None

    def rows() -> Iterator[bytes | None]:
        left = skip
        groups: list[int] = []
        for number in range(file.num_row_groups):
            size = file.metadata.row_group(number).num_rows
            if groups or left < size:
                groups.append(number)
            else:
                left -= size
        try:
            with file:
                for batch in file.iter_batches(_ROWS_AT_ONCE, groups, [field], use_threads=False):
                    texts = batch.column(0).cast(arrow.large_binary()).to_pylist()
                    yield from islice(texts, min(left, len(texts)), None)
                    left -= min(left, len(texts))
        except (arrow.ArrowException, OSError) as error:
            raise _damaged_table(source, error) from None

    return file.metadata.num_rows, rows()


def _check_column(schema: Any, field: str, source: Input, types: Any) -> None:
    if field not in schema.names:
        names = printable(", ".join(schema.names))
        raise DataError(f"{source.path} has no column {field!r:.80}; --field chooses among {names:.200}")
    if (times := schema.names.count(field)) > 1:
        raise DataError(f"{source.path} has {times} columns that are called {field!r:.80}")
    kind = schema.field(field).type
    kind = kind.value_type if types.is_dictionary(kind) else kind
    if not (types.is_string(kind) or types.is_large_string(kind)):
        name = printable(str(kind))
        raise DataError(f"{source.path}: its column {field!r:.80} is of type {name:.80}, not string")


def _damaged_table(source: Input, error: Exception) -> DataError:
    reason = printable(str(error).strip().splitlines()[0])
    return DataError(f"{source.path} cannot be read as Parquet: {reason}")


def _decoded(data: bytes) -> tuple[str, int]:
    """The text, with U+FFFD for what is not UTF-8, and their number."""
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
