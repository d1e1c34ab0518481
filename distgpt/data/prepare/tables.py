"""Texts out of a column of a Parquet file, in bounded memory whatever the file says.

Arrow unpacks a page as a whole, so the sizes of all pages are read from their headers first.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

from distgpt.errors import DataError, UsageError, escape, first_line
from distgpt.files import open_regular, storage_errors
from distgpt.formatting import size

ROWS_AT_ONCE = 64
PAGES = 2  # a page may be so many times as large as the largest document
AT_ONCE = 64 << 20  # bytes of the texts of some rows, which may all be the same entry of a dictionary
_HEADER = 1 << 12  # bytes that hold most headers of pages
_LARGEST_HEADER = 16 << 20
# Numbers of fields in Parquet's Thrift.
_ROW_GROUPS, _COLUMNS, _META_DATA, _PATH = 4, 1, 3, 3
_PACKED_SIZE, _DATA_OFFSET, _DICTIONARY_OFFSET = 7, 9, 11
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
            at_once = _rows_at_once(path, field, most)
            for batch in file.iter_batches(at_once, groups, [field], use_threads=False):
                found = batch.column(0).cast(arrow.large_binary()).to_pylist()
                for text in found[skip:]:
                    yield text, about.num_rows
                skip = max(0, skip - len(found))
    except (arrow.ArrowException, OSError, UnicodeError) as error:
        raise DataError(f"{path} cannot be read as Parquet: {escape(first_line(error))}") from None


def _check_column(schema: Any, field: str, path: Path, types: Any) -> None:
    if field not in schema.names:
        names = escape(", ".join(schema.names))
        raise DataError(f"{path} has no column {field!r:.80}; --field chooses among {names:.200}")
    if (times := schema.names.count(field)) > 1:
        raise DataError(f"{path} has {times} columns that are called {field!r:.80}")
    kind = schema.field(field).type
    kind = kind.value_type if types.is_dictionary(kind) else kind
    if not (types.is_string(kind) or types.is_large_string(kind)):
        name = escape(str(kind))
        raise DataError(f"{path}: its column {field!r:.80} is of type {name:.80}, not string")


def _rows_at_once(path: Path, field: str, most: int) -> int:
    """How many rows may be read together; a DataError if a page unpacks to too much."""
    dictionary = 1
    with storage_errors("read", path), open_regular(path) as file:
        try:
            pages = list(_pages(file, field))
        except (IndexError, KeyError, TypeError, ValueError):
            raise DataError(f"{path} cannot be read as Parquet: its metadata are damaged") from None
    for kind, unpacked in pages:
        if unpacked > PAGES * most:
            raise DataError(
                f"{path} has a page that unpacks to {size(unpacked)}, more than {PAGES} documents of"
                f" {size(most)}: --max-document allows more"
            )
        if kind == _DICTIONARY_PAGE:
            dictionary = max(dictionary, unpacked)
    return max(1, min(ROWS_AT_ONCE, AT_ONCE // dictionary))


def _pages(file: BinaryIO, field: str) -> Iterator[tuple[int, int]]:
    """Kind and unpacked size of each page of a column, by the headers that stand before them.

    Not by Arrow's metadata, which end the process if some are damaged.
    """
    end = file.seek(-8, os.SEEK_END)
    length = int.from_bytes(file.read(4), "little")
    footer = _Thrift(os.pread(file.fileno(), length, end - length)).struct()
    for group in footer[_ROW_GROUPS]:
        for column in group[_COLUMNS]:
            chunk = column[_META_DATA]
            if chunk[_PATH] == [field.encode()]:
                yield from _pages_of(file, chunk)


def _pages_of(file: BinaryIO, chunk: dict[int, Any]) -> Iterator[tuple[int, int]]:
    at, dictionary = chunk[_DATA_OFFSET], chunk.get(_DICTIONARY_OFFSET, 0)
    if 0 < dictionary < at:
        at = dictionary
    end = at + chunk[_PACKED_SIZE]
    while at < end:
        wanted = _HEADER
        while True:
            thrift = _Thrift(os.pread(file.fileno(), wanted, at))
            try:
                header = thrift.struct()
                break
            except IndexError:
                wanted *= 8
                if wanted > _LARGEST_HEADER:
                    raise
        kind, unpacked, packed = header[1], header[2], header[3]
        if min(unpacked, packed) < 0:
            raise ValueError
        yield kind, unpacked
        at += thrift.at + packed


class _Thrift:
    """Reads Thrift's compact form, in which Parquet describes itself; an IndexError if it is cut."""

    def __init__(self, data: bytes) -> None:
        self._data, self.at = data, 0

    def struct(self, depth: int = 0) -> dict[int, Any]:
        """Values by the numbers of their fields."""
        if depth > 16:
            raise ValueError
        found, field = {}, 0
        while byte := self._byte():
            field = field + (byte >> 4) if byte >> 4 else self._integer()
            found[field] = self._value(byte & 15, depth + 1)
        return found

    def _byte(self) -> int:
        self.at += 1
        return self._data[self.at - 1]

    def _number(self) -> int:
        value = shift = 0
        while (byte := self._byte()) & 0x80:
            value |= (byte & 0x7F) << shift
            if (shift := shift + 7) > 63:
                raise ValueError
        return value | byte << shift

    def _integer(self) -> int:
        return ((value := self._number()) >> 1) ^ -(value & 1)

    def _value(self, kind: int, depth: int) -> Any:
        if kind in (1, 2):
            return kind == 1
        if kind in (4, 5, 6):
            return self._integer()
        if kind == 8:
            return self._bytes(self._number())
        if kind in (9, 10):
            byte = self._byte()
            kind = max(3, byte & 15)  # booleans are bytes there
            return [self._value(kind, depth) for _ in range(self._number() if byte >> 4 == 15 else byte >> 4)]
        if kind == 12:
            return self.struct(depth)
        return self._bytes({3: 1, 7: 8}[kind])

    def _bytes(self, count: int) -> bytes:
        self.at += count
        if self.at > len(self._data):
            raise IndexError
        return self._data[self.at - count : self.at]
