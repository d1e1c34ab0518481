"""Token shards: a folder of .npy files with a manifest that says what they hold and shows any damage."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from distgpt.checked import Must, checked, parse_json
from distgpt.data.shardfile import Sha256, Shard, ShardReader, Size, file_bytes, shard_name, verify_shard
from distgpt.data.tokenizers.naming import Tokenizer, fingerprint, id_dtype, tokenizer_from_json
from distgpt.errors import DataError
from distgpt.files import read_small, storage_errors
from distgpt.kernels.api import Array

FORMAT, VERSION = "distgpt-shards", 2
WITHOUT_SOURCES = 1  # an earlier version
MANIFEST, TOKENIZER = "manifest.json", "tokenizer.json"
SPLITS = ("val", "train")  # in the order they are written
MOST_OPEN = 128  # files of one split
_Plain = Annotated[Any, Must("be a plain value", lambda value: not isinstance(value, list | dict))]


@dataclass(frozen=True, slots=True)
class Manifest:
    """`tokenizer` is a fingerprint. The last fields say where the tokens came from; nothing depends on them.

    `separator` are the ids beside each document; `text_bytes` counts the documents' UTF-8, `replaced` the
    U+FFFD that stand in it for bytes which were no UTF-8.
    """

    tokenizer: Sha256
    description: str
    vocab_size: Annotated[int, Must("be possible", lambda size: 0 < size <= 1 << 24)]
    dtype: str
    shards: tuple[Shard, ...]
    separator: tuple[Size, ...]
    settings: dict[str, _Plain]
    inputs: tuple[tuple[str, Size], ...]  # name and bytes
    sources: tuple[tuple[Size, Size], ...]  # of each input, documents and their tokens; empty if not known
    documents: Size
    text_bytes: Size
    replaced: Size

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
            document = parse_json(text)
        except ValueError as error:
            raise DataError(f"{source} is no manifest of shards: it is not JSON ({error})") from None
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise DataError(f"{source} is no manifest of shards: its format is not {FORMAT!r}")
        version = document.get("version")
        if type(version) is not int or not WITHOUT_SOURCES <= version <= VERSION:
            raise DataError(
                f"{source} has format version {version!r:.20}, this distgpt reads up to {VERSION}: upgrade it"
            )
        if version == WITHOUT_SOURCES:
            document["sources"] = []
        try:
            manifest: Manifest = checked(
                Manifest, {k: document[k] for k in document.keys() - {"format", "version"}}
            )
            _refuse_contradictions(manifest)
        except ValueError as error:
            raise DataError(f"{source} is damaged: {error}") from None
        return manifest


def _refuse_contradictions(manifest: Manifest) -> None:
    """Raise a ValueError unless the parts of a manifest fit each other."""
    size, names = manifest.vocab_size, [shard.name for shard in manifest.shards]
    dtype = np.dtype(id_dtype(size)).newbyteorder("<").str
    for fits, complaint in (
        (manifest.dtype == dtype, f"its dtype is not {dtype}, as its vocab_size needs"),
        (all(token < size for token in manifest.separator), "its separator is no list of ids"),
        (len(manifest.sources) in (0, len(manifest.inputs)), "its sources are not two counts for each input"),
        (bool(names), "it has no list of shards"),
        (
            names == [shard_name(split, i) for split in SPLITS for i in range(len(manifest.of(split)))],
            "its shards are not numbered one by one",
        ),
        *(
            (shard.bytes == file_bytes(dtype, shard.tokens), f"{shard.name} cannot have so many bytes")
            for shard in manifest.shards
        ),
        *((shard.largest < size, f"{shard.name} has an impossible id") for shard in manifest.shards),
    ):
        if not fits:
            raise ValueError(complaint)


def verify_shards(
    folder: Path,
    manifest: Manifest,
    shards: Iterable[Shard],
    advanced: Callable[[int], None] = lambda n: None,
) -> None:
    """Raise a DataError about the first of these files that is not what the manifest says."""
    for shard in shards:
        verify_shard(folder, shard, manifest.dtype, manifest.vocab_size, advanced)


def is_shards(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    return Manifest.from_json(read_small(path).decode("utf-8", "replace"), str(path))


def shards_tokenizer(folder: Path, manifest: Manifest) -> Tokenizer:
    """The tokenizer that the shards were made with, which lies beside them."""
    tokenizer = read_tokenizer(folder)
    if fingerprint(tokenizer) != manifest.tokenizer or tokenizer.size != manifest.vocab_size:
        raise DataError(f"{folder / TOKENIZER} is not the tokenizer that the shards beside it were made with")
    return tokenizer


def read_tokenizer(folder: Path) -> Tokenizer:
    path = folder / TOKENIZER
    return tokenizer_from_json(read_small(path).decode("utf-8", "replace"), str(path))


def unlisted(folder: Path, manifest: Manifest) -> list[str]:
    """Files that look like shards but are not in the manifest."""
    known = {shard.name for shard in manifest.shards}
    with storage_errors("read", folder):
        return sorted(path.name for path in folder.glob("*.npy") if path.name not in known)


class ShardTokens:
    """The shards of a split end to end, as Tokens. Opening reads headers and sizes only."""

    def __init__(self, folder: Path, manifest: Manifest, split: str) -> None:
        shards = manifest.of(split)
        self._files = [ShardReader(folder, shard, manifest.dtype) for shard in shards]
        self._open: list[ShardReader] = []  # the last one read at the end
        self._starts = [0, *accumulate(shard.tokens for shard in shards)]
        self._dtype = np.dtype(manifest.dtype)
        self.fingerprint = manifest.fingerprint_of((split,))

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, start: int, stop: int) -> Array:
        ids = np.empty(stop - start, self._dtype)
        at = bisect_right(self._starts, start) - 1
        done = 0
        while done < len(ids):
            first, end = self._starts[at : at + 2]
            count = min(stop, end) - start
            self._recent(at).read(ids[done : done + count], start - first)
            done, start, at = done + count, end, at + 1
        return ids

    def _recent(self, at: int) -> ShardReader:
        """A file to read, and close the one that was not for the longest time if too many are open."""
        file = self._files[at]
        if file in self._open:
            self._open.remove(file)
        elif len(self._open) == MOST_OPEN:
            self._open.pop(0).close()
        self._open.append(file)
        return file
