"""The plan of a run: all that rank 0 decides before data are read.

Settings, directory and, for `--resume`, the run, its settings and its checkpoint.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from distgpt.core.base.errors import DataError, Say, UsageError
from distgpt.core.base.formatting import count
from distgpt.core.comm.agree import on_root
from distgpt.core.comm.api import Comm
from distgpt.core.config import RunConfig, TrainConfig
from distgpt.core.config.asked import Asked, resolve, resumed
from distgpt.core.data.named import resolve_data
from distgpt.core.data.tokenizers import tokenizer_from_json
from distgpt.core.saved.checkpoint import State, load_state
from distgpt.core.saved.modelfile import Base, Description, read_description
from distgpt.core.saved.named import weights_of
from distgpt.core.saved.rundir import RunDirectory, place_for
from distgpt.core.train.compatibility import refuse_unsuited
from distgpt.core.train.resumption import (
    Change,
    Resumption,
    changed,
    find_run,
    is_finished,
    refuse_impossible,
)
from distgpt.core.train.seams import kind_of


@dataclass(frozen=True, slots=True)
class Plan:
    """A run before it is opened: settings, directory, and where it begins. The same on all ranks."""

    run: RunConfig
    directory: RunDirectory
    checkpoint: Path | None  # a verified one, from which the run resumes
    state: State  # what was saved in it
    origin: Description | None  # the model that is trained further: the checkpoint's, or that of --init
    changes: dict[str, Change]  # settings of a resumed run that were others so far
    is_finished: bool = False  # a run to leave as it is
    until: int | None = None  # a step to end at for now, as if it were the last: the schedule stays as it is
    uncounted: float = 0.0  # seconds of this process that are none of the run's time

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


def make_plan(comm: Comm, asked: Asked, say: Say) -> Plan:
    """Resolve the settings, choose the directory, verify the checkpoint; write nothing. Collective.

    Without `asked.out` a new run gets a new directory runs/<name>.
    """
    if comm.size == 1:
        return _decide(asked, 1, say)
    return decode(on_root(comm, lambda: encode(_decide(asked, comm.size, say))))


def _decide(asked: Asked, ranks: int, say: Say) -> Plan:
    """Return the plan of rank 0, whose say it is."""
    if asked.resume is None:
        run = new_run(asked)
        found = Resumption(RunDirectory(asked.out or place_for(Path("runs"), asked.name, resuming=False)))
    else:
        found = find_run(asked.resume, asked.out, asked.name, say)
        run = _resumed_run(found.settings, asked) if found.settings else new_run(asked)
    refuse_unsuited(run.train, ranks, on_gpu=False)
    directory, checkpoint = found.directory, found.checkpoint
    if checkpoint:
        _refuse_moved(run.train)
    directory.refuse_undecodable()
    if dead := directory.refuse_second():
        say(f"{dead} has left this run without an end: taking over")
    state = State.from_json(load_state(checkpoint)) if checkpoint else State()
    origin = _origin(run, checkpoint)
    _refuse_conflicts(found, run, origin, state.step, asked.resume is not None)
    changes = changed(origin.run if checkpoint and origin else found.settings, run)
    is_done = is_finished(found, run, state, changes)
    if checkpoint and not is_done:
        say(f"resuming from {checkpoint}")
    return Plan(run, directory, checkpoint, state, origin, changes, is_done, uncounted=asked.uncounted)


def new_run(asked: Asked) -> RunConfig:
    """Return the configuration of a new run, in which `init` is the path of the weights. For rank 0."""
    init = asked.settings().get("init")
    if not init or not isinstance(init, str):
        return resolve(asked)
    weights = weights_of(Path(init), asked.fetches)
    run = resolve(asked, read_description(weights).run.model)
    return run.with_values({"init": str(weights)})


def _resumed_run(settings: RunConfig, asked: Asked) -> RunConfig:
    """Return a run's own configuration, changed by what is given now."""
    run = resumed(settings, asked)
    init = run.train.init
    return run.with_values({"init": str(weights_of(Path(init), asked.fetches))}) if init else run


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


# What rank 0 sends to the others. One process has the plan itself.


def encode(plan: Plan) -> dict[str, Any]:
    """Return a plan as JSON."""
    own = {name: getattr(plan, name) for name in ("changes", "is_finished", "until", "uncounted")}
    return {
        **own,
        "run": asdict(plan.run),
        "directory": str(plan.directory.path),
        "checkpoint": plan.checkpoint and str(plan.checkpoint),
        "state": plan.state.to_json(),
        "origin": plan.origin and _encode_description(plan.origin),
    }


def decode(wire: dict[str, Any]) -> Plan:
    """Return the plan that was encoded."""
    own = {
        "run": RunConfig.from_dict(wire["run"]),
        "directory": RunDirectory(Path(wire["directory"])),
        "checkpoint": Path(wire["checkpoint"]) if wire["checkpoint"] else None,
        "state": State.from_json(wire["state"]),
        "origin": wire["origin"] and _decode_description(wire["origin"]),
        "changes": {name: (before, now) for name, (before, now) in wire["changes"].items()},
    }
    return Plan(**{**wire, **own})


def _encode_description(model: Description) -> dict[str, Any]:
    found = {"run": asdict(model.run), "rounded": model.rounded, "base": model.base and asdict(model.base)}
    return {**found, "tokenizer": model.tokenizer and model.tokenizer.to_json()}


def _decode_description(wire: dict[str, Any]) -> Description:
    own = {
        "run": RunConfig.from_dict(wire["run"]),
        "tokenizer": wire["tokenizer"] and tokenizer_from_json(wire["tokenizer"], "rank 0's tokenizer"),
        "base": wire["base"] and Base(**wire["base"]),
    }
    return Description(**{**wire, **own})
