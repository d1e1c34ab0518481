"""The directory of a run and the files in it, which only rank 0 touches."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Container
from dataclasses import fields
from pathlib import Path

from distgpt.config import CHANGEABLE, RunConfig, parse_toml
from distgpt.errors import UsageError
from distgpt.files import atomic_file, storage_errors


class RunDirectory:
    """The files of one run, by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.tokenizer = path / "tokenizer.json"
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.weights = path / "weights.safetensors"
        self.best = path / "best.safetensors"
        self.summary = path / "summary.json"

    def saved(self) -> RunConfig | None:
        """The configuration of the run in here, if there is one."""
        with storage_errors("use the run directory", self.path):
            if not self.config.exists():
                return None
            text = self.config.read_text(encoding="utf-8", errors="replace")
        return RunConfig().with_values(parse_toml(text, str(self.config)))

    def refuse_conflict(self, run: RunConfig, resuming: bool) -> None:
        """Raise a UsageError if the directory holds anything but this very run. Writes nothing."""
        with storage_errors("use the run directory", self.path):
            if saved := self.saved():
                refuse_differences(f"{self.path} holds a run", saved, run, CHANGEABLE if resuming else set())
                if not resuming:
                    raise UsageError(
                        f"{self.path} holds this run already; add --resume auto, or choose another --out"
                    )
            elif self.path.is_dir() and any(self.path.iterdir()):
                raise UsageError(f"{self.path} is not empty and holds no run; choose another --out")
            elif self.path.exists() and not self.path.is_dir():
                raise UsageError(f"{self.path} is not a directory; choose another --out")

    def create(self, run: RunConfig, tokenizer_json: str, step: int) -> None:
        """Create the directory with configuration and tokenizer; a failure leaves no new directory behind.

        Metrics of steps after `step`, which will be repeated, are dropped.
        """
        fresh = not self.path.exists()
        with storage_errors("use the run directory", self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                for path, text in ((self.config, run.to_toml()), (self.tokenizer, tokenizer_json)):
                    with atomic_file(path) as file:
                        file.write(text.encode())
                self._drop_metrics_after(step)
            except BaseException:
                if fresh:
                    shutil.rmtree(self.path, ignore_errors=True)
                raise

    def record(self, metrics: dict[str, float]) -> None:
        """Append one line to metrics.jsonl, with null for values that are not finite."""
        with storage_errors("write", self.metrics), self.metrics.open("a") as file:
            known = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
            file.write(json.dumps(known) + "\n")

    def _drop_metrics_after(self, step: int) -> None:
        """Keep the metrics up to a step, without the half line that a killed run may have left."""
        if not self.metrics.exists():
            return
        lines = self.metrics.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if step and 0 <= _step_of(line) <= step]
        if kept != lines:
            with atomic_file(self.metrics) as file:
                file.writelines(kept)


def _step_of(line: bytes) -> int:
    """The step of a line of metrics, -1 if the line is not whole."""
    try:
        return int(json.loads(line)["step"]) if line.endswith(b"\n") else -1
    except (ValueError, KeyError, TypeError):
        return -1


def refuse_differences(what: str, saved: RunConfig, run: RunConfig, changeable: Container[str]) -> None:
    """Raise a UsageError that names what differs. An unknown vocabulary size differs from none."""
    different = [
        f"{field.name} was {getattr(before, field.name)!r} and is now {getattr(now, field.name)!r}"
        for before, now in ((saved.model, run.model), (saved.train, run.train))
        for field in fields(before)
        if getattr(before, field.name) != getattr(now, field.name)
        and field.name not in changeable
        and (field.name != "vocab_size" or run.model.vocab_size)
    ]
    if different:
        raise UsageError(
            f"{what} with another configuration ({'; '.join(different[:3])}"
            f"{'; …' if len(different) > 3 else ''}); choose another --out"
        )


def place_for(parent: Path, name: str, resuming: bool) -> Path:
    """parent/name, or parent/name-2, -3, … if that is taken; when resuming, the last one taken."""
    count, path = 1, parent / name
    last = path
    while path.exists():
        last = path
        count += 1
        path = parent / f"{name}-{count}"
    return last if resuming else path
