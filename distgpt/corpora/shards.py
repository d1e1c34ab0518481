"""Token shards: a directory of .npy files with a manifest that detects corruption."""

from __future__ import annotations

import hashlib
import json
import os
import re
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from io import BufferedReader
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Literal

import numpy as np

from distgpt.core.base.checked import Must, checked, parse_json
from distgpt.core.base.errors import DataError, DistgptError, Say
from distgpt.core.base.files import (
    atomic_file,
    open_regular,
    read_small,
    storage_errors,
)
from distgpt.core.base.formatting import count
from distgpt.core.comm.agree import collective_error, on_root, raise_if_any
from distgpt.core.comm.api import Comm
from distgpt.core.data.batches import Tokens
from distgpt.core.data.loading import Corpus, DataRequest
from distgpt.core.data.textfile import resolve_data
from distgpt.core.data.tokenizers import (
    AUTO,
    Ids,
    Tokenizer,
    can_mean,
    find_kind,
    fingerprint,
    id_dtype,
    tokenizer_from_json,
)

HEADER_BYTES = 128  # of every one-dimensional .npy file
READ_BYTES = 1 << 22  # bytes read at a time during verification
_MOST = 1 << 48  # maximum of any count of tokens or bytes
_NAME = re.compile(r"(train|val)-\d{6,12}\.npy")
_SHA256 = re.compile(r"[0-9a-f]{64}")

Split = Literal["val", "train"]
Size = Annotated[int, Must("be a count", lambda number: 0 <= number < _MOST)]
Sha256 = Annotated[str, Must("be a SHA-256", _SHA256.fullmatch)]


@dataclass(frozen=True, slots=True)
class Shard:
    """The manifest's entry for one file. `split` is "train" or "val", `largest` its largest id."""

    name: Annotated[str, Must("be the name of a shard", _NAME.fullmatch)]
    split: Split
    tokens: Annotated[Size, Must("be at least 1", bool)]
    bytes: Size
    sha256: Sha256
    largest: Size


def header(dtype: str, tokens: int) -> bytes:
    """Return the header of the file, as numpy.save writes it."""
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': ({tokens},), }}"
    length = HEADER_BYTES - 10
    return b"\x93NUMPY\x01\x00" + length.to_bytes(2, "little") + text.ljust(length - 1).encode() + b"\n"


def file_bytes(dtype: str, tokens: int) -> int:
    return HEADER_BYTES + tokens * np.dtype(dtype).itemsize


def read_at(descriptor: int, out: memoryview, offset: int) -> bool:
    """out ← the bytes of a file from `offset` on. Return False if it ends early."""
    while out:
        if not (count := os.preadv(descriptor, [out], offset)):
            return False
        out, offset = out[count:], offset + count
    return True


def check_front(path: Path, shard: Shard, dtype: str) -> None:
    """Raise a DataError unless the size and header of a file match the manifest."""
    with storage_errors("read", path):
        try:
            with open_regular(path) as file:
                size = os.fstat(file.fileno()).st_size
                front = file.read(HEADER_BYTES)
        except FileNotFoundError:
            raise DataError(f"{path} is missing") from None
    if size != shard.bytes:
        raise DataError(f"{path} is corrupt: {size:,} bytes, but {shard.bytes:,} in the manifest")
    if front != header(dtype, shard.tokens):
        raise DataError(f"{path} is corrupt: wrong header for {shard.tokens:,} IDs of type {dtype}")


def write_shard(
    folder: Path, split: Split, number: int, dtype: str, tokens: int, ids: Iterable[Ids]
) -> Shard:
    """Write ids to a file that gets its name only when it is on disk."""
    name, front, largest = f"{split}-{number:06d}.npy", header(dtype, tokens), 0
    digest = hashlib.sha256(front)
    with atomic_file(folder / name) as file:
        file.write(front)
        for some in ids:
            data = np.ascontiguousarray(some, dtype).data
            file.write(data)
            digest.update(data)
            largest = max(largest, int(some.max(initial=0)))
    return Shard(name, split, tokens, file_bytes(dtype, tokens), digest.hexdigest(), largest)


SHARDS_FORMAT, SHARDS_VERSION = "distgpt-shards", 2
WITHOUT_SOURCES = 1  # an earlier version
MANIFEST, TOKENIZER = "manifest.json", "tokenizer.json"
SPLITS = ("val", "train")  # write order
MOST_OPEN = 128  # open files per split; a process may often have only 1,024
_Plain = Annotated[object, Must("be a plain value", lambda value: not isinstance(value, list | dict))]


@dataclass(frozen=True, slots=True)
class Manifest:
    """A directory's manifest. `tokenizer` is a fingerprint, `separator` the ids between documents.

    The fields from `settings` on are only informative. `text_bytes` counts the documents' UTF-8, `replaced`
    the U+FFFD that replace invalid UTF-8.
    """

    tokenizer: Sha256
    description: str
    vocab_size: Annotated[int, Must("be possible", lambda size: 0 < size <= 1 << 24)]
    dtype: str
    shards: tuple[Shard, ...]
    separator: tuple[Size, ...]
    settings: dict[str, _Plain]
    inputs: tuple[tuple[str, Size], ...]  # name and bytes
    sources: tuple[tuple[Size, Size], ...]  # documents and tokens of each input; empty if unknown
    documents: Size
    text_bytes: Size
    replaced: Size

    def fingerprint(self, splits: tuple[str, ...] = SPLITS) -> str:
        """Return a hash of the ids in these splits and of the tokenizer."""
        hashes = [shard.sha256 for split in splits for shard in self.of(split)]
        return "sha256:" + hashlib.sha256("\n".join([self.tokenizer, *splits, *hashes]).encode()).hexdigest()

    def of(self, split: str) -> list[Shard]:
        return [shard for shard in self.shards if shard.split == split]

    def tokens(self, split: str) -> int:
        return sum(shard.tokens for shard in self.of(split))

    def to_json(self) -> str:
        return (
            json.dumps({"format": SHARDS_FORMAT, "version": SHARDS_VERSION, **asdict(self)}, indent=1) + "\n"
        )

    @staticmethod
    def from_json(text: str, source: str) -> Manifest:
        """Parse an untrusted manifest; `source` names it in errors."""
        try:
            document = parse_json(text)
        except ValueError as error:
            raise DataError(f"{source} is not a manifest of shards: not JSON ({error})") from None
        if not isinstance(document, dict) or document.get("format") != SHARDS_FORMAT:
            raise DataError(f"{source} is not a manifest of shards: the format is not {SHARDS_FORMAT!r}")
        version = document.get("version")
        if type(version) is not int or not WITHOUT_SOURCES <= version <= SHARDS_VERSION:
            raise DataError(
                f"{source} has format version {version!r:.20}; this distgpt reads up to {SHARDS_VERSION};"
                " upgrade distgpt"
            )
        if version == WITHOUT_SOURCES:
            document["sources"] = []
        try:
            manifest = checked(Manifest, {k: document[k] for k in document.keys() - {"format", "version"}})
            _refuse_contradictions(manifest)
        except ValueError as error:
            raise DataError(f"{source} is corrupt: {error}") from None
        return manifest


def _refuse_contradictions(manifest: Manifest) -> None:
    """Raise a ValueError unless the parts of a manifest are consistent."""
    size, shards = manifest.vocab_size, manifest.shards
    dtype = np.dtype(id_dtype(size)).newbyteorder("<").str
    numbered = [f"{split}-{i:06d}.npy" for split in SPLITS for i in range(len(manifest.of(split)))]
    for fits, complaint in (
        (manifest.dtype == dtype, f"its dtype must be {dtype} for its vocab_size"),
        (all(token < size for token in manifest.separator), "its separator is not a list of IDs"),
        (len(manifest.sources) in (0, len(manifest.inputs)), "its sources must be two counts per input"),
        (shards, "it has no list of shards"),
        ([shard.name for shard in shards] == numbered, "its shards are not numbered consecutively"),
        (all(x.bytes == file_bytes(dtype, x.tokens) for x in shards), "a shard has a wrong number of bytes"),
        (all(shard.largest < size for shard in shards), "a shard has an ID outside the vocabulary"),
    ):
        if not fits:
            raise ValueError(complaint)


def verify_shards(folder: Path, manifest: Manifest, shards: Iterable[Shard]) -> None:
    """Verify files against the manifest. A DataError names the first file that differs."""
    kind, vocab_size = np.dtype(manifest.dtype), manifest.vocab_size
    for shard in shards:
        path, largest = folder / shard.name, 0
        check_front(path, shard, manifest.dtype)
        with storage_errors("read", path), open_regular(path) as file:
            digest = hashlib.sha256(file.read(HEADER_BYTES))
            while piece := file.read(READ_BYTES):
                digest.update(piece)
                ids = np.frombuffer(piece, kind, len(piece) // kind.itemsize)
                largest = max(largest, int(ids.max(initial=0)))
        if digest.hexdigest() != shard.sha256:
            raise DataError(f"{path} is corrupt: its SHA-256 differs from the manifest")
        if largest >= vocab_size:
            raise DataError(_impossible(path, largest, vocab_size))
        if largest != shard.largest:
            raise DataError(f"{path}: its largest token is {largest}, but {shard.largest} in the manifest")


def _impossible(path: Path, token: int, vocab_size: int) -> str:
    return f"{path} has the token {token}, but the vocabulary ends at {vocab_size - 1}"


def is_shards(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    return Manifest.from_json(read_small(path).decode("utf-8", "replace"), str(path))


def shards_tokenizer(folder: Path, manifest: Manifest) -> Tokenizer:
    """Return the tokenizer that the shards were made with, from their directory."""
    tokenizer = read_tokenizer(folder)
    if fingerprint(tokenizer) != manifest.tokenizer or tokenizer.size != manifest.vocab_size:
        raise DataError(f"{folder / TOKENIZER} is not the tokenizer of these shards")
    return tokenizer


def read_tokenizer(folder: Path) -> Tokenizer:
    path = folder / TOKENIZER
    return tokenizer_from_json(read_small(path).decode("utf-8", "replace"), str(path))


class ShardTokens:
    """The concatenated shards of a split, as Tokens. Opening reads only headers and sizes.

    Files are not memory-mapped, because an I/O error in a mapped file kills the process.
    """

    def __init__(self, folder: Path, manifest: Manifest, split: str) -> None:
        self._open: dict[int, BufferedReader] = {}  # the most recently read is last
        shards = manifest.of(split)
        for shard in shards:
            check_front(folder / shard.name, shard, manifest.dtype)
        self._paths = [folder / shard.name for shard in shards]
        self._starts = [0, *accumulate(shard.tokens for shard in shards)]
        self._dtype, self._vocab_size = np.dtype(manifest.dtype), manifest.vocab_size
        self.fingerprint = manifest.fingerprint((split,))

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, start: int, stop: int) -> Ids:
        """Return the ids [start, stop).

        Raises a DataError if a file is too short or an id is invalid. Models index memory by ids, which may
        have been verified long ago or never.
        """
        ids = np.empty(stop - start, self._dtype)
        at = bisect_right(self._starts, start) - 1
        done = 0
        while done < len(ids):
            first, end = self._starts[at : at + 2]
            count = min(stop, end) - start
            self._read(at, ids[done : done + count], start - first)
            done, start, at = done + count, end, at + 1
        return ids

    def _read(self, at: int, out: Ids, start: int) -> None:
        path = self._paths[at]
        with storage_errors("read", path):
            self._open[at] = file = self._open.pop(at, None) or open_regular(path)
            if len(self._open) > MOST_OPEN:
                self._open.pop(next(iter(self._open))).close()
            if not read_at(file.fileno(), out.view(np.uint8).data, HEADER_BYTES + start * out.itemsize):
                raise DataError(f"{path} was truncated while open")
        if (largest := int(out.max(initial=0))) >= self._vocab_size:
            where = f"(at position {start + int(out.argmax()):,})"
            raise DataError(f"{_impossible(path, largest, self._vocab_size)} {where}")

    def __del__(self) -> None:
        for file in self._open.values():
            file.close()


class _Shards:
    """The data kind of a directory of token shards."""

    def refuse_missing(self, request: DataRequest) -> None:
        path = resolve_data(request.data)
        made_with = shards_tokenizer(path, read_manifest(path))
        kind, _ = find_kind(request.tokenizer)
        if kind is None or kind.means is not None:  # otherwise it would have to be downloaded
            _refuse_other_tokenizer(made_with, request, path)

    def load(self, comm: Comm, request: DataRequest, say: Say) -> Corpus:
        folder = on_root(comm, lambda: resolve_data(request.data))
        note = "--val-fraction has no effect: shards have their own validation part"
        return replace(load_shards(comm, folder, request, say), notes=(note,) * bool(request.val_fraction))


SHARDS = _Shards()


def load_shards(comm: Comm, folder: Path, request: DataRequest, say: Say) -> Corpus:
    """Load shards by rank 0's manifest. Ranks of a node share the verification. Collective."""

    def describe() -> tuple[str, str]:
        manifest = read_manifest(folder)
        tokenizer = shards_tokenizer(folder, manifest)
        _refuse_other_tokenizer(tokenizer, request, folder)
        return manifest.to_json(), tokenizer.to_json()

    text, saved = on_root(comm, describe)
    manifest = Manifest.from_json(text, "rank 0's manifest")
    tokenizer = tokenizer_from_json(saved, str(folder))
    wanted = [shard for shard in manifest.shards if shard.split in request.splits]
    shards = wanted or list(manifest.shards)
    if request.verify and comm.rank == 0:
        say(f"verifying {sum(shard.tokens for shard in shards):,} tokens in {count(len(shards), 'shard')}")
    splits: dict[str, Tokens] = {}

    def problem() -> str:
        if not folder.is_dir():
            return f"{folder} does not exist on this node; all nodes must share its file system"
        try:
            for split in dict.fromkeys(shard.split for shard in shards):
                splits[split] = ShardTokens(folder.absolute(), manifest, split)  # read during training
                if len(splits[split]) < 2:
                    return f"{folder} has a single token of split {split!r}; at least 2 are required"
            if request.verify:
                verify_shards(folder, manifest, shards[comm.local_rank :: comm.local_size])
        except DistgptError as error:
            return str(error)
        return ""

    raise_if_any(comm, problem(), DataError)
    if "train" in request.splits and "train" not in splits:
        raise collective_error(DataError(f"{folder} has no shards of split 'train'"))
    is_separated = manifest.separator == (tokenizer.separator,)
    val = splits.get("val")
    train = splits.get("train", val)  # the validation shards, if only these were requested
    assert train is not None
    return Corpus(tokenizer, train, val, tokenizer.separator if is_separated else None)


def _refuse_other_tokenizer(tokenizer: Tokenizer, request: DataRequest, folder: Path) -> None:
    """Raise a DataError if the ids are not from the model's tokenizer, or from the requested one."""
    made_with = f"{folder} contains tokens of {tokenizer.describe()}"
    if request.existing is not None and fingerprint(request.existing) != fingerprint(tokenizer):
        raise DataError(f"{made_with}, but the model's tokenizer is {request.existing.describe()}")
    if not can_mean(request.tokenizer, tokenizer):
        raise DataError(f"{made_with}, not of {request.tokenizer!r}; use --tokenizer {AUTO}")
