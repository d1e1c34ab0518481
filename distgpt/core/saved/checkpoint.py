"""Checkpoints: directories that are written atomically, with a manifest that reveals corruption.

`directory` is RUN/checkpoints, and `path` is one checkpoint. Only one process may save; the others get the
result through core/comm/agree.py.
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

# The files of a checkpoint, besides files that components of a run add.
WEIGHTS = "weights.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
MANIFEST = "manifest.json"
_NAME = re.compile(r"step-\d{8,}(\.old)?")
# An empty file that marks a checkpoint to keep forever. Users may create it (docs/reference/files.md).
MARK = "kept"
DAMAGED = "damaged-"  # the prefix of quarantined checkpoints
_FILE = re.compile(r"[\w.-]+")
_BEST = "best"  # a key in the metadata of weights
MOST_RECENT = 100  # maximum number of good steps with losses and gradient norms in a state


@dataclass(frozen=True, slots=True)
class Best:
    """The lowest validation loss, over `tokens` tokens. In checkpoints and in the best weights.

    Older versions saved no step, and nothing with the weights.
    """

    loss: float
    tokens: Positive
    step: Count | None = None

    def to_metadata(self) -> dict[str, str]:
        return {_BEST: json.dumps(asdict(self))}

    @staticmethod
    def from_metadata(metadata: Mapping[str, str]) -> Best | None:
        """Return the record in a weights file's metadata; None if there is none. Raises ValueError."""
        return checked(Best, parse_json(metadata[_BEST])) if _BEST in metadata else None


_Shares = Annotated[list[Positive], Must("not be empty", bool)]
_Seconds = Annotated[float, Must("be a duration", lambda seconds: 0 <= seconds < math.inf)]
_Recent = Annotated[
    tuple[tuple[float, float], ...], Must("be short", lambda steps: len(steps) <= MOST_RECENT)
]


@dataclass(frozen=True, slots=True)
class State:
    """A run after `step` steps. Defaults replace keys that older checkpoints lack."""

    step: Count = 0
    seed: int | None = None
    ranks: Positive | None = None
    corpus: str | None = None  # the training corpus's fingerprint
    micro_batches: Count = 0  # 0: unknown
    shares: _Shares | None = None  # sequences per rank in a micro-batch, if they differ
    hosts: Count | None = None  # a checksum of the ranks' hosts and threads, if shares depend on them
    best: Best | None = None
    evaluation_pending: bool = False  # an evaluation was due after this step, but a signal came first
    skipped: Count = 0  # batches skipped because a bad step was undone
    bad_steps: Count = 0
    recent: _Recent = ()  # loss and gradient norm of the last good steps
    seconds: _Seconds = 0.0  # elapsed time of a time-limited run
    guards: dict[str, dict[str, Any]] = field(default_factory=dict)  # saved callback states, by class name

    def to_json(self) -> dict[str, object]:
        result = {_KEYS.get(name, name): value for name, value in asdict(self).items()}
        if self.best and self.best.step is None:
            del result["best"]["step"]
        if not self.guards:
            del result["guards"]
        step = result.pop("step")
        return {**result, "step": step}

    @staticmethod
    def from_json(document: Mapping[str, object]) -> State:
        """Parse a document and ignore unknown keys. Raises ValueError."""
        keys = {name: _KEYS.get(name, name) for name in State.__slots__}
        known = {name: document[key] for name, key in keys.items() if document.get(key) is not None}
        return checked(State, {"step": None, **known})  # the only required key


# Keys of state.json that differ from the fields of State, because the format is unchanged.
_KEYS = {
    "ranks": "world_size",
    "micro_batches": "rounds",
    "hosts": "places",
    "evaluation_pending": "owes_evaluation",
}


@dataclass(frozen=True, slots=True)
class Listed:
    """A manifest entry."""

    bytes: Count
    sha256: str = ""  # checksum of the whole file; "" for tensors
    header_sha256: str = ""  # checksum of a tensor file's header, which covers its data


Manifest = dict[str, Listed]  # all files of a checkpoint except the manifest


RetentionPolicy = Callable[[Sequence[Path]], Sequence[Path]]  # checkpoints, newest first → the expired ones


def is_kept(checkpoint: Path) -> bool:
    return (checkpoint / MARK).exists()


def expired_checkpoints(keep: int, saved: Sequence[Path]) -> list[Path]:
    """Return the expired checkpoints, which excludes the newest `keep` and marked ones."""
    return [path for path in saved[keep:] if not is_kept(path)]


def save_checkpoint(directory: Path, groups: Groups, state: State, outdated: RetentionPolicy) -> Path:
    """Write `step-<step>`, then delete expired checkpoints up to this step.

    Keep later steps. A run that resumed from an earlier checkpoint may have them, and they must not expire
    the new one.
    """
    final = directory / f"step-{state.step:08d}"
    partial = directory / f".tmp-{final.name}"
    with storage_errors("save checkpoint", final):
        directory.mkdir(parents=True, exist_ok=True)
        sync_directory(directory.parent)  # a power failure must not lose the new directory's name
        remove_unfinished(directory)  # first, because it may fill the disk
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
    """Remove checkpoints that killed runs left partly written or partly removed."""
    for stale in directory.glob(".tmp-*step-*"):
        shutil.rmtree(stale, ignore_errors=True)


def quarantine_corrupt(directory: Path, step: int) -> None:
    """Rename corrupt checkpoints from this step on, so that they do not count as saved."""
    for path in saved_checkpoints(directory):
        if step_of(path) < step:
            return
        try:
            verify(path)
        except DataError as error:
            cause = system_error(error)
            if cause is not None and not isinstance(cause, FileNotFoundError):
                continue  # a disk error, which may be temporary
            aside = path.with_name(f"{DAMAGED}{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)


def drop(path: Path) -> None:
    """Rename a checkpoint, then remove it. If the process is killed, no partial checkpoint keeps the name."""
    aside = path.with_name(f".tmp-{path.name}")
    with suppress(OSError):
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


def latest_valid_checkpoint(directory: Path, most: float = math.inf) -> tuple[Path, list[str]] | None:
    """Return the latest valid checkpoint, and a line about each newer corrupt one.

    None if there are no checkpoints up to step `most`. Raises a DataError if all are corrupt.
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
        raise DataError(f"no checkpoint in {directory} is valid: {'; '.join(damaged)}")
    return None


def newest_step(directory: Path) -> int | None:
    """Return the step of the newest checkpoint by name, valid or corrupt; None if there is none."""
    return next((step_of(path) for path in saved_checkpoints(directory)), None)


def verify(path: Path) -> None:
    """Verify every file of a checkpoint against the manifest. A DataError names the first corrupt file."""
    manifest = read_manifest(path)
    for name in dict.fromkeys((WEIGHTS, OPTIMIZER, *manifest, STATE)):
        check_file(path, name, manifest)
    _parse_state(path)


def load_state(path: Path) -> State:
    """Return the verified state of a checkpoint. Ignore unknown keys."""
    return State.from_json(load_document(path))


def load_document(path: Path) -> JsonObject:
    """Return the verified state as a document, without keys whose value is null."""
    check_file(path, STATE, read_manifest(path))
    return {key: value for key, value in _parse_state(path).items() if value is not None}


def _parse_state(path: Path) -> JsonObject:
    """Return the content of a state file, or raise a DataError."""
    document = _object(path / STATE)
    try:
        step = State.from_json(document).step
    except ValueError as error:
        raise DataError(f"{path / STATE} is corrupt: {error}") from None
    if _NAME.fullmatch(path.name) and step != step_of(path):
        raise DataError(f"{path / STATE} is from step {step}, not the step of its directory")
    return document


def load_group(path: Path, stem: str, destination: Tensors) -> None:
    """Fill `destination` from a file of a checkpoint. A corrupt file leaves it unchanged."""
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
    """Write an object and return the SHA-256 of the file."""
    text = json.dumps(content, indent=1).encode()
    with atomic_file(path) as file:
        file.write(text)
    return hashlib.sha256(text).hexdigest()


def _put_in_place(partial: Path, final: Path) -> None:
    """Rename a finished checkpoint to its final name.

    An older one of this step is renamed first, because a directory cannot replace one that is not empty.
    """
    old = final.with_name(f"{final.name}.old")
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    partial.rename(final)
    sync_directory(final.parent)
    drop(old)


def saved_checkpoints(directory: Path, most: float = math.inf) -> list[Path]:
    """Return the checkpoints up to step `most`, newest first; a replaced one follows its replacement."""
    with storage_errors("read", directory):
        inside = directory.iterdir() if directory.exists() else ()
        result = [path for path in inside if _NAME.fullmatch(path.name) and step_of(path) <= most]
    return sorted(result, key=lambda path: (step_of(path), not path.suffix), reverse=True)


def step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


def check_file(path: Path, name: str, manifest: Manifest) -> None:
    """Verify one file against the size and checksum in its manifest entry."""
    listed = _listed(path, name, manifest)
    try:
        with open_regular(path / name) as file:
            length = os.fstat(file.fileno()).st_size
            if length != listed.bytes:
                raise DataError(f"{path / name} has {length} bytes, not {listed.bytes}")
            if listed.sha256 and hashlib.file_digest(file, "sha256").hexdigest() != listed.sha256:
                raise DataError(f"{path / name} is corrupt: its SHA-256 differs from manifest.json")
        if listed.header_sha256:
            verify_whole(path / name, listed.header_sha256)
    except (OSError, StorageError) as error:
        raise DataError(f"cannot read {path / name}: {getattr(error, 'strerror', error)}") from error


def _listed(path: Path, name: str, manifest: Manifest) -> Listed:
    if name not in manifest:
        raise DataError(f"{path / MANIFEST} does not list {name}")
    return manifest[name]


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of a checkpoint, or raise a DataError."""
    result = {}
    for name, entry in _object(path / MANIFEST).items():
        damaged = DataError(f"{path / MANIFEST} is corrupt at {name!r:.80}")
        try:
            result[name] = listed = checked(Listed, entry)
        except ValueError:
            raise damaged from None
        has_header = name.endswith(".safetensors")
        if (not listed.sha256, bool(listed.header_sha256)) != (has_header,) * 2 or not _FILE.fullmatch(name):
            raise damaged
    return result


def _object(path: Path) -> JsonObject:
    """Return the JSON object in a file. A read error raises a DataError, like a corrupt file."""
    try:
        return parse_object(read_small(path), path)
    except StorageError as error:
        raise DataError(str(error)) from error
