"""A training run's checkpoints: what is saved of a run, found again, and restored."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from distgpt.comm.api import Comm
from distgpt.errors import DataError
from distgpt.model.model import Model
from distgpt.model.optim import AdamW
from distgpt.saved import checkpoint
from distgpt.saved.modelfile import Description, fill, on_host
from distgpt.saved.rundir import RunDirectory

Say = Callable[[str], None]


def find_checkpoint(directory: RunDirectory, resume: str | None, say: Say) -> Path | None:
    """Return the verified checkpoint that `--resume` means, or None to start at step 0. For rank 0."""
    if resume is None:
        return None
    if resume != "auto":
        path = Path(resume)
        if not path.is_dir():
            raise DataError(f"--resume {resume}: there is no such checkpoint directory")
        checkpoint.verify(path)
        return path
    newest = checkpoint.newest_intact(directory.checkpoints)
    if newest is None:
        say(f"no checkpoint in {directory.checkpoints} yet: starting from the beginning")
        return None
    path, damaged = newest
    for line in damaged:
        say(f"skipping a damaged checkpoint: {line}")
    say(f"resuming from {path}")
    return path


def save(
    directory: RunDirectory,
    step: int,
    description: Description,
    model: Model,
    optimizer: AdamW,
    state: dict[str, Any],
) -> None:
    """Write a checkpoint and drop the oldest. For rank 0."""
    moments = on_host(model, optimizer.m, "m/") | on_host(model, optimizer.v, "v/")
    groups = {
        "weights": (on_host(model, model.weights), description.to_metadata()),
        "optimizer": (moments, {}),
    }
    keep = description.run.train.keep
    checkpoint.save_checkpoint(directory.checkpoints, step, groups, state, keep)


def restore(comm: Comm, path: Path, model: Model, optimizer: AdamW) -> None:
    """Read weights and moments of a verified checkpoint on rank 0 and share them. Collective."""
    moments = {"m/": optimizer.m, "v/": optimizer.v}
    for stem, buffers in (("weights", {"": model.weights}), ("optimizer", moments)):
        fill(comm, model, buffers, partial(checkpoint.load_group, path, stem))


def saved_best_loss(state: dict[str, Any], path: Path, directory: RunDirectory, tokens: int) -> float:
    """Return the lowest validation loss so far, if over as many tokens and if its weights still exist."""
    best = state.get("best")
    own = path.resolve().parent == directory.checkpoints.resolve()
    if not best or not own or best["tokens"] != tokens or not directory.best.exists():
        return math.inf
    return float(best["loss"])


def refuse_changed_text(state: dict[str, Any], path: Path, fingerprint: str) -> None:
    """Refuse to resume with another text under the same name. For rank 0."""
    if state.get("corpus") != fingerprint:
        raise DataError(
            f"the text has changed since {path} was written: resume with the old text, or start a new run"
        )
