"""The plan of a run: all that rank 0 decides before data are read, shared by one broadcast."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distgpt.comm.agree import on_root
from distgpt.comm.api import Comm
from distgpt.config import CHANGEABLE, ModelConfig, RunConfig, parse_toml
from distgpt.config.presets import resolve
from distgpt.data.batches import refuse_uneven
from distgpt.data.tokenizers.naming import tokenizer_from_json
from distgpt.errors import DataError, UsageError
from distgpt.saved.checkpoint import load_state, newest_intact, verify
from distgpt.saved.modelfile import Description, read_description
from distgpt.saved.rundir import RunDirectory, place_for, refuse_differences

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run computes, where it writes, and what it begins with; the same on all ranks."""

    run: RunConfig
    directory: RunDirectory
    checkpoint: Path | None  # a verified one, from which the run resumes
    state: dict[str, Any]  # what was saved in it
    origin: Description | None  # the model that is trained further: the checkpoint's, or that of --init

    @property
    def step(self) -> int:
        return int(self.state["step"])

    @property
    def resumed(self) -> RunConfig | None:
        """The run as it was when its checkpoint was written."""
        return self.origin.run if self.origin and self.checkpoint else None

    def micro_batches(self, ranks: int) -> int:
        """Micro-batches of a step so far, with which sums keep their order; 0 where unknown or outdated."""
        return int(self.state.get("rounds", 0)) if self.state.get("world_size") == ranks else 0


def configure(
    comm: Comm, preset: str | None, toml: Path | None, flags: Mapping[str, Any]
) -> tuple[str, RunConfig]:
    """Return a run's name and configuration as rank 0 resolves them. Collective."""
    name, text = on_root(comm, lambda: _resolved(preset, toml, flags))
    return name, _run(text)


def make_plan(
    comm: Comm,
    preset: str | None,
    toml: Path | None,
    flags: Mapping[str, Any],
    out: Path | None,
    resume: str | None,
    say: Say,
) -> Plan:
    """Resolve the settings, choose the directory, verify the checkpoint; write nothing. Collective.

    Without `out` the run gets a new directory runs/<name>, or resumes in the last one of that name. `resume`
    is "auto", for the newest intact checkpoint in there, or the path of one.
    """

    def decide() -> dict[str, Any]:
        name, text = _resolved(preset, toml, flags, out if resume else None)
        run = _run(text)
        refuse_uneven(run.train.batch_size, comm.size, run.train.grad_accum or 1)
        directory = RunDirectory(out or place_for(Path("runs"), name, resuming=resume == "auto"))
        checkpoint = _find_checkpoint(directory, resume, say)
        state = load_state(checkpoint) if checkpoint else {"step": 0}
        weights = checkpoint / "weights.safetensors" if checkpoint else run.train.init
        origin = read_description(Path(weights)) if weights else None
        if state["step"] > run.train.steps:
            raise UsageError(
                f"{checkpoint} is at step {state['step']}, past the {run.train.steps} steps asked for"
            )
        directory.refuse_conflict(run, resume is not None)
        if checkpoint and origin:
            refuse_differences(f"{checkpoint} is of a run", origin.run, run, CHANGEABLE)
        return {
            "run": text,
            "directory": str(directory.path),
            "checkpoint": checkpoint and str(checkpoint),
            "state": state,
            "origin": origin and _written(origin),
        }

    decided = on_root(comm, decide)
    origin = None
    if decided["origin"]:
        text, tokenizer = decided["origin"]
        known = tokenizer_from_json(tokenizer, "rank 0's tokenizer") if tokenizer else None
        origin = Description(_run(text), known)
    checkpoint = decided["checkpoint"]
    return Plan(
        run=_run(decided["run"]),
        directory=RunDirectory(Path(decided["directory"])),
        checkpoint=Path(checkpoint) if checkpoint else None,
        state=decided["state"],
        origin=origin,
    )


def _find_checkpoint(directory: RunDirectory, resume: str | None, say: Say) -> Path | None:
    """Return the verified checkpoint that `--resume` means, or None to start at step 0."""
    if resume is None:
        return None
    if resume != "auto":
        path = Path(resume)
        if not path.is_dir():
            raise DataError(f"--resume {resume}: there is no such checkpoint directory")
        verify(path)
        return path
    newest = newest_intact(directory.checkpoints)
    if newest is None:
        say(f"no checkpoint in {directory.checkpoints} yet: starting from the beginning")
        return None
    path, damaged = newest
    for line in damaged:
        say(f"skipping a damaged checkpoint: {line}")
    say(f"resuming from {path}")
    return path


def _resolved(
    preset: str | None, toml: Path | None, flags: Mapping[str, Any], resumed_in: Path | None = None
) -> tuple[str, str]:
    """The run's name and configuration in TOML. A resumed run no longer needs the weights it began with."""

    def model_in(weights: str) -> ModelConfig:
        saved = RunDirectory(resumed_in).saved() if resumed_in else None
        if saved and saved.train.init == weights:
            return saved.model
        return read_description(Path(weights)).run.model

    name, run = resolve(preset, toml, flags, model_in)
    return name, run.to_toml()


def _written(model: Description) -> list[str]:
    return [model.run.to_toml(), model.tokenizer.to_json() if model.tokenizer else ""]


def _run(toml: str) -> RunConfig:
    return RunConfig().with_values(parse_toml(toml, "rank 0's configuration"))
