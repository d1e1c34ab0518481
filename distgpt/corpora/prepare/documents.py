"""Read documents from files in bounded memory: inputs are cut into pieces, pieces into documents.

Inputs are named files, files found in directories, or a copy of standard input. A piece has about 1 MiB and
can be tokenized separately, in any thread. A long document is cut only before a blank that follows another
character, which does not change GPT-2's word splitting. If 1 MiB has no such place, it is cut between any two
characters.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import stat
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast

from distgpt.core.base.checked import LARGEST_JSON, Count
from distgpt.core.base.errors import DataError, Say, StorageError, UsageError, escape, first_line
from distgpt.core.base.files import open_regular, storage_errors
from distgpt.core.base.formatting import count
from distgpt.core.base.formatting import size as size_in_words
from distgpt.core.data.textfile import CONVERT, refuse_by_name

MOST_ENDINGS = 6  # suffixes of skipped files in a note
FIELD = "text"  # default field or column of the text, in JSON lines and tables
TEXT, LINES, ROWS = "text", "lines", "rows"  # one document · one per JSON line · one per table row
# Suffixes read from directories. A named file with another suffix is text.
ENDINGS = {".txt": TEXT, ".md": TEXT, ".txt.gz": TEXT, ".jsonl": LINES, ".jsonl.gz": LINES, ".parquet": ROWS}
_SMALL = 1 << 12  # bytes that are enough to detect the type of a file
_FOLDER = next(filter(Path.is_dir, map(Path, ("/proc/self/fd", "/dev/fd"))), Path("/dev/fd"))  # open files


@dataclass(frozen=True, slots=True)
class Input:
    """One file. `name` is its path relative to the given directory, which is the same on other machines."""

    path: Path
    name: str
    kind: str
    bytes: int
    mtime_ns: int

    @property
    def compressed(self) -> bool:
        return self.path.name.lower().endswith(".gz")


def find_inputs(
    paths: Sequence[Path | Input], note: Say = lambda text: None, endings: Mapping[str, str] = ENDINGS
) -> list[Input]:
    """List the files and, for a directory, the files of known kinds in it, sorted.

    `endings` has the kinds by suffix. `note` gets the number of files read, and the number and suffixes of
    files skipped.
    """
    result: list[Input] = []
    for path in paths:
        if isinstance(path, Input):
            result.append(path)
        elif not path.exists():
            raise DataError(f"{path} is not a file or a directory")
        elif path.is_dir():
            files = _files(path)
            taken = [file for file in files if kind_of(file.name, endings)]
            if not taken:
                raise DataError(f"{path} has no files that end in {', '.join(endings)}")
            result += [_described(file, file.relative_to(path).as_posix(), endings) for file in taken]
            others = sorted({file.suffix.lower() or file.name for file in {*files} - {*taken}})
            shown = escape(", ".join(others[:MOST_ENDINGS])) + ", …" * (len(others) > MOST_ENDINGS)
            skipped = f", {len(files) - len(taken):,} skipped ({shown})" if others else ""
            note(f"{count(len(taken), 'file')} read{skipped}")
        else:
            if not kind_of(path.name, endings):
                refuse_by_name(path)
            result.append(_described(path, path.name, endings))
    for source in result:  # before any work is done
        if source.kind != ROWS:
            with opened(source) as (stream, _):
                if b"\0" in stream.read(_SMALL):
                    raise _no_text(source.path)
    return result


def _no_text(name: Path | str) -> DataError:
    return DataError(f"{name} is not UTF-8 text, because it contains zero bytes; {CONVERT}")


def _files(folder: Path) -> list[Path]:
    """Return all files except hidden ones. Follow links, but enter each directory only once."""

    def refuse(error: OSError) -> NoReturn:
        raise StorageError(f"cannot read {error.filename}: {error.strerror}") from error

    result = []
    seen = set()
    for parent, folders, files in os.walk(folder, onerror=refuse, followlinks=True):
        with storage_errors("read", Path(parent)):
            about = Path(parent).stat()
        if (about.st_dev, about.st_ino) in seen:
            folders.clear()
            continue
        seen.add((about.st_dev, about.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        result += [Path(parent, name) for name in files if not name.startswith(".")]
    return sorted(result, key=lambda path: path.parts)


def kind_of(name: str, endings: Mapping[str, str]) -> str | None:
    return next((kind for ending, kind in endings.items() if name.lower().endswith(ending)), None)


def _described(path: Path, name: str, endings: Mapping[str, str]) -> Input:
    with storage_errors("read", path):
        about = path.stat()
    if not stat.S_ISREG(about.st_mode):
        raise DataError(f"{path} is not a regular file; save the output of a pipe first")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise DataError(f"the name of the file {str(path)!r} is not valid UTF-8") from None
    return Input(path, name, kind_of(path.name, endings) or TEXT, about.st_size, about.st_mtime_ns)


@contextmanager
def opened(source: Input, offset: int = 0) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Yield a file's uncompressed bytes from an offset on, and the file itself. Errors become a DataError."""
    with storage_errors("read", source.path), open_regular(source.path) as file:
        stream = gzip.GzipFile(fileobj=file) if source.compressed else file
        try:
            stream.seek(offset)
            yield cast(BinaryIO, stream), file
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise DataError(f"{source.path} is corrupt, or not gzip: {error}") from None


@contextmanager
def piped(stream: BinaryIO) -> Iterator[Input]:
    """Yield standard input as an Input: JSON lines if it starts with "{", otherwise text.

    The copy has no name, so it disappears when the process ends. Its mtime is 0, so the same text from
    another pipe resumes an interrupted run.
    """
    with ExitStack() as stack:
        with storage_errors("store standard input in", Path(os.environ.get("TMPDIR", "/tmp"))):
            file = stack.enter_context(tempfile.TemporaryFile())
            shutil.copyfileobj(stream, file)
            size = file.tell()
            file.seek(0)
            first = file.read(_SMALL)
        if b"\0" in first:
            raise _no_text("standard input")
        is_json = first.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{")
        name, kind = ("stdin.jsonl", LINES) if is_json else ("stdin.txt", TEXT)
        yield Input(_FOLDER / str(file.fileno()), name, kind, size, mtime_ns=0)


PIECE = 1 << 20  # bytes; a piece ends at the next suitable place
ROWS_AT_ONCE = 64  # rows per read of a dictionary column; others are read row by row, as one can fill a page
HARMLESS = 16 << 20  # bytes of a row group that may be decompressed to name the row that is too long
LIMIT = 2 * PIECE  # maximum size of a piece of text
MAX_DOCUMENT = 64 << 20  # maximum bytes of a JSON line or a table's text; other text is split
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_BEFORE_BLANK = re.compile(rb"[^ \t\n\r\x0b\x0c\x1c-\x1f][ \t\n\r]")
_REPLACEMENT = "\ufffd"
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Offset:
    """The start of a piece: index of the input, bytes (rows of a table) and lines before it."""

    input: Count = 0
    offset: Count = 0
    line: Count = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of one input: part of a text file, whole lines, or one document per entry of `data`.

    `place` is its start, `next` the start of the next piece. `consumed` counts the bytes of all files up to
    its end. `begins`: it starts a text file.
    """

    source: str
    kind: str
    data: tuple[bytes, ...]
    place: Offset
    next: Offset
    consumed: int
    begins: bool = True

    def size(self) -> int:
        return sum(map(len, self.data))


# The data of a piece, the start of the next piece, and the bytes of the file before that start.
_Cut = tuple[list[bytes], Offset, int]


def documents(paths: Sequence[Path | Input], field: str, max_document: int = MAX_DOCUMENT) -> Iterator[str]:
    """Return the documents in these files and directories. Long ones are split."""
    result = pieces(find_inputs(paths), field, Offset(), max_document)
    return (text for piece in result for text, _ in parts(piece, field))


def parts(piece: Piece, field: str) -> Iterator[tuple[str, int]]:
    """Yield each non-empty document of a piece, and its number of undecodable characters."""
    for number, data in enumerate(piece.data, start=1):
        text, replaced = _decoded(data)
        if piece.kind == LINES:
            if not text.strip():
                continue
            text, broken = _member(text, field, f"{piece.source}, line {piece.place.line + number}")
            replaced += broken
        if text := text.replace("\r\n", "\n"):
            yield text, replaced


def pieces(
    inputs: Sequence[Input], field: str, start: Offset, max_document: int = MAX_DOCUMENT
) -> Iterator[Piece]:
    """Cut the inputs into pieces, from a `place` or `next` of an earlier piece on."""
    cut = {TEXT: _text, LINES: _lines, ROWS: _rows}
    for number in range(start.input, len(inputs)):
        source, before = inputs[number], sum(other.bytes for other in inputs[:number])
        place = start if number == start.input else Offset(number)
        for data, after, consumed in cut[source.kind](source, field, place, max_document):
            begins = place.offset == 0 or source.kind != TEXT
            if place.offset == 0 and source.kind != ROWS:
                data[0] = data[0].removeprefix(_BYTE_ORDER_MARK)
            yield Piece(source.name, source.kind, tuple(data), place, after, before + consumed, begins)
            place = after


def _text(source: Input, field: str, place: Offset, most: int) -> Iterator[_Cut]:
    offset = place.offset
    with opened(source, offset) as (stream, file):
        data = stream.read(LIMIT)
        while data:
            length = _good_length(data)
            consumed = file.tell() * (offset + length) // (offset + len(data))
            offset += length
            yield [data[:length]], Offset(place.input, offset), consumed
            data = data[length:] + stream.read(length)


def _good_length(data: bytes) -> int:
    """Return the length of the next piece, at most `LIMIT` bytes."""
    if len(data) <= PIECE:
        return len(data)
    for result in _BEFORE_BLANK.finditer(data, PIECE - 1):
        cut = result.end() - 1
        last = data[max(0, cut - 4) : cut].decode("utf-8", "replace")[-1]
        if not last.isspace():
            return cut
    if len(data) >= LIMIT:  # the last place that splits neither a character nor a line break
        for cut in range(len(data) - 1, len(data) - 5, -1):
            if data[cut] & 0xC0 != 0x80 and data[cut - 1 : cut + 1] != b"\r\n":
                return cut
    return len(data)


def _lines(source: Input, field: str, place: Offset, most: int) -> Iterator[_Cut]:
    with opened(source, place.offset) as (stream, file):
        while True:
            lines: list[bytes] = []
            size = 0
            while size < PIECE and (line := stream.readline(most + 1)):
                if len(line) > most:
                    raise _too_long(f"{source.name}, line {place.line + len(lines) + 1}", most)
                lines.append(line)
                size += len(line)
            if not lines:
                return
            place = Offset(place.input, place.offset + size, place.line + len(lines))
            yield lines, place, file.tell()


def _too_long(where: str, most: int) -> DataError:
    hint = "" if most == LARGEST_JSON else "; raise --max-document"  # chats have a fixed limit
    return DataError(f"{where} is longer than {size_in_words(most)}{hint}")


def _rows(source: Input, field: str, place: Offset, most: int) -> Iterator[_Cut]:
    waiting: list[bytes] = []
    size, at = 0, place.offset
    for text, rows in _texts(source.path, field, place.offset, most):
        at += 1
        if text is None:
            raise DataError(f"{source.path}: row {at} has no {field!r}")
        if len(text) > most:
            raise _too_long(f"{source.path}, row {at},", most)
        waiting.append(text.to_pybytes())
        size += len(text)
        if size >= PIECE:
            yield waiting, Offset(place.input, at), source.bytes * at // rows
            waiting, size = [], 0
    if waiting:
        yield waiting, Offset(place.input, at), source.bytes


def _texts(path: Path, field: str, skip: int, most: int) -> Iterator[tuple[Any, int]]:
    """Yield (buffer or None, total rows) from row `skip` on.

    A page of a few kilobytes can expand to many values of 1 GB, so values are decoded one at a time.
    """
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise UsageError(f"reading {path} requires pyarrow: pip install 'distgpt[parquet]'") from None
    try:
        with parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:
            kind = _checked_type(file.schema_arrow, field, path, arrow.types)
            at_once = ROWS_AT_ONCE if arrow.types.is_dictionary(kind) else 1
            about = file.metadata
            ends = list(accumulate(about.row_group(number).num_rows for number in range(file.num_row_groups)))
            groups = [number for number, end in enumerate(ends) if end > skip]
            skip -= max((end for end in ends if end <= skip), default=0)
            for number in groups:  # raise if it is larger than HARMLESS and its values at `most` bytes each
                group = about.row_group(number)
                for part in (group.column(column) for column in range(group.num_columns)):
                    least = max(HARMLESS, (part.num_values + 1) * most)
                    if part.path_in_schema == field and part.total_uncompressed_size > least:
                        raise _too_long(f"{path}: an entry of row group {number}", most)
            for batch in file.iter_batches(at_once, groups, [field], use_threads=False):
                for text in batch.column(0)[skip:]:
                    text = text.value if text.is_valid and at_once > 1 else text
                    yield text.as_buffer() if text.is_valid else None, about.num_rows
                skip = max(0, skip - len(batch))
    except (arrow.ArrowException, OSError, UnicodeError) as error:
        raise DataError(f"cannot read {path} as Parquet: {escape(first_line(error))}") from None


def _checked_type(schema: Any, field: str, path: Path, types: Any) -> Any:
    """Return the type of the column. Raises a DataError if it is not a string."""
    if field not in schema.names:
        names = escape(", ".join(schema.names))
        raise DataError(f"{path} has no column {field!r:.80}; set --field to one of {names:.200}")
    if (times := schema.names.count(field)) > 1:
        raise DataError(f"{path} has {times} columns named {field!r:.80}")
    result = schema.field(field).type
    kind = result.value_type if types.is_dictionary(result) else result
    if not (types.is_string(kind) or types.is_large_string(kind)):
        name = escape(str(kind))
        raise DataError(f"{path}: column {field!r:.80} must have type string, not {name:.80}")
    return result


def _decoded(data: bytes) -> tuple[str, int]:
    """Return the text, with U+FFFD for invalid UTF-8, and the number of replacements."""
    try:
        return data.decode("utf-8"), 0
    except UnicodeDecodeError:
        text = data.decode("utf-8", "replace")
        return text, text.count(_REPLACEMENT) - data.count(_REPLACEMENT.encode())


def _member(line: str, field: str, where: str) -> tuple[str, int]:
    """Return the text of a JSON line and the number of lone surrogates, which are replaced."""
    try:
        result = json.loads(line)
    except (ValueError, RecursionError):
        raise DataError(f"{where}: not JSON: {line.strip()!r:.60}") from None
    if not isinstance(result, dict) or not isinstance(result.get(field), str):
        there = f"; it has {', '.join(map(repr, result))}" if isinstance(result, dict) else ""
        raise DataError(f"{where}: not an object with a string {field!r:.80}{there:.120}")
    return _SURROGATE.subn(_REPLACEMENT, result[field])
