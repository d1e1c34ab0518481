"""--dtype auto: the number format of a new run that names none."""

from __future__ import annotations

from dataclasses import replace

from distgpt.core.base.errors import Say
from distgpt.core.comm.agree import on_root
from distgpt.core.config import AUTO_DTYPE, RunConfig
from distgpt.core.config.asked import Asked
from distgpt.core.cpu.stages import Stage, expected_dtype
from distgpt.core.train.plan import new_run
from distgpt.core.train.resumption import begins_anew

DTYPE = "dtype"


def with_dtype(asked: Asked, stage: Stage, say: Say) -> Asked:
    """Return what is asked for with the dtype of a new run. One that is named stays. Collective."""

    def decides() -> bool:
        if is_open(asked) and begins_anew(asked):
            return True
        if cost := stage.cost_of(asked.named(DTYPE)):
            say(cost)
        return False

    is_decided_here = on_root(stage.comm, decides)
    if asked.given.get(DTYPE) == AUTO_DTYPE:  # a resumed run has its own
        asked = replace(asked, given={name: value for name, value in asked.given.items() if name != DTYPE})
    if not is_decided_here:
        return asked
    found = stage.dtype_for_training(lambda: new_run(asked))
    if stage.comm.rank == 0 and found.why:
        say(f"{found.name}: {found.why} (--dtype)")
    return replace(asked, given={**asked.given, DTYPE: found.name})


def is_open(asked: Asked) -> bool:
    """Return whether neither preset nor file nor flags name a dtype."""
    return asked.named(DTYPE) in (None, AUTO_DTYPE)


def decided(stage: Stage, run: RunConfig) -> RunConfig:
    """Return a run whose dtype is open with one. Collective."""
    return run.with_values({DTYPE: stage.dtype_for_training(lambda: run).name})


def foreseen(stage: str, asked: Asked, tf32: bool) -> RunConfig:
    """Return the configuration of a new run that a stage of this name would begin on this machine."""
    run = new_run(asked)
    return run.with_values({DTYPE: expected_dtype(stage, run, tf32).name}) if is_open(asked) else run
