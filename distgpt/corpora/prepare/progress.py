"""Unfinished shards: what has been written so far, and where to resume after an interruption."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, astuple, dataclass, field
from operator import add
from pathlib import Path
from typing import Annotated, Any

from distgpt.core.base.checked import Count, Must, checked, parse_json
from distgpt.core.base.errors import DataError, Say, UsageError
from distgpt.core.base.files import atomic_file, locked, read_small, storage_errors
from distgpt.core.base.formatting import count
from distgpt.corpora.prepare.documents import Input, Offset
from distgpt.corpora.prepare.spool import SPOOL
from distgpt.corpora.shards import MANIFEST, SPLITS, TOKENIZER, Shard, is_shards

PROGRESS = "progress.json"
# To be raised when the same inputs are cut or tokenized differently: the rest would not fit.
FORMAT, VERSION = "distgpt-unfinished-shards", 4
_SHARD = re.compile(rf"({'|'.join(SPLITS)})-\d{{6,}}\.npy")
Settings = dict[str, Any]
_Pair = Annotated[list[Count], Must("be two counts", lambda pair: len(pair) == 2)]


@dataclass(frozen=True, slots=True)
class Counts:
    documents: Count = 0
    text_bytes: Count = 0
    replaced: Count = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*map(add, astuple(self), astuple(other)))


@dataclass(slots=True)
class Progress:
    """The finished shards, and how much is in the spool: all pieces before `place`.

    `counts` are of these pieces, as `sources`, which are documents and their tokens of each input. `spooled`
    are the sizes of the spool's files. `held_out` is the number of tokens for validation, once
    all are in the spool. `complete` says that all shards are finished.
    """

    settings: Settings
    inputs: list[Annotated[list[Any], Must("have three entries", lambda entry: len(entry) == 3)]]
    held_out: Count | None = None
    shards: list[Shard] = field(default_factory=list)
    place: Offset = field(default_factory=Offset)
    counts: Counts = field(default_factory=Counts)
    sources: list[_Pair] = field(default_factory=list)
    spooled: _Pair = field(default_factory=lambda: [0, 0])
    complete: bool = False

    @property
    def begun(self) -> bool:
        """True if there is anything to resume."""
        return bool(self.shards) or self.place != Offset()

    def finished(self) -> str:
        """Return the progress in words."""
        if self.shards:
            return count(len(self.shards), "finished shard")
        return count(self.spooled[0], "token")

    def tokens(self, split: str) -> int:
        return sum(shard.tokens for shard in self.shards if shard.split == split)

    def save(self, folder: Path) -> None:
        contents = {"format": FORMAT, "version": VERSION, "sha256": _sha256(asdict(self)), **asdict(self)}
        with atomic_file(folder / PROGRESS) as file:
            file.write(json.dumps(contents, indent=1).encode())


def list_inputs(inputs: Sequence[Input]) -> list[list[Any]]:
    return [[source.name, source.bytes, source.mtime_ns] for source in inputs]


class BeingPrepared(UsageError):
    """Shards that another process is making."""


@contextmanager
def reserved(folder: Path, say: Say) -> Iterator[None]:
    """Make the folder if there is none and lock it for this process; remove it again if it stays empty."""
    with storage_errors("write to", folder):
        is_new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if not locked(descriptor, folder, say):
            is_new = False  # the other's
            raise BeingPrepared(f"another process is preparing shards in {folder}")
        yield
    finally:
        if is_new:
            with suppress(OSError):
                folder.rmdir()
        os.close(descriptor)


def load_progress(folder: Path, fresh: Progress) -> Progress:
    """Return the progress of an earlier process, else `fresh`; a UsageError if its work was other work."""
    if is_shards(folder):
        raise UsageError(f"{folder} holds shards already; give another --out, or remove it")
    path = folder / PROGRESS
    with storage_errors("read", folder):
        if not path.exists():  # accept only what a killed process left half-written
            if others := [path.name for path in folder.iterdir() if not _is_partial(path.name)]:
                raise UsageError(
                    f"{folder} is not empty (it holds {min(others)!r}); give a new folder for the shards"
                )
            return fresh
        found = _unfinished(folder)
    if found is None:
        raise UsageError(f"{path} is not of distgpt data prepare; give a new folder for the shards")
    if found.pop("version", None) != VERSION:
        raise UsageError(
            f"{folder} holds unfinished shards of another version of distgpt;"
            " finish them with that one, or remove the folder"
        )
    try:  # types are checked, too, since a hash can be made to fit
        if found.pop("sha256", None) != _sha256(found):
            raise ValueError("its SHA-256 is another")
        earlier: Progress = checked(Progress, found)
        if earlier.begun and len(earlier.sources) != len(earlier.inputs):
            raise ValueError("its sources are not two counts for each input")
    except ValueError as error:
        raise DataError(f"{path} is damaged ({error}); remove {folder} and begin again") from None
    if not earlier.begun:
        return fresh
    different = [
        f"{name} is {fresh.settings.get(name)!r}, was {value!r}"
        for name, value in earlier.settings.items()
        if fresh.settings.get(name) != value
    ]
    if earlier.inputs != fresh.inputs:
        changed = [f"{entry[0]!r}" for entry in fresh.inputs if entry not in earlier.inputs]
        different.append(f"other inputs{': ' * bool(changed)}{', '.join(changed[:3])}")
    if different:
        raise UsageError(
            f"{folder} holds unfinished shards of another command ({'; '.join(different)});"
            f" repeat that one, or remove {folder}"
        )
    return earlier


def _unfinished(folder: Path) -> dict[str, Any] | None:
    """Return what this or another version of distgpt has noted of shards that it began here."""
    try:
        found = parse_json(read_small(folder / PROGRESS)) if (folder / PROGRESS).exists() else None
    except (ValueError, DataError):
        return None
    return found if isinstance(found, dict) and found.pop("format", None) == FORMAT else None


def refuse_unfinished(folder: Path) -> None:
    """Raise a DataError if the shards in a folder are not finished."""
    with storage_errors("read", folder):
        unfinished = folder.is_dir() and _unfinished(folder) is not None
    if unfinished:
        raise DataError(f"the shards in {folder} are not finished: the same distgpt data prepare resumes")


def _sha256(contents: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()


def _is_partial(name: str) -> bool:
    own = (PROGRESS, TOKENIZER, MANIFEST, "train-", "val-")
    return name.endswith(".tmp") and name.startswith(tuple(f".{start}" for start in own))


def remove_partial(folder: Path, progress: Progress) -> None:
    """Remove what a process left half-written, and all shards and files of a spool but those it knows."""
    known = {shard.name for shard in progress.shards}
    if any(progress.spooled):
        known.update(SPOOL)
    with storage_errors("write to", folder):
        for path in folder.iterdir():
            is_own = path.name in SPOOL or _SHARD.fullmatch(path.name)
            if (is_own and path.name not in known) or _is_partial(path.name):
                path.unlink()


def remove_all(folder: Path) -> None:
    """Remove everything, so that nothing is left to resume."""
    remove_partial(folder, Progress({}, []))
    with storage_errors("write to", folder):
        for name in (TOKENIZER, PROGRESS):
            (folder / name).unlink(missing_ok=True)
