"""Token shards: a folder of .npy files with a manifest that says what they hold and shows any damage."""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from distgpt.data.shardfile import Shard, ShardReader, file_bytes, shard_name, verify_shard
from distgpt.data.tokenizers.naming import Tokenizer, fingerprint, id_dtype, tokenizer_from_json
from distgpt.errors import DataError, printable
from distgpt.files import parse_json, read_small, storage_errors
from distgpt.kernels.api import Array

FORMAT, VERSION = "distgpt-shards", 2
WITHOUT_SOURCES = 1  # an earlier version
MANIFEST, TOKENIZER = "manifest.json", "tokenizer.json"
SPLITS = ("val", "train")  # in the order they are written
MOST_OPEN = 128  # files of one split
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MOST = 1 << 48  # tokens or bytes of anything


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
    sources: tuple[tuple[int, int], ...]  # of each input, documents and their tokens; empty if not known
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
            return _parse({key: document[key] for key in document.keys() - {"format", "version"}})
        except ValueError as error:
            raise DataError(f"{source} is damaged: {error}") from None


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
    sources = found["sources"]
    _require(
        isinstance(sources, list)
        and len(sources) in (0, len(found["inputs"]))
        and all(isinstance(pair, list) and len(pair) == 2 and all(map(_is_count, pair)) for pair in sources),
        "its sources are not two counts for each input",
    )
    for name in ("documents", "text_bytes", "replaced"):
        _require(_is_count(found[name]), f"its {name} is no count")
    _require(isinstance(found["shards"], list) and bool(found["shards"]), "it has no list of shards")
    shards = tuple(_parse_shard(shard, dtype, size) for shard in found["shards"])
    counts = {split: sum(shard.split == split for shard in shards) for split in SPLITS}
    names = [shard_name(split, i) for split in SPLITS for i in range(counts[split])]
    _require([shard.name for shard in shards] == names, "its shards are not numbered one by one")
    inputs, sources = (tuple(map(tuple, pairs)) for pairs in (found["inputs"], sources))
    plain = {"shards": shards, "separator": tuple(ids), "inputs": inputs, "sources": sources}
    return Manifest(**{**found, **plain})


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
