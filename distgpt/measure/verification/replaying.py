"""`distgpt replay`: recompute steps of a run, and compare losses, norms and weights with its files.

The replay starts from a checkpoint of the run or from its initial weights, on any number of ranks. It writes
to a temporary directory, not to the run, which may still be training.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from distgpt.core.base.errors import DataError, DisagreementError, Say, UsageError
from distgpt.core.base.files import storage_errors
from distgpt.core.base.formatting import count
from distgpt.core.comm.agree import collective_error, on_root
from distgpt.core.components import Components, components
from distgpt.core.config import RunConfig, TrainConfig
from distgpt.core.cpu.first_use import COMPILING
from distgpt.core.cpu.stages import Stage
from distgpt.core.data.loading import kind_of
from distgpt.core.model.optim import learning_rate
from distgpt.core.saved.checkpoint import State, latest_valid_checkpoint, load_state, verify
from distgpt.core.saved.modelfile import read_description
from distgpt.core.saved.rundir import RunDirectory
from distgpt.core.saved.tensors import fingerprint, read_header, read_rows
from distgpt.core.train.interfaces import Listener, StepPolicy
from distgpt.core.train.loop import finish_steps
from distgpt.core.train.parallel_strategy import WEIGHTS
from distgpt.core.train.plan import Plan, reject_unsuited
from distgpt.core.train.progress import Progress
from distgpt.core.train.run import BadStep, Run
from distgpt.core.train.setup import open_run
from distgpt.core.train.step import InFlight, no_flags
from distgpt.measure.verification.kept import Facts, facts_of
from distgpt.measure.verification.records import (
    NEUTRAL,
    Kind,
    Record,
    Side,
    Start,
    distance,
    numbers_apart,
    tabulated,
    tolerance_of,
    why_rounding,
)

SAME, ROUNDING, DIFFERENT, UNJUDGED = "same", "rounding", "different", "unjudged"
IN_RUN, HERE = "in the run", "here"
# Numbers of a step to compare, by their names in metrics.jsonl.
COMPARED = {"loss": "loss", "grad_norm": "gradient norm", "lr": "learning rate"}
WHOLE_NATS = 0.5  # rounding never changes a loss by more, at any step


@dataclass(slots=True)
class Found:
    """Findings of a replay. Lists are in step order."""

    run: str
    steps: tuple[int, int]  # the requested steps
    begun: int  # step of the checkpoint, 0 for the initial weights
    ranks: int = 1
    why: list[str] = field(default_factory=list)  # why results may differ bitwise; if empty, they must not
    judged: int = 0  # steps in which differences are judged as rounding or more
    kinds: dict[str, Kind] = field(default_factory=lambda: {name: Kind() for name in COMPARED})
    weights: dict[int, Kind] = field(default_factory=dict)  # comparisons, by the step of a checkpoint

    @property
    def verdict(self) -> str:
        if not any(kind.words for kind in [*self.kinds.values(), *self.weights.values()]):
            return SAME
        if difference(self):
            return DIFFERENT
        return UNJUDGED if self.unjudged == _steps(*self.steps) else ROUNDING

    @property
    def unjudged(self) -> str:
        """The requested steps in which rounding may have grown too far to judge."""
        first, last = self.steps
        first = max(first, self.begun + self.judged + 1)
        return _steps(first, last) if self.why and first <= last else ""

    def to_json(self) -> dict[str, object]:
        return {"verdict": self.verdict, "promised": not self.why, **asdict(self)}


class Replayed(Components):
    """Default components, except for the policy that rejects bad steps."""

    def step_policy(self, t: TrainConfig, progress: Progress) -> StepPolicy:
        return components().step_policy(t, progress)


def replay(again: Again) -> Found | None:
    """Return the findings on rank 0, None on other ranks. Collective."""
    stage, comm = again.stage, again.stage.comm
    with storage_errors("create a directory in", Path(os.environ.get("TMPDIR", "/tmp"))):
        folder = Path(tempfile.mkdtemp(prefix="distgpt-replay-")) if comm.rank == 0 else Path()
    try:
        task = on_root(comm, lambda: again.task(folder / "run"))
        tokenized = again.path.resolve().parent / "tokenized"
        if comm.rank == 0 and tokenized.is_dir():
            (folder / "tokenized").symlink_to(tokenized)
        if task["threads"]:
            stage = replace(stage, threads=task["threads"])
        plan = task["plan"]
        run = open_run(plan, stage, again, parts=Replayed())
        if task["data"] and run.batches.fingerprint != task["data"]:
            changed = f"{plan.config.train.data} or its tokenizer has changed since the run"
            raise collective_error(DataError(f"{changed}; pass the old one with --data"))
        again.begun(run)
        skipped, elapsed, in_flight = dict(task["skipped"]), dict(task["elapsed"]), InFlight()
        for number in range(run.progress.step, again.last):
            run.batches.skipped = skipped.get(number, run.batches.skipped)
            in_flight.add_launched(run.launch(number, run.batches, no_flags, elapsed.get(number)))
            try:
                finish_steps(run, in_flight, leave=0)
            except BadStep as bad:
                what = f"step {bad.step} is bad here, but was not in the run: {bad.reason}"
                raise collective_error(DisagreementError(what)) from None
            again.compare_weights(run)
            run.step.restart_clock()
        if comm.rank == 0:
            run.directory.lock.release()
    finally:
        if comm.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    return again.found if comm.rank == 0 else None


@dataclass(slots=True)
class Again(Listener):
    """A replay of steps `first` to `last`. Only rank 0 has the run's record; the others compute."""

    path: Path
    first: int
    last: int
    values: Mapping[str, bool | int | float | str]  # dtype, data, init that replace the run's
    keeps_threads: bool  # uses the run's number of threads
    stage: Stage
    say: Say
    record: Record = field(init=False)
    starts: list[Start] = field(init=False)  # starts that took the steps
    found: Found = field(init=False)
    opening: str = ""
    tolerance: float = 0.0
    with_weights: dict[int, str] = field(default_factory=dict)  # checkpoints to compare, by step

    def task(self, folder: Path) -> dict[str, Any]:
        """Return the steps to take, up to `plan.until`, for all ranks. Only on rank 0."""
        size = self.stage.comm.size
        self.record = record = Record(self.path)
        last = max((*record.steps, *(step for step, _ in record.checkpoints())), default=0)
        if self.last > last:
            raise UsageError(f"{self.path} has only {count(last, 'step')}, not {self.last}")
        checkpoint, damaged = _before(record, self.first)
        state = load_state(checkpoint) if checkpoint else State()
        self.starts = _starts(record, state.step, self.first, self.last)
        facts = self.starts[0].facts if self.starts else None
        config = self._settings(record.settings_of(self.last), facts)
        t = config.train
        refuse_other_ranks(t.outer_every, self.starts, size)
        reject_unsuited(t, size, self.stage.on_gpu)
        components().model(t).reject_moved(t)
        if not t.chats:
            try:
                kind_of(t.data)
            except DataError as error:
                raise DataError(f"{error}; pass the run's text with --data") from None
        steps = range(state.step, self.last)
        known = any(step in record.steps for step in range(self.first, self.last + 1))
        if not known and not self._checkpoints_from(self.first - 1):
            raise UsageError(f"{record.path} has no metrics and no checkpoints of these steps")
        if not checkpoint and facts and facts.init and fingerprint(Path(t.init)) != facts.init:
            raise DataError(f"{t.init} has changed since the run; pass the old file with --init")
        self.found = Found(str(self.path), (self.first, self.last), state.step)
        before = self.first - 1 - state.step
        self.opening = "\n".join(
            [
                *damaged,
                f"{_steps(self.first, self.last)} of {self.path}, from"
                f" {checkpoint or 'its first weights'}"
                + (f", which takes {count(before, 'more step')}" if before else ""),
            ]
        )
        return {
            "plan": _plan(config, RunDirectory(folder), checkpoint, state, self.last),
            "data": facts.data if facts else state.corpus or "",  # fingerprint of the text, "" if unknown
            "elapsed": [*_elapsed(record, config, steps).items()],  # fractions of time, for learning rates
            "skipped": [*record.skipped.items()],  # number of skipped batches, from a step on
            # of each rank; 0: the stage's default
            "threads": threads_of(facts, t.reproducible_parts, size) if self.keeps_threads else 0,
        }

    def _settings(self, config: RunConfig, facts: Facts | None) -> RunConfig:
        """Return the run's settings, with the memory settings it chose, without evaluation and sampling."""
        values: dict[str, bool | int | float | str] = {"val": "", "hellaswag": "", "save": "sync"}
        values |= {"eval_every": 0, "sample_every": 0, "verify_every": 0}
        if facts and facts.ranks == self.stage.comm.size and bool(facts.gpu) == self.stage.on_gpu:
            values["recompute"] = facts.recompute
            if not config.train.reproducible_parts:
                values["grad_accum"] = facts.micro_batches
        return config.with_values({**values, **self.values})

    def _checkpoints_from(self, first: int) -> dict[int, str]:
        """Return the checkpoints after a step, up to the last replayed one."""
        last = self.last
        return {step: str(path) for step, path in self.record.checkpoints() if first < step <= last}

    # Called by all ranks while steps are taken.

    def begun(self, run: Run) -> None:
        """Report whether the results must be bitwise identical. Collective."""
        facts = facts_of(run)

        def promise() -> dict[int, str]:
            t = self.record.settings_of(self.last).train
            result = self.found
            result.ranks = run.comm.size
            here = Side(facts, run.settings, HERE)
            thens = [start.facts for start in self.starts] or [None]
            reasons = [reason for then in thens for reason in why_rounding(Side(then, t, IN_RUN), here)]
            result.why = list(dict.fromkeys(reasons))
            self.tolerance, result.judged = tolerance_of(t, run.settings)
            promised = f"rounding is expected: {'; '.join(result.why)}" if result.why else ""
            self.say(f"{self.opening}\n{promised or 'bitwise identity is expected'}")
            # There is no valid checkpoint between the start and `first`: the replay would start there.
            return self._checkpoints_from(self.first - 1)

        self.with_weights = on_root(run.comm, promise)

    # Listener methods, called on rank 0.

    def noted(self, text: str) -> None:
        if text.startswith(COMPILING):  # compiling may take a minute
            self.say(text)

    def stepped(self, here: dict[str, float]) -> None:
        """Compare the numbers of a step. Rounding grows, so later steps must be far off to count."""
        step = int(here["step"])
        known, is_late = self.record.steps.get(step, {}), step - self.found.begun > self.found.judged
        # A norm is a sum over gradients, which rounding changes more than the loss.
        allowed = {"loss": self.tolerance, "grad_norm": 100 * self.tolerance, "lr": 1e-12}
        for name, kind in self.found.kinds.items():
            if name not in known:
                continue
            before, now = known[name], here[name]
            is_requested, off = step >= self.first, distance(before, now)
            kind.add(step, numbers_apart(before, now, (IN_RUN, HERE)) if off else "", is_requested)
            is_far = name == "loss" and before is not None and abs(before - now) > WHOLE_NATS
            if not off or (is_late and math.isfinite(off) and not is_far):
                continue
            kind.largest = max(kind.largest, off) if math.isfinite(off) else kind.largest
            if off > allowed[name] and kind.beyond is None:
                kind.beyond = step

    def compare_weights(self, run: Run) -> None:
        """Compare the weights after this step, if a checkpoint has them. Collective."""
        step = run.progress.step
        if path := self.with_weights.get(step):
            run.checkpoints.on_root(partial(self._compare_weights, run, step, Path(path)))

    def _compare_weights(self, run: Run, step: int, path: Path) -> None:
        """Compare all tensors of a checkpoint, weights first, in forward order. Only on rank 0."""
        verify(path)
        result = Kind()
        for stem, tensors in run.checkpoints.groups().items():
            file = path / f"{stem}.safetensors"
            header = read_header(file) if file.exists() else None
            for name in reversed(list(tensors)):
                if header is None or name not in header.tensors:
                    continue  # belongs to a rank that this job does not have
                here = tensors[name]
                before = np.empty(header.tensors[name].shape, here.dtype)
                read_rows(file, header, name, before)
                integer = f"i{here.dtype.itemsize}"
                differing = int(np.count_nonzero(before.view(integer) != np.asarray(here).view(integer)))
                which = name if stem == WEIGHTS else f"{stem} {name}"
                words = f"{which}: {differing:,} of {count(before.size, 'element')}"
                result.add(step, words if differing else "")
        self.found.weights[step] = result


def _before(record: Record, first: int) -> tuple[Path | None, list[str]]:
    """Return the newest valid checkpoint before a step, and lines about newer corrupt ones.

    None: start from the run's initial weights.
    """
    damaged = []
    try:
        if newest := latest_valid_checkpoint(record.directory.checkpoints, first - 1):
            return newest
    except DataError as error:
        damaged.append(f"no usable checkpoint before step {first}: {error}")
    origin = record.directory.branched_from()
    if origin is None:
        return None, damaged
    begun = record.starts[0].step if record.starts else 0
    if first <= begun:
        raise UsageError(f"{record.path} starts after step {begun} of another run, {origin}")
    verify(origin)
    return origin, damaged


def _starts(record: Record, begun: int, first: int, last: int) -> list[Start]:
    """Return the starts that took the steps. Raise an error if they changed settings that affect steps."""
    starts = record.starts_of(begun + 1, last)
    for before, start in pairwise(starts):
        changed = [name for name in start.changes if name not in NEUTRAL]
        if before.facts and start.facts and before.facts.data != start.facts.data:
            changed.append("data")
        if changed:
            raise UsageError(
                f"{record.path} resumed after step {start.step} with other settings ({', '.join(changed)});"
                f" replay the steps up to {start.step} and the later ones separately"
            )
    return starts


def threads_of(facts: Facts | None, reproducible_parts: int, size: int) -> int:
    """Return the run's thread count if results depend on it bitwise; 0: the stage's default."""
    return facts.threads[0] if facts and not reproducible_parts and facts.ranks == size else 0


def refuse_other_ranks(outer_every: int, starts: list[Start], size: int) -> None:
    """Reject a different number of ranks if each rank takes local steps."""
    others = {start.ranks for start in starts if start.ranks is not None} - {size}
    if outer_every and others:
        raise UsageError(
            f"--outer-every {outer_every} gives each rank its own steps; replay on"
            f" {count(min(others), 'rank')}"
        )


def _plan(
    config: RunConfig, directory: RunDirectory, checkpoint: Path | None, state: State, last: int
) -> Plan:
    t, origin = config.train, None
    if weights := checkpoint / "weights.safetensors" if checkpoint else t.init:
        origin = read_description(Path(weights))
        components().model(t).reject_origin(origin, Path(weights), t, resumed=checkpoint is not None)
    # `replay` compares the text once it is read, with a better message.
    changes: dict[str, tuple[object, object]] = {"data": (t.data, t.data)}
    return Plan(config, directory, checkpoint, replace(state, best=None), origin, changes, until=last)


def _elapsed(record: Record, config: RunConfig, steps: range) -> dict[int, float]:
    """Return the elapsed fraction of the run's time at each step, if the learning rate follows the clock."""
    result = dict[int, float]()
    for number in steps if config.train.train_minutes else ():
        rate = record.steps.get(number + 1, {}).get("lr")
        if rate is None:
            raise UsageError(
                f"the learning rate of this run follows the clock, but {record.directory.metrics} has none"
                f" for step {number + 1}"
            )
        result[number] = elapsed_at(config.train, number, rate)
    return result


def elapsed_at(t: TrainConfig, step: int, rate: float) -> float:
    """Return a fraction of the run's time at which a step, counted from 0, has exactly this learning rate.

    Rates fall over time, so bisection finds it.
    """
    parts = 1 << 60  # resolution of the fraction
    at = bisect_left(range(parts), -rate, key=lambda part: -learning_rate(t, step, part / parts)) / parts
    if learning_rate(t, step, at) != rate:
        raise UsageError(f"the learning rate of step {step + 1}, {rate!r}, is not possible with its schedule")
    return at


def _steps(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first} to {last}"


def page(found: Found) -> str:
    """Return a table of the comparison, and the verdict below it unless that is an error."""
    kinds = {COMPARED[name]: kind for name, kind in found.kinds.items()}
    kinds |= {f"weights, step {step}": kind for step, kind in found.weights.items()}
    lines = [tabulated(kinds)]
    if found.verdict == SAME:
        lines.append("bitwise identical" + (", which was not guaranteed" if found.why else ""))
    if found.verdict == ROUNDING:
        later = f"; {found.unjudged} not judged" if found.unjudged else ""
        loss = f"losses have a relative difference of at most {found.kinds['loss'].largest:.1g}"
        lines.append(f"identical within rounding: {loss}{later}")
    return "\n".join(lines)


def difference(found: Found) -> str:
    """Return the first step or checkpoint that differs more than allowed; losses come before weights."""
    places = [
        (step, f"the {name} of step {step}" + f", {kind.words.partition(': ')[0]}" * (name == "weights"))
        for name, kind in [
            *((COMPARED[name], kind) for name, kind in found.kinds.items()),
            *(("weights", kind) for kind in found.weights.values()),
        ]
        if (step := kind.beyond if found.why else kind.first) is not None
    ]
    return f"{min(places)[1]} differs first" if places else ""


def undecided(found: Found) -> str:
    """Return why no step was judged, and what to do; "" for any other verdict."""
    if found.verdict != UNJUDGED:
        return ""
    return (
        f"{found.unjudged} not judged: as rounding grows, only {found.judged} steps are judged, after"
        f" step {found.begun}; replay on ranks, threads and processors that make it bitwise identical"
    )
