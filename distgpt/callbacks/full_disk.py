"""Handles a full disk: reserves space for the final weights, and deletes old checkpoints to write new ones.

`Checkpoints` passes every write of weights through `FullDiskHandler`. An exhausted quota counts as a full
disk. `Retention` selects the checkpoints to keep for good.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np

from distgpt.core.base.errors import DistgptError, Say, StorageError, escape
from distgpt.core.base.files import storage_errors, system_error, unfinished
from distgpt.core.base.formatting import size
from distgpt.core.comm.agree import on_root
from distgpt.core.comm.api import Comm
from distgpt.core.config import TrainConfig
from distgpt.core.model.model import Model
from distgpt.core.saved.checkpoint import (
    DAMAGED,
    MANIFEST,
    MARK,
    drop,
    is_kept,
    latest_valid_checkpoint,
    saved_checkpoints,
    step_of,
)
from distgpt.core.saved.modelfile import Description
from distgpt.core.saved.rundir import RunDirectory
from distgpt.core.train.interfaces import Disk

FULL = (errno.ENOSPC, errno.EDQUOT)  # an exhausted quota counts as a full disk
SLACK = 1 / 32  # fraction of each write to leave free, for lines of metrics
MORE = 64 << 10  # bytes reserved in addition to the weights, for the summary and the last metrics
ENTRY = 256  # maximum bytes of a tensor's entry in a header


class FullDiskHandler(Disk):
    """The disk space of a run. Methods that are not collective are for rank 0."""

    def __init__(self, directory: RunDirectory, t: TrainConfig, weights: int, say: Say) -> None:
        """`weights`: maximum bytes of the final weights file."""
        self._directory, self._keep, self._weights, self._say = directory, t.keep, weights, say
        self._gives_up = t.on_disk_error != "stop"
        self._reserve: Path | None = None
        self._given_up: list[str] = []  # names of deleted checkpoints, not yet reported
        self._reason = 0  # step that needed their space
        self._fewest = t.keep  # remaining checkpoints at the last report

    @contextmanager
    def reserved(self, comm: Comm, step: int) -> Iterator[None]:
        """Reserve space for the final weights inside the `with` block. Collective."""
        try:
            on_root(comm, partial(self.write, step, self._weights, self._take))
        finally:
            self.report()
        try:
            yield
        finally:
            with suppress(StorageError):  # keep the run's own error; the next start removes the file
                self._release()
            self.report()

    def _take(self) -> None:
        path = unfinished(self._directory.weights)  # `RunDirectory.create` removes it after a kill
        with storage_errors(f"reserve {size(self._weights)} for the final weights in", self._directory.path):
            try:
                with path.open("xb") as file:
                    allocate(file, self._weights)
            except BaseException:
                path.unlink(missing_ok=True)
                raise
        self._reserve = path

    def _release(self) -> None:
        path, self._reserve = self._reserve, None
        if path:
            with storage_errors("remove", path):
                path.unlink(missing_ok=True)

    def write(self, step: int, n_bytes: int, write: Callable[[], object]) -> None:
        """Call write(). If space is short and old checkpoints would free enough, delete them one by one.

        A write that cannot fit is not started, since it would leave no space for metrics.
        """
        needed, failed = n_bytes * (1 + SLACK), None
        outdated: list[Path] | None = None  # listed when the first one must be deleted
        while True:
            if outdated == [] or _free(self._directory.path) >= needed:
                try:
                    write()
                    return
                except StorageError as error:
                    result = system_error(error)
                    if result is None or result.errno not in FULL:
                        raise
                    failed = error
            if outdated is None:
                outdated = list(self._outdated(step))
                if _free(self._directory.path) + sum(map(_size, outdated)) < needed:
                    outdated = []  # other files fill the disk, so deletion cannot help
            if outdated:
                path, self._reason = outdated.pop(0), step
                drop(path)
                self._given_up += [] if path.exists() else [path.name]
            elif failed:
                raise failed

    def write_final(self, step: int, n_bytes: int, write: Callable[[], object]) -> None:
        self._release()
        self.write(step, n_bytes, write)

    def report(self) -> None:
        """Report deleted checkpoints: always in history.jsonl, but printed only if fewer remain."""
        if not self._given_up:
            return
        with suppress(StorageError):  # if there is no space for this line either, the next report includes it
            left, names = len(saved_checkpoints(self._directory.checkpoints)), ", ".join(self._given_up)
            if left < self._fewest or DAMAGED in names:
                self._fewest = left
                self._say(
                    f"the disk is full: deleted {names} for step {self._reason};"
                    f" {left} of {self._keep} checkpoints remain in {escape(str(self._directory.path))}"
                )
            if left < self._keep or DAMAGED in names:  # otherwise retention would have deleted them anyway
                self._directory.remember({"step": self._reason, "given_up": self._given_up})
            self._given_up = []

    def _outdated(self, step: int) -> Iterator[Path]:
        """Yield the checkpoints that a run does not need at this step: corrupt ones, then others from the
        oldest.

        Excluded are the newest valid one, checkpoints of later steps, starting points of other runs, and
        checkpoints to keep for good.
        """
        checkpoints = self._directory.checkpoints
        try:
            newest = latest_valid_checkpoint(checkpoints, step) if self._gives_up else None
            saved = saved_checkpoints(checkpoints, step)
        except DistgptError:  # no checkpoint is valid or readable, so delete none
            return
        if newest is None:
            return
        yield from sorted(checkpoints.glob(f"{DAMAGED}*"))
        needed = _begun_with(self._directory.path) | {path.resolve() for path in filter(is_kept, saved)}
        for path in reversed(saved[saved.index(newest[0]) + 1 :]):
            if path.resolve() not in needed:
                yield path


def disk_handler(
    directory: RunDirectory, t: TrainConfig, model: Model, description: Description, say: Say
) -> FullDiskHandler:
    """Return the disk space of a run, with the maximum size of its weights file."""
    layout, wide = model.weights.layout, np.dtype(model.kernels.accum_dtype)
    header = len(json.dumps(description.to_metadata(), ensure_ascii=False).encode())
    weights = int(layout.elements * wide.itemsize) + header + ENTRY * len(layout.specs) + MORE
    return FullDiskHandler(directory, t, weights, say)


def _begun_with(run: Path) -> set[Path]:
    """Return the checkpoints that other runs in the same directory started from."""
    result = set()
    with suppress(OSError):
        for other in run.absolute().parent.iterdir():
            with suppress(DistgptError, OSError):
                if origin := RunDirectory(other).branched_from():
                    result.add(origin.resolve())
            with suppress(DistgptError, OSError):
                if (config := RunDirectory(other).saved()) and config.train.init:
                    result.add(Path(config.train.init).resolve().parent)
    return result


def _free(path: Path) -> float:
    """Return the free bytes for this user, infinity if unknown. A quota may allow less."""
    try:
        result = os.statvfs(path)
    except OSError:
        return float("inf")
    blocks = result.f_bavail if os.geteuid() else result.f_bfree  # root may use reserved blocks
    return blocks * result.f_frsize if result.f_blocks else float("inf")


def _size(folder: Path) -> int:
    with suppress(OSError):
        return sum(file.stat().st_size for file in folder.iterdir())
    return 0


def allocate(file: BinaryIO, n_bytes: int) -> None:
    """Reserve `n_bytes` on disk for a new file, if the system supports it."""
    if hasattr(os, "posix_fallocate"):  # not on macOS
        os.posix_fallocate(file.fileno(), 0, n_bytes)
    os.fsync(file.fileno())  # network file systems check the space when data arrives


class Retention:
    """Selects the checkpoints to delete, a `RetentionPolicy` (core/saved/checkpoint.py).

    When a checkpoint is the newest, it is decided once whether to keep it for good. It is then marked,
    because a copy on another disk may lose its time.
    """

    def __init__(self, t: TrainConfig) -> None:
        self._t = t

    def __call__(self, saved: Sequence[Path]) -> list[Path]:
        """Mark the newest one if it stays for good. Return the deletable ones. `saved`: newest first."""
        if saved and self._is_due(saved[0], next(filter(is_kept, saved[1:]), None)):
            with suppress(OSError):  # no space: the next one will be due as well
                (saved[0] / MARK).touch()
        return [path for path in saved[self._t.keep :] if not is_kept(path)]

    def _is_due(self, newest: Path, last: Path | None) -> bool:
        """Return whether to keep the newest for good. `last`: the previous one kept for good."""
        every, minutes = self._t.keep_every, self._t.keep_every_minutes
        if every:
            return step_of(newest) // every > (step_of(last) // every if last else 0)
        return bool(minutes) and (last is None or _saved_at(newest) - _saved_at(last) >= 60 * minutes)


def _saved_at(checkpoint: Path) -> float:
    """Return when a checkpoint was finished; -inf if unknown."""
    with suppress(OSError):
        return (checkpoint / MANIFEST).stat().st_mtime
    return -math.inf
