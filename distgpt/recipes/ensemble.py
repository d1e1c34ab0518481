"""Ensembles: runs with consecutive seeds, whose models become one model that averages their predictions."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from distgpt.core.base.checked import parse_object
from distgpt.core.base.errors import DataError, Say, UsageError, reject_combination
from distgpt.core.base.files import atomic_file, read_small
from distgpt.core.comm.agree import on_root
from distgpt.core.config import SETTINGS, RunConfig
from distgpt.core.config.run_request import RunRequest
from distgpt.core.cpu.stages import Stage
from distgpt.core.model.model import Model
from distgpt.core.saved.modelfile import Description, load_model, read_description
from distgpt.core.saved.rundir import RunDirectory
from distgpt.core.train.assessment import Scorer
from distgpt.core.train.plan import Plan, make_plan
from distgpt.core.train.run import Run
from distgpt.models.ensemble import ensemble_config, write_ensemble


@dataclass(frozen=True, slots=True)
class Ensemble:
    model: Model
    description: Description
    trained: int  # models that this process trained
    last: Run | None  # the last of them
    loss: float | None  # validation loss; None if unknown
    losses: list[float]  # best validation losses of the models


def is_possible(config: RunConfig) -> bool:
    """Return whether models like this run's can form an ensemble."""
    try:
        ensemble_config(config.model, 2)
    except UsageError:
        return False
    return not config.train.lora_rank


def refuse_impossible(plan: Plan) -> None:
    """Raise a UsageError if the run and others like it cannot form an ensemble. For rank 0."""
    t = plan.config.train
    reject_combination("--set ensemble", {"lora-rank": t.lora_rank}, "an ensemble combines whole models")
    reject_combination("--set ensemble", {"chats": t.chats}, "tune the ensemble of pretrained models")
    ensemble_config(plan.config.model, t.ensemble)
    SETTINGS["seed"].check("seed", t.seed + t.ensemble - 1)
    if plan.checkpoint and not plan.directory.owns(plan.checkpoint):
        raise UsageError("a run from another run's checkpoint trains one model; drop --set ensemble")
    if not plan.checkpoint and (existing := [each.path for each in _others(plan) if each.is_there()]):
        raise UsageError(f"{existing[0]} already exists; choose another --out")


def train_ensemble(
    plan: Plan, stage: Stage, train_planned: Callable[[Plan, Stage], Run], say: Say
) -> Ensemble | None:
    """Train all models of an ensemble, or resume them, and combine them. None if that was done. Collective.

    `plan`: of the first model.
    """
    comm, t = stage.comm, plan.config.train

    def is_complete() -> bool:
        refuse_impossible(plan)
        if not plan.is_finished:
            return False
        path, groups = plan.directory.ensemble, plan.config.model.norm_groups * t.ensemble
        with suppress(DataError):  # a damaged file is written again
            if path.exists() and read_description(path).run.model.norm_groups == groups:
                return True
        if plan.changes:  # the other models read them, and nothing else will write them
            with atomic_file(plan.directory.config) as file:
                file.write(plan.config.to_toml().encode())
        return False

    if on_root(comm, is_complete):
        return None
    last = None if plan.is_finished else train_planned(plan, stage)
    trained = int(last is not None)
    for number, directory in enumerate(_others(plan), 2):
        if comm.rank == 0:
            say(f"model {number} of {t.ensemble}, in {directory.path}")
        request = RunRequest(
            toml=plan.directory.config,
            given={"seed": t.seed + number - 1, "ensemble": 1},
            out=directory.path,
            resume="auto" if on_root(comm, directory.is_there) else None,
        )
        stage = replace(stage, begun=time.monotonic())
        each = make_plan(stage, request, say)
        if not each.is_finished:
            last = None
            gc.collect()  # frees the last model
            last = train_planned(replace(each, directory=directory), stage)
            trained += 1
    return _combined(plan, stage, last, trained)


def _others(plan: Plan) -> list[RunDirectory]:
    """Return the directories of all models but the first."""
    own = plan.directory.path
    path = own if own.name.strip(".") else own.resolve()
    numbers = range(2, plan.config.train.ensemble + 1)
    return [RunDirectory(path.parent / f"{path.name}-member-{number}", own) for number in numbers]


def _combined(plan: Plan, stage: Stage, last: Run | None, trained: int) -> Ensemble:
    """Write the ensemble of finished runs, and evaluate it on the held-out text of `last`. Collective."""
    path, t, comm = plan.directory.ensemble, plan.config.train, stage.comm
    runs = [plan.directory, *_others(plan)]

    def combine() -> list[float]:
        write_ensemble([run.path for run in runs], path)
        found = [parse_object(read_small(run.summary), run.summary).get("best_val_loss") for run in runs]
        return [each for each in found if isinstance(each, float)]

    losses = on_root(comm, combine)
    model, description = load_model(path, stage.kernels(t.dtype, t.matmul_backend), comm)
    validation = last.assessment.validation if last and last.assessment else None
    loss = validation.measure(Scorer(model, comm)) if validation else None
    return Ensemble(model, description, trained, last, loss, losses)
