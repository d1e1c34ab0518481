"""Shards in the making: what has been finished, and where to go on after an interruption."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from distgpt.data.prepare.encoding import Counts
from distgpt.data.prepare.inputs import Input
from distgpt.data.prepare.pieces import Place
from distgpt.data.shardfile import Shard
from distgpt.data.shards import MANIFEST, SPLITS, TOKENIZER, is_shards
from distgpt.errors import DataError, UsageError, printable
from distgpt.files import atomic_file, storage_errors

PROGRESS = "progress.json"
# Another version where the same inputs are cut or tokenized differently: the rest would not fit.
FORMAT, VERSION = "distgpt-unfinished-shards", 1
_SHARD = re.compile(rf"({'|'.join(SPLITS)})-\d{{6,}}\.npy")
Settings = dict[str, Any]


@dataclass(slots=True)
class Progress:
    """`place` is the piece, and `skip` the token in it, with which the next shard begins; `counts` are of all
    pieces before. `held_out` is the number of tokens for validation, once it has been fixed."""

    settings: Settings
    inputs: list[list[Any]]
    held_out: int | None = None
    shards: list[Shard] = field(default_factory=list)
    place: Place = field(default_factory=Place)
    skip: int = 0
    counts: Counts = field(default_factory=Counts)

    def tokens(self, split: str) -> int:
        return sum(shard.tokens for shard in self.shards if shard.split == split)

    def save(self, folder: Path) -> None:
        said = {"format": FORMAT, "version": VERSION, "sha256": _sha256(asdict(self)), **asdict(self)}
        with atomic_file(folder / PROGRESS) as file:
            file.write(json.dumps(said, indent=1).encode())


def listed(inputs: Sequence[Input]) -> list[list[Any]]:
    return [[source.name, source.bytes, source.mtime_ns] for source in inputs]


@contextmanager
def reserved(folder: Path) -> Iterator[None]:
    """The folder, made if there is none, for this process alone; one that stayed empty is removed again."""
    with storage_errors("write to", folder):
        is_new = _made(folder)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(descriptor, folder)
        try:
            yield
        finally:
            if is_new:
                with suppress(OSError):
                    folder.rmdir()
    finally:
        os.close(descriptor)


def _made(folder: Path) -> bool:
    """Whether there was none."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        return False
    return True


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(f"another process is preparing shards in {folder}") from None
    except OSError:
        return  # a file system without locks


def found_progress(folder: Path, wanted: Progress) -> Progress:
    """What an earlier process left of the same work, or `wanted` itself; a UsageError if it is other work."""
    if is_shards(folder):
        raise UsageError(f"{folder} holds shards already; give another --out, or remove it")
    path = folder / PROGRESS
    with storage_errors("read", folder):
        if not path.exists():
            _refuse_others(folder)
            return wanted
        if not is_unfinished(folder):
            raise UsageError(f"{path} is not of distgpt data prepare; give a new folder for the shards")
        earlier = _parsed(path)
    if not earlier.shards:
        return wanted
    differences = [
        f"{name} is {wanted.settings.get(name)!r}, was {value!r}"
        for name, value in earlier.settings.items()
        if wanted.settings.get(name) != value
    ]
    if differences or earlier.inputs != wanted.inputs:
        what = "; ".join(differences or [_changed(earlier.inputs, wanted.inputs)])
        raise UsageError(
            f"{folder} holds unfinished shards of another command ({what});"
            f" repeat that one, or remove {folder}"
        )
    return earlier


def is_unfinished(folder: Path) -> bool:
    """Whether shards have been begun here, by this or another version."""
    try:
        said = json.loads((folder / PROGRESS).read_bytes())
    except (FileNotFoundError, ValueError, RecursionError):
        return False
    return isinstance(said, dict) and said.get("format") == FORMAT


def _changed(before: list[list[Any]], now: list[list[Any]]) -> str:
    old, new = ({tuple(entry) for entry in entries} for entries in (before, now))
    names = sorted({entry[0] for entry in old ^ new})
    if not names:
        return "the inputs come in another order"
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"the input {printable(names[0])}{others} has changed, is new or is missing"


def _parsed(path: Path) -> Progress:
    """What was saved, to the letter: a hash tells."""
    said = json.loads(path.read_bytes())
    del said["format"]
    if said.pop("version", None) != VERSION:
        raise UsageError(
            f"{path.parent} holds unfinished shards of another version of distgpt;"
            " go on with that one, or remove the folder"
        )
    if said.pop("sha256", None) != _sha256(said):
        raise DataError(f"{path} is damaged; remove {path.parent} and begin again")
    shards = [Shard(**shard) for shard in said.pop("shards")]
    place, counts = Place(**said.pop("place")), Counts(**said.pop("counts"))
    return Progress(**said, shards=shards, place=place, counts=counts)


def _sha256(said: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _refuse_others(folder: Path) -> None:
    """Only what a killed process left half-written may be there."""
    others = [path.name for path in folder.iterdir() if not _is_partial(path.name)]
    if others:
        raise UsageError(
            f"{folder} is not empty (it holds {min(others)!r}); give a new folder for the shards"
        )


def _is_partial(name: str) -> bool:
    own = (PROGRESS, TOKENIZER, MANIFEST, "train-", "val-")
    return name.endswith(".tmp") and name.startswith(tuple(f".{start}" for start in own))


def tidy(folder: Path, shards: Sequence[Shard]) -> None:
    """Remove what a process left that ended while it wrote; finished are only these shards."""
    known = {shard.name for shard in shards}
    with storage_errors("write to", folder):
        for path in folder.iterdir():
            unknown = path.name not in known and _SHARD.fullmatch(path.name)
            if unknown or _is_partial(path.name):
                path.unlink()


def forget(folder: Path) -> None:
    """Nothing is left to go on from."""
    tidy(folder, ())
    with storage_errors("write to", folder):
        for name in (TOKENIZER, PROGRESS):
            (folder / name).unlink(missing_ok=True)
