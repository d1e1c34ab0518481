"""Token shards: a folder of .npy files with a manifest that says what they hold and shows any damage."""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from distgpt.data.shardfile import Shard, check_shard, file_bytes, map_shard
from distgpt.data.tokenizers.api import Tokenizer, fingerprint, id_dtype
from distgpt.data.tokenizers.naming import tokenizer_from_json
from distgpt.errors import DataError, printable
from distgpt.files import storage_errors
from distgpt.kernels.api import Array

FORMAT, VERSION = "distgpt-shards", 1
MANIFEST, TOKENIZER = "manifest.json", "tokenizer.json"
SPLITS = ("val", "train")  # in the order of the text
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MOST = 1 << 48  # tokens or bytes of anything


def shard_name(split: str, number: int) -> str:
    return f"{split}-{number:06d}.npy"


@dataclass(frozen=True, slots=True)
class Manifest:
    """`tokenizer` is a fingerprint. The last fields tell where the tokens came from; nothing depends on them.

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
        """The manifest in this text, which is not trusted; `source` names it in errors."""
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
            return _parsed({key: document[key] for key in document.keys() - {"format", "version"}})
        except ValueError as error:
            raise DataError(f"{source} is damaged: {error}") from None


def is_shards(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    with storage_errors("read", path):
        return Manifest.from_json(path.read_bytes().decode("utf-8", "replace"), str(path))


def shards_tokenizer(folder: Path, manifest: Manifest) -> Tokenizer:
    """The one that the shards were made with, which lies beside them."""
    path = folder / TOKENIZER
    with storage_errors("read", path):
        tokenizer = tokenizer_from_json(path.read_bytes().decode("utf-8", "replace"), str(path))
    if fingerprint(tokenizer) != manifest.tokenizer or tokenizer.size != manifest.vocab_size:
        raise DataError(f"{path} is not the tokenizer that the shards beside it were made with")
    return tokenizer


def verify_shard(
    folder: Path, manifest: Manifest, shard: Shard, advanced: Callable[[int], None] = lambda count: None
) -> None:
    """Read one file; a DataError if it is not what the manifest says. `advanced` hears of bytes read."""
    check_shard(folder, shard, manifest.dtype, manifest.vocab_size, advanced)


def strangers(folder: Path, manifest: Manifest) -> list[str]:
    """Files that look like shards, of which the manifest knows nothing."""
    known = {shard.name for shard in manifest.shards}
    with storage_errors("read", folder):
        return sorted(path.name for path in folder.glob("*.npy") if path.name not in known)


class ShardTokens:
    """The shards of a split end to end, as Tokens. Opening looks at headers and sizes only."""

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


def _parsed(found: dict[str, Any]) -> Manifest:
    """A ValueError says what makes no sense."""
    _require_keys(found, Manifest, "it")
    _require(_is_sha256(found["tokenizer"]), "its tokenizer is no fingerprint")
    _require(isinstance(found["description"], str), "its description is no text")
    _require(
        _is_count(found["vocab_size"]) and 0 < found["vocab_size"] <= 1 << 24, "an impossible vocab_size"
    )
    dtype = np.dtype(id_dtype(found["vocab_size"])).newbyteorder("<").str
    _require(found["dtype"] == dtype, f"its dtype is not {dtype}, as its vocab_size needs")
    separator = found["separator"]
    _require(
        isinstance(separator, list) and all(_is_count(i) and i < found["vocab_size"] for i in separator),
        "its separator is no list of ids",
    )
    settings = found["settings"]
    _require(
        isinstance(settings, dict)
        and all(isinstance(v, str | int | float | None) for v in settings.values()),
        "its settings are not plain values by name",
    )
    inputs = found["inputs"]
    _require(
        isinstance(inputs, list)
        and all(
            isinstance(i, list) and len(i) == 2 and isinstance(i[0], str) and _is_count(i[1]) for i in inputs
        ),
        "its inputs are not names with sizes",
    )
    for name in ("documents", "text_bytes", "replaced"):
        _require(_is_count(found[name]), f"its {name} is no count")
    _require(isinstance(found["shards"], list) and bool(found["shards"]), "it has no list of shards")
    shards = tuple(_parsed_shard(shard, dtype, found["vocab_size"]) for shard in found["shards"])
    names = [
        shard_name(split, i) for split in SPLITS for i in range(sum(shard.split == split for shard in shards))
    ]
    _require([shard.name for shard in shards] == names, "its shards are not numbered one by one")
    return Manifest(
        **{
            **found,
            "shards": shards,
            "separator": tuple(separator),
            "inputs": tuple((name, size) for name, size in inputs),
        }
    )


def _parsed_shard(said: Any, dtype: str, vocab_size: int) -> Shard:
    _require(isinstance(said, dict), "a shard is no object")
    which = f"shard {said.get('name')!r:.40}"
    _require_keys(said, Shard, which)
    _require(said["split"] in SPLITS and isinstance(said["name"], str), f"{which} is of no known split")
    _require(_is_count(said["tokens"]) and said["tokens"] > 0, f"{which} has an impossible number of tokens")
    _require(
        _is_count(said["bytes"]) and said["bytes"] == file_bytes(dtype, said["tokens"]),
        f"{which} cannot have so many bytes",
    )
    _require(_is_sha256(said["sha256"]), f"{which} has no SHA-256")
    _require(_is_count(said["largest"]) and said["largest"] < vocab_size, f"{which} has an impossible id")
    return Shard(**said)


def _require(fine: bool, complaint: str) -> None:
    if not fine:
        raise ValueError(complaint)


def _require_keys(found: dict[str, Any], kind: Any, what: str) -> None:
    expected = {field.name for field in fields(kind)}
    if wrong := expected ^ found.keys():
        raise ValueError(f"{what} lacks, or should not have, {printable(', '.join(sorted(wrong))):.80}")


def _is_count(value: Any) -> bool:
    """type(), because JSON's true is an int to Python."""
    return type(value) is int and 0 <= value < _MOST


def _is_sha256(value: Any) -> bool:
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None
