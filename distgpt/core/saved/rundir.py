"""The directory of a run and its files. Only rank 0 accesses them."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Container, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import NoneType
from typing import Any

from distgpt.core.base.checked import JsonObject, parse_json, parse_object
from distgpt.core.base.errors import DataError, StorageError, UsageError
from distgpt.core.base.files import (
    append,
    atomic_file,
    open_regular,
    read_small,
    storage_errors,
    unfinished_versions,
)
from distgpt.core.config import RunConfig, differences, former_choices, parse_toml
from distgpt.core.saved.checkpoint import quarantine_corrupt, remove_unfinished
from distgpt.core.saved.run_lock import RunLock


class RunDirectory:
    """The files of a run, by name."""

    def __init__(self, path: Path, resumed_by: Path | None = None) -> None:
        """`resumed_by`: the --out that resumes the run; default: `path`."""
        self.path = path
        self.resumed_by = resumed_by or path
        self.config = path / "config.toml"
        self.tokenizer = path / "tokenizer.json"
        self.metrics = path / "metrics.jsonl"
        self.history = path / "history.jsonl"
        self.samples = path / "samples.jsonl"
        self.checkpoints = path / "checkpoints"
        self.weights = path / "weights.safetensors"
        self.best = path / "best.safetensors"
        self.ensemble = path / "ensemble.safetensors"
        self.summary = path / "summary.json"
        self.lock = RunLock(path)
        self._unwritten: list[bytes] = []  # lines of metrics

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunDirectory) and self.path == other.path

    def __hash__(self) -> int:
        return hash(self.path)

    def is_there(self) -> bool:
        """Return whether the path exists."""
        with storage_errors("use the run directory", self.path):
            return self.path.exists()

    def saved(self) -> RunConfig | None:
        """Return the configuration of the run in this directory; None if there is no run."""
        with storage_errors("use the run directory", self.path):
            if not self.config.exists():
                return None
        text = read_small(self.config).decode(errors="replace")
        return RunConfig().with_values(parse_toml(text, str(self.config)))

    def former_choices(self) -> list[str]:
        """Return a line for each setting whose saved value has a new name."""
        return former_choices(read_small(self.config).decode(errors="replace"), str(self.config))

    def has_no_step(self) -> bool:
        """Return whether a run ended before its first step, so that another run may replace it.

        False for a branch, which resumes from its origin, and while a process may be about to take a step.
        """
        kept = (self.lock.path, self.checkpoints, self.metrics, self.weights, self.best, self.summary)
        with storage_errors("use the run directory", self.path):
            is_empty = self.config.is_file() and not any(path.exists() for path in kept)
        return is_empty and self.branched_from() is None

    def refuse_conflict(self, run: RunConfig, resuming: bool) -> None:
        """Raise a UsageError if the directory contains anything except this run. Writes nothing."""
        with storage_errors("use the run directory", self.path):
            saved = self.saved()
            if saved is None and self.path.is_dir():
                if set(self.path.iterdir()) - {self.lock.path, *self._left_behind()}:
                    raise UsageError(
                        f"{self.path} is not empty and not a run directory; choose another --out"
                    )
            elif saved is None and self.path.exists():
                raise UsageError(f"{self.path} is not a directory; choose another --out")
        if saved is None or (not resuming and self.has_no_step()):
            return
        different = differing(saved, run)
        if not different and resuming:
            return
        holds = f"a run with other settings ({different})" if different else "this run"
        resume = "" if resuming else "add --resume auto, or "
        raise UsageError(f"{self.path} already contains {holds}; {resume}choose another --out")

    def _left_behind(self) -> list[Path]:
        """List the unfinished files of a run that was killed while it started or wrote."""
        weights = (self.weights, self.best, self.ensemble)
        files = (self.config, self.tokenizer, self.metrics, self.summary, *weights)
        result = [path for file in files for path in unfinished_versions(file)]
        # The history starts before the configuration. Do not take another program's file of this name.
        if not self.config.exists() and self.history.is_file():
            with suppress(DataError, StorageError):
                first = self._first_event()
                if not first or "time" in first:
                    result.append(self.history)
        return result

    def _first_event(self) -> JsonObject:
        """Read the first line of the history; empty if a full disk prevented it."""
        line = read_small(self.history).split(b"\n")[0]
        return parse_object(line, self.history) if line else {}

    def refuse_undecodable(self) -> None:
        """Raise a UsageError if the directory's name cannot be written to its files."""
        name = str(self.path.absolute())
        if "\0" in name:
            raise UsageError(f"{name!r} contains a NUL byte; choose another --out")
        if any("\ud800" <= character <= "\udfff" for character in name):
            raise UsageError(f"{name!r} is not valid UTF-8; choose another --out")

    def create(
        self, run: RunConfig, tokenizer_json: str, event: Mapping[str, Any], owes_evaluation: bool
    ) -> None:
        """Create the directory with configuration and tokenizer. A failure leaves no new directory.

        `event` is for the history: the run's first "step" and origin. In an existing directory, drop metrics
        of later steps, which will be repeated, and of this step's evaluation if it is still due.
        """
        step: int = event["step"]
        fresh = True
        with storage_errors("use the run directory", self.path):
            try:
                self.path.mkdir(parents=True)
            except FileExistsError:
                fresh = False
            try:
                self.lock.claim()  # first: the code below deletes files of other processes
                if not fresh:  # remove unfinished files of killed processes
                    remove_unfinished(self.checkpoints)
                    quarantine_corrupt(self.checkpoints, step)
                    for path in self._left_behind():
                        path.unlink(missing_ok=True)
                self.remember(event)  # before the configuration, so that every configuration has its origin
                for path, text in ((self.config, run.to_toml()), (self.tokenizer, tokenizer_json)):
                    with atomic_file(path) as file:
                        file.write(text.encode())
                if not fresh:
                    self.drop_metrics_after(step, owes_evaluation)  # they are repeated
                    self.ensemble.unlink(missing_ok=True)  # until all its models are finished again
                    if self.finished_at() not in (None, step):  # the run resumes before its end
                        self.summary.unlink(missing_ok=True)
            except UsageError:  # another process holds the directory, so keep it
                raise
            except BaseException:
                if fresh:
                    shutil.rmtree(self.path, ignore_errors=True)
                raise

    def remove_unbegun(self) -> None:
        """Remove the directory if its run finished no step and it has no other files."""
        files = {self.config, self.tokenizer, self.metrics, self.history, self.summary, self.lock.path}
        with suppress(OSError):
            lines = self.metrics.read_bytes().splitlines(keepends=True) if self.metrics.exists() else []
            if files.issuperset(self.path.iterdir()) and all(_step_of(line) <= 0 for line in lines):
                for path in files:
                    path.unlink(missing_ok=True)
                self.path.rmdir()

    def record(self, metrics: Mapping[str, float]) -> None:
        """Append one line to metrics.jsonl, with null for values that are not finite.

        If a line cannot be written, it is kept for the next call.
        """
        known = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
        self._unwritten.append(_line(known))
        self.write_metrics()

    def write_metrics(self) -> None:
        """Append lines that could not be written before."""
        if self._unwritten:
            with storage_errors("write", self.metrics):
                append(self.metrics, b"".join(self._unwritten))
            self._unwritten.clear()

    def remember(self, event: Mapping[str, object], path: Path | None = None) -> None:
        """Append one line to a file, by default history.jsonl, with the time."""
        moment = {"time": datetime.now(UTC).isoformat(timespec="seconds")}
        path = path or self.history
        with storage_errors("write", path):
            append(path, _line({**moment, **event}))

    def branched_from(self) -> Path | None:
        """Return the other run's checkpoint that this run started from, or None."""
        if not self.history.exists():
            return None
        first = self._first_event()
        origin = first.get("from") if first.get("branch") is True else None
        return Path(origin) if isinstance(origin, str) and "\0" not in origin else None

    def finished_at(self) -> int | None:
        """Return the last step of a finished run, from its summary; None if it is not finished.

        The summary is written after the weights. If a run is killed in between, the summary is an old one.
        """
        with suppress(DataError, StorageError):  # the summary is missing or corrupt
            summary = parse_object(read_small(self.summary), self.summary)
            step = summary.get("step")
            if summary.get("stop") == "finished" and type(step) is int and self.weights.exists():
                return step
        return None

    def owns(self, checkpoint: Path) -> bool:
        return checkpoint.resolve().parent == self.checkpoints.resolve()

    def drop_metrics_after(self, step: int, owes_evaluation: bool) -> None:
        """Drop metrics after a step, and the incomplete last line of a killed run."""
        self.write_metrics()
        if not self.metrics.exists():
            return
        with storage_errors("read", self.metrics), open_regular(self.metrics) as file:
            lines = file.readlines()
        kept = [line for line in lines if step and 0 <= _step_of(line) <= step]
        if owes_evaluation:
            kept = [line for line in kept if _step_of(line) < step or b'"loss": ' in line]
        if kept != lines:
            with atomic_file(self.metrics) as file:
                file.writelines(kept)


def _line(event: Mapping[str, object]) -> bytes:
    return json.dumps(event).encode() + b"\n"


def _step_of(line: bytes) -> int:
    """Return the step of a metrics line; -1 if the line is incomplete."""
    try:
        step = json.loads(line)["step"] if line.endswith(b"\n") else -1
    except (ValueError, KeyError, TypeError, RecursionError):
        return -1
    return step if type(step) is int else -1


def differing(before: RunConfig, now: RunConfig, changeable: Container[str] = ()) -> str:
    """List differing settings that must not change, for a message; "" if there are none."""
    different = [
        f"{name} was {old!r:.80} and is now {new!r:.80}"
        for name, (old, new) in differences(before, now).items()
        if name not in changeable
    ]
    return "; ".join(different[:3]) + "; …" * (len(different) > 3)


def place_for(parent: Path, name: str, resuming: bool) -> Path:
    """Return parent/name, or parent/name-2, -3, … if it exists; when resuming, the last existing one."""
    path = last = parent / name
    count = 1
    while path.exists():
        last = path
        count += 1
        path = parent / f"{name}-{count}"
    return last if resuming else path


MOST_METRICS = 1 << 30  # bytes
MOST_STEPS = 1 << 53  # limit for a plot's axis
# Names in metrics and summaries: losses in nats per token → the same in bits per byte.
IN_BITS = {"loss": "train_bits_per_byte", "val_loss": "bits_per_byte"}


@dataclass(frozen=True, slots=True)
class Metrics:
    """The numbers of one step by name, from a line of metrics. None: not finite."""

    step: int
    numbers: dict[str, float | None]


def read_metrics(path: Path) -> Iterator[Metrics]:
    """Yield the metrics of all complete lines."""
    return (parse_metrics(line, number, path) for number, line in enumerate(whole_lines(path), 1))


def whole_lines(path: Path) -> list[bytes]:
    """Return the lines, without the incomplete last line of a killed run."""
    content = read_small(path, MOST_METRICS)
    return content[: content.rfind(b"\n") + 1].splitlines()


def parse_metrics(line: bytes, number: int, path: Path) -> Metrics:
    """Parse a line of metrics. A DataError names a line without metrics."""
    try:
        document = parse_json(line)
    except ValueError:
        document = None
    numbers: dict[str, Any] = document if isinstance(document, dict) else {}
    step = numbers.pop("step", None)
    if type(step) is not int or {*map(type, numbers.values())} - {int, float, NoneType}:
        raise DataError(f"{path}: line {number} is not a line of metrics")
    if not 0 <= step < MOST_STEPS:
        raise DataError(f"{path}: line {number} has an invalid step")
    return Metrics(step, numbers)
