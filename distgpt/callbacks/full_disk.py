"""Guard against a full disk: room for the final weights from the start, and old checkpoints given up for new.

`Checkpoints` passes every write of weights through `Room`. Quotas count as a full disk. `Retention` says what
stays for good.
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
    newest_intact,
    saved_checkpoints,
    step_of,
)
from distgpt.core.saved.modelfile import Description
from distgpt.core.saved.rundir import RunDirectory
from distgpt.core.train.seams import Disk

FULL = (errno.ENOSPC, errno.EDQUOT)  # a quota that is used up counts as a full disk
SLACK = 1 / 32  # of what is written, which shall stay free for lines of metrics
MORE = 64 << 10  # bytes that are reserved beside the weights, for the summary and the last metrics
ENTRY = 256  # bytes of a tensor's entry in a header, at most


class Room(Disk):
    """The room that a run has on its disk. For rank 0, where not collective."""

    def __init__(self, directory: RunDirectory, t: TrainConfig, weights: int, say: Say) -> None:
        """`weights`: bytes of the file of final weights, at most."""
        self._directory, self._keep, self._weights, self._say = directory, t.keep, weights, say
        self._gives_up = t.on_disk_error != "stop"
        self._reserve: Path | None = None
        self._given_up: list[str] = []  # names of checkpoints, not yet reported
        self._reason = 0  # the step for which they were
        self._fewest = t.keep  # checkpoints that were left whenever it was said

    @contextmanager
    def reserved(self, comm: Comm, step: int) -> Iterator[None]:
        """Hold room for the final weights meanwhile. Collective."""
        try:
            on_root(comm, partial(self.write, step, self._weights, self._take))
        finally:
            self.report()
        try:
            yield
        finally:
            with suppress(StorageError):  # what ended the run counts more; the next start removes the file
                self._release()
            self.report()

    def _take(self) -> None:
        path = unfinished(self._directory.weights)  # a name that `RunDirectory.create` cleans up after a kill
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
        """Call write(), and give up old checkpoints while that finds no room, if all of them would be enough.

        One that could not fit is not begun: it would fill the disk, and lines of metrics would find no room.
        """
        needed, failed = n_bytes * (1 + SLACK), None
        outdated: list[Path] | None = None  # looked for when the first of them has to go
        while True:
            if outdated == [] or _free(self._directory.path) >= needed:
                try:
                    write()
                    return
                except StorageError as error:
                    found = system_error(error)
                    if found is None or found.errno not in FULL:
                        raise
                    failed = error
            if outdated is None:
                outdated = list(self._outdated(step))
                if _free(self._directory.path) + sum(map(_size, outdated)) < needed:
                    outdated = []  # a disk that others fill takes no more
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
        """Report what was given up: every time in history.jsonl, but said only as it gets worse."""
        if not self._given_up:
            return
        with suppress(StorageError):  # where this line has no room either, the next one says it, too
            left, names = len(saved_checkpoints(self._directory.checkpoints)), ", ".join(self._given_up)
            if left < self._fewest or DAMAGED in names:
                self._fewest = left
                self._say(
                    f"the disk is full: gave up {names} for step {self._reason};"
                    f" {left} of {self._keep} checkpoints are left in {escape(str(self._directory.path))}"
                )
            if left < self._keep or DAMAGED in names:  # else they would be gone by now in any case
                self._directory.remember({"step": self._reason, "given_up": self._given_up})
            self._given_up = []

    def _outdated(self, step: int) -> Iterator[Path]:
        """Yield what a run at this step can do without: damaged checkpoints, then others from the oldest.

        Neither the newest intact one, nor those of later steps, nor one that another run begins with, nor
        one that is to stay for good.
        """
        checkpoints = self._directory.checkpoints
        try:
            newest = newest_intact(checkpoints, step) if self._gives_up else None
            saved = saved_checkpoints(checkpoints, step)
        except DistgptError:  # none is intact, or none can be read: this is no moment to remove any
            return
        if newest is None:
            return
        yield from sorted(checkpoints.glob(f"{DAMAGED}*"))
        needed = _begun_with(self._directory.path) | {path.resolve() for path in filter(is_kept, saved)}
        for path in reversed(saved[saved.index(newest[0]) + 1 :]):
            if path.resolve() not in needed:
                yield path


def room_for(
    directory: RunDirectory, t: TrainConfig, model: Model, description: Description, say: Say
) -> Room:
    """Return the room of a run, which holds the most bytes that the file of its weights can have."""
    layout, wide = model.weights.layout, np.dtype(model.kernels.wide)
    header = len(json.dumps(description.to_metadata(), ensure_ascii=False).encode())
    weights = int(layout.elements * wide.itemsize) + header + ENTRY * len(layout.specs) + MORE
    return Room(directory, t, weights, say)


def _begun_with(run: Path) -> set[Path]:
    """Return the checkpoints with which the other runs in this run's folder began."""
    found = set()
    with suppress(OSError):
        for other in run.absolute().parent.iterdir():
            with suppress(DistgptError, OSError):
                if origin := RunDirectory(other).branched_from():
                    found.add(origin.resolve())
            with suppress(DistgptError, OSError):
                if (config := RunDirectory(other).saved()) and config.train.init:
                    found.add(Path(config.train.init).resolve().parent)
    return found


def _free(path: Path) -> float:
    """Return the bytes that this disk has for a user, infinite if it does not say. A quota may allow less."""
    try:
        found = os.statvfs(path)
    except OSError:
        return float("inf")
    blocks = found.f_bavail if os.geteuid() else found.f_bfree  # root may use what is kept back for it
    return blocks * found.f_frsize if found.f_blocks else float("inf")


def _size(folder: Path) -> int:
    with suppress(OSError):
        return sum(file.stat().st_size for file in folder.iterdir())
    return 0


def allocate(file: BinaryIO, n_bytes: int) -> None:
    """Reserve this many bytes of the disk for a new file, where the system can."""
    if hasattr(os, "posix_fallocate"):  # not on macOS
        os.posix_fallocate(file.fileno(), 0, n_bytes)
    os.fsync(file.fileno())  # a network's disk counts what it gets


class Retention:
    """Says which checkpoints may go: an `Outdated` (core/saved/checkpoint.py).

    Whether one stays for good is decided once, when it is the newest, and not by its time, which a copy on
    another disk may not have: it is marked.
    """

    def __init__(self, t: TrainConfig) -> None:
        self._t = t

    def __call__(self, saved: Sequence[Path]) -> list[Path]:
        """Mark the newest one if it is to stay for good. Return those that may go. `saved`: newest first."""
        if saved and self._is_due(saved[0], next(filter(is_kept, saved[1:]), None)):
            with suppress(OSError):  # no room: the next one is due, too
                (saved[0] / MARK).touch()
        return [path for path in saved[self._t.keep :] if not is_kept(path)]

    def _is_due(self, newest: Path, last: Path | None) -> bool:
        """Return whether the newest is to stay, where `last` is the one before it that does."""
        every, minutes = self._t.keep_every, self._t.keep_every_minutes
        if every:
            return step_of(newest) // every > (step_of(last) // every if last else 0)
        return bool(minutes) and (last is None or _saved_at(newest) - _saved_at(last) >= 60 * minutes)


def _saved_at(checkpoint: Path) -> float:
    """Return when a checkpoint was finished; long ago where that is not known."""
    with suppress(OSError):
        return (checkpoint / MANIFEST).stat().st_mtime
    return -math.inf
