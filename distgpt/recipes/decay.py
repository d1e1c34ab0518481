"""--decay-from: an end of a run whose learning rate is constant, as a new run from one of its checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from distgpt.core.base.errors import DataError, UsageError, refuse_beside
from distgpt.core.comm.api import Comm
from distgpt.core.config import TrainConfig
from distgpt.core.config.asked import Asked
from distgpt.core.config.setting import Values
from distgpt.core.model.optim import learning_rate
from distgpt.core.saved.checkpoint import load_state
from distgpt.core.saved.rundir import RunDirectory, place_for
from distgpt.core.train.resume import find_run
from distgpt.recipes.derived import everywhere

OTHERS = ("set train_minutes", "schedule", "set decay_fraction", "init")


def with_decay(asked: Asked, comm: Comm) -> Asked:
    """Return what --decay-from stands for: a branch whose schedule falls. Collective."""
    return everywhere(comm, lambda: _branch(asked, str(asked.decay_from)))


def _branch(asked: Asked, origin: str) -> Asked:
    """Return the branch: the settings of the fall, the new run's directory, and the checkpoint."""
    path, steps, out = Path(origin), asked.given.get("steps"), asked.out
    others = {name: asked.given.get(name.removeprefix("set ")) for name in OTHERS}
    others = {"resume": asked.resume, "depth": asked.depth, "within": asked.within, **others}
    refuse_beside("--decay-from", others, "it says where a run begins and how it ends")
    if not steps or not isinstance(steps, int):
        raise UsageError("--decay-from lets the learning rate fall over the next --steps: say how many")
    if not path.is_dir():
        raise DataError(f"--decay-from {path}: there is no such checkpoint or run directory")
    of_checkpoint = path.parent.parent if len(path.parts) > 2 else path.resolve().parent.parent
    run = path if RunDirectory(path).saved() else of_checkpoint
    out = out or place_for(run.parent, f"{run.resolve().name}-decayed", resuming=False)
    found = find_run(str(path), out, "", lambda text: None)
    if found.in_place or found.settings is None or found.checkpoint is None:
        raise UsageError(f"--decay-from {path} begins a new run: give it another --out")
    step = load_state(found.checkpoint).step
    _refuse_fallen(found.settings.train, step, found.checkpoint)
    end = step + steps
    fall: Values = {"steps": end, "schedule": "wsd", "decay_fraction": steps / end, "train_minutes": 0.0}
    given = {**asked.given, **fall}
    return replace(asked, decay_from=None, given=given, out=out, resume=str(found.checkpoint))


def _refuse_fallen(t: TrainConfig, step: int, checkpoint: Path) -> None:
    """Refuse a checkpoint from before or after the part of a run in which the learning rate is constant."""
    by_clock = bool(t.train_minutes) and t.schedule != "constant"
    if by_clock or step < t.warmup or learning_rate(t, step) != t.lr:
        raise UsageError(
            f"--decay-from {checkpoint}: the learning rate is not constant there (--schedule {t.schedule}):"
            " take a checkpoint of a run with --schedule constant, or with wsd from before it falls"
        )
