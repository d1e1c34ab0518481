"""Reads the history of a run's steps from its files, and explains why two runs may differ bitwise."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from distgpt.core.base.checked import JsonObject, parse_object
from distgpt.core.base.errors import DataError, UsageError, nearest_path
from distgpt.core.config import RunConfig, TrainConfig
from distgpt.core.saved.checkpoint import saved_checkpoints
from distgpt.core.saved.rundir import MOST_STEPS, RunDirectory, read_metrics, whole_lines
from distgpt.measure.stages import TOLERANCES, judged_steps, relative
from distgpt.measure.verification.kept import KEY, Facts
from distgpt.show.page import terminal_table

# These settings change no bit of a step. They control what is shown, saved, measured and checked. The
# training text is compared by its fingerprint, not by its name.
NEUTRAL = frozenset(
    {
        *("data", "val", "val_tokens", "hellaswag", "eval_every", "sample_every", "save_every"),
        *("save_minutes", "save", "keep", "keep_every", "keep_every_minutes"),
        *("on_disk_error", "verify_every", "verify_data", "bad_steps_allowed"),
    }
)
# Facts that determine the order in which gradients are added.
OF_SUMS = ("threads", "nodes", "exchange", "transport", "mpi", "micro_batches")

Numbers = Mapping[str, float | None]  # numbers of a step by name; None: not finite
Changes = Mapping[str, tuple[Any, Any]]  # a setting's old and new value


@dataclass(frozen=True, slots=True)
class Start:
    """A process that took steps of a run, after `step`."""

    step: int
    ranks: int | None
    changes: Changes
    facts: Facts | None  # None: from a version that did not record them


class Record:
    def __init__(self, path: Path) -> None:
        self.path, self.directory = path, RunDirectory(path)
        if not path.is_dir():
            raise UsageError(f"no directory {path}{nearest_path(path)}")
        config = self.directory.saved()
        if config is None:
            raise UsageError(f"{path} is not a run directory: no config.toml")
        self.config: RunConfig = config  # config of the last start

    @cached_property
    def steps(self) -> dict[int, Numbers]:
        """Numbers of each training step, as far as they were written."""
        if not self.directory.metrics.exists():
            return {}
        lines = read_metrics(self.directory.metrics)
        return {line.step: line.numbers for line in lines if "loss" in line.numbers}

    @cached_property
    def _events(self) -> list[tuple[int, JsonObject]]:
        """Lines of history.jsonl, each with its step."""
        path, result = self.directory.history, list[tuple[int, JsonObject]]()
        if not path.exists():
            return result
        for number, line in enumerate(whole_lines(path), 1):
            event = parse_object(line, path)
            step = event.get("step")
            if type(step) is not int or not 0 <= step < MOST_STEPS:
                raise DataError(f"{path}: line {number} has an invalid step")
            result.append((step, event))
        return result

    @cached_property
    def starts(self) -> list[Start]:
        """Starts whose steps count, in order. A start replaces all starts after its step."""
        result: list[Start] = []
        event: Any
        for step, event in self._events:
            if KEY in event and result and result[-1].step == step:
                with self._damage(KEY):
                    facts = Facts.from_json(event[KEY])
                result[-1] = Start(step, result[-1].ranks, result[-1].changes, facts)
            elif "ranks" in event and "changes" in event:
                ranks = event["ranks"] if type(event["ranks"]) is int else None
                with self._damage("changes"):
                    changes = {name: (before, now) for name, (before, now) in event["changes"].items()}
                result = [start for start in result if start.step < step]
                result.append(Start(step, ranks, changes, None))
        return result

    @contextmanager
    def _damage(self, key: str) -> Iterator[None]:
        try:
            yield
        except (ValueError, TypeError, AttributeError) as error:
            raise DataError(f"{self.directory.history} is corrupt at {key!r}: {error}") from None

    @cached_property
    def skipped(self) -> dict[int, int]:
        """The number of skipped batches after a step, at each step at which it changed."""
        result: dict[int, int] = {}
        for step, event in self._events:
            if "changes" in event or "back_to" in event:  # a start without a checkpoint skips none
                from_weights = "changes" in event and not event.get("from")
                result = {} if from_weights else {at: n for at, n in result.items() if at <= step}
            if "back_to" in event and isinstance(count := event.get("skipped"), int):
                result[step] = count
        return result

    def starts_of(self, first: int, last: int) -> list[Start]:
        """Return the starts that took steps `first` to `last`."""
        later = [start for start in self.starts if first <= start.step < last]
        before = [start for start in self.starts if start.step < first]
        return before[-1:] + later

    def settings_of(self, step: int) -> RunConfig:
        """Return the settings at a step: the last start's, without the changes of later starts."""
        config = self.config
        for start in reversed(self.starts):
            if start.step < step:
                break
            config = config.with_values({name: before for name, (before, _) in start.changes.items()})
        return config

    def checkpoints(self) -> Iterator[tuple[int, Path]]:
        """Yield the step and path of each existing checkpoint, earliest first."""
        for path in reversed(saved_checkpoints(self.directory.checkpoints)):
            if not path.suffix:
                yield int(path.name.removeprefix("step-")), path


# -- numbers that are compared


def tolerance_of(one: TrainConfig, other: TrainConfig) -> tuple[float, int]:
    """Return the relative difference in loss that rounding may cause, and within how many steps."""
    apart = max(TOLERANCES[t.dtype] for t in (one, other))
    return apart, min(judged_steps(t.optimizer, t.dtype) for t in (one, other))


def distance(one: float | None, other: float | None) -> float:
    """Return the relative difference: 0 if both are bitwise equal or not finite."""
    numbers = {value if value is not None and math.isfinite(value) else None for value in (one, other)}
    return relative(one, other) if len(numbers) > 1 else 0.0


def numbers_apart(one: float | None, other: float | None, words: tuple[str, str]) -> str:
    shown = ["not finite" if value is None else repr(value) for value in (one, other)]
    apart = distance(one, other)
    by = f", a relative difference of {apart:.1e}" if math.isfinite(apart) else ""
    return f"{shown[0]} {words[0]}, {shown[1]} {words[1]}{by}"


@dataclass(slots=True)
class Kind:
    """Comparison of one kind of number or of a checkpoint's tensors: counts, and the first difference."""

    compared: int = 0
    same: int = 0
    first: int | None = None  # first step that differs
    words: str = ""  # description of the first difference
    largest: float = 0.0  # largest relative difference that was judged
    beyond: int | None = None  # first step whose difference is more than rounding

    def add(self, step: int, difference: str, is_counted: bool = True) -> None:
        self.compared += is_counted
        self.same += is_counted and not difference
        if difference and self.first is None:
            self.first, self.words = step, difference


def tabulated(kinds: Mapping[str, Kind]) -> str:
    columns = ("what", "compared", "identical", "first difference")
    rows = [
        (name, f"{kind.compared:,}", f"{kind.same:,}", kind.words and f"step {kind.first}: {kind.words}")
        for name, kind in kinds.items()
        if kind.compared
    ]
    return terminal_table(columns, rows)


# -- when the same bits are promised


@dataclass(frozen=True, slots=True)
class Side:
    """One of two ways to take the same steps; `words` name it in a sentence."""

    facts: Facts | None
    t: TrainConfig
    words: str


def why_rounding(one: Side, other: Side) -> list[str]:
    """Return why the same steps may differ bitwise. If empty, they must not differ."""
    a, b = one.facts, other.facts
    if a is None or b is None:
        unknown = [side.words for side in (one, other) if side.facts is None]
        return [f"no record of the environment {' and '.join(unknown)}"]
    # Reproducible parts of the batch are summed in a fixed tree, so ranks and threads do not matter. The
    # exception is Muon: a shard may start within a piece of the norm.
    is_sharded = other.t.optimizer == "muon" and "sharded" in (one.t.grad_sync, other.t.grad_sync)
    parts = one.t.reproducible_parts if one.t.reproducible_parts == other.t.reproducible_parts else 0
    skipped = {"versions", "data", "init", *(OF_SUMS if parts and not is_sharded else ())}
    if not a.gpu and not b.gpu:
        skipped.add("recompute")
    pairs = {name: (getattr(a, name), getattr(b, name)) for name in Facts.__slots__ if name not in skipped}
    pairs |= {name: (a.versions.get(name), b.versions.get(name)) for name in {**a.versions, **b.versions}}
    pairs |= {"dtype": (one.t.dtype, other.t.dtype), "grad_sync": (one.t.grad_sync, other.t.grad_sync)}
    if not is_sharded:
        del pairs["grad_sync"]
    del pairs["distgpt"]  # versions with the same sources compute the same
    result = [
        f"{name}: {_shown(before)} {one.words}, {_shown(now)} {other.words}"
        for name, (before, now) in pairs.items()
        if before != now
    ]
    if max(len(a.processors), len(b.processors)) > 1:
        result.append("different kinds of processors")
    if a.gpu and "True" not in (a.gpu.get("deterministic"), b.gpu.get("deterministic")):
        result.append("GPUs without --deterministic")
    if not parts and b.ranks > 1 and other.t.balance == "auto":
        result.append("--balance auto measures the ranks")
    return result


def _shown(value: object) -> str:
    """Format a value, and a list as counts: [1, 1, 2] → "2 × 1 and 1 × 2"."""
    if isinstance(value, list):
        return " and ".join(f"{n} × {each}" for each, n in Counter(value).items())
    return str(value or "none")
