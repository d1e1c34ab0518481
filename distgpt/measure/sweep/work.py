"""The workers of a sweep: check the grid, open a stage on each rank, and train the runs that are due."""

from __future__ import annotations

import gc
import shutil
import signal
import time
import traceback
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from distgpt.callbacks.attach import LEAVING
from distgpt.cluster.launch.environment import launched_as
from distgpt.core.base.errors import DistgptError, Say, StorageError, UsageError, first_line
from distgpt.core.base.formatting import clock, count
from distgpt.core.base.interrupts import Interrupted
from distgpt.core.comm.agree import on_every_rank, on_root
from distgpt.core.comm.api import Comm, SerialComm
from distgpt.core.config import ON_GPU, SEVERAL, WITH_MPI, GpuConfig, RunConfig
from distgpt.core.config.run_request import RunRequest, asked_for
from distgpt.core.cpu.stages import Notes, Stage, open_stage
from distgpt.core.data.loading import DataRequest, kind_of, load_corpus, refuse_missing
from distgpt.core.model.optim import learning_rate
from distgpt.core.saved.rundir import RunDirectory, read_metrics
from distgpt.core.train import interfaces
from distgpt.core.train.loop import train
from distgpt.core.train.plan import DTYPE, is_open, make_plan, new_run, reject_unsuited
from distgpt.core.train.run import Limits
from distgpt.core.train.setup import open_run
from distgpt.measure.sweep.grid import (
    BITS,
    PRESET,
    Grid,
    Ledger,
    Result,
    Run,
    Rung,
    Values,
    begin,
    is_past,
    measured,
    read_back,
    read_grid,
)
from distgpt.recipes.depth import holds_out
from distgpt.recipes.derived import derived

PAUSE = 0.5  # seconds before an idle process checks again
SECONDS_BETWEEN_LINES = 10.0  # about a run in training
LAST = 20  # steps over which the training loss is averaged


def open_stages(name: str, threads: int | None, gpu: GpuConfig) -> tuple[Comm, Stage]:
    """Return the communicator of this job, and a stage in which this rank trains on its own. Collective."""
    if name in WITH_MPI:
        raise UsageError(f"each rank of a sweep trains separately; use --stage serial or cuda, not {name}")
    if launched_as() == 1:
        stage = open_stage(name, threads, gpu)
        return stage.comm, stage
    # These GPUs exchange nothing, and other transports would take GPU memory.
    job = open_stage(SEVERAL[name], threads, replace(gpu, allreduce="host") if name in ON_GPU else gpu)
    alone = SerialComm(job.comm)
    if not job.on_gpu:
        return job.comm, replace(job, name=name, comm=alone)
    of_gpu: Any = {"gpu": gpu, "transport": ""}
    # New notes: the job's notes describe how gradients are summed.
    return job.comm, replace(job, name=name, comm=alone, notes=Notes(), **of_gpu)


def begin_sweep(
    comm: Comm, ready: Stage, path: Path, out: Path, say: Say, assigned: Values | None = None
) -> Ledger:
    """Start or resume the sweep of a grid file in `out`. Collective.

    `ready` is a stage of only this rank. `assigned` replaces fixed settings of the file.
    """

    def prepare() -> None:
        grid = _with_dtype(read_grid(path, assigned), ready, out)
        runs = checked_runs(grid)
        begin(out, grid)
        for line in rungs_of(grid, runs):
            say(line)
        tokenize(runs, out, say)
        Ledger(out, grid).forget_failures()

    on_root(comm, prepare)
    return Ledger(out, on_every_rank(comm, lambda: read_back(out)))


def _with_dtype(grid: Grid, ready: Stage, out: Path | None = None) -> Grid:
    """Return the grid with one dtype for all runs, chosen for the first run if the grid has none.

    A sweep that has started keeps its dtype. A sweep from an earlier version has none and uses float32.
    """
    first = next(grid.runs())
    if not is_open(asked_of(first)):
        return grid
    fixed = {name: value for name, value in grid.fixed.items() if name != DTYPE}
    if out and (out / "grid.json").exists():
        known = {name: value for name, value in read_back(out).fixed.items() if name == DTYPE}
    else:
        known = {DTYPE: ready.auto_dtype(lambda: configured(first).train.matmul).name}
    return replace(grid, fixed=fixed | known)


def preview(path: Path, ready: Stage, assigned: Values | None = None) -> str:
    """Return the runs of a grid file and its rungs, without writing anything."""
    grid = _with_dtype(read_grid(path, assigned), ready)
    runs = checked_runs(grid)
    lines = [f"{name}  {count(run.train.steps, 'step')}" for name, run in runs.items()]
    return "\n".join([*lines, count(len(runs), "run"), *rungs_of(grid, runs)])


def configured(run: Run) -> RunConfig:
    """Return a run's complete configuration. Raise an error if its values are incompatible."""
    try:
        return new_run(derived(asked_of(run), 1))
    except DistgptError as error:
        raise type(error)(f"{run.name}: {error}") from None


def asked_of(run: Run) -> RunRequest:
    """Return a run's settings as if a user had set them."""
    settings = {name: value for name, value in run.values.items() if name != PRESET}
    return asked_for(settings, run.values.get(PRESET))


def checked_runs(grid: Grid) -> dict[str, RunConfig]:
    """Return every run's configuration by name. Reject invalid settings and missing files."""
    runs = {run.name: configured(run) for run in grid.runs()}
    first = next(iter(runs.values())).train
    for name, run in runs.items():
        t = run.train
        reject_unsuited(t, 1, on_gpu=False)
        refuse_missing(filter(None, (t.data, t.val)), t.tokenizer)
        if grid.metric != "loss" and not holds_out(asdict(t)):
            raise UsageError(
                f"{name}: no validation data to compute {grid.metric}; set val_fraction or val, or"
                ' metric = "loss" in [sweep]'
            )
        if grid.metric != BITS and t.tokenizer != first.tokenizer:
            raise UsageError(
                f"{name} has the tokenizer {t.tokenizer}, not {first.tokenizer} as other runs, so losses per"
                f' token are not comparable; set metric = "{BITS}" in [sweep]'
            )
        if t.train_minutes and grid.rungs > 1:
            raise UsageError(f"{name}: rungs require steps and cannot be combined with train_minutes")
    return runs


def tokenize(runs: dict[str, RunConfig], out: Path, say: Say) -> None:
    """Tokenize directories and tables of text in advance, since processes cannot do so at the same time."""
    texts = {(t.data, t.val, t.tokenizer, t.val_fraction) for t in (run.train for run in runs.values())}
    for data, val, tokenizer, val_fraction in sorted(texts):
        if not {kind_of(text) for text in (data, val) if text} <= {"plain", "shards"}:
            request = DataRequest(data, tokenizer, 1, val_fraction, val=val, kept=out / "tokenized")
            load_corpus(SerialComm(), request, say)


def rungs_of(grid: Grid, runs: dict[str, RunConfig]) -> list[str]:
    """Return a line about each rung, if there is more than one. Steps are the first run's."""
    points, t, lines = len(grid.points), next(iter(runs.values())).train, []
    for rung in range(grid.rungs if grid.rungs > 1 else 0):
        each = count(points, "point") + (f" of {count(len(grid.seeds), 'seed')}" if grid.seeds else "")
        step = grid.until(rung, t.steps)
        peak = learning_rate(t, step - 1) / t.lr
        lines.append(f"rung {rung + 1}: {each} to step {step:,}, with {peak:.0%} of the peak learning rate")
        points = grid.promoted(points)
    return lines


class Listener(interfaces.Listener):
    """Prints a line about a run every 10 seconds, and each note once."""

    def __init__(self, say: Say) -> None:
        self._say, self._name, self._known = say, "", set[str]()
        self._begun = self._last = time.monotonic()
        self._steps = 0

    def begin(self, run: Run) -> None:
        self._name = run.name
        self._begun = self._last = time.monotonic()

    def ended(self, text: str) -> None:
        self._say(f"{text} ({clock(time.monotonic() - self._begun)})")

    def started(self, facts: dict[str, Any]) -> None:
        self._steps = facts["steps"]

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
    """A process that works on a sweep, until `end` by time.monotonic() if set."""

    ledger: Ledger
    stage: Stage
    listener: Listener
    end: float | None = None

    def work(self) -> None:
        """Train due runs until none is left. Wait while other processes train the rest of a rung."""
        try:
            while (due := self.ledger.due()) is not None:
                rung, runs, of = due
                if not any(self._attempt(rung, run, of) for run in runs):
                    time.sleep(PAUSE)
                    if self.end is not None and time.monotonic() > self.end - LEAVING:
                        raise Interrupted(signal.SIGUSR1, why="time limit reached")
        except Interrupted as interrupt:  # other ranks get the signal as well, or finish the remaining runs
            interrupt.shared = True
            interrupt.add_note("to resume the sweep, repeat the command")
            raise

    def _attempt(self, rung: int, run: Run, of: int) -> bool:
        """Train a run to its rung, unless another process does or did. Return whether it was trained here."""
        with self.ledger.taken(run) as is_mine:
            if not is_mine or is_past(result := self.ledger.result(run), rung):
                return False
            self.listener.begin(run)
            self._train(rung, run, result)
            self.ledger.store(run, result)
            due = self.ledger.due()
            done = of - (len(due[1]) if due and due[0] == rung else 0)
            how = f"{result.stop}: {result.error.partition('; ')[0]}"
            if not result.stop:
                found = measured(self.ledger.grid, result, rung)
                how = f"{self.ledger.grid.metric} {found:.4f} at step {result.rungs[-1].step:,}"
            self.listener.ended(f"{done} of {of}: {run.name}: {how}")
        return True

    def _train(self, rung: int, run: Run, result: Result) -> None:
        """Train a run to its rung, and store its results or error. Errors that end the sweep are raised."""
        gc.collect()  # free the memory of the previous run
        try:
            step = self._to_rung(rung, run)
            result.rungs.append(_rung(self.ledger.directory(run), step, result))
            if measured(self.ledger.grid, result, rung) is None:
                result.stop, result.error = "failed", f"it has no {self.ledger.grid.metric}"
        except StorageError as error:  # a full disk is not caused by these settings
            raise StorageError(f"{run.name}: {error}") from None
        except Exception as error:
            result.stop = getattr(error, "stop", "failed")
            result.error = str(error) if isinstance(error, DistgptError) else first_line(error)
            if not isinstance(error, DistgptError | MemoryError):
                traceback.print_exception(error)

    def _to_rung(self, rung: int, run: Run) -> int:
        """Train a run, from its last checkpoint if any, to the step of a rung. Return that step."""
        ledger, stage = self.ledger, replace(self.stage, begun=time.monotonic())
        request = replace(asked_of(run), out=ledger.directory(run).path, resume="auto")
        plan = make_plan(stage, derived(request, 1), lambda text: None)
        by_clock = bool(plan.config.train.train_minutes)
        until = None if by_clock else ledger.grid.until(rung, plan.config.train.steps)
        if until is not None and plan.state.step >= until and not plan.state.evaluation_pending:
            return plan.state.step  # killed after this step, before the result was stored
        try:
            opened = open_run(replace(plan, until=until), stage, self.listener, Limits(self.end))
            train(opened)
        finally:
            plan.directory.lock.release()
        if rung == ledger.grid.rungs - 1:
            shutil.rmtree(plan.directory.checkpoints, ignore_errors=True)  # no rung follows
        return opened.progress.step


def _rung(directory: RunDirectory, step: int, result: Result) -> Rung:
    """Return the run's metrics at this step, and store its speed."""
    lines = [line for line in read_metrics(directory.metrics) if line.step <= step]
    found: dict[str, float | None] = {}
    for line in lines:
        found |= line.numbers if line.step == step else {}

    def known(name: str) -> list[float]:
        return [value for line in lines if (value := line.numbers.get(name)) is not None]

    rates = known("tokens_per_s")
    result.tokens_per_s = median(rates) if rates else None
    loss, bits = (known(name)[-LAST:] for name in ("loss", "train_bits_per_byte"))
    validated = found.get("val_loss"), found.get("bits_per_byte")
    return Rung(step, fmean(loss) if loss else None, *validated, fmean(bits) if bits else None)
