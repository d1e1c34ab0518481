"""Documents out of files, never all in memory at once: inputs are cut into pieces, pieces into documents.

Inputs are files given by name, found in folders, or kept from standard input. A piece is about a megabyte,
which can be tokenized on its own, in any thread. A long text is cut where GPT-2's rule for splitting words
cannot notice: before a blank that follows something else. Only a text without such a place for a whole
megabyte is cut between any two characters.
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
from collections.abc import Iterator, Sequence
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

MOST_ENDINGS = 6  # of skipped files, in a note
FIELD = "text"  # where lines of JSON and tables have the text, unless another one is named
TEXT, LINES, ROWS = "text", "lines", "rows"  # one document · one per line of JSON · one per row of a table
# What is taken from folders; a file given by name is a text unless its ending says otherwise.
ENDINGS = {".txt": TEXT, ".md": TEXT, ".txt.gz": TEXT, ".jsonl": LINES, ".jsonl.gz": LINES, ".parquet": ROWS}
_SMALL = 1 << 12  # bytes that show what a file is
_FOLDER = next(filter(Path.is_dir, map(Path, ("/proc/self/fd", "/dev/fd"))), Path("/dev/fd"))  # of open files


@dataclass(frozen=True, slots=True)
class Input:
    """One file. `name` is its path below the folder that was given, which is the same on other machines."""

    path: Path
    name: str
    kind: str
    bytes: int
    mtime_ns: int

    @property
    def compressed(self) -> bool:
        return self.path.name.lower().endswith(".gz")


def find_inputs(paths: Sequence[Path | Input], note: Say = lambda text: None) -> list[Input]:
    """List these files and, for a folder, the files of known kinds below it, sorted.

    `note` gets the numbers of files in a folder that are read, and skipped by their endings.
    """
    found: list[Input] = []
    for path in paths:
        if isinstance(path, Input):
            found.append(path)
        elif not path.exists():
            raise DataError(f"{path} is no readable file and no folder")
        elif path.is_dir():
            files = _files(path)
            taken = [file for file in files if _kind(file.name)]
            if not taken:
                raise DataError(f"{path} holds no file that ends in {', '.join(ENDINGS)}")
            found += [_described(file, file.relative_to(path).as_posix()) for file in taken]
            others = sorted({file.suffix.lower() or file.name for file in {*files} - {*taken}})
            shown = escape(", ".join(others[:MOST_ENDINGS])) + ", …" * (len(others) > MOST_ENDINGS)
            skipped = f", {len(files) - len(taken):,} skipped ({shown})" if others else ""
            note(f"{count(len(taken), 'file')} read{skipped}")
        else:
            refuse_by_name(path)
            found.append(_described(path, path.name))
    for source in found:  # before any work is done
        if source.kind != ROWS:
            with opened(source) as (stream, _):
                if b"\0" in stream.read(_SMALL):
                    raise _no_text(source.path)
    return found


def _no_text(name: Path | str) -> DataError:
    return DataError(f"{name} is no text in UTF-8, there are zero bytes in it: {CONVERT}")


def _files(folder: Path) -> list[Path]:
    """Return all files but hidden ones. Links are followed, each folder is entered once."""

    def refuse(error: OSError) -> NoReturn:
        raise StorageError(f"cannot read {error.filename}: {error.strerror}") from error

    found = []
    seen = set()
    for parent, folders, files in os.walk(folder, onerror=refuse, followlinks=True):
        with storage_errors("read", Path(parent)):
            about = Path(parent).stat()
        if (about.st_dev, about.st_ino) in seen:
            folders.clear()
            continue
        seen.add((about.st_dev, about.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [Path(parent, name) for name in files if not name.startswith(".")]
    return sorted(found, key=lambda path: path.parts)


def _kind(name: str) -> str | None:
    return next((kind for ending, kind in ENDINGS.items() if name.lower().endswith(ending)), None)


def _described(path: Path, name: str) -> Input:
    with storage_errors("read", path):
        about = path.stat()
    if not stat.S_ISREG(about.st_mode):
        raise DataError(f"{path} is no regular file; save what comes from a pipe first")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise DataError(f"the name of the file {str(path)!r} is not valid UTF-8") from None
    return Input(path, name, _kind(path.name) or TEXT, about.st_size, about.st_mtime_ns)


@contextmanager
def opened(source: Input, offset: int = 0) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Yield a file's uncompressed bytes from an offset on, and the file itself; failures become one line."""
    with storage_errors("read", source.path), open_regular(source.path) as file:
        stream = gzip.GzipFile(fileobj=file) if source.compressed else file
        try:
            stream.seek(offset)
            yield cast(BinaryIO, stream), file
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise DataError(f"{source.path} is damaged, or not gzip: {error}") from None


@contextmanager
def piped(stream: BinaryIO) -> Iterator[Input]:
    """Yield everything that comes from there: lines of JSON if the first one begins so, else a text.

    The file has no name, so that nothing is left however the process ends. The input's time is always the
    same: the same text from another pipe resumes what was interrupted.
    """
    with ExitStack() as stack:
        with storage_errors("keep standard input in", Path(os.environ.get("TMPDIR", "/tmp"))):
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


PIECE = 1 << 20  # bytes; a piece ends at the next good place
ROWS_AT_ONCE = 64  # of a column whose texts stay in their dictionary: of others one, as a text can be a page
HARMLESS = 16 << 20  # bytes of a table's row group that are unpacked to name the row that is too long
LIMIT = 2 * PIECE  # where a piece of a text ends at the latest
MAX_DOCUMENT = 64 << 20  # bytes of a line of JSON, or a text in a table; other texts come in pieces
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_BEFORE_BLANK = re.compile(rb"[^ \t\n\r\x0b\x0c\x1c-\x1f][ \t\n\r]")
_REPLACEMENT = "\ufffd"
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Offset:
    """The beginning of a piece: number of the input, bytes (of a table rows) into it, lines before."""

    input: Count = 0
    offset: Count = 0
    line: Count = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """Some of one input: part of a text, whole lines, or one document per entry of `data`.

    `place` is where it begins, `next` where the one after it begins; `consumed` counts the bytes of
    all files up to its end. `begins` says that a text's first part is here.
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


# The data of a piece, where the one after it begins, and how many bytes of the file have been read by then.
_Cut = tuple[list[bytes], Offset, int]


def documents(paths: Sequence[Path | Input], field: str, max_document: int = MAX_DOCUMENT) -> Iterator[str]:
    """Return the documents in these files and folders, a long text in several parts."""
    found = pieces(find_inputs(paths), field, Offset(), max_document)
    return (text for piece in found for text, _ in parts(piece, field))


def parts(piece: Piece, field: str) -> Iterator[tuple[str, int]]:
    """Yield the documents of a piece that are not empty, and how many characters could not be decoded."""
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
    """Cut the inputs from a place on that some piece has as its `place` or `next`."""
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
    """Return the length of a text's next piece: at most `LIMIT` bytes."""
    if len(data) <= PIECE:
        return len(data)
    for found in _BEFORE_BLANK.finditer(data, PIECE - 1):
        cut = found.end() - 1
        last = data[max(0, cut - 4) : cut].decode("utf-8", "replace")[-1]
        if not last.isspace():
            return cut
    if len(data) >= LIMIT:  # the last place that is in no character, and in no line break either
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
    hint = "" if most == LARGEST_JSON else ": --max-document allows more"  # chats have a fixed limit
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
    """Yield one column from the row `skip` on: each text as a buffer, or None, with the number of all rows.

    Some kilobytes of a compressed page can stand for many texts of a gigabyte each: one is decoded at a time.
    """
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise UsageError(f"reading {path} needs pyarrow: pip install 'distgpt[parquet]'") from None
    try:
        with parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:
            kind = _checked_type(file.schema_arrow, field, path, arrow.types)
            at_once = ROWS_AT_ONCE if arrow.types.is_dictionary(kind) else 1
            about = file.metadata
            ends = list(accumulate(about.row_group(number).num_rows for number in range(file.num_row_groups)))
            groups = [number for number, end in enumerate(ends) if end > skip]
            skip -= max((end for end in ends if end <= skip), default=0)
            for number in groups:  # too large for that many texts of at most `most` bytes, and for a look
                group = about.row_group(number)
                for part in (group.column(column) for column in range(group.num_columns)):
                    least = max(HARMLESS, (part.num_values + 1) * most)
                    if part.path_in_schema == field and part.total_uncompressed_size > least:
                        raise _too_long(f"{path}: a text of row group {number}", most)
            for batch in file.iter_batches(at_once, groups, [field], use_threads=False):
                for text in batch.column(0)[skip:]:
                    text = text.value if text.is_valid and at_once > 1 else text
                    yield text.as_buffer() if text.is_valid else None, about.num_rows
                skip = max(0, skip - len(batch))
    except (arrow.ArrowException, OSError, UnicodeError) as error:
        raise DataError(f"{path} cannot be read as Parquet: {escape(first_line(error))}") from None


def _checked_type(schema: Any, field: str, path: Path, types: Any) -> Any:
    """Return the type of a column that holds texts; refuse others."""
    if field not in schema.names:
        names = escape(", ".join(schema.names))
        raise DataError(f"{path} has no column {field!r:.80}; --field chooses among {names:.200}")
    if (times := schema.names.count(field)) > 1:
        raise DataError(f"{path} has {times} columns that are called {field!r:.80}")
    found = schema.field(field).type
    kind = found.value_type if types.is_dictionary(found) else found
    if not (types.is_string(kind) or types.is_large_string(kind)):
        name = escape(str(kind))
        raise DataError(f"{path}: its column {field!r:.80} is of type {name:.80}, not string")
    return found


def _decoded(data: bytes) -> tuple[str, int]:
    """Return the text, with U+FFFD for what is not UTF-8, and their number."""
    try:
        return data.decode("utf-8"), 0
    except UnicodeDecodeError:
        text = data.decode("utf-8", "replace")
        return text, text.count(_REPLACEMENT) - data.count(_REPLACEMENT.encode())


def _member(line: str, field: str, where: str) -> tuple[str, int]:
    """Return the text in a line of JSON. Halves of surrogate pairs, which JSON can spell, are replaced."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        raise DataError(f"{where}: not JSON: {line.strip()!r:.60}") from None
    if not isinstance(found, dict) or not isinstance(found.get(field), str):
        there = f"; it has {', '.join(map(repr, found))}" if isinstance(found, dict) else ""
        raise DataError(f"{where}: not an object with a text under {field!r:.80}{there:.120}")
    return _SURROGATE.subn(_REPLACEMENT, found[field])
