"""Tensors on disk: strict and durable safetensors files, with checksums in the metadata.

`data_sha256` covers the data. `header_sha256` covers the header and all metadata except itself. Weights from
a GGUF file stay in its blocks if these are Q8_0 or Q4_0, which other readers of safetensors do not support.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from distgpt.core.base.checked import Must, checked, parse_json
from distgpt.core.base.errors import DataError
from distgpt.core.base.files import Direct, atomic_file, open_regular, storage_errors
from distgpt.core.ops.low_precision import BLOCK, BLOCKS, from_blocks

HostArray = NDArray[np.generic]  # any dtype, in host memory
Tensors = Mapping[str, HostArray]
Kind = tuple[np.dtype[np.generic], tuple[int, ...]]

DTYPES: dict[str, Any] = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", **BLOCKS}  # BF16 as bits
_STORED = DTYPES | {"I8": "<i1", "U8": "<u1"}  # integers are read only if expected (rounded.py)
_NAMES = {np.dtype(stored): name for name, stored in _STORED.items()}
_OTHERS = {"BOOL": 1, "I16": 2, "I32": 4, "I64": 8}  # bytes per element; described, but never read
_WIDTHS = {name: dtype.itemsize for dtype, name in _NAMES.items()} | _OTHERS
DATA_SUM, HEADER_SUM = "data_sha256", "header_sha256"  # keys in the metadata
PIECE_ELEMENTS = 1 << 20  # elements per read or write, to avoid copies of whole tensors
_HEADER_CAP = 100_000_000  # bytes, as in the official reader
_Length = Annotated[int, Must("be of 63 bits", lambda number: 0 <= number < 1 << 63)]
_Lengths = Annotated[tuple[_Length, ...], Must("be short", lambda lengths: len(lengths) <= 64)]
_PICKLES = (b"PK", b"\x80")  # PyTorch's zip archives and bare pickles


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor with bytes `start` to `stop`, counted from the start of the data."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Header:
    """The tensors of a file, in file order, and its metadata."""

    tensors: dict[str, Entry]
    metadata: dict[str, str]
    data_start: int

    def facts(self) -> dict[str, str]:
        """Return the metadata without checksums, for a file with other data."""
        return {name: text for name, text in self.metadata.items() if name not in (DATA_SUM, HEADER_SUM)}


class LazyTensors(Mapping[str, HostArray]):
    """Tensors that are created on access. Their types and shapes are available before."""

    def __init__(self, kinds: Mapping[str, Kind], make: Callable[[str], HostArray]) -> None:
        self.kinds = kinds
        self.make = make

    def __getitem__(self, name: str) -> HostArray:
        return self.make(name)

    def __contains__(self, name: object) -> bool:
        return name in self.kinds

    def __iter__(self) -> Iterator[str]:
        return iter(self.kinds)

    def __len__(self) -> int:
        return len(self.kinds)


def write_tensors(path: Path, tensors: Tensors, metadata: Mapping[str, str]) -> str:
    """Write float or 8-bit integer arrays. Return the header's checksum, which covers everything.

    Equal input gives equal bytes. The header, which precedes the data, is written again with its checksum.
    """
    kinds = _kinds(tensors)
    # Large elements first, as in the official writer, so that each tensor is aligned to its element size.
    order = sorted(kinds, key=lambda name: (-kinds[name][0].alignment, name))
    header: dict[str, object] = {}
    end = 0
    for name in order:
        dtype, shape = kinds[name]
        start, end = end, end + prod(shape) * dtype.itemsize
        elements = (*shape[:-1], shape[-1] * BLOCK) if dtype in BLOCKS.values() else shape
        header[name] = {"dtype": _NAMES[dtype], "shape": elements, "data_offsets": (start, end)}

    def front(data_sum: str) -> tuple[bytes, str]:
        known = {**metadata, DATA_SUM: data_sum}
        header_sum = _header_sum(header, known)
        text = _as_text({**header, "__metadata__": {**known, HEADER_SUM: header_sum}})
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text, header_sum

    checksum = hashlib.sha256()
    with atomic_file(path) as file:
        with Direct(file) as direct:
            direct.write(front(checksum.hexdigest())[0])
            for piece in _pieces(tensors, order):
                checksum.update(piece)
                direct.write(piece)
        text, header_sum = front(checksum.hexdigest())
        file.seek(0)
        file.write(text)
    return header_sum


def data_bytes(tensors: Tensors) -> int:
    """Return the data size of tensors, in bytes. Creates no lazy tensors."""
    return sum(prod(shape) * dtype.itemsize for dtype, shape in _kinds(tensors).values())


def _kinds(tensors: Tensors) -> Mapping[str, Kind]:
    if isinstance(tensors, LazyTensors):
        return tensors.kinds
    return {name: (array.dtype, array.shape) for name, array in tensors.items()}


def _as_text(header: Mapping[str, object]) -> bytes:
    return json.dumps(header, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()


def _header_sum(tensors: Mapping[str, object], metadata: Mapping[str, str]) -> str:
    others = {name: text for name, text in metadata.items() if name != HEADER_SUM}
    return hashlib.sha256(_as_text({**tensors, "__metadata__": others})).hexdigest()


def _flat(array: HostArray) -> HostArray | np.flatiter[HostArray]:
    """Return a one-dimensional view, or NumPy's flat iterator if the memory is not contiguous."""
    return array.reshape(-1) if array.flags.c_contiguous else array.flat


def _cuts(size: int) -> Iterator[slice]:
    return (slice(start, min(start + PIECE_ELEMENTS, size)) for start in range(0, size, PIECE_ELEMENTS))


def _pieces(tensors: Tensors, order: list[str]) -> Iterator[memoryview]:
    for name in order:
        array = tensors[name]
        flat = _flat(array)
        yield from (flat[cut].view(np.uint8).data for cut in _cuts(array.size))


def read_header(path: Path) -> Header:
    """Return the tensors and metadata of a file. A DataError describes any problem."""
    with storage_errors("read", path), open_regular(path) as file:
        return _checked_header(file, path)


def read_into(path: Path, destination: Tensors, header_sum: str = "") -> None:
    """Fill the arrays of `destination` from a file and convert float types as needed.

    First verify names, shapes and checksums: the data's if the file has one, the header's if `header_sum` is
    given. If verification fails, the destination is unchanged.
    """
    with storage_errors("read", path), open_regular(path) as file:
        header = _checked_header(file, path)
        refuse_misfits(header, {name: array.shape for name, array in destination.items()}, path)
        _refuse_other(header, header_sum, path)
        _verify(file, header, path)
        file.seek(header.data_start)
        for name, entry in header.tensors.items():
            _fill(destination[name], name, entry, file, path)


def verify_whole(path: Path, header_sum: str) -> None:
    """Raise a DataError unless this is a valid file whose header has this checksum."""
    header = read_header(path)
    _refuse_other(header, header_sum, path)
    verify_data(path, header)


def fingerprint(path: Path) -> str:
    """Return the header's checksum, which identifies the content; otherwise compute the file's."""
    if result := read_header(path).metadata.get(HEADER_SUM):
        return result
    with storage_errors("read", path), open_regular(path) as file:
        return _digest(file)


def _refuse_other(header: Header, header_sum: str, path: Path) -> None:
    known = header.metadata
    if header_sum and (known.get(HEADER_SUM) != header_sum or DATA_SUM not in known):
        raise DataError(f"{path} is corrupt: wrong checksum of the header")


def verify_data(path: Path, header: Header) -> bool:
    """Return whether the file has a checksum of its data. Raise a DataError if it does not match."""
    with storage_errors("read", path), open_regular(path) as file:
        _verify(file, header, path)
    return DATA_SUM in header.metadata


def read_rows(path: Path, header: Header, name: str, rows: HostArray, first: int = 0) -> None:
    """Fill `rows` from one tensor, starting at its row `first`.

    Convert as `read_into` does, without verification; for that, call `verify_data` for the whole file.
    """
    entry = header.tensors[name]
    width = _bytes(entry.dtype, entry.shape[1:])
    with storage_errors("read", path), open_regular(path) as file:
        file.seek(header.data_start + entry.start + first * width)
        _fill(rows, name, entry, file, path)


def _verify(file: BufferedReader, header: Header, path: Path) -> None:
    """Verify the data's SHA-256 if the file has one."""
    file.seek(header.data_start)
    expected = header.metadata.get(DATA_SUM)
    if expected and _digest(file) != expected:
        raise DataError(f"{path} is corrupt: wrong checksum of the data")


def _digest(file: BufferedReader) -> str:
    """Return the SHA-256 of the rest of a file."""
    return hashlib.file_digest(file, "sha256").hexdigest()


def _fill(array: HostArray, name: str, entry: Entry, file: BufferedReader, path: Path) -> None:
    """Read the file's next tensor into `array`, through a buffer if it must be converted."""
    flat = _flat(array)
    stored = np.dtype(_STORED[entry.dtype])
    direct = array.dtype == stored and array.flags.c_contiguous
    for cut in _cuts(array.size):
        count = cut.stop - cut.start
        piece = flat[cut] if direct else np.empty(count // BLOCK if entry.dtype in BLOCKS else count, stored)
        if file.readinto(piece.view(np.uint8).data) != piece.nbytes:
            raise DataError(f"{path} was truncated while being read")
        if entry.dtype == "BF16" and not direct:  # the upper half of a float32
            flat[cut] = (piece.astype("<u4") << 16).view("<f4")
        elif entry.dtype in BLOCKS and not direct:
            flat[cut] = from_blocks(piece)
        elif not direct:
            with np.errstate(over="ignore"):
                flat[cut] = piece
            if entry.dtype == "F64" and (np.isinf(flat[cut]) & np.isfinite(piece)).any():
                raise DataError(f"{path}: {name} has values too large for {array.dtype}")


def refuse_misfits(
    header: Header, expected: Mapping[str, tuple[int, ...]], path: Path, integers: bool = False
) -> None:
    """Raise a DataError unless the file has exactly these tensors and shapes, of floats (or integers)."""
    readable = _STORED if integers else DTYPES
    wrong = {
        "missing": [name for name in expected if name not in header.tensors],
        "unexpected": [f"{name!r:.80}" for name in header.tensors if name not in expected],
        "wrong shape": [
            f"{name} is {header.tensors[name].shape}, not {shape}"
            for name, shape in expected.items()
            if name in header.tensors and header.tensors[name].shape != shape
        ],
        "not of floats": [
            f"{name} is {entry.dtype}"
            for name, entry in header.tensors.items()
            if name in expected and entry.dtype not in readable
        ],
    }
    lists = [
        f"{problem}: {', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
        for problem, names in wrong.items()
        if names
    ]
    if lists:
        raise DataError(f"{path} does not have the tensors of this model: {'; '.join(lists)}")


def _checked_header(file: BufferedReader, path: Path) -> Header:
    try:
        return _parse(file, os.fstat(file.fileno()).st_size)
    except ValueError as error:
        raise DataError(f"{path} is not a valid safetensors file: {error}") from error


def _parse(file: BufferedReader, size: int) -> Header:
    """Read and check everything before the data. A ValueError describes any problem."""
    front = file.read(9)
    length = int.from_bytes(front[:8], "little")
    # Check for the brace also, because a valid header of 128 bytes starts with \x80.
    if front[8:] != b"{" and front.startswith(_PICKLES):
        raise ValueError("a pickle file; distgpt reads only safetensors")
    if front.startswith(b"GGUF"):
        raise ValueError("a GGUF file; import it with distgpt weights import")
    if front[8:] != b"{" or length < 2:
        raise ValueError("no header")
    if length > min(_HEADER_CAP, size - 8):
        raise ValueError(f"the header has {length} bytes, but the file only {size}")
    header = parse_json(b"{" + file.read(length - 1), _HEADER_CAP)
    assert isinstance(header, dict)  # since it starts with a brace
    metadata = checked(dict[str, str], header.pop("__metadata__", {}), ("__metadata__",))
    if HEADER_SUM in metadata and metadata[HEADER_SUM] != _header_sum(header, metadata):
        raise ValueError("wrong checksum of the header")
    result = [(name, _entry(name, described)) for name, described in header.items()]
    entries = dict(sorted(result, key=lambda item: (item[1].start, item[1].stop)))
    end = 0
    for name, entry in entries.items():
        if entry.start != end:
            raise ValueError(f"tensor {name!r:.80} starts at byte {entry.start} of the data, expected {end}")
        end = entry.stop
    if end != size - 8 - length:
        raise ValueError(f"the header describes {end} bytes of data, but the file has {size - 8 - length}")
    return Header(entries, metadata, 8 + length)


@dataclass(frozen=True, slots=True)
class _Described:
    """A tensor's description in a header."""

    dtype: str
    shape: _Lengths
    data_offsets: _Lengths


def _entry(name: str, described: object) -> Entry:
    """Parse a tensor's entry. A ValueError names the tensor."""
    tensor = f"tensor {name!r:.80}"
    try:
        result = checked(_Described, described)
    except ValueError as error:
        raise ValueError(f"{tensor} requires dtype, shape and data_offsets: {error}") from None
    dtype, shape, offsets = result.dtype, result.shape, result.data_offsets
    if dtype not in _WIDTHS:
        raise ValueError(f"{tensor} has dtype {dtype!r:.40}, not one of {', '.join(_WIDTHS)}")
    if dtype in BLOCKS and (not shape or shape[-1] % BLOCK):
        raise ValueError(f"{tensor} of shape {shape!r:.80} is not in whole blocks")
    if len(offsets) != 2 or offsets[1] - offsets[0] != _bytes(dtype, shape):
        raise ValueError(f"{tensor} of shape {shape!r:.80} does not fill bytes {offsets!r:.80}")
    return Entry(dtype, shape, *offsets)


def _bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return prod(shape) // (BLOCK if dtype in BLOCKS else 1) * int(_WIDTHS[dtype])
