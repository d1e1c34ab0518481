"""The plan of a run: all that rank 0 decides before data are read, shared by one broadcast.

Settings, directory and, for `--resume`, the run, its settings and its checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from distgpt.comm.agree import on_root
from distgpt.comm.api import Comm
from distgpt.config import ModelConfig, RunConfig, TrainConfig, parse_toml
from distgpt.config.presets import resolve, resumed, run_name, tuning
from distgpt.data.named import resolve_data
from distgpt.data.tokenizers.naming import tokenizer_from_json
from distgpt.errors import DataError, Say, UsageError, refuse_beside
from distgpt.formatting import count
from distgpt.saved.checkpoint import State, load_state
from distgpt.saved.modelfile import Description, read_description
from distgpt.saved.named import weights_of
from distgpt.saved.rundir import RunDirectory, place_for
from distgpt.training.exchange.reproducible import usual_parts
from distgpt.training.opening.compatibility import refuse_unsuited
from distgpt.training.opening.dial import DEPTH, DIALLED, TOKENS, WITHIN, Dial
from distgpt.training.opening.kinds import kind_of
from distgpt.training.opening.resumption import (
    Resumption,
    changed,
    find_run,
    is_finished,
    refuse_impossible,
)

DETERMINISTIC = (
    "deterministic"  # a flag of CPU stages: reproducible_parts, if no source of settings names them
)
TUNED = "tune"  # the name of runs on chats
NO_SETTINGS = (DETERMINISTIC, DEPTH, WITHIN, TOKENS)


@dataclass(frozen=True, slots=True)
class Plan:
    """A run before it is opened: settings, directory, and where it begins. The same on all ranks."""

    run: RunConfig
    directory: RunDirectory
    checkpoint: Path | None  # a verified one, from which the run resumes
    state: State  # what was saved in it
    origin: Description | None  # the model that is trained further: the checkpoint's, or that of --init
    changes: dict[str, Any]  # settings of a resumed run that were others so far: [before, now]
    is_finished: bool = False  # a run to leave as it is
    until: int | None = None  # a step to end at for now, as if it were the last: the schedule stays as it is

    @property
    def step(self) -> int:
        return self.state.step

    @property
    def resumed(self) -> RunConfig | None:
        """Return the run as it was when its checkpoint was written."""
        return self.origin.run if self.origin and self.checkpoint else None

    def is_of_same_text(self, fingerprint: str) -> bool:
        """Return whether the checkpoint was trained on the text of this fingerprint."""
        return self.state.corpus == fingerprint

    def micro_batches(self, ranks: int) -> int:
        """Return the micro-batches of a step so far, which keep the sums' order; 0 if unknown or outdated."""
        same = self.state.ranks == ranks and "reproducible_parts" not in self.changes
        return self.state.micro_batches if same else 0

    def shares(self, fitted: TrainConfig, ranks: int, hosts: int) -> list[int] | None:
        """Return the sequences of each rank in a micro-batch so far; None if that cannot be so again."""
        known = self.state.shares or []
        same = self.state.ranks == len(known) == ranks and self.state.hosts == hosts
        return known if same and sum(known) * fitted.grad_accum == fitted.batch_size else None


def configure(
    comm: Comm,
    preset: str | None,
    toml: Path | None,
    flags: Mapping[str, Any],
    ranks: int = 0,
    fetches: bool = True,
) -> tuple[str, RunConfig]:
    """Return a run's name and configuration as rank 0 resolves them. Collective.

    `ranks`: of the run, if not those of `comm`. `fetches`: see `weights_of`.
    """
    flags, deterministic, dial = _plain(flags, ranks or comm.size)

    def decide() -> list[str]:
        name, run = _resolved(preset, toml, flags, dial, ranks or comm.size, fetches)
        return [name, (_with_parts(run) if deterministic else run).to_toml()]

    name, text = on_root(comm, decide)
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

    Without `out` a new run gets a new directory runs/<name>. What `resume` may be: see `find_run`.
    """

    decided = on_root(comm, lambda: _decide(comm.size, preset, toml, flags, out, resume, say))
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
        state=State.from_json(decided["state"]),
        origin=origin,
        changes=decided["changes"],
        is_finished=decided["is_finished"],
    )


def _decide(
    ranks: int,
    preset: str | None,
    toml: Path | None,
    flags: Mapping[str, Any],
    out: Path | None,
    resume: str | None,
    say: Say,
) -> dict[str, Any]:
    """Return what rank 0 broadcasts: a plan as JSON."""
    name = _name(preset, toml, flags)
    flags, deterministic, dial = _plain(flags, ranks)
    if resume is None:
        run = _resolved(preset, toml, flags, dial, ranks)[1]
        found = Resumption(RunDirectory(out or place_for(Path("runs"), name, resuming=False)))
    else:
        found = find_run(resume, out, name, say)
        run = _resumed(found, preset, toml, flags, dial, ranks)
    run = _with_parts(run) if deterministic else run
    if dial and not found.settings:
        say(dial.described(run))
    refuse_unsuited(run.train, ranks, on_gpu=False)
    directory, checkpoint = found.directory, found.checkpoint
    if checkpoint:
        _refuse_moved(run.train)
    directory.refuse_undecodable()
    if dead := directory.refuse_second():
        say(f"{dead} has left this run without an end: taking over")
    state = load_state(checkpoint) if checkpoint else {"step": 0}
    origin = _origin(run, checkpoint)
    _refuse_conflicts(found, run, origin, state["step"], resume is not None)
    changes = changed(origin.run if checkpoint and origin else found.settings, run)
    is_done = is_finished(found, run, state, changes)
    if checkpoint and not is_done:
        say(f"resuming from {checkpoint}")
    return {
        "run": run.to_toml(),
        "directory": str(directory.path),
        "checkpoint": checkpoint and str(checkpoint),
        "state": state,
        "origin": origin and _written(origin),
        "changes": changes,
        "is_finished": is_done,
    }


def _origin(run: RunConfig, checkpoint: Path | None) -> Description | None:
    """Return the model that is trained further, if there is one; refuse one that cannot be."""
    weights = checkpoint / "weights.safetensors" if checkpoint else run.train.init
    if not weights:
        return None
    origin = read_description(Path(weights))
    kind_of(run.train).refuse_origin(origin, Path(weights), run.train, resumed=checkpoint is not None)
    return origin


def _refuse_conflicts(
    found: Resumption, run: RunConfig, origin: Description | None, step: int, resuming: bool
) -> None:
    """Refuse settings that the checkpoint, or the run in this directory, cannot go on with."""
    if found.checkpoint and origin:
        refuse_impossible(f"{found.checkpoint} is of a run", origin.run, run)
    if found.settings and found.in_place:
        refuse_impossible(f"{found.directory.path} holds a run", found.settings, run)
    else:
        found.directory.refuse_conflict(run, resuming)
    if step > run.train.steps and not run.train.train_minutes:
        steps = count(run.train.steps, "step")
        raise UsageError(f"{found.checkpoint} is at step {step}, past the {steps} asked for")


def _refuse_moved(t: TrainConfig) -> None:
    """Refuse to resume a run whose text or model is gone, or cannot be found from here."""
    for option, text in {"--data": t.data, "--val": t.val or t.data}.items():
        try:
            resolve_data(text)
        except DataError as error:
            raise DataError(f"{error}: {option} says where the text of this run is now") from None
    kind_of(t).refuse_moved(t)


def begins_anew(
    preset: str | None, toml: Path | None, flags: Mapping[str, Any], out: Path | None, resume: str | None
) -> bool:
    """Return whether there is no run yet that `resume` asks for."""
    if resume != "auto":
        return resume is None
    found = out or place_for(Path("runs"), _name(preset, toml, flags), resuming=True)
    return RunDirectory(found).saved() is None


def _name(preset: str | None, toml: Path | None, flags: Mapping[str, Any]) -> str:
    if flags.get("chats") and not toml:
        return TUNED
    return run_name(DIALLED if not preset and not toml and flags.keys() & {DEPTH, WITHIN} else preset, toml)


def _resolved(
    preset: str | None,
    toml: Path | None,
    flags: Mapping[str, Any],
    dial: Dial | None,
    ranks: int,
    fetches: bool = True,
) -> tuple[str, RunConfig]:
    def model_in(weights: str) -> ModelConfig:
        return read_description(weights_of(Path(weights), fetches)).run.model

    if dial is None:
        of_chats = (partial(tuning, ranks),) if flags.get("chats") else ()
        name, run = resolve(preset, toml, flags, model_in, *of_chats)
        return name, _with_weights(run, fetches)
    if preset not in (None, DIALLED):
        raise UsageError(f"--depth is for the preset {DIALLED}: leave out --preset {preset}")
    return resolve(DIALLED, toml, flags, model_in, dial.settings)


def _resumed(
    found: Resumption,
    preset: str | None,
    toml: Path | None,
    flags: Mapping[str, Any],
    dial: Dial | None,
    ranks: int,
) -> RunConfig:
    """Return the run's own configuration, changed by what is given now."""
    if found.settings is None:
        return _resolved(preset, toml, flags, dial, ranks)[1]
    same = {"n_layer": dial.depth} if dial else {}
    if (asked := found.settings.train.within_minutes) and flags.get("within_minutes") == asked:
        # The same command again, as of a job that is queued again: a run that needs less time keeps its own.
        flags = {name: value for name, value in flags.items() if name != "train_minutes"}
    return _with_weights(resumed(found.settings, preset, toml, {**same, **flags}))


def _plain(flags: Mapping[str, Any], ranks: int) -> tuple[dict[str, Any], bool, Dial | None]:
    """Return the flags that are settings; of the others whether DETERMINISTIC is there, and the dial."""
    settings = {name: value for name, value in flags.items() if name not in NO_SETTINGS}
    if "steps" in settings:
        refuse_beside("--steps", {"epochs": settings.get("epochs")}, "each says when a run ends")
        settings["epochs"] = 0.0
    depth, tokens = flags.get(DEPTH), flags.get(TOKENS, 0.0)
    return settings, bool(flags.get(DETERMINISTIC)), None if depth is None else Dial(depth, tokens, ranks)


def _with_parts(run: RunConfig) -> RunConfig:
    """Return the run with a number of reproducible parts."""
    return (
        run
        if run.train.reproducible_parts
        else run.with_values({"reproducible_parts": usual_parts(run.train.batch_size)})
    )


def _with_weights(run: RunConfig, fetches: bool = True) -> RunConfig:
    """Return the run with the path of the weights that --init stands for."""
    init = run.train.init
    return run.with_values({"init": str(weights_of(Path(init), fetches))}) if init else run


def _written(model: Description) -> list[str]:
    return [model.run.to_toml(), model.tokenizer.to_json() if model.tokenizer else ""]


def _run(toml: str) -> RunConfig:
    return RunConfig().with_values(parse_toml(toml, "rank 0's configuration"))
