"""The work of a sweep: a process takes a run that is due, trains it to its rung, and takes the next."""

from __future__ import annotations

import gc
import shutil
import signal
import time
import traceback
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

from distgpt.callbacks.attach import LEAVING
from distgpt.core.base.errors import DistgptError, Say, StorageError, first_line
from distgpt.core.base.formatting import clock
from distgpt.core.base.interrupts import Interrupted
from distgpt.core.config import RunConfig
from distgpt.core.config.asked import Asked, asked_for
from distgpt.core.cpu.stages import Stage
from distgpt.core.saved.metrics import read_metrics
from distgpt.core.saved.rundir import RunDirectory
from distgpt.core.train.loop import train
from distgpt.core.train.plan import make_plan, new_run
from distgpt.core.train.run import Limits
from distgpt.core.train.setup import open_run
from distgpt.measure.sweep.grid import PRESET, Run
from distgpt.measure.sweep.ledger import Due, Ledger, Result, Rung, is_past, measured
from distgpt.recipes.derived import derived

PAUSE = 0.5  # seconds before a process without work looks again
SECONDS_BETWEEN_LINES = 10.0  # about a run that trains
LAST = 20  # steps whose training losses are averaged


class Listener:
    """Says a line about a run now and then, and everything that there is to note once."""

    def __init__(self, say: Say) -> None:
        self._say, self._name, self._known = say, "", set[str]()
        self._begun = self._last = time.monotonic()
        self._steps = 0

    def begin(self, run: Run) -> None:
        self._name, self._begun = run.name, time.monotonic()
        self._last = self._begun

    def ended(self, text: str) -> None:
        self._say(f"{text} ({clock(time.monotonic() - self._begun)})")

    def started(self, facts: dict[str, Any]) -> None:
        self._steps = facts["steps"]

    def sampled(self, step: int, text: str) -> None:
        """Nobody reads a sample of every run."""

    def evaluated(self, metrics: dict[str, Any]) -> None:
        """It is in the run's metrics."""

    def stepped(self, metrics: dict[str, Any]) -> None:
        if time.monotonic() - self._last > SECONDS_BETWEEN_LINES:
            self._last = time.monotonic()
            self._say(f"{self._name}: step {metrics['step']:,}/{self._steps:,}, loss {metrics['loss']:.4f}")

    def noted(self, text: str) -> None:
        if text not in self._known:
            self._known.add(text)
            self._say(text)


@dataclass(frozen=True, slots=True)
class Worker:
    """A process that takes part in a sweep, and has to be gone by `end`, a moment of time.monotonic()."""

    ledger: Ledger
    stage: Stage
    listener: Listener
    end: float | None = None

    def work(self) -> None:
        """Train what is due until nothing is left."""
        try:
            self._work()
        except Interrupted as interrupt:  # the other ranks have had it too, or finish what this one has left
            interrupt.shared = True
            interrupt.add_note("the same command resumes the sweep")
            raise

    def _work(self) -> None:
        """Take runs in turn; wait where other processes train the rest of a rung."""
        while (due := self.ledger.due()) is not None:
            if not any(self._attempt(due, run) for run in due.runs):
                time.sleep(PAUSE)
                if self.end is not None and time.monotonic() > self.end - LEAVING:
                    raise Interrupted(signal.SIGUSR1, why="the time is up")

    def _attempt(self, due: Due, run: Run) -> bool:
        """Train a run to its rung, unless another process does or did. Return whether it was trained here."""
        with self.ledger.taken(run) as is_mine:
            if not is_mine or is_past(result := self.ledger.result(run), due.rung):
                return False
            self.listener.begin(run)
            self._train(due.rung, run, result)
            self.ledger.store(run, result)
            self.listener.ended(_account(self.ledger, due, run, result))
        return True

    def _train(self, rung: int, run: Run, result: Result) -> None:
        """Bring a run to its rung and note how it did, or why it failed. What ends the sweep is raised."""
        gc.collect()  # the memory of the run before
        try:
            step = self._to_rung(rung, run)
            result.rungs.append(_rung(self.ledger.directory(run), step, result))
            if measured(self.ledger.grid, result, rung) is None:
                result.stop, result.error = "failed", f"it has no {self.ledger.grid.metric}"
        except StorageError as error:  # a full disk is no fault of these settings
            raise StorageError(f"{run.name}: {error}") from None
        except Exception as error:
            result.stop = getattr(error, "stop", "failed")
            result.error = str(error) if isinstance(error, DistgptError) else first_line(error)
            if not isinstance(error, DistgptError | MemoryError):
                traceback.print_exception(error)

    def _to_rung(self, rung: int, run: Run) -> int:
        """Train a run, from its last checkpoint if it has one, to the step of a rung; return that step."""
        ledger, stage = self.ledger, replace(self.stage, begun=time.monotonic())
        asked = replace(asked_of(run), out=ledger.directory(run).path, resume="auto")
        plan = make_plan(stage, derived(asked, 1), lambda text: None)
        by_clock = bool(plan.config.train.train_minutes)
        until = None if by_clock else ledger.grid.until(rung, plan.config.train.steps)
        is_there = until is not None and plan.state.step >= until and not plan.state.evaluation_pending
        if is_there:  # it was killed before that was noted
            return plan.state.step
        try:
            opened = open_run(replace(plan, until=until), stage, self.listener, Limits(self.end))
            train(opened)
        finally:
            plan.directory.lock.release()
        if rung == ledger.grid.rungs - 1:
            shutil.rmtree(plan.directory.checkpoints, ignore_errors=True)  # nothing follows
        return opened.progress.step


def configured(run: Run) -> RunConfig:
    """Return a run's whole configuration; refuse values that do not go together."""
    try:
        return new_run(derived(asked_of(run), 1))
    except DistgptError as error:
        raise type(error)(f"{run.name}: {error}") from None


def asked_of(run: Run) -> Asked:
    """Return what a run of the grid is asked for."""
    settings = {name: value for name, value in run.values.items() if name != PRESET}
    return asked_for(settings, run.values.get(PRESET))


def _rung(directory: RunDirectory, step: int, result: Result) -> Rung:
    """Return what the run's metrics say about this step; note its speed."""
    lines = [line for line in read_metrics(directory.metrics) if line.step <= step]
    found: dict[str, float | None] = {}
    for line in lines:
        found |= line.numbers if line.step == step else {}
    rates = [rate for line in lines if (rate := line.numbers.get("tokens_per_s"))]
    result.tokens_per_s = median(rates) if rates else None

    def mean(name: str) -> float | None:
        last = [value for line in lines if (value := line.numbers.get(name)) is not None][-LAST:]
        return fmean(last) if last else None

    validated = found.get("val_loss"), found.get("bits_per_byte")
    return Rung(step, mean("loss"), *validated, mean("train_bits_per_byte"))


def _account(ledger: Ledger, due: Due, run: Run, result: Result) -> str:
    """Return a line about a run that is done for now."""
    now = ledger.due()
    left = len(now.runs) if now and now.rung == due.rung else 0
    done = f"{due.of - left} of {due.of}"
    if result.stop:
        return f"{done}: {run.name}: {result.stop}: {result.why}"
    found = measured(ledger.grid, result, due.rung)
    return f"{done}: {run.name}: {ledger.grid.metric} {found:.4f} at step {result.rungs[-1].step:,}"
