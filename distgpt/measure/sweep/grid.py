"""A grid: settings that all runs have, points of settings that vary, and how runs are compared."""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from distgpt.core.base.checked import Must
from distgpt.core.base.errors import UsageError, nearest
from distgpt.core.config import BATCH_IN_TOKENS, BATCH_TOKENS, SETTINGS
from distgpt.core.config.run_config import flat_settings, load_toml, read_text, renamed
from distgpt.core.config.setting import Setting, brief

PRESET, SEED = "preset", "seed"
BITS = "bits_per_byte"
METRICS = ("val_loss", BITS, "loss")
MOST_RUNS = 10_000
DIGITS = 3  # of a number that is drawn
LONGEST_NAME = 100  # characters of a run's name, which is also a folder's

# Settings that may vary, and what [sweep] says besides.
VARYING = {**SETTINGS, BATCH_TOKENS: BATCH_IN_TOKENS, PRESET: Setting(str, "A named configuration.")}
RULES = {
    "draws": Setting(int, "Draw this many points, instead of taking all.", low=1, most=MOST_RUNS),
    "draw_seed": Setting(int, "Seed of what is drawn.", low=0),
    "metric": Setting(str, "Compare runs by this.", choices=METRICS),
    "rungs": Setting(int, "Compare this many times, the last time at the end.", low=1, most=20),
    "eta": Setting(
        float, "Promote the best 1/eta of the points at each comparison but the last.", above=1, most=1000
    ),
}

Values = dict[str, Any]
Name = Annotated[str, Must("be the name of a file", lambda name: 0 < len(name) < 200 and "/" not in name)]


@dataclass(frozen=True, slots=True)
class Run:
    """A run of the sweep: all of its settings, `preset` among them."""

    name: Name
    point: str  # the name of its point, which runs of several seeds share
    values: Values


@dataclass(frozen=True, slots=True)
class Grid:
    """A grid file, with all that is drawn. `points`: by name, the settings that vary and their values."""

    fixed: Values
    points: dict[str, Values]
    seeds: list[int]  # none: all runs have the seed of `fixed`
    metric: str = "val_loss"
    rungs: int = 1
    eta: float = 3.0

    def runs(self) -> Iterator[Run]:
        """Yield the runs, seeds of a point side by side."""
        for point, values in self.points.items():
            for own in [{SEED: seed} for seed in self.seeds] or [{}]:
                yield Run(_named(values | own), point, {"keep": 1, **self.fixed, **values, **own})

    def until(self, rung: int, steps: int) -> int:
        """Return the step of a run at which it is compared on this rung, from 0 on."""
        return max(1, round(steps / self.eta ** (self.rungs - 1 - rung)))

    def promoted(self, points: int) -> int:
        """Return how many of these points are promoted from a rung."""
        return max(1, math.ceil(points / self.eta))


@dataclass(frozen=True, slots=True)
class Range:
    """Values from `low` to `high`, evenly likely, or by their logarithm."""

    low: float
    high: float
    is_log: bool
    kind: type

    def draw(self, random: np.random.Generator) -> Any:
        """Return a value of few digits, within the range."""
        ends = (math.log(self.low), math.log(self.high)) if self.is_log else (self.low, self.high)
        drawn = random.uniform(*ends)
        drawn = math.exp(drawn) if self.is_log else drawn
        if self.kind is int:
            return round(drawn)
        return min(self.high, max(self.low, float(f"{drawn:.{DIGITS}g}")))


Choices = dict[str, list[Any] | Range]


def read_grid(path: Path, assigned: Values | None = None) -> Grid:
    """Return the grid in a TOML file, its fixed settings changed by what --set has assigned."""
    document = load_toml(read_text(path, "GRID"), str(path))
    table = document.pop("sweep", None)
    if not isinstance(table, dict) or not table:
        raise UsageError(f"{path} has no table [sweep] with settings that vary, such as: lr = [0.01, 0.02]")
    fixed, table = renamed(flat_settings(document, str(path)) | (assigned or {})), renamed(table)
    rules: Values = {name: table.pop(name) for name in RULES if name in table}
    for name, value in rules.items():
        RULES[name].check(f"{path}: [sweep] {name}", value)
    if not table:
        raise UsageError(f"{path}: [sweep] has nothing that varies")
    for names, known in ((fixed, {*VARYING}), (table, {*VARYING, *RULES})):
        for name in names.keys() - known:
            raise UsageError(f"{path}: unknown setting {name!r:.80}{nearest(name[:80], known)}")
    for name in sorted(fixed.keys() & table.keys()):
        raise UsageError(f"{path}: {name} is given twice, for all runs and in [sweep]")
    choices = {name: _choices(f"{path}: [sweep] {name}", name, value) for name, value in table.items()}
    seeds = choices.pop(SEED, [])
    if isinstance(seeds, Range):
        raise UsageError(f"{path}: [sweep] {SEED} is a range: give a list, of which every point has all")
    draws, draw_seed = rules.pop("draws", 0), rules.pop("draw_seed", 0)
    points = _drawn(choices, draws, draw_seed) if draws else _all(path, choices)
    named = {_named(point): point for point in itertools.islice(points, MOST_RUNS + 1)}
    if len(named) * max(1, len(seeds)) > MOST_RUNS:
        raise UsageError(f"{path}: these are more than {MOST_RUNS:,} runs; draws = N draws N points of them")
    return Grid(fixed, named, list(dict.fromkeys(seeds)), **rules)


def _choices(where: str, name: str, given: Any) -> list[Any] | Range:
    """Return a setting's values, each of its type and within its bounds."""
    about = VARYING[name]
    if isinstance(given, dict):
        return _range(where, about, given)
    if not isinstance(given, list) or not given:
        raise UsageError(
            f"{where} is {brief(given)}: give a list of values, or a range {{low = …, high = …}}"
        )
    for value in given:
        about.check(where, value)
    return list(dict.fromkeys(map(float, given) if about.kind is float else given))


def _range(where: str, about: Setting, given: Mapping[str, Any]) -> Range:
    low, high, scale = given.get("low"), given.get("high"), given.get("scale", "linear")
    is_whole = {"low", "high"} <= given.keys() <= {"low", "high", "scale"}
    if not is_whole or scale not in ("linear", "log") or about.kind not in (int, float):
        raise UsageError(f'{where}: a range of numbers is {{low = …, high = …}}, and maybe scale = "log"')
    for value in (low, high):
        about.check(where, value)
    assert isinstance(low, int | float) and isinstance(high, int | float)
    if low >= high or (scale == "log" and low <= 0):
        raise UsageError(f"{where}: low is {low} and high is {high}: low must be less, and above 0 for log")
    return Range(low, high, scale == "log", about.kind)


def _all(path: Path, choices: Choices) -> Iterator[Values]:
    """Yield every combination."""
    lists = []
    for name, values in choices.items():
        if isinstance(values, Range):
            raise UsageError(f"{path}: [sweep] {name} is a range: set draws = N, how many points to draw")
        lists.append(values)
    return (dict(zip(choices, values, strict=True)) for values in itertools.product(*lists))


def _drawn(choices: Choices, draws: int, seed: int) -> Iterator[Values]:
    """Yield this many different points, or all there are. The first ones are the same for more draws."""
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


def _named(values: Values) -> str:
    """Return a name for these values that is fit for a folder; it has all of them, or a hash of them."""
    whole = ",".join(
        f"{name}={value:g}" if type(value) is float else f"{name}={value}" for name, value in values.items()
    )
    name = re.sub(r"[^\w=.,+-]", "_", whole)
    is_exact = all(type(value) is not float or float(f"{value:g}") == value for value in values.values())
    if name == whole and len(name) <= LONGEST_NAME and is_exact:
        return name or "one"
    exact = repr(sorted(values.items()))
    return f"{name[:LONGEST_NAME]}-{hashlib.sha256(exact.encode()).hexdigest()[:8]}"
