"""Token shards: a folder of .npy files with a manifest that says what they hold and shows any damage."""

from __future__ import annotations

import hashlib
import json
import os
import re
from bisect import bisect_right
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from distgpt.data.tokenizers.naming import Ids, Tokenizer, fingerprint, id_dtype, tokenizer_from_json
from distgpt.errors import DataError, printable
from distgpt.files import storage_errors, sync_directory
from distgpt.kernels.api import Array

FORMAT, VERSION = "distgpt-shards", 1
MANIFEST, TOKENIZER = "manifest.json", "tokenizer.json"
SPLITS = ("val", "train")  # in the order of the text
HEADER_BYTES = 128  # of every one-dimensional .npy file
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MOST = 1 << 48  # tokens or bytes of anything
_PIECE = 1 << 22  # bytes verified together


@dataclass(frozen=True, slots=True)
class Shard:
    """The manifest's entry for one file. `split` is "train" or "val", `largest` the largest id in it."""

    name: str
    split: str
    tokens: int
    bytes: int
    sha256: str
    largest: int


def shard_name(split: str, number: int) -> str:
    return f"{split}-{number:06d}.npy"


@dataclass(frozen=True, slots=True)
class Manifest:
    """`tokenizer` is a fingerprint. The last fields say where the tokens came from; nothing depends on them.

    `separator` are the ids beside each document; `text_bytes` counts the documents' UTF-8, `replaced` the
    U+FFFD that stand in it for bytes which were no UTF-8.
    """

    tokenizer: str
    description: str
    vocab_size: int
    dtype: str
    shards: tuple[Shard, ...]
    separator: tuple[int, ...]
    settings: dict[str, Any]
    inputs: tuple[tuple[str, int], ...]  # name and bytes
    documents: int
    text_bytes: int
    replaced: int

    @property
    def fingerprint(self) -> str:
        return self.fingerprint_of(SPLITS)

    def fingerprint_of(self, splits: tuple[str, ...]) -> str:
        """Of the ids in these splits, and of what they mean."""
        hashes = [shard.sha256 for split in splits for shard in self.of(split)]
        return "sha256:" + hashlib.sha256("\n".join([self.tokenizer, *splits, *hashes]).encode()).hexdigest()

    def of(self, split: str) -> list[Shard]:
        return [shard for shard in self.shards if shard.split == split]

    def tokens(self, split: str) -> int:
        return sum(shard.tokens for shard in self.of(split))

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1) + "\n"

    @staticmethod
    def from_json(text: str, source: str) -> Manifest:
        """Parse a manifest that is not trusted; `source` names it in errors."""
        try:
            document = json.loads(text)
        except (ValueError, RecursionError):
            raise DataError(f"{source} is no manifest of shards: it is not JSON") from None
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise DataError(f"{source} is no manifest of shards: its format is not {FORMAT!r}")
        if document.get("version") != VERSION:
            version = document.get("version")
            raise DataError(
                f"{source} has format version {version!r:.20}, this distgpt reads {VERSION}: upgrade it"
            )
        try:
            return _parse({key: document[key] for key in document.keys() - {"format", "version"}})
        except ValueError as error:
            raise DataError(f"{source} is damaged: {error}") from None


def is_shards(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    with storage_errors("read", path):
        return Manifest.from_json(path.read_text("utf-8", "replace"), str(path))


def shards_tokenizer(folder: Path, manifest: Manifest) -> Tokenizer:
    """The tokenizer that the shards were made with, which lies beside them."""
    tokenizer = read_tokenizer(folder)
    if fingerprint(tokenizer) != manifest.tokenizer or tokenizer.size != manifest.vocab_size:
        raise DataError(f"{folder / TOKENIZER} is not the tokenizer that the shards beside it were made with")
    return tokenizer


def read_tokenizer(folder: Path) -> Tokenizer:
    path = folder / TOKENIZER
    with storage_errors("read", path):
        return tokenizer_from_json(path.read_text("utf-8", "replace"), str(path))


def unlisted(folder: Path, manifest: Manifest) -> list[str]:
    """Files that look like shards but are not in the manifest."""
    known = {shard.name for shard in manifest.shards}
    with storage_errors("read", folder):
        return sorted(path.name for path in folder.glob("*.npy") if path.name not in known)


class ShardTokens:
    """The shards of a split end to end, as Tokens. Opening reads headers and sizes only."""

    def __init__(self, folder: Path, manifest: Manifest, split: str) -> None:
        shards = manifest.of(split)
        self._maps = [map_shard(folder, shard, manifest.dtype) for shard in shards]
        self._starts = [0, *accumulate(shard.tokens for shard in shards)]
        self._dtype = np.dtype(manifest.dtype)
        self.fingerprint = manifest.fingerprint_of((split,))

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, start: int, stop: int) -> Array:
        """A view, unless a border between shards lies in between."""
        pieces = []
        at = bisect_right(self._starts, start) - 1
        while start < stop:
            first = self._starts[at]
            pieces.append(self._maps[at][start - first : stop - first])
            at += 1
            start = self._starts[at]
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate(pieces) if pieces else np.empty(0, self._dtype)


# One file


def header(dtype: str, tokens: int) -> bytes:
    """The first bytes of the file, as numpy.save writes them."""
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': ({tokens},), }}"
    length = HEADER_BYTES - 10
    return b"\x93NUMPY\x01\x00" + length.to_bytes(2, "little") + text.ljust(length - 1).encode() + b"\n"


def file_bytes(dtype: str, tokens: int) -> int:
    return HEADER_BYTES + tokens * np.dtype(dtype).itemsize


class ShardWriter:
    """Writes ids to a file that gets its name only when it is finished."""

    def __init__(self, path: Path, dtype: str) -> None:
        self._path, self._dtype = path, dtype
        self._partial = path.with_name(f".{path.name}.tmp")
        self.tokens = 0
        self._largest = 0
        with storage_errors("write", path):
            self._file = self._partial.open("wb")
            self._file.write(header(dtype, 0))

    def write(self, ids: Ids) -> None:
        with storage_errors("write", self._path):
            self._file.write(np.ascontiguousarray(ids, self._dtype).data)
        self.tokens += len(ids)
        self._largest = max(self._largest, int(ids.max(initial=0)))

    def finish(self, split: str) -> Shard:
        """Put the file on the disk, under its name. Its hash is of what can be read back."""
        with storage_errors("write", self._path):
            self._file.seek(0)
            self._file.write(header(self._dtype, self.tokens))
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            with self._partial.open("rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            self._partial.replace(self._path)
            sync_directory(self._path.parent)
        size = file_bytes(self._dtype, self.tokens)
        return Shard(self._path.name, split, self.tokens, size, sha256, self._largest)

    def discard(self) -> None:
        with suppress(OSError):
            self._file.close()
        with suppress(OSError):
            self._partial.unlink()


def map_shard(folder: Path, shard: Shard, dtype: str) -> Array:
    """The ids of a file as they lie on the disk; only the header has been read."""
    path = folder / shard.name
    with storage_errors("read", path):
        _check_front(path, shard, dtype)
        return np.memmap(path, dtype, "r", HEADER_BYTES, (shard.tokens,))


def verify_shard(
    folder: Path, manifest: Manifest, shard: Shard, advanced: Callable[[int], None] = lambda count: None
) -> None:
    """Read a file once; a DataError if it is not what the manifest says. `advanced` gets the bytes read."""
    path, dtype = folder / shard.name, np.dtype(manifest.dtype)
    buffer = np.empty(_PIECE, np.uint8)
    largest = 0
    with storage_errors("read", path):
        _check_front(path, shard, manifest.dtype)
        with path.open("rb") as file:
            digest = hashlib.sha256(file.read(HEADER_BYTES))
            while filled := file.readinto(buffer.data):
                digest.update(buffer[:filled].data)
                whole = filled - filled % dtype.itemsize
                largest = max(largest, int(buffer[:whole].view(dtype).max(initial=0)))
                advanced(filled)
    if digest.hexdigest() != shard.sha256:
        raise DataError(f"{path} is damaged: its SHA-256 is not the one in the manifest")
    if largest >= manifest.vocab_size:
        raise DataError(
            f"{path} has the token {largest}, but the vocabulary ends at {manifest.vocab_size - 1}"
        )
    if largest != shard.largest:
        raise DataError(f"{path}: its largest token is {largest}, in the manifest it is {shard.largest}")


def _check_front(path: Path, shard: Shard, dtype: str) -> None:
    """Raise a DataError unless size and header are exactly those that the manifest leads to expect."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            front = file.read(HEADER_BYTES)
    except FileNotFoundError:
        raise DataError(f"{path} is missing") from None
    if size != shard.bytes:
        raise DataError(f"{path} is damaged: it has {size:,} bytes, in the manifest {shard.bytes:,}")
    if front != header(dtype, shard.tokens):
        raise DataError(f"{path} is damaged: its header is not that of {shard.tokens:,} ids of type {dtype}")


# Parsing an untrusted manifest: a ValueError says what is wrong


def _parse(found: dict[str, Any]) -> Manifest:
    _require_fields(found, Manifest, "it")
    size = found["vocab_size"]
    _require(_is_sha256(found["tokenizer"]), "its tokenizer is no fingerprint")
    _require(isinstance(found["description"], str), "its description is no text")
    _require(_is_count(size) and 0 < size <= 1 << 24, "an impossible vocab_size")
    dtype = np.dtype(id_dtype(size)).newbyteorder("<").str
    _require(found["dtype"] == dtype, f"its dtype is not {dtype}, as its vocab_size needs")
    ids = found["separator"]
    _require(
        isinstance(ids, list) and all(_is_count(i) and i < size for i in ids),
        "its separator is no list of ids",
    )
    settings = found["settings"]
    _require(
        isinstance(settings, dict)
        and all(isinstance(v, str | int | float | None) for v in settings.values()),
        "its settings are not plain values by name",
    )
    _require(
        isinstance(found["inputs"], list) and all(map(_is_input, found["inputs"])),
        "its inputs are not names with sizes",
    )
    for name in ("documents", "text_bytes", "replaced"):
        _require(_is_count(found[name]), f"its {name} is no count")
    _require(isinstance(found["shards"], list) and bool(found["shards"]), "it has no list of shards")
    shards = tuple(_parse_shard(shard, dtype, size) for shard in found["shards"])
    counts = {split: sum(shard.split == split for shard in shards) for split in SPLITS}
    names = [shard_name(split, i) for split in SPLITS for i in range(counts[split])]
    _require([shard.name for shard in shards] == names, "its shards are not numbered one by one")
    inputs = tuple((name, n_bytes) for name, n_bytes in found["inputs"])
    return Manifest(**{**found, "shards": shards, "separator": tuple(ids), "inputs": inputs})


def _parse_shard(found: Any, dtype: str, vocab_size: int) -> Shard:
    _require(isinstance(found, dict), "a shard is no object")
    which = f"shard {found.get('name')!r:.40}"
    _require_fields(found, Shard, which)
    tokens, largest = found["tokens"], found["largest"]
    _require(found["split"] in SPLITS and isinstance(found["name"], str), f"{which} is of no known split")
    _require(_is_count(tokens) and tokens > 0, f"{which} has an impossible number of tokens")
    _require(
        _is_count(found["bytes"]) and found["bytes"] == file_bytes(dtype, tokens),
        f"{which} cannot have so many bytes",
    )
    _require(_is_sha256(found["sha256"]), f"{which} has no SHA-256")
    _require(_is_count(largest) and largest < vocab_size, f"{which} has an impossible id")
    return Shard(**found)


def _require(fine: bool, complaint: str) -> None:
    if not fine:
        raise ValueError(complaint)


def _require_fields(found: dict[str, Any], kind: Any, what: str) -> None:
    expected = {field.name for field in fields(kind)}
    if wrong := expected ^ found.keys():
        raise ValueError(f"{what} lacks, or should not have, {printable(', '.join(sorted(wrong))):.80}")


def _is_count(value: Any) -> bool:
    """type(), because JSON's true is an int to Python."""
    return type(value) is int and 0 <= value < _MOST


def _is_input(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and _is_count(value[1])


def _is_sha256(value: Any) -> bool:
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None
