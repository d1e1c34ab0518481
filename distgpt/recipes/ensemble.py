"""Ensembles: runs with consecutive seeds, whose models become one model that averages their predictions."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from distgpt.core.base.checked import parse_object
from distgpt.core.base.errors import reject_combination
from distgpt.core.base.files import read_small
from distgpt.core.comm.agree import on_root
from distgpt.core.comm.api import Comm
from distgpt.core.config.run_request import RunRequest
from distgpt.core.cpu.stages import Stage
from distgpt.core.model.model import Model
from distgpt.core.saved.modelfile import Description, load_model, read_description
from distgpt.core.saved.rundir import RunDirectory
from distgpt.core.train.assessment import Scorer
from distgpt.core.train.plan import Plan
from distgpt.core.train.run import Run
from distgpt.models.ensemble import ensemble_config, write_ensemble

# (request, stage, a note that names the model) → its run; None if it was finished
TrainOne = Callable[[RunRequest, Stage, str], Run | None]


@dataclass(frozen=True, slots=True)
class Ensemble:
    model: Model
    description: Description
    last: Run | None  # None: all runs were finished before
    loss: float | None  # validation loss; None if unknown
    losses: list[float]  # best validation losses of the models


def refuse_impossible(comm: Comm, plan: Plan) -> None:
    """Raise a UsageError if models like this run's cannot form an ensemble. Collective."""
    t = plan.config.train

    def check() -> None:
        reject_combination("--set ensemble", {"lora-rank": t.lora_rank}, "an ensemble combines whole models")
        ensemble_config(plan.config.model, t.ensemble)

    on_root(comm, check)


def is_complete(comm: Comm, plan: Plan) -> bool:
    """Return whether the run is finished and its ensemble is written. Collective."""
    groups = plan.config.model.norm_groups * plan.config.train.ensemble

    def is_written() -> bool:
        path = plan.directory.ensemble
        return path.exists() and read_description(path).run.model.norm_groups == groups

    return plan.is_finished and on_root(comm, is_written)


def train_others(plan: Plan, run: Run | None, stage: Stage, train_one: TrainOne) -> Ensemble:
    """Train all models of an ensemble but the first, or resume them; then combine them. Collective.

    `run`: the first model's, None if it was finished before.
    """
    path, size, seed = plan.directory.path, plan.config.train.ensemble, plan.config.train.seed
    runs = [plan.directory]
    for number in range(2, size + 1):
        each = RunDirectory(path.parent / f"{path.name}-member-{number}")
        request = RunRequest(
            toml=plan.directory.config,
            given={"seed": seed + number - 1, "ensemble": 1},
            out=each.path,
            resume="auto" if on_root(stage.comm, each.is_there) else None,
        )
        if run:
            run.step.release()
        note = f"model {number} of {size}, in {each.path}"
        run = train_one(request, replace(stage, begun=time.monotonic()), note) or run
        runs.append(each)
    return _combined(plan, runs, run, stage)


def _combined(plan: Plan, runs: list[RunDirectory], last: Run | None, stage: Stage) -> Ensemble:
    """Write the ensemble of finished runs, and evaluate it on the held-out text of `last`. Collective."""
    path, t = plan.directory.ensemble, plan.config.train
    files = [run.best if run.best.is_file() else run.weights for run in runs]
    on_root(stage.comm, lambda: write_ensemble(files, path))
    model, description = load_model(path, stage.kernels(t.dtype, t.matmul), stage.comm)
    validation = last.assessment.validation if last and last.assessment else None
    loss = validation.measure(Scorer(model, stage.comm)) if validation else None
    found = [parse_object(read_small(run.summary), run.summary).get("best_val_loss") for run in runs]
    losses = [each for each in found if isinstance(each, float)]
    return Ensemble(model, description, last, loss, losses)
