"""Steps of a run, taken again on any number of ranks, from a checkpoint of it or from its first weights.

Nothing is written to the run, which may be going on: a directory of their own takes what a run writes.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distgpt.core.base.errors import DataError, DisagreementError, Say, UsageError
from distgpt.core.base.files import storage_errors
from distgpt.core.comm.agree import on_root, shared
from distgpt.core.components import Components, components
from distgpt.core.config import TrainConfig
from distgpt.core.cpu.first_use import COMPILING
from distgpt.core.cpu.stages import Stage
from distgpt.core.model.optim import learning_rate
from distgpt.core.train.loop import settle
from distgpt.core.train.plan import Plan, decode, encode
from distgpt.core.train.progress import Finished, Progress
from distgpt.core.train.run import BadStep, Limits, Run
from distgpt.core.train.seams import Guard, Judge
from distgpt.core.train.setup import open_run
from distgpt.core.train.step import InFlight, no_votes

RUN = "run"  # the name of the directory, in a temporary one


@dataclass(frozen=True, slots=True)
class Task:
    """The steps to take, up to `plan.until`. The same on all ranks."""

    plan: Plan
    data: str  # the fingerprint of the run's text; "": unknown
    elapsed: dict[int, float]  # of the run's time at each step, from 0, if its learning rate follows that
    skipped: dict[int, int]  # batches that were left out, from such a step on
    threads: int = 0  # of each rank; 0: as the stage has them

    def encode(self) -> dict[str, object]:
        maps = {"elapsed": list(self.elapsed.items()), "skipped": list(self.skipped.items())}
        return {"plan": encode(self.plan), "data": self.data, "threads": self.threads, **maps}

    @staticmethod
    def decode(wire: dict[str, Any]) -> Task:
        own = {"plan": decode(wire["plan"])} | {name: dict(wire[name]) for name in ("elapsed", "skipped")}
        return Task(**{**wire, **own})


class Quiet:
    """A listener that passes on what is compiled, which may take a minute, and nothing else."""

    def __init__(self, say: Say) -> None:
        self._say = say

    def noted(self, text: str) -> None:
        if text.startswith(COMPILING):
            self._say(text)

    def started(self, facts: dict[str, object]) -> None: ...
    def stepped(self, metrics: dict[str, float]) -> None: ...
    def evaluated(self, metrics: dict[str, float]) -> None: ...
    def sampled(self, step: int, text: str) -> None: ...


class Last(AbstractContextManager["Last"]):
    """A guard that keeps the last finished step."""

    done: Finished | None = None

    def __exit__(self, *ended: object) -> None: ...

    def after_step(self, done: Finished) -> dict[str, float]:
        self.done = done
        return {}


def taken(
    make: Callable[[Path], Task],
    kept: Path,
    stage: Stage,
    say: Say,
    begun: Callable[[Run], None],
    each: Callable[[Run, Finished], None],
) -> None:
    """Take the steps of a task, which rank 0 makes for a directory. Collective.

    `kept` may hold texts that were tokenized. `begun` is called before the first step, `each` after all of
    them.
    """
    comm = stage.comm
    with storage_errors("create a folder in", Path(os.environ.get("TMPDIR", "/tmp"))):
        folder = Path(tempfile.mkdtemp(prefix="distgpt-replay-")) if comm.rank == 0 else Path()
    try:
        task = Task.decode(on_root(comm, lambda: make(folder / RUN).encode()))
        if comm.rank == 0 and kept.is_dir():
            (folder / "tokenized").symlink_to(kept.resolve())
        if task.threads:
            stage = replace(stage, threads=task.threads)
        last = Last()
        run = open_run(task.plan, stage, Quiet(say), parts=Replayed(last))
        if task.data and run.batches.fingerprint != task.data:
            text = task.plan.config.train.data
            raise shared(
                DataError(
                    f"{text} or its tokenizer has changed since the run: --data says where the old one lies"
                )
            )
        begun(run)
        _take(run, task, last, each)
        if comm.rank == 0:
            run.directory.lock.release()
    finally:
        if comm.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


class Replayed(Components):
    """The plain parts of a run, except for the policy that rejects bad steps."""

    def __init__(self, last: Last) -> None:
        self._last = last

    def step_policy(self, t: TrainConfig, progress: Progress) -> Judge:
        return components().step_policy(t, progress)

    def callbacks(self, run: Run, limits: Limits) -> Sequence[Guard]:
        return (self._last,)


def _take(run: Run, task: Task, last: Last, each: Callable[[Run, Finished], None]) -> None:
    in_flight = InFlight(0)
    assert task.plan.until is not None
    for number in range(run.progress.step, task.plan.until):
        run.batches.skipped = task.skipped.get(number, run.batches.skipped)
        in_flight.add_launched(run.launch(number, run.batches, no_votes, task.elapsed.get(number)))
        try:
            settle(run, in_flight, leave=0)
        except BadStep as bad:
            raise shared(
                DisagreementError(f"step {bad.step} is bad here, and was not in the run: {bad.reason}")
            ) from None
        assert last.done
        each(run, last.done)
        run.step.restart_clock()


def elapsed_at(t: TrainConfig, step: int, rate: float) -> float:
    """Return a fraction of the run's time at which a step, from 0, has exactly this learning rate.

    Rates fall as time goes on, so halving an interval finds one.
    """
    low, high = 0.0, 1.0
    for end in (low, high):
        if learning_rate(t, step, end) == rate:
            return end
    while low < (middle := (low + high) / 2) < high:
        found = learning_rate(t, step, middle)
        if found == rate:
            return middle
        low, high = (middle, high) if found > rate else (low, middle)
    raise UsageError(f"step {step + 1} has a learning rate, {rate!r}, that its schedule has at no time")
