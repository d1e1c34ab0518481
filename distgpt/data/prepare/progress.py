"""Unfinished shards: what has been written so far, and where to resume after an interruption."""

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

from distgpt.checked import parse_json, parse_object
from distgpt.data.prepare.documents import Input, Place
from distgpt.data.prepare.encoding import Counts
from distgpt.data.prepare.spool import MOST_FILES, spool_names
from distgpt.data.shardfile import Shard, shard_name
from distgpt.data.shards import MANIFEST, SPLITS, TOKENIZER, is_shards
from distgpt.errors import DataError, UsageError, printable
from distgpt.files import atomic_file, read_small, storage_errors
from distgpt.units import count

PROGRESS = "progress.json"
# To be raised when the same inputs are cut or tokenized differently: the rest would not fit.
FORMAT, VERSION = "distgpt-unfinished-shards", 2
_OWN = re.compile(rf"({'|'.join(SPLITS)})-\d{{6,}}\.npy|spool-\d{{3}}\.(ids|keys)")
Settings = dict[str, Any]


@dataclass(slots=True)
class Progress:
    """The finished shards, and where the next one begins: at the token `skip` of the piece at `place`.

    `counts` are of all pieces before it, as `sources`, which are documents and their tokens of each input.
    `held_out` is the number of tokens for validation, once it is fixed. `spooled` are tokens and records of
    the files of a spool. `complete` says that all shards are finished.
    """

    settings: Settings
    inputs: list[list[Any]]
    held_out: int | None = None
    shards: list[Shard] = field(default_factory=list)
    place: Place = field(default_factory=Place)
    skip: int = 0
    counts: Counts = field(default_factory=Counts)
    sources: list[list[int]] = field(default_factory=list)
    spooled: list[list[int]] = field(default_factory=list)
    complete: bool = False

    @property
    def begun(self) -> bool:
        """Whether there is anything to resume."""
        return bool(self.shards) or self.place != Place()

    def finished(self) -> str:
        """How far it is, in words."""
        if self.shards:
            return count(len(self.shards), "finished shard")
        return count(sum(tokens for tokens, _ in self.spooled), "token")

    def tallies(self) -> list[list[int]]:
        """A copy of `sources`."""
        return [list(pair) for pair in self.sources] or [[0, 0] for _ in self.inputs]

    def tokens(self, split: str) -> int:
        return sum(shard.tokens for shard in self.shards if shard.split == split)

    def save(self, folder: Path) -> None:
        contents = {"format": FORMAT, "version": VERSION, "sha256": _sha256(asdict(self)), **asdict(self)}
        with atomic_file(folder / PROGRESS) as file:
            file.write(json.dumps(contents, indent=1).encode())


def list_inputs(inputs: Sequence[Input]) -> list[list[Any]]:
    return [[source.name, source.bytes, source.mtime_ns] for source in inputs]


@contextmanager
def reserved(folder: Path) -> Iterator[None]:
    """Make the folder if there is none and lock it for this process; remove it again if it stays empty."""
    with storage_errors("write to", folder):
        is_new = _make(folder)
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


def _make(folder: Path) -> bool:
    """Make the folder; False if there is one already."""
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


def load_progress(folder: Path, fresh: Progress) -> Progress:
    """What an earlier process left of the same work, or `fresh` itself; a UsageError if it is other work."""
    if is_shards(folder):
        raise UsageError(f"{folder} holds shards already; give another --out, or remove it")
    path = folder / PROGRESS
    with storage_errors("read", folder):
        if not path.exists():
            _refuse_others(folder)
            return fresh
        if not is_unfinished(folder):
            raise UsageError(f"{path} is not of distgpt data prepare; give a new folder for the shards")
        earlier = _parse(path)
    if not earlier.begun:
        return fresh
    differences = [
        f"{name} is {fresh.settings.get(name)!r}, was {value!r}"
        for name, value in earlier.settings.items()
        if fresh.settings.get(name) != value
    ]
    if differences or earlier.inputs != fresh.inputs:
        what = "; ".join(differences or [_changed(earlier.inputs, fresh.inputs)])
        raise UsageError(
            f"{folder} holds unfinished shards of another command ({what});"
            f" repeat that one, or remove {folder}"
        )
    return earlier


def is_unfinished(folder: Path) -> bool:
    """Whether this or another version of distgpt has begun shards here."""
    if not (folder / PROGRESS).exists():
        return False
    try:
        found = parse_json(read_small(folder / PROGRESS))
    except (ValueError, DataError):
        return False
    return isinstance(found, dict) and found.get("format") == FORMAT


def _changed(before: list[list[Any]], now: list[list[Any]]) -> str:
    old, new = ({tuple(entry) for entry in entries} for entries in (before, now))
    names = sorted({entry[0] for entry in old ^ new})
    if not names:
        return "the inputs come in another order"
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"the input {printable(names[0])}{others} has changed, is new or is missing"


def _parse(path: Path) -> Progress:
    """What was saved, checked by its hash, and for those who can make that fit, by its types."""
    found = parse_object(read_small(path), path)
    del found["format"]
    if found.pop("version", None) != VERSION:
        raise UsageError(
            f"{path.parent} holds unfinished shards of another version of distgpt;"
            " finish them with that one, or remove the folder"
        )
    try:
        if found.pop("sha256", None) != _sha256(found):
            raise ValueError
        shards = [Shard(**shard) for shard in found.pop("shards")]
        place, counts = Place(**found.pop("place")), Counts(**found.pop("counts"))
        progress = Progress(**found, shards=shards, place=place, counts=counts)
        _check(progress)
    except (TypeError, ValueError, KeyError, AttributeError):
        raise DataError(f"{path} is damaged; remove {path.parent} and begin again") from None
    return progress


def _check(progress: Progress) -> None:
    """Raise a ValueError unless all values are such as this program saves."""
    p = progress
    numbers = [p.skip, *asdict(p.place).values(), *asdict(p.counts).values()]
    for pair in (*p.sources, *p.spooled):
        _require(isinstance(pair, list) and len(pair) == 2)
        numbers += pair
    for shard in p.shards:
        named = isinstance(shard.name, str) and isinstance(shard.sha256, str) and shard.split in SPLITS
        _require(named and shard.name == shard_name(shard.split, int(shard.name[-10:-4])))
        numbers += [shard.tokens, shard.bytes, shard.largest]
    _require(all(type(number) is int and 0 <= number < 1 << 48 for number in numbers))
    _require(p.held_out is None or (type(p.held_out) is int and p.held_out >= 0))
    _require(len(p.spooled) <= MOST_FILES and len(p.sources) in (0, len(p.inputs)))
    _require(isinstance(p.settings, dict) and type(p.complete) is bool)
    _require(all(isinstance(entry, list) and len(entry) == 3 for entry in p.inputs))


def _require(fine: bool) -> None:
    if not fine:
        raise ValueError


def _sha256(contents: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()


def _refuse_others(folder: Path) -> None:
    """Accept only what a killed process left half-written."""
    others = [path.name for path in folder.iterdir() if not _is_partial(path.name)]
    if others:
        raise UsageError(
            f"{folder} is not empty (it holds {min(others)!r}); give a new folder for the shards"
        )


def _is_partial(name: str) -> bool:
    own = (PROGRESS, TOKENIZER, MANIFEST, "train-", "val-")
    return name.endswith(".tmp") and name.startswith(tuple(f".{start}" for start in own))


def remove_partial(folder: Path, progress: Progress) -> None:
    """Remove what a process left half-written, and all shards and files of a spool but those it knows."""
    known = {shard.name for shard in progress.shards}
    for number in range(len(progress.spooled)):
        known |= {*spool_names(number)}
    with storage_errors("write to", folder):
        for path in folder.iterdir():
            unknown = path.name not in known and _OWN.fullmatch(path.name)
            if unknown or _is_partial(path.name):
                path.unlink()


def remove_all(folder: Path) -> None:
    """Remove everything, so that nothing is left to resume."""
    remove_partial(folder, Progress({}, []))
    with storage_errors("write to", folder):
        for name in (TOKENIZER, PROGRESS):
            (folder / name).unlink(missing_ok=True)
