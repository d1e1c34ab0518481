"""A run's directory: config.toml, metrics.jsonl, checkpoints/, weights.safetensors. For rank 0 alone."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from distgpt.config import RunConfig, parse_toml
from distgpt.errors import UsageError
from distgpt.storage import atomic_file, storage_errors

# What may change when a run goes on: none of it alters what the steps so far computed.
CHANGEABLE = {"steps", "log_every", "save_every", "keep", "sample_every", "verify_every", "grad_sync"}


class RunDirectory:
    """The files of one run, by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.weights = path / "weights.safetensors"

    def prepare(self, run: RunConfig, going_on: bool) -> None:
        """Make the directory and save the configuration; refuses to mix two runs."""
        with storage_errors("use the run directory", self.path):
            if self.config.exists():
                self._refuse_conflict(run, going_on)
            elif self.path.is_dir() and any(self.path.iterdir()):
                raise UsageError(f"{self.path} is not empty and holds no run; choose another --out")
            self.path.mkdir(parents=True, exist_ok=True)
        with atomic_file(self.config) as file:
            file.write(run.to_toml().encode())

    def record(self, metrics: dict[str, Any]) -> None:
        """Append one line to metrics.jsonl."""
        with storage_errors("write", self.metrics), self.metrics.open("a") as file:
            file.write(json.dumps(metrics) + "\n")

    def _refuse_conflict(self, run: RunConfig, going_on: bool) -> None:
        text = self.config.read_text(encoding="utf-8", errors="replace")
        saved = RunConfig().with_values(parse_toml(text, str(self.config)))
        different = [
            f"{field.name} was {getattr(before, field.name)!r} and is now {getattr(now, field.name)!r}"
            for before, now in ((saved.model, run.model), (saved.train, run.train))
            for field in fields(before)
            if getattr(before, field.name) != getattr(now, field.name)
            and not (going_on and field.name in CHANGEABLE)
        ]
        if different:
            raise UsageError(
                f"{self.path} holds a run with another configuration ({'; '.join(different[:3])}"
                f"{'; …' if len(different) > 3 else ''}); choose another --out"
            )
        if not going_on:
            raise UsageError(
                f"{self.path} holds this run already; add --resume auto, or choose another --out"
            )


def free_name(parent: Path, name: str) -> Path:
    """parent/name, or parent/name-2, -3, … where that is taken."""
    count, path = 1, parent / name
    while path.exists():
        count += 1
        path = parent / f"{name}-{count}"
    return path
