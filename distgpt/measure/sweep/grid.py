"""The grid of a sweep with its points, and the sweep's directory with runs and results.

Any number of processes can work on a sweep. A process locks its run. The lock ends with the process, so
another one can take the run of a process that died. The runs that are due depend only on the results.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import numpy as np

from distgpt.core.base.checked import Must, read_as
from distgpt.core.base.errors import UsageError, did_you_mean
from distgpt.core.base.files import read_small, storage_errors, write_json
from distgpt.core.config import BATCH_IN_TOKENS, BATCH_TOKENS, SETTINGS
from distgpt.core.config.run_config import flat_settings, load_toml, read_text, renamed
from distgpt.core.config.setting import Setting, brief
from distgpt.core.saved.run_lock import RunLock
from distgpt.core.saved.rundir import RunDirectory

PRESET, SEED = "preset", "seed"
BITS = "bits_per_byte"
METRICS = ("val_loss", BITS, "loss")
MOST_RUNS = 10_000
DIGITS = 3  # significant digits of a drawn number
DIVERGED = ("not finite", "outlier")
RULES_KEPT = ("metric", "rungs", "eta")
MOST_SHOWN = 5  # names in a message
LONGEST_NAME = 100  # characters of a run's name, which is also a directory name

# Settings that may vary, and the other keys of [sweep].
VARYING = {**SETTINGS, BATCH_TOKENS: BATCH_IN_TOKENS, PRESET: Setting(str, "A named configuration.")}
RULES = {
    "draws": Setting(int, "Draw N random points instead of running all.", low=1, most=MOST_RUNS),
    "draw_seed": Setting(int, "Seed for drawing points.", low=0),
    "metric": Setting(str, "Metric by which runs are compared.", choices=METRICS),
    "rungs": Setting(int, "Number of comparisons, the last one at the end.", low=1, most=20),
    "eta": Setting(
        float, "Promote the best 1/eta of the points at each comparison but the last.", above=1, most=1000
    ),
}

Values = dict[str, Any]
Name = Annotated[str, Must("be the name of a file", lambda name: 0 < len(name) < 200 and "/" not in name)]


@dataclass(frozen=True, slots=True)
class Run:
    """A run of the sweep with all its settings, including `preset`."""

    name: Name
    point: str  # name of its point, shared by runs with different seeds
    values: Values


@dataclass(frozen=True, slots=True)
class Grid:
    """The content of a grid file, including drawn points. `points` maps names to varying settings."""

    fixed: Values
    points: dict[str, Values]
    seeds: list[int]  # if empty, all runs use the seed of `fixed`
    metric: str = "val_loss"
    rungs: int = 1
    eta: float = 3.0

    def runs(self) -> Iterator[Run]:
        """Yield the runs. Seeds of a point are adjacent."""
        for point, values in self.points.items():
            for own in [{SEED: seed} for seed in self.seeds] or [{}]:
                yield Run(_named(values | own), point, {"keep": 1, **self.fixed, **values, **own})

    def until(self, rung: int, steps: int) -> int:
        """Return the step at which runs are compared on a rung (the first is 0)."""
        return max(1, round(steps / self.eta ** (self.rungs - 1 - rung)))

    def promoted(self, points: int) -> int:
        """Return how many of these points are promoted from a rung."""
        return max(1, math.ceil(points / self.eta))


@dataclass(frozen=True, slots=True)
class Range:
    """Values from `low` to `high`, with a uniform distribution of the value or of its logarithm."""

    low: float
    high: float
    is_log: bool
    kind: type

    def draw(self, random: np.random.Generator) -> Any:
        """Return a value with few digits, within the range."""
        ends = (math.log(self.low), math.log(self.high)) if self.is_log else (self.low, self.high)
        drawn = random.uniform(*ends)
        drawn = math.exp(drawn) if self.is_log else drawn
        if self.kind is int:
            return round(drawn)
        return min(self.high, max(self.low, float(f"{drawn:.{DIGITS}g}")))


Choices = dict[str, list[Any] | Range]


def read_grid(path: Path, assigned: Values | None = None) -> Grid:
    """Return the grid in a TOML file. Values in `assigned` (--set) replace fixed settings."""
    document = load_toml(read_text(path, "GRID"), str(path))
    table = document.pop("sweep", None)
    if not isinstance(table, dict) or not table:
        raise UsageError(f"{path} requires a table [sweep] of varied settings, such as lr = [0.01, 0.02]")
    fixed, table = renamed(flat_settings(document, str(path)) | (assigned or {})), renamed(table)
    rules: Values = {name: table.pop(name) for name in RULES if name in table}
    for name, value in rules.items():
        RULES[name].check(f"{path}: [sweep] {name}", value)
    if not table:
        raise UsageError(f"{path}: [sweep] has no settings that vary")
    for names, known in ((fixed, {*VARYING}), (table, {*VARYING, *RULES})):
        for name in names.keys() - known:
            raise UsageError(f"{path}: unknown setting {name!r:.80}{did_you_mean(name[:80], known)}")
    for name in sorted(fixed.keys() & table.keys()):
        raise UsageError(f"{path}: {name} is set twice, for all runs and in [sweep]")
    if "ensemble" in table or fixed.get("ensemble", 1) != 1:
        raise UsageError(f"{path}: a sweep trains single models; remove ensemble")
    choices = {name: _choices(f"{path}: [sweep] {name}", name, value) for name, value in table.items()}
    seeds = choices.pop(SEED, [])
    if isinstance(seeds, Range):
        raise UsageError(f"{path}: [sweep] {SEED} must be a list, not a range")
    draws, draw_seed = rules.pop("draws", 0), rules.pop("draw_seed", 0)
    points = _drawn(choices, draws, draw_seed) if draws else _all(path, choices)
    named = {_named(point): point for point in itertools.islice(points, MOST_RUNS + 1)}
    if len(named) * max(1, len(seeds)) > MOST_RUNS:
        raise UsageError(f"{path}: more than {MOST_RUNS:,} runs; set draws = N to draw N points")
    return Grid(fixed, named, list(dict.fromkeys(seeds)), **rules)


def _choices(where: str, name: str, given: Any) -> list[Any] | Range:
    """Return a setting's values. Each has the setting's type and is within its bounds."""
    about = VARYING[name]
    if isinstance(given, dict):
        return _range(where, about, given)
    if not isinstance(given, list) or not given:
        raise UsageError(
            f"{where} must be a list of values or a range {{low = …, high = …}}, not {brief(given)}"
        )
    for value in given:
        about.check(where, value)
    return list(dict.fromkeys(map(float, given) if about.kind is float else given))


def _range(where: str, about: Setting, given: Mapping[str, Any]) -> Range:
    low, high, scale = given.get("low"), given.get("high"), given.get("scale", "linear")
    is_whole = {"low", "high"} <= given.keys() <= {"low", "high", "scale"}
    if not is_whole or scale not in ("linear", "log") or about.kind not in (int, float):
        raise UsageError(f'{where}: a range must be {{low = …, high = …}}, with an optional scale = "log"')
    for value in (low, high):
        about.check(where, value)
    assert isinstance(low, int | float) and isinstance(high, int | float)
    if low >= high or (scale == "log" and low <= 0):
        raise UsageError(f"{where}: low ({low}) must be less than high ({high}), and above 0 for log")
    return Range(low, high, scale == "log", about.kind)


def _all(path: Path, choices: Choices) -> Iterator[Values]:
    lists = []
    for name, values in choices.items():
        if isinstance(values, Range):
            raise UsageError(f"{path}: [sweep] {name} is a range, which requires draws = N")
        lists.append(values)
    return (dict(zip(choices, values, strict=True)) for values in itertools.product(*lists))


def _drawn(choices: Choices, draws: int, seed: int) -> Iterator[Values]:
    """Yield up to `draws` different points. With more draws, the first points stay the same."""
    known: set[str] = set()
    for number in range(20 * draws):
        random = np.random.default_rng((seed, number))
        point = {
            name: values.draw(random) if isinstance(values, Range) else values[random.integers(len(values))]
            for name, values in choices.items()
        }
        if (name := _named(point)) not in known and len(known) < draws:
            known.add(name)
            yield point


def shortly(value: Any) -> str:
    return f"{value:g}" if type(value) is float else str(value)


def _named(values: Values) -> str:
    """Return a valid directory name for these values, with a hash if it cannot contain them exactly."""
    whole = ",".join(f"{name}={shortly(value)}" for name, value in values.items())
    name = re.sub(r"[^\w=.,+-]", "_", whole)
    is_exact = all(type(value) is not float or float(f"{value:g}") == value for value in values.values())
    if name == whole and len(name) <= LONGEST_NAME and is_exact:
        return name or "one"
    exact = repr(sorted(values.items()))
    return f"{name[:LONGEST_NAME]}-{hashlib.sha256(exact.encode()).hexdigest()[:8]}"


# The directory of a sweep


@dataclass(slots=True)
class Rung:
    """Results of a run at the step of a comparison. None: not measured."""

    step: int
    loss: float | None = None  # mean of the last steps before it
    val_loss: float | None = None
    bits_per_byte: float | None = None  # validation
    train_bits_per_byte: float | None = None


@dataclass(slots=True)
class Result:
    """Results of a run. `stop` is the reason why it stopped for good, or ""."""

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
        """Return a run's result, empty if it has not started."""
        path = self._result(run)
        if not path.exists():
            return Result()
        result: Result = read_as(Result, read_small(path), path)
        return result

    def store(self, run: Run, result: Result) -> None:
        write_json(self._result(run), asdict(result))

    def forget_failures(self) -> None:
        """Allow retries of runs that failed for reasons other than their settings."""
        for run in self.runs:
            result = self.result(run)
            if result.stop and result.stop not in DIVERGED:
                self.store(run, Result(result.rungs))

    @contextmanager
    def taken(self, run: Run) -> Iterator[bool]:
        """Lock a run inside the `with` block. Yield False, without a lock, if another process holds it."""
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
        """Return the first incomplete rung, its missing runs, and its total number of runs.

        None: the sweep is done.
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
    """Return whether a run is done with a rung."""
    return bool(result.stop) or len(result.rungs) > rung


def on_rung(grid: Grid, results: dict[str, Result], rung: int) -> list[str]:
    """Return the points on a rung: the best of the previous rung, which must be complete."""
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
    """Return the mean over a point's runs on a rung, or infinity if one failed."""
    found = [measured(grid, result, rung) for result in results]
    return fmean(value for value in found if value is not None) if None not in found else math.inf


def measured(grid: Grid, result: Result, rung: int) -> float | None:
    """Return a run's metric on a rung, or None if it did not get there."""
    found = getattr(result.rungs[rung], grid.metric) if len(result.rungs) > rung else None
    return None if found is None else float(found)


def begin(path: Path, grid: Grid) -> None:
    """Create the directory, or check that it has this grid, apart from added runs."""
    file = path / "grid.json"
    with storage_errors("use the directory", path):
        if file.exists():
            _refuse_changed(path, read_back(path), grid)
        elif path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise UsageError(f"{path} is not empty and has no sweep; choose another --out")
        path.mkdir(parents=True, exist_ok=True)
    write_json(file, asdict(grid))


def read_back(path: Path) -> Grid:
    file = path / "grid.json"
    if not file.exists():
        raise UsageError(f"{path} does not exist on this host; --out must be in a shared file system")
    grid: Grid = read_as(Grid, read_small(file), file)
    return grid


def _refuse_changed(path: Path, before: Grid, now: Grid) -> None:
    """Raise an error if the grid has changes other than added runs."""
    old, new = (grid.fixed | {name: getattr(grid, name) for name in RULES_KEPT} for grid in (before, now))
    changed = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    known = {run.name for run in now.runs()}
    changed += [run.name for run in before.runs() if run.name not in known]
    if changed:
        raise UsageError(
            f"{path} has a sweep of another grid ({', '.join(changed[:MOST_SHOWN])} changed); only add runs,"
            " or choose another --out"
        )
