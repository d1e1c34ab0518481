"""--decay-from: an end of a run whose learning rate is constant, as a new run from one of its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distgpt.comm.agree import on_root
from distgpt.comm.api import Comm
from distgpt.config import TrainConfig
from distgpt.errors import DataError, UsageError, refuse_beside
from distgpt.model.optim import learning_rate
from distgpt.saved.checkpoint import load_state
from distgpt.saved.rundir import RunDirectory, place_for
from distgpt.training.opening.dial import DEPTH, WITHIN
from distgpt.training.opening.resumption import find_run

DECAY_FROM = "decay_from"
OTHERS = (DEPTH, WITHIN, "train-minutes", "schedule", "decay-fraction", "init")

Asked = tuple[dict[str, Any], Path | None, str | None]  # flags, --out and --resume


def with_decay(comm: Comm, flags: Mapping[str, Any], out: Path | None, resume: str | None) -> Asked:
    """Return what --decay-from stands for: a branch whose schedule falls. Collective."""
    if DECAY_FROM not in flags:
        return dict(flags), out, resume
    found = on_root(comm, lambda: _decided(flags, out, resume))
    rest = {name: value for name, value in flags.items() if name != DECAY_FROM}
    return {**rest, **found["settings"]}, Path(found["out"]), found["resume"]


def _decided(flags: Mapping[str, Any], out: Path | None, resume: str | None) -> dict[str, Any]:
    """Return the settings of the fall, the new run's directory, and the checkpoint."""
    path, steps = Path(flags[DECAY_FROM]), flags.get("steps")
    others = {name: flags.get(name.replace("-", "_")) for name in OTHERS}
    refuse_beside("--decay-from", {"resume": resume, **others}, "it says where a run begins and how it ends")
    if not steps:
        raise UsageError("--decay-from lets the learning rate fall over the next --steps: say how many")
    if not path.is_dir():
        raise DataError(f"--decay-from {path}: there is no such checkpoint or run directory")
    of_checkpoint = path.parent.parent if len(path.parts) > 2 else path.resolve().parent.parent
    run = path if RunDirectory(path).saved() else of_checkpoint
    out = out or place_for(run.parent, f"{run.resolve().name}-decayed", resuming=False)
    found = find_run(str(path), out, "", lambda text: None)
    if found.in_place or found.settings is None or found.checkpoint is None:
        raise UsageError(f"--decay-from {path} begins a new run: give it another --out")
    step = load_state(found.checkpoint)["step"]
    _refuse_fallen(found.settings.train, step, found.checkpoint)
    end = step + steps
    fall = {"steps": end, "schedule": "wsd", "decay_fraction": steps / end, "train_minutes": 0.0}
    return {"settings": fall, "out": str(out), "resume": str(found.checkpoint)}


def _refuse_fallen(t: TrainConfig, step: int, checkpoint: Path) -> None:
    """Refuse a checkpoint from before or after the part of a run in which the learning rate is constant."""
    by_clock = bool(t.train_minutes) and t.schedule != "constant"
    if by_clock or step < t.warmup or learning_rate(t, step) != t.lr:
        raise UsageError(
            f"--decay-from {checkpoint}: the learning rate is not constant there (--schedule {t.schedule}):"
            " take a checkpoint of a run with --schedule constant, or with wsd from before it falls"
        )
