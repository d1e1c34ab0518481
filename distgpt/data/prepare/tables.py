"""Texts out of a column of a Parquet file, in bounded memory whatever the file says.

Arrow unpacks a page as a whole, so the sizes of all pages are read from their headers first.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

from distgpt.errors import DataError, UsageError, printable
from distgpt.files import open_regular, storage_errors
from distgpt.units import size

ROWS_AT_ONCE = 64
PAGES = 2  # a page may be so many times as large as the largest document
AT_ONCE = 64 << 20  # bytes of the texts of some rows, which may all be the same entry of a dictionary
_HEADER = 1 << 12  # bytes that hold most headers of pages
_LARGEST_HEADER = 16 << 20
_DICTIONARY_PAGE = 2


def texts(path: Path, field: str, skip: int, most: int) -> Iterator[tuple[bytes | None, int]]:
    """One column from the row `skip` on, each text with the number of all rows."""
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise UsageError(f"reading {path} needs pyarrow: pip install 'distgpt[parquet]'") from None
    try:
        with parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:
            _check_column(file.schema_arrow, field, path, arrow.types)
            about = file.metadata
            ends = list(accumulate(about.row_group(number).num_rows for number in range(file.num_row_groups)))
            groups = [number for number, end in enumerate(ends) if end > skip]
            skip -= max((end for end in ends if end <= skip), default=0)
            at_once = _rows_at_once(path, [_chunk(about.row_group(number), field) for number in groups], most)
            for batch in file.iter_batches(at_once, groups, [field], use_threads=False):
                found = batch.column(0).cast(arrow.large_binary()).to_pylist()
                for text in found[skip:]:
                    yield text, about.num_rows
                skip = max(0, skip - len(found))
    except (arrow.ArrowException, OSError, UnicodeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(f"{path} cannot be read as Parquet: {printable(reason)}") from None


def _check_column(schema: Any, field: str, path: Path, types: Any) -> None:
    if field not in schema.names:
        names = printable(", ".join(schema.names))
        raise DataError(f"{path} has no column {field!r:.80}; --field chooses among {names:.200}")
    if (times := schema.names.count(field)) > 1:
        raise DataError(f"{path} has {times} columns that are called {field!r:.80}")
    kind = schema.field(field).type
    kind = kind.value_type if types.is_dictionary(kind) else kind
    if not (types.is_string(kind) or types.is_large_string(kind)):
        name = printable(str(kind))
        raise DataError(f"{path}: its column {field!r:.80} is of type {name:.80}, not string")


def _chunk(group: Any, field: str) -> Any:
    """The metadata of a column in a group of rows."""
    columns = (group.column(number) for number in range(group.num_columns))
    return next(column for column in columns if column.path_in_schema == field)


def _rows_at_once(path: Path, chunks: list[Any], most: int) -> int:
    """How many rows may be read together; a DataError if a page unpacks to too much."""
    dictionary = 1
    with storage_errors("read", path), open_regular(path) as file:
        for chunk in chunks:
            for kind, unpacked in _pages(file, chunk, path):
                if unpacked > PAGES * most:
                    raise DataError(
                        f"{path} has a page that unpacks to {size(unpacked)}, more than {PAGES} documents of"
                        f" {size(most)}: --max-document allows more"
                    )
                if kind == _DICTIONARY_PAGE:
                    dictionary = max(dictionary, unpacked)
    return max(1, min(ROWS_AT_ONCE, AT_ONCE // dictionary))


def _pages(file: BinaryIO, chunk: Any, path: Path) -> Iterator[tuple[int, int]]:
    """Kind and unpacked size of each page of a column, by the headers that stand before them."""
    at, dictionary = chunk.data_page_offset, chunk.dictionary_page_offset
    if dictionary is not None and 0 < dictionary < at:
        at = dictionary
    end = at + chunk.total_compressed_size
    while at < end:
        wanted = _HEADER
        while True:
            data = os.pread(file.fileno(), wanted, at)
            try:
                header = _Header(data)
                break
            except IndexError:
                wanted *= 8
                if wanted > _LARGEST_HEADER or len(data) < wanted // 8:
                    raise DataError(f"{path} is damaged: no header of a page at byte {at}") from None
        if min(header.sizes) < 0:
            raise DataError(f"{path} is damaged: an impossible page at byte {at}")
        unpacked, packed = header.sizes
        yield header.kind, unpacked
        at += header.bytes + packed


class _Header:
    """The first three fields of a page's header, in Thrift's compact form; an IndexError if it is cut."""

    def __init__(self, data: bytes) -> None:
        self._data, self.bytes = data, 0
        found = self._struct(0)
        self.kind, self.sizes = found.get(1, -1), (found.get(2, -1), found.get(3, -1))

    def _byte(self) -> int:
        self.bytes += 1
        return self._data[self.bytes - 1]

    def _number(self) -> int:
        value = shift = 0
        while (byte := self._byte()) & 0x80 and shift < 63:
            value |= (byte & 0x7F) << shift
            shift += 7
        return value | byte << shift

    def _struct(self, depth: int) -> dict[int, int]:
        found, field = {}, 0
        while byte := self._byte():
            step, kind = byte >> 4, byte & 15
            number = field = field + step if step else self._number() >> 1
            value = self._value(kind, depth + 1)
            found[number] = (value >> 1) ^ -(value & 1)  # zigzag
        return found

    def _value(self, kind: int, depth: int) -> int:
        """A number; what is skipped is 0."""
        if depth > 16:
            raise IndexError
        if kind in (4, 5, 6):
            return self._number()
        if kind == 8:
            length = self._number()
            self.bytes += length
        elif kind in (9, 10):
            byte = self._byte()
            for _ in range(self._number() if byte >> 4 == 15 else byte >> 4):
                self._value(byte & 15 if byte & 15 > 2 else 3, depth + 1)
        elif kind == 12:
            self._struct(depth)
        elif kind in (3, 7):
            self.bytes += 1 if kind == 3 else 8
        elif kind not in (1, 2):
            raise IndexError
        return 0
