"""Checkpoints and best weights, which rank 0 writes during training; handling of disk errors."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import TracebackType

import numpy as np

from distgpt.core.base.errors import DistgptError, StorageError
from distgpt.core.base.interrupts import Interrupted
from distgpt.core.comm.agree import on_root
from distgpt.core.comm.api import Comm, SerialComm
from distgpt.core.config import TrainConfig
from distgpt.core.model.memory import FlatBuffer
from distgpt.core.model.model import Model
from distgpt.core.model.optim import AdamW
from distgpt.core.saved.checkpoint import (
    Best,
    RetentionPolicy,
    State,
    expired_checkpoints,
    newest_step,
    save_checkpoint,
)
from distgpt.core.saved.modelfile import Description
from distgpt.core.saved.rundir import RunDirectory
from distgpt.core.saved.tensors import LazyTensors, data_bytes, write_tensors
from distgpt.core.train.interfaces import Disk
from distgpt.core.train.parallel_strategy import OPTIMIZER, WEIGHTS, Groups, StateGatherer, whole_moments

SECONDS_BETWEEN_ATTEMPTS = 20.0
SECONDS_BETWEEN_REPORTS = 600.0  # while a disk keeps failing
LONGEST_WRITE = 60.0  # seconds; training then waits for the thread
SECONDS_AT_ONCE = 1.0  # seconds that a signal waits for an unfinished checkpoint
NICE = 19  # lowest priority, so that workers come first
COPIED_AT_ONCE = 1 << 22  # elements per copy, by one worker

Live = dict[str, Mapping[str, FlatBuffer]]  # the stem of a checkpoint's file → buffers by prefix


class Checkpoints:
    """Writer of one checkpoint at a time: synchronously, or from a copy in a thread. Rank 0 writes.

    If a save fails and an older checkpoint exists, it is reported and retried. Otherwise, or with
    on_disk_error stop, `disk.lost` is the error that ends the run.
    """

    def __init__(
        self,
        model: Model,
        optimizer: AdamW,
        directory: RunDirectory,
        description: Description,
        config: TrainConfig,
        say: Callable[[str], None],
        comm: Comm | None = None,
        best: Best | None = None,
        disk: Disk | None = None,
        gathering: StateGatherer | None = None,
        outdated: RetentionPolicy | None = None,
    ) -> None:
        """`gathering` sends the other ranks' weights and moments to rank 0. `best`: see below."""
        self.disk = disk or Disk()
        self._directory = directory
        self.description = description
        self._config = config
        self._say = say
        self._live: Live = {WEIGHTS: {"": model.weights}, OPTIMIZER: whole_moments(optimizer)}
        self._comm = comm or SerialComm()
        self._gathering = gathering or StateGatherer(self._comm)
        self._model = model
        self._copy = Copy(model) if config.save == "async" else None
        self._thread: threading.Thread | None = None
        self._write: Callable[[], None] | None = None  # the current or failed write
        self._best_in_write: Best | None = None  # the best weights in the current write
        self._failed: Exception | None = None
        self._begun = self._failed_at = 0.0
        self._is_failing = False  # whether a failure was reported
        self._reported_at = -math.inf
        self._outdated = outdated or partial(expired_checkpoints, config.keep)
        self.best = best  # the loss of the best weights on the disk; only on rank 0
        self.seconds: float | None = None  # the duration of the last checkpoint

    @property
    def has_all(self) -> bool:
        """Whether rank 0 can save without the other ranks."""
        return self._gathering.has_all

    def on_root(self, save: Callable[[], None]) -> None:
        """Call `save` on rank 0 while the others wait or send their tensors. Collective."""
        self._gathering.on_root(save)

    def is_best(self, loss: float) -> bool:
        """Return whether a loss is below all saved and currently written weights'. For rank 0."""
        known = self._best_in_write or self.best
        return loss < (known.loss if known else math.inf)

    def begin(self, state: State, best: Best | None, checkpoint: bool) -> None:
        """Start writing the best weights, a checkpoint, or both. A failure is not raised.

        Called on all ranks. Collective unless `has_all`.
        """
        write = partial(self._begin, state, best, checkpoint)
        if not self.has_all:
            self.on_root(write)
        elif self._comm.rank == 0:
            write()

    def _begin(self, state: State, best: Best | None, checkpoint: bool) -> None:
        self._clear()
        live = self._live if checkpoint else {WEIGHTS: self._live[WEIGHTS]}
        groups = self._copy.update(live) if self._copy else self._on_host(live)
        self._write, self._best_in_write = partial(self._save, groups, state, best), best
        if self._copy:
            self._start()
        else:
            self._attempt()
            if self._failed and best and self._config.on_disk_error != "stop":
                self._attempt()  # retry now, because the next step changes the weights
            self._handle_outcome()
            self._write = self._best_in_write = None

    def _clear(self) -> None:
        """Wait for the current write. If best weights failed, retry before their copy is overwritten."""
        self.wait()
        if self._write and self._best_in_write:
            self._attempt()
            self._handle_outcome()
        self._write = self._best_in_write = None

    def write_now(self, state: State, best: Best | None = None) -> None:
        """Write a checkpoint synchronously and raise any failure."""
        self._clear()
        try:
            self._save(self.groups(), state, best)
        finally:
            self.disk.report()
        self.report_recovery()

    def write_last(self, state: State, best: Best | None) -> None:
        """Write the last checkpoint. If it fails, write only the weights and raise the failure."""
        try:
            self.write_now(state, best)
        except StorageError as error:
            try:
                self.write_weights(state.step)
            except StorageError:
                raise error from None
            raise StorageError(f"{error}; the weights are saved in {self._directory.weights}") from error

    def write_weights(self, step: int) -> None:
        """Write the final weights and raise any failure. For rank 0, in `on_root`."""
        weights = self._on_host({WEIGHTS: self._live[WEIGHTS]})[WEIGHTS]
        write = partial(write_tensors, self._directory.weights, weights, self.description.to_metadata())
        self.disk.write_final(step, data_bytes(weights), write)
        self.disk.report()

    def wait_at_exit(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """At an early exit, wait for the current write. After a signal, wait at most a second."""
        if isinstance(error, Interrupted):
            self.wait(SECONDS_AT_ONCE)
        elif isinstance(error, DistgptError):
            self.wait()

    def wait(self, seconds: float | None = None) -> None:
        """Wait until the current write ends, or for at most `seconds`."""
        if self._thread:
            self._thread.join(seconds)
            if not self._thread.is_alive():
                self._thread = None
                self._handle_outcome()

    def check(self, has_lost_disk: bool) -> None:
        """Between two steps, end the run if rank 0 cannot save, or retry a failed save. Collective.

        `has_lost_disk`: whether rank 0 has a fatal error, according to the shared flags.
        """
        if has_lost_disk:
            on_root(self._comm, self._raise_fatal)
        if self._thread:
            if not self._thread.is_alive() or time.monotonic() > self._begun + LONGEST_WRITE:
                self.wait()
        elif self._copy and self._write and time.monotonic() > self._failed_at + SECONDS_BETWEEN_ATTEMPTS:
            self._start()

    def _raise_fatal(self) -> None:
        assert self.disk.lost
        raise self.disk.lost

    def tolerate(self, error: StorageError) -> None:
        """Report a failed write, with a rate limit. Raise the error if the run must end."""
        try:
            saved = newest_step(self._directory.checkpoints)
        except StorageError:
            saved = None
        if saved is None or self._config.on_disk_error == "stop":
            raise error
        if not self._is_failing and time.monotonic() > self._reported_at + SECONDS_BETWEEN_REPORTS:
            self._is_failing, self._reported_at = True, time.monotonic()
            self._say(f"{error}; continuing, with step {saved} saved, and trying again")

    def report_recovery(self) -> None:
        """Report a successful write after a failed one."""
        if self._is_failing:
            self._is_failing = False
            self._say("the disk is writable again")

    def _start(self) -> None:
        self._begun = time.monotonic()
        self._thread = threading.Thread(target=self._attempt_aside, name="saving", daemon=True)
        self._thread.start()

    def _attempt_aside(self) -> None:
        if sys.platform == "linux":  # Linux has priorities per thread
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        self._attempt()

    def _attempt(self) -> None:
        assert self._write
        self._failed = None
        try:
            self._write()
        except Exception as error:  # the main thread raises or tolerates it
            self._failed = error

    def _handle_outcome(self) -> None:
        """Report the outcome of an attempt, and save the error if it is fatal."""
        self.disk.report()
        failed = self._failed
        self._failed = None
        if failed is None:
            self._write = self._best_in_write = None
            self.report_recovery()
            return
        self._failed_at = time.monotonic()
        if not isinstance(failed, StorageError):
            raise failed
        try:
            self.tolerate(failed)
        except StorageError as error:
            self.disk.lost = error
            self._write = self._best_in_write = None

    def groups(self) -> Groups:
        """Return the current content of a checkpoint's files. For rank 0, in `on_root`."""
        return self._on_host(self._live)

    def _on_host(self, live: Live) -> Groups:
        gathered = self._gathering.groups(weights_alone=OPTIMIZER not in live)
        own = {stem: buffers for stem, buffers in live.items() if stem not in gathered}
        return {**{stem: self._read_twice(buffers) for stem, buffers in own.items()}, **gathered}

    def _read_twice(self, buffers: Mapping[str, FlatBuffer]) -> LazyTensors:
        """Return a file's tensors, copied from a GPU one by one, because all may not fit in memory."""
        to_host = self._model.kernels.to_host
        result = {}
        kinds = {}
        for prefix, buffer in buffers.items():
            dtype = to_host(buffer.flat[:1]).dtype
            for name, array in buffer.items():
                result[prefix + name], kinds[prefix + name] = array, (dtype, array.shape)
        return LazyTensors(kinds, lambda name: to_host(result[name]))

    def _save(self, groups: Groups, state: State, best: Best | None) -> None:
        self._directory.lock.refuse_taken()
        begun = time.perf_counter()
        metadata = self.description.to_metadata()
        if best:
            weights, path, facts = groups[WEIGHTS], self._directory.best, metadata | best.to_metadata()
            self.disk.write(state.step, data_bytes(weights), lambda: write_tensors(path, weights, facts))
            self.best = best
        state = replace(state, best=self.best)
        if OPTIMIZER in groups:
            files = {stem: (group, metadata if stem == WEIGHTS else {}) for stem, group in groups.items()}
            path = self._directory.checkpoints
            size = sum(data_bytes(group) for group in groups.values())
            write = partial(save_checkpoint, path, files, state, self._outdated)
            self.disk.write(state.step, size, write)
            self.seconds = time.perf_counter() - begun


class Copy:
    """A copy of weights and moments at one step, in its own host memory."""

    def __init__(self, model: Model) -> None:
        self._kernels = model.kernels
        self._buffers: dict[str, FlatBuffer] = {}

    def update(self, live: Live) -> Groups:
        """Copy the current buffers. Return their tensors by file."""
        return {
            stem: {
                prefix + name: array
                for prefix, buffer in buffers.items()
                for name, array in self._copied(prefix, buffer).items()
            }
            for stem, buffers in live.items()
        }

    def _copied(self, prefix: str, buffer: FlatBuffer) -> FlatBuffer:
        to_host = self._kernels.to_host
        if prefix not in self._buffers:
            dtype = to_host(buffer.flat[:1]).dtype
            self._buffers[prefix] = FlatBuffer(buffer.layout, partial(np.empty, dtype=dtype))
        own = self._buffers[prefix].flat
        flat = buffer.flat
        # Copy in pieces, because `copy_bytes` counts a GPU array only once in host memory.
        pieces = [slice(i, i + COPIED_AT_ONCE) for i in range(0, flat.size, COPIED_AT_ONCE)]
        self._kernels.each(lambda i: np.copyto(own[pieces[i]], to_host(flat[pieces[i]])), len(pieces))
        return self._buffers[prefix]
