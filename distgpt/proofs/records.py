"""Reads what became of a run's steps from its files: starts, settings, numbers, checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from distgpt.core.base.checked import JsonObject, parse_object
from distgpt.core.base.errors import DataError, UsageError, nearest_path
from distgpt.core.base.files import read_small
from distgpt.core.config import RunConfig
from distgpt.core.saved.checkpoint import saved_checkpoints
from distgpt.core.saved.rundir import RunDirectory
from distgpt.proofs.kept import KEY, Facts
from distgpt.show.metrics import MOST_METRICS, MOST_STEPS, read_metrics

# Settings of which no bit of a step depends: what is shown, saved, measured and checked beside the steps.
# A text is compared by its fingerprint, not by its name.
NEUTRAL = frozenset(
    {
        *("data", "val", "val_tokens", "hellaswag", "eval_every", "sample_every", "save_every"),
        *("save_minutes", "save", "keep", "keep_every", "keep_every_minutes"),
        *("on_disk_error", "verify_every", "verify_data", "bad_steps_allowed"),
    }
)

Numbers = Mapping[str, float | None]  # of a step, by name; None: not finite
Changes = Mapping[str, tuple[Any, Any]]  # what a setting was, and what it is now


@dataclass(frozen=True, slots=True)
class Start:
    """A process that has taken steps of a run: those after `step`."""

    step: int
    event: JsonObject  # its line in history.jsonl
    changes: Changes
    facts: Facts | None  # None: of a version that did not keep them, or without this component

    @property
    def ranks(self) -> int | None:
        found = self.event.get("ranks")
        return found if type(found) is int else None


class Record:
    """The files of one run."""

    def __init__(self, path: Path) -> None:
        self.directory = RunDirectory(path)
        if not path.is_dir():
            raise UsageError(f"there is no directory {path}{nearest_path(path)}")
        config = self.directory.saved()
        if config is None:
            raise UsageError(f"{path} holds no run: there is no config.toml")
        self.config: RunConfig = config  # of the last start

    @property
    def path(self) -> Path:
        return self.directory.path

    @cached_property
    def steps(self) -> dict[int, Numbers]:
        """The numbers of each training step, as far as they were written."""
        if not self.directory.metrics.exists():
            return {}
        lines = read_metrics(self.directory.metrics)
        return {line.step: line.numbers for line in lines if "loss" in line.numbers}

    @cached_property
    def _events(self) -> list[tuple[int, JsonObject]]:
        """The lines of history.jsonl, each with its step."""
        path, found = self.directory.history, list[tuple[int, JsonObject]]()
        if not path.exists():
            return found
        content = read_small(path, MOST_METRICS)
        for number, line in enumerate(content[: content.rfind(b"\n") + 1].splitlines(), 1):
            event = parse_object(line, path)
            step = event.get("step")
            if type(step) is not int or not 0 <= step < MOST_STEPS:
                raise DataError(f"{path}: line {number} is of no step")
            found.append((step, event))
        return found

    @cached_property
    def starts(self) -> list[Start]:
        """The starts whose steps count, in order: one that began earlier has replaced those after it."""
        found: list[Start] = []
        for step, event in self._events:
            if KEY in event and found and found[-1].step == step:
                found[-1] = Start(step, found[-1].event, found[-1].changes, self._facts(event[KEY]))
            elif "ranks" in event and "changes" in event:
                found = [start for start in found if start.step < step]
                found.append(Start(step, event, self._changes(event["changes"]), None))
        return found

    def _facts(self, document: Any) -> Facts:
        try:
            return Facts.from_json(document if isinstance(document, dict) else {})
        except ValueError as error:
            raise DataError(f"{self.directory.history} is damaged at {KEY!r}: {error}") from None

    def _changes(self, document: Any) -> Changes:
        pairs: dict[str, Any] = document if isinstance(document, dict) else {"": None}
        if all(isinstance(pair, list) and len(pair) == 2 for pair in pairs.values()):
            return {name: (before, now) for name, (before, now) in pairs.items()}
        raise DataError(f"{self.directory.history} is damaged at 'changes'")

    @cached_property
    def skipped(self) -> dict[int, int]:
        """The batches that were left out before the steps after a step, where their number changed."""
        found: dict[int, int] = {}
        for step, event in self._events:
            if "changes" in event or "back_to" in event:  # a start without a checkpoint leaves none out
                from_weights = "changes" in event and not event.get("from")
                found = {} if from_weights else {at: n for at, n in found.items() if at <= step}
            if "back_to" in event and isinstance(count := event.get("skipped"), int):
                found[step] = count
        return found

    def starts_of(self, first: int, last: int) -> list[Start]:
        """Return the starts that have taken steps `first` to `last`."""
        later = [start for start in self.starts if first <= start.step < last]
        before = [start for start in self.starts if start.step < first]
        return before[-1:] + later

    def settings_of(self, step: int) -> RunConfig:
        """Return the settings of a step: those of the last start, without what later starts have changed."""
        config = self.config
        for start in reversed(self.starts):
            if start.step < step:
                break
            config = config.with_values({name: before for name, (before, _) in start.changes.items()})
        return config

    def checkpoints(self) -> Iterator[tuple[int, Path]]:
        """Yield the steps of the checkpoints that are there, and where they lie, the earliest first."""
        for path in reversed(saved_checkpoints(self.directory.checkpoints)):
            if not path.suffix:
                yield int(path.name.removeprefix("step-")), path
