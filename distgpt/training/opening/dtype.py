"""--dtype auto: the number format of a new run that names none."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distgpt.comm.agree import on_root
from distgpt.comm.serial import SerialComm
from distgpt.config import AUTO_DTYPE, RunConfig
from distgpt.config.presets import named
from distgpt.dtypes import cost_of, expected, for_training
from distgpt.errors import Say
from distgpt.stages import Stage
from distgpt.training.opening.plan import begins_anew, configure

DTYPE = "dtype"


def with_dtype(
    stage: Stage,
    preset: str | None,
    toml: Path | None,
    flags: Mapping[str, Any],
    out: Path | None,
    resume: str | None,
    say: Say,
) -> dict[str, Any]:
    """Return the flags with the dtype of a new run. One that is named stays, and a resumed run has its own.

    Collective.
    """
    rest = {name: value for name, value in flags.items() if (name, value) != (DTYPE, AUTO_DTYPE)}

    def find() -> tuple[object, bool]:
        return named(preset, toml, flags, DTYPE), begins_anew(preset, toml, flags, out, resume)

    asked, is_new = on_root(stage.comm, find)
    if asked in (None, AUTO_DTYPE) and is_new:
        return _with_auto(stage, preset, toml, rest, say)
    if stage.comm.rank == 0 and (cost := cost_of(stage, asked)):
        say(cost)
    return rest


def _with_auto(
    stage: Stage, preset: str | None, toml: Path | None, rest: dict[str, Any], say: Say
) -> dict[str, Any]:
    found = for_training(stage, configure(stage.comm, preset, toml, rest)[1])
    if stage.comm.rank == 0 and found.why:
        say(f"{found.name}: {found.why} (--dtype)")
    return {**rest, DTYPE: found.name}


def is_open(preset: str | None, toml: Path | None, flags: Mapping[str, Any]) -> bool:
    """Return whether neither preset nor file nor flags name a dtype."""
    return named(preset, toml, flags, DTYPE) in (None, AUTO_DTYPE)


def decided(stage: Stage, run: RunConfig) -> RunConfig:
    """Return a run whose dtype is open with one. Collective."""
    return run.with_values({DTYPE: for_training(stage, run).name})


def foreseen(
    stage: str, preset: str | None, toml: Path | None, flags: Mapping[str, Any], tf32: bool, ranks: int = 1
) -> tuple[str, RunConfig]:
    """Return the name and configuration of a run that a stage of this name would begin on this machine."""
    name, run = configure(SerialComm(), preset, toml, flags, ranks, fetches=False)
    is_named = not is_open(preset, toml, flags)
    return name, run if is_named else run.with_values({DTYPE: expected(stage, run, tf32).name})
