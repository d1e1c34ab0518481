"""What a run has recorded, as curves over its steps."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from distgpt.errors import DataError, UsageError, printable
from distgpt.files import storage_errors
from distgpt.kernels.api import Array
from distgpt.saved.rundir import RunDirectory
from distgpt.show.drawing import drawable

MOST_STEPS = 1 << 53  # as many as a picture's axis can tell apart


@dataclass(frozen=True, slots=True)
class Curve:
    """A value at some of the steps."""

    steps: Array
    values: Array

    def __len__(self) -> int:
        return len(self.steps)

    def finite(self) -> Curve:
        """Where its values are known."""
        known = np.isfinite(self.values)
        return Curve(self.steps[known], self.values[known])

    def smoothed(self, count: int) -> Array:
        """The mean of `count` neighbours of each value.

        At the steep beginning it is of fewer, as many on either side, and at the end of those there are.
        """
        known = np.isfinite(self.values)
        sums = np.concatenate([[0.0], np.cumsum(np.where(known, self.values, 0.0))])
        counts = np.concatenate([[0], np.cumsum(known)])
        first, stop = self._neighbours(count)
        many = counts[stop] - counts[first]
        means = (sums[stop] - sums[first]) / np.maximum(many, 1)
        return np.where(many > 0, means, np.nan)

    def medians(self, count: int) -> Array:
        """The same with the middle one of the neighbours, which outliers do not move."""
        pieces = [
            self.values[start:end][np.isfinite(self.values[start:end])]
            for start, end in zip(*self._neighbours(count), strict=True)
        ]
        return np.array([np.median(piece) if len(piece) else np.nan for piece in pieces])

    def _neighbours(self, count: int) -> tuple[Array, Array]:
        """Where they begin, and where they end, for every place."""
        places = np.arange(len(self))
        reach = np.minimum(places, count // 2)
        return places - reach, np.minimum(places + reach, len(self) - 1) + 1


class Run:
    """The curves of one run by the names that metrics.jsonl has for them; those it lacks are empty."""

    def __init__(self, name: str, lines: Sequence[dict[str, Any]]) -> None:
        self.name = name
        self._lines = lines

    def __getitem__(self, key: str) -> Curve:
        points = [(line["step"], line[key]) for line in self._lines if key in line]
        steps, values = zip(*points, strict=True) if points else ((), ())
        return Curve(np.array(steps, np.int64), np.array(values, np.float64))

    @property
    def last(self) -> Array:
        """The last step of which anything is known, alone."""
        return np.array([self._lines[-1]["step"]])

    def places(self, axis: str, steps: Array) -> Array:
        """Where these steps lie on the axis of "steps", "tokens", or "time" (seconds of training)."""
        if axis == "steps":
            return steps
        known = self["tokens"].finite() if axis == "tokens" else self._seconds()
        return np.interp(steps, [0, *known.steps], [0.0, *known.values])

    def _seconds(self) -> Curve:
        """A step that was not recorded took as long as the next one that was."""
        taken = self["step_s"].finite()
        return Curve(taken.steps, np.cumsum(taken.values * np.diff(taken.steps, prepend=0)))


def read_runs(paths: Iterable[Path]) -> list[Run]:
    """Each run once, by the shortest ends of their paths that tell them apart."""
    different = {path.resolve(): path for path in paths}
    names = short_names(list(different))
    return [
        Run(printable(name), _history(path)) for name, path in zip(names, different.values(), strict=True)
    ]


def short_names(paths: Sequence[Path]) -> list[str]:
    for length in range(1, max(len(path.parts) for path in paths)):
        names = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _history(path: Path) -> list[dict[str, Any]]:
    """One line a step, in order. A run that was taken up again has lost what it had recorded beyond."""
    if not path.exists():
        raise UsageError(f"there is no run directory {path}")
    directory = RunDirectory(path)
    if not directory.metrics.is_file():
        begun = directory.config.is_file()
        raise UsageError(f"{path} has recorded no steps yet" if begun else f"{path} is not a run directory")
    history: dict[int, dict[str, Any]] = {}
    for line in _lines(directory.metrics):
        step = line["step"]
        if "loss" in line and any("loss" in history[later] for later in _from(history, step)):
            for later in _from(history, step):
                del history[later]
        history[step] = history.get(step, {}) | line
    if not history:
        raise UsageError(f"{path} has recorded no steps yet")
    return [history[step] for step in sorted(history)]


def _from(history: dict[int, Any], step: int) -> list[int]:
    """The steps in there that are not before this one; they come last."""
    late = []
    for known in reversed(history):
        if known < step:
            break
        late.append(known)
    return late


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Without the half line that a killed run may have left at the end."""
    with storage_errors("read", path):
        content = path.read_bytes()
    for number, text in enumerate(content[: content.rfind(b"\n") + 1].splitlines(), 1):
        try:
            line = json.loads(text)
            step = int(line.pop("step"))
            found = {key: drawable(value) for key, value in line.items()}
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            raise DataError(f"{path}: line {number} holds no metrics") from None
        if not 0 <= step < MOST_STEPS:
            raise DataError(f"{path}: line {number} is of an impossible step")
        yield {"step": step, **found}
