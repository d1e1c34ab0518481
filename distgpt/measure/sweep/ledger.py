"""The folder of a sweep: its grid, its runs, and a result of each. Any number of processes work in it.

A process takes a run by a lock, which ends with the process, so that a run whose process died is free again.
Which runs are due follows from the results alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from distgpt.core.base.checked import read_as
from distgpt.core.base.errors import DataError, UsageError
from distgpt.core.base.files import atomic_file, read_small, storage_errors
from distgpt.core.saved.run_lock import RunLock
from distgpt.core.saved.rundir import RunDirectory
from distgpt.measure.sweep.grid import Grid, Run

DIVERGED = ("not finite", "outlier")
RULES_KEPT = ("metric", "rungs", "eta")
MOST_SHOWN = 5  # names in a message


@dataclass(slots=True)
class Rung:
    """A run at the step at which it is compared. What was not measured is None."""

    step: int
    loss: float | None = None  # of the last steps before it, on average
    val_loss: float | None = None
    bits_per_byte: float | None = None  # of validation
    train_bits_per_byte: float | None = None


@dataclass(slots=True)
class Result:
    """A run so far. `stop`: what has ended it for good, "" if nothing has."""

    rungs: list[Rung] = field(default_factory=list)
    stop: str = ""
    error: str = ""
    tokens_per_s: float | None = None


class Ledger:
    """A sweep on disk."""

    def __init__(self, path: Path, grid: Grid) -> None:
        self.path, self.grid = path, grid
        self.runs = list(grid.runs())

    def directory(self, run: Run) -> RunDirectory:
        return RunDirectory(self.path / run.name)

    def result(self, run: Run) -> Result:
        """Return a run's result so far, empty before it has begun."""
        path = self._result(run)
        if not path.exists():
            return Result()
        found: Result = read_as(Result, read_small(path), path)
        return found

    def store(self, run: Run, result: Result) -> None:
        _write(self._result(run), asdict(result))

    def forget_failures(self) -> None:
        """Let runs be tried again that failed for another reason than their settings."""
        for run in self.runs:
            result = self.result(run)
            if result.stop and result.stop not in DIVERGED:
                self.store(run, Result(result.rungs))

    @contextmanager
    def taken(self, run: Run) -> Iterator[bool]:
        """Hold a run meanwhile; yield False, and hold nothing, if another process does."""
        directory = self._result(run).parent
        with storage_errors("write", directory):
            directory.mkdir(parents=True, exist_ok=True)
        lock = RunLock(directory)
        try:
            if is_mine := not lock.is_held():
                lock.claim()
        except UsageError:
            is_mine = False
        try:
            yield is_mine
        finally:
            if is_mine:
                lock.release()

    def due(self) -> tuple[int, list[Run], int] | None:
        """Return the first rung that is not complete, the runs that it lacks, and how many it has in all.

        None at the end.
        """
        results = self.results()
        for rung in range(self.grid.rungs):
            points = on_rung(self.grid, results, rung)
            members = [run for run in self.runs if run.point in points]
            left = [run for run in members if not is_past(results[run.name], rung)]
            if left:
                return rung, left, len(members)
        return None

    def results(self) -> dict[str, Result]:
        return {run.name: self.result(run) for run in self.runs}

    def _result(self, run: Run) -> Path:
        return self.path / "results" / run.name / "result.json"


def is_past(result: Result, rung: int) -> bool:
    """Return whether a run has nothing more to do on a rung."""
    return bool(result.stop) or len(result.rungs) > rung


def on_rung(grid: Grid, results: dict[str, Result], rung: int) -> list[str]:
    """Return the points that come to a rung: the best ones of the rung before, which must be complete."""
    members: dict[str, list[Result]] = {point: [] for point in grid.points}
    for run in grid.runs():
        members[run.point].append(results[run.name])
    points = list(members)
    for before in range(rung):
        values = {point: mean(grid, members[point], before) for point in points}
        finite = sorted((point for point in points if math.isfinite(values[point])), key=values.__getitem__)
        points = finite[: grid.promoted(len(points))]
    return points


def mean(grid: Grid, results: Iterable[Result], rung: int) -> float:
    """Return the mean over the runs of a point on a rung; infinite if one of them has failed."""
    found = [measured(grid, result, rung) for result in results]
    return fmean(value for value in found if value is not None) if None not in found else math.inf


def measured(grid: Grid, result: Result, rung: int) -> float | None:
    """Return what is compared of a run on a rung; None if it did not come there."""
    found = getattr(result.rungs[rung], grid.metric) if len(result.rungs) > rung else None
    return None if found is None else float(found)


def begin(path: Path, grid: Grid) -> None:
    """Make the folder, or check that it is of this grid, to which runs may have been added."""
    file = path / "grid.json"
    with storage_errors("use the folder", path):
        if not file.exists():
            if path.exists() and (not path.is_dir() or any(path.iterdir())):
                raise UsageError(f"{path} holds no sweep and is not empty: choose another --out")
            path.mkdir(parents=True, exist_ok=True)
    if file.exists():
        _refuse_changed(path, read_back(path), grid)
    _write(file, asdict(grid))


def read_back(path: Path) -> Grid:
    """Return the grid of a folder in which a sweep has begun."""
    file = path / "grid.json"
    if not file.exists():
        raise UsageError(f"{path} cannot be seen here: --out must lie in a file system that all hosts share")
    grid: Grid = read_as(Grid, read_small(file), file)
    return grid


def _refuse_changed(path: Path, before: Grid, now: Grid) -> None:
    """Reject a grid in which more has changed than runs that were added."""
    old, new = (grid.fixed | {name: getattr(grid, name) for name in RULES_KEPT} for grid in (before, now))
    changed = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    known = {run.name for run in now.runs()}
    changed += [run.name for run in before.runs() if run.name not in known]
    if changed:
        raise UsageError(
            f"{path} holds a sweep of another grid ({', '.join(changed[:MOST_SHOWN])} changed): you may only"
            " add runs; or choose another --out"
        )


def _write(path: Path, content: Any) -> None:
    try:
        text = json.dumps(content, indent=1, allow_nan=False)
    except ValueError:
        raise DataError(f"{path}: a value is not finite") from None
    with atomic_file(path) as file:
        file.write(text.encode() + b"\n")
