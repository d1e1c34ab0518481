"""Checkpoints: directories that appear whole or not at all, with a manifest that shows any damage.

`directory` is RUN/checkpoints, which holds them all, `path` a single checkpoint in it. Only one process may
save; the others learn the result through core/comm/agree.py.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from distgpt.core.base.checked import (
    Count,
    JsonObject,
    Must,
    Positive,
    checked,
    parse_json,
    parse_object,
)
from distgpt.core.base.errors import DataError, StorageError
from distgpt.core.base.files import (
    atomic_file,
    open_regular,
    read_small,
    storage_errors,
    sync_directory,
    system_error,
)
from distgpt.core.saved.tensors import (
    Tensors,
    read_into,
    verify_whole,
    write_tensors,
)

Groups = Mapping[str, tuple[Tensors, Mapping[str, str]]]  # file stem → tensors and metadata

# The files of a checkpoint, besides those that parts of a run add.
WEIGHTS = "weights.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
MANIFEST = "manifest.json"
_NAME = re.compile(r"step-\d{8,}(\.old)?")
# An empty file in a checkpoint that stays for good, also where people have made it (docs/reference/files.md).
MARK = "kept"
DAMAGED = "damaged-"  # in front of the name of a checkpoint that is set aside
_FILE = re.compile(r"[\w.-]+")
_BEST = "best"  # in the metadata of weights
MOST_RECENT = 100  # good steps whose losses and gradient norms a state may hold


@dataclass(frozen=True, slots=True)
class Best:
    """The lowest validation loss, over this many tokens; in checkpoints and in the weights that have it.

    Former versions did not save its step, nor anything of it with the weights.
    """

    loss: float
    tokens: Positive
    step: Count | None = None

    def to_metadata(self) -> dict[str, str]:
        return {_BEST: json.dumps(asdict(self))}

    @staticmethod
    def from_metadata(metadata: Mapping[str, str]) -> Best | None:
        """Return the record in a weights file's metadata, or raise a ValueError; None if there is none."""
        return checked(Best, parse_json(metadata[_BEST])) if _BEST in metadata else None


_Shares = Annotated[list[Positive], Must("not be empty", bool)]
_Seconds = Annotated[float, Must("be a duration", lambda seconds: 0 <= seconds < math.inf)]
_Recent = Annotated[
    tuple[tuple[float, float], ...], Must("be short", lambda steps: len(steps) <= MOST_RECENT)
]


@dataclass(frozen=True, slots=True)
class State:
    """A run after `step` steps. A default stands for a key that checkpoints of former versions lack."""

    step: Count = 0
    seed: int | None = None
    ranks: Positive | None = None
    corpus: str | None = None  # the fingerprint of the training text
    micro_batches: Count = 0  # 0: unknown
    shares: _Shares | None = None  # sequences of each rank in a micro-batch, if they differ
    hosts: Count | None = None  # a checksum of the ranks' hosts and threads, if shares depend on them
    best: Best | None = None
    evaluation_pending: bool = False  # one was due after this step, and a signal came first
    skipped: Count = 0  # batches that are not seen again, since a bad step was undone
    bad_steps: Count = 0
    recent: _Recent = ()  # loss and gradient norm of the last good steps
    seconds: _Seconds = 0.0  # of a run that ends by the clock
    guards: dict[str, dict[str, Any]] = field(default_factory=dict)  # what guards save, by their classes

    def to_json(self) -> dict[str, object]:
        found = {_KEYS.get(name, name): value for name, value in asdict(self).items()}
        if self.best and self.best.step is None:
            del found["best"]["step"]
        if not self.guards:
            del found["guards"]
        step = found.pop("step")
        return {**found, "step": step}

    @staticmethod
    def from_json(document: Mapping[str, object]) -> State:
        """Read a document, or raise a ValueError; keys that no State has are ignored."""
        keys = {name: _KEYS.get(name, name) for name in State.__slots__}
        known = {name: document[key] for name, key in keys.items() if document.get(key) is not None}
        return checked(State, {"step": None, **known})  # the one key that no document may lack


# Keys of state.json with other names than the fields of State: its format stays as it was.
_KEYS = {
    "ranks": "world_size",
    "micro_batches": "rounds",
    "hosts": "places",
    "evaluation_pending": "owes_evaluation",
}


@dataclass(frozen=True, slots=True)
class Listed:
    """A file in the manifest."""

    bytes: Count
    sha256: str = ""  # of the whole file; "" for tensors
    header_sha256: str = ""  # of the header of a file of tensors, which covers the rest


Manifest = dict[str, Listed]  # every file in a checkpoint but the manifest


Outdated = Callable[[Sequence[Path]], Sequence[Path]]  # of checkpoints, newest first, those that may go


def is_kept(checkpoint: Path) -> bool:
    return (checkpoint / MARK).exists()


def beyond(keep: int, saved: Sequence[Path]) -> list[Path]:
    """Return those that may go: all but the newest `keep`, and those that stay for good."""
    return [path for path in saved[keep:] if not is_kept(path)]


def save_checkpoint(directory: Path, groups: Groups, state: State, outdated: Outdated) -> Path:
    """Write `step-<step>`, then drop the checkpoints up to this step that may go.

    Later steps stay: a run that resumed from an earlier checkpoint left them behind, and they must not push
    out the one just written.
    """
    final = directory / f"step-{state.step:08d}"
    partial = directory / f".tmp-{final.name}"
    with storage_errors("save checkpoint", final):
        directory.mkdir(parents=True, exist_ok=True)
        sync_directory(directory.parent)  # a power cut must not take the new folder's name
        remove_unfinished(directory)  # first: it may fill the disk
        try:
            partial.mkdir()
            _write(partial, groups, state)
            _put_in_place(partial, final)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    for path in outdated(saved_checkpoints(directory, state.step)):
        drop(path)
    return final


def remove_unfinished(directory: Path) -> None:
    """Remove checkpoints that killed runs left half-written, or half-removed."""
    for stale in directory.glob(".tmp-*step-*"):
        shutil.rmtree(stale, ignore_errors=True)


def set_damaged_aside(directory: Path, step: int) -> None:
    """Rename damaged checkpoints from this step on, so that they do not count among those to keep."""
    for path in saved_checkpoints(directory):
        if step_of(path) < step:
            return
        try:
            verify(path)
        except DataError as error:
            cause = system_error(error)
            if cause is not None and not isinstance(cause, FileNotFoundError):
                continue  # the disk fails, and may be back in a moment
            aside = path.with_name(f"{DAMAGED}{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)


def drop(path: Path) -> None:
    """Rename a checkpoint and remove it: a killed process leaves no half of one under its name."""
    aside = path.with_name(f".tmp-{path.name}")
    with suppress(OSError):
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


def newest_intact(directory: Path, most: float = math.inf) -> tuple[Path, list[str]] | None:
    """Return the newest checkpoint without damage, and a line about each newer one that is damaged.

    None if there are no checkpoints up to step `most`; a DataError if every one is damaged.
    """
    damaged = []
    for path in saved_checkpoints(directory, most):
        try:
            verify(path)
        except DataError as error:
            damaged.append(str(error))
        else:
            return path, damaged
    if damaged:
        raise DataError(f"no checkpoint in {directory} is intact: {'; '.join(damaged)}")
    return None


def newest_step(directory: Path) -> int | None:
    """Return the step of the newest checkpoint by its name, intact or not; None if there is none."""
    return next((step_of(path) for path in saved_checkpoints(directory)), None)


def verify(path: Path) -> None:
    """Compare every file of a checkpoint with its manifest; a DataError names one that is damaged."""
    manifest = read_manifest(path)
    for name in dict.fromkeys((WEIGHTS, OPTIMIZER, *manifest, STATE)):
        check_file(path, name, manifest)
    _parse_state(path)


def load_state(path: Path) -> State:
    """Return the state that was passed to `save_checkpoint`, verified; keys that no State has are ignored."""
    return State.from_json(load_document(path))


def load_document(path: Path) -> JsonObject:
    """Return the verified state as its file has it, without the keys whose value is null."""
    check_file(path, STATE, read_manifest(path))
    return {key: value for key, value in _parse_state(path).items() if value is not None}


def _parse_state(path: Path) -> JsonObject:
    """Return the content of a state's file, or raise a DataError."""
    document = _object(path / STATE)
    try:
        step = State.from_json(document).step
    except ValueError as error:
        raise DataError(f"{path / STATE} is damaged: {error}") from None
    if _NAME.fullmatch(path.name) and step != step_of(path):
        raise DataError(f"{path / STATE} is of step {step}, not of its folder's")
    return document


def load_group(path: Path, stem: str, destination: Tensors) -> None:
    """Fill `destination` from one file of a checkpoint; a damaged file leaves it untouched."""
    name = f"{stem}.safetensors"
    read_into(path / name, destination, _listed(path, name, read_manifest(path)).header_sha256)


def _write(partial: Path, groups: Groups, state: State) -> None:
    files: dict[str, dict[str, object]] = {}
    for stem, (tensors, metadata) in groups.items():
        name = f"{stem}.safetensors"
        files[name] = {"header_sha256": write_tensors(partial / name, tensors, metadata)}
    files[STATE] = {"sha256": _write_json(partial / STATE, state.to_json())}
    for name, entry in files.items():
        entry["bytes"] = (partial / name).stat().st_size
    _write_json(partial / MANIFEST, files)


def _write_json(path: Path, content: Mapping[str, object]) -> str:
    """Write an object, and return the SHA-256 of its file."""
    text = json.dumps(content, indent=1).encode()
    with atomic_file(path) as file:
        file.write(text)
    return hashlib.sha256(text).hexdigest()


def _put_in_place(partial: Path, final: Path) -> None:
    """Give a finished checkpoint its name.

    An older one of this step is set aside until then: a folder cannot replace one that is not empty.
    """
    old = final.with_name(f"{final.name}.old")
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    partial.rename(final)
    sync_directory(final.parent)
    drop(old)


def saved_checkpoints(directory: Path, most: float = math.inf) -> list[Path]:
    """Return the checkpoints up to step `most`, newest first; one set aside comes after its replacement."""
    with storage_errors("read", directory):
        inside = directory.iterdir() if directory.exists() else ()
        found = [path for path in inside if _NAME.fullmatch(path.name) and step_of(path) <= most]
    return sorted(found, key=lambda path: (step_of(path), not path.suffix), reverse=True)


def step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


def check_file(path: Path, name: str, manifest: Manifest) -> None:
    """Compare one file with its entry in the manifest, which has a checksum of all of it or of its header."""
    listed = _listed(path, name, manifest)
    try:
        with open_regular(path / name) as file:
            length = os.fstat(file.fileno()).st_size
            if length != listed.bytes:
                raise DataError(f"{path / name} has {length} bytes, {listed.bytes} were written")
            if listed.sha256 and hashlib.file_digest(file, "sha256").hexdigest() != listed.sha256:
                raise DataError(f"{path / name} is damaged: its SHA-256 is not the one in manifest.json")
        if listed.header_sha256:
            verify_whole(path / name, listed.header_sha256)
    except (OSError, StorageError) as error:
        raise DataError(f"{path / name} cannot be read: {getattr(error, 'strerror', error)}") from error


def _listed(path: Path, name: str, manifest: Manifest) -> Listed:
    if name not in manifest:
        raise DataError(f"{path / MANIFEST} lists no {name}")
    return manifest[name]


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of a checkpoint, or raise a DataError."""
    found = {}
    for name, entry in _object(path / MANIFEST).items():
        damaged = DataError(f"{path / MANIFEST} is damaged at {name!r:.80}")
        try:
            found[name] = listed = checked(Listed, entry)
        except ValueError:
            raise damaged from None
        has_header = name.endswith(".safetensors")
        if (not listed.sha256, bool(listed.header_sha256)) != (has_header,) * 2 or not _FILE.fullmatch(name):
            raise damaged
    return found


def _object(path: Path) -> JsonObject:
    """Return the JSON object in a file; a DataError where it cannot be read, as if it were damaged."""
    try:
        return parse_object(read_small(path), path)
    except StorageError as error:
        raise DataError(str(error)) from error
