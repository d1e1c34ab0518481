"""Reports of rank 0: facts and notes at the start, then steps, evaluations and samples."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from distgpt.core.base.errors import Say, StorageError, escape
from distgpt.core.base.formatting import count
from distgpt.core.comm.agree import gather
from distgpt.core.comm.job import this_job
from distgpt.core.config import METRICS, WITH_MPI, RunConfig, TrainConfig
from distgpt.core.cpu.stages import Stage
from distgpt.core.data.batches import Batches
from distgpt.core.data.loading import Corpus, bits_per_byte
from distgpt.core.saved.rundir import RunDirectory
from distgpt.core.train.checkpoints import Checkpoints
from distgpt.core.train.interfaces import Budget, Listener, is_over, time_is_over
from distgpt.core.train.plan import Plan
from distgpt.core.train.progress import Finished


def note_settings(plan: Plan, t: TrainConfig, corpus: Corpus, batches: Batches, say: Say) -> None:
    """Print changed settings, and settings with effects the user may not expect. For rank 0."""
    state = plan.state
    if plan.changes:
        listed = ", ".join(f"{name} {escape(f'{old} → {new}')}" for name, (old, new) in plan.changes.items())
        say(f"changed from step {state.step} on: {listed}")
    for line in batches.notes(t.steps):
        say(line)
    if corpus.val is not None and corpus.val.fingerprint == batches.fingerprint:
        say(f"{escape(t.val)} is also the training text, so validation does not measure generalization")
    if t.warmup > t.steps > 0:
        say(f"--warmup {t.warmup} is longer than the run ({count(t.steps, 'step')}); --lr is never reached")
    for line in corpus.notes:
        say(line)
    if t.eval_every and corpus.val is None and not t.metrics:
        *others, last = ("--val", "--val-fraction", *(f"--{name}" for name in METRICS))
        say(f"no validation data, so nothing is evaluated; see {', '.join(others)} and {last}")
    if not plan.checkpoint:
        return
    if is_over(state.step, state.seconds, t):
        more = "--within" if time_is_over(state.seconds, t) else "epochs" if t.epochs else "--steps"
        say(f"nothing is left to train; increase {more}")
    if state.corpus != batches.fingerprint:
        say(f"the training data has changed; reading {escape(t.data)} from now on")


@dataclass(frozen=True, slots=True)
class Report:
    """Called on all ranks; only rank 0 reports. Tolerates disk errors as `Checkpoints` does."""

    rank: int
    run: RunConfig
    directory: RunDirectory
    listener: Listener
    checkpoints: Checkpoints
    batches: Batches
    bytes_per_token: float | None  # None if some data are not text
    budget: Budget

    def bits_per_byte(self, loss: float | None) -> float | None:
        """Convert a training loss to bits per byte; None if unknown."""
        return bits_per_byte(loss, self.bytes_per_token)

    def report_step(self, step: int, done: Finished, more: dict[str, float]) -> None:
        t = self.run.train
        if self.rank:
            return
        per_step = t.batch_size * self.run.model.seq_len
        windows = (step + self.batches.skipped) * t.batch_size  # read in all steps
        metrics = {
            "step": step,
            "loss": done.loss,
            "lr": done.lr,
            "grad_norm": done.norm,
            "tokens": per_step * step,
            "tokens_per_s": per_step / done.seconds,
            "step_s": done.seconds,
            "epoch": round(windows / self.batches.windows_per_epoch, 4),
        }
        if (bits := self.bits_per_byte(done.loss)) is not None:
            metrics["train_bits_per_byte"] = bits
        if self.budget.elapsed is not None:  # a time-limited run
            metrics["elapsed_s"] = round(self.budget.seconds(), 3)
        self.listener.stepped(self._record(metrics | more))

    def report_evaluation(self, metrics: dict[str, float]) -> None:
        if not self.rank:
            self.listener.evaluated(self._record(metrics))

    def note(self, text: str) -> None:
        if not self.rank:
            self.listener.noted(text)

    def report_skipped(self, step: int, reason: str, skipped: int) -> None:
        """Report that the step after `step` was bad and skipped. `skipped`: total of skipped batches."""
        if not self.rank:
            what = f"{reason} at step {step + 1}"
            self.remember({"step": step, "bad": what, "skipped": skipped})
            self.listener.noted(f"{what}: skipped")

    def remember(self, event: dict[str, object], path: Path | None = None) -> None:
        """Append an event to a file, by default history.jsonl."""
        if self.rank:
            return
        try:
            self.directory.remember(event, path)
        except StorageError as error:
            self.checkpoints.tolerate(error)

    def _record(self, metrics: dict[str, float]) -> dict[str, float]:
        """Write a line of metrics with the time in seconds since 1970, and return it."""
        timed = {**metrics, "time": round(time.time(), 3)}
        try:
            self.directory.record(timed)
        except StorageError as error:
            self.checkpoints.tolerate(error)
        return timed


MOST_SHOWN = 4  # hosts


def run_environment(stage: Stage) -> dict[str, Any]:
    """Return the available facts about hosts, job and MPI, ready for JSON. Collective."""
    job, mpi = this_job(), ""
    if stage.name in WITH_MPI:
        from distgpt.core.comm.mpi import library  # loads MPI

        mpi = library()
    result = {
        "hosts": compact(gather(stage.comm, platform.node())),
        "processors": list(dict.fromkeys(gather(stage.comm, processor_name()))),  # without duplicates
        "job": job.batch,
        "launcher": job.launcher,
        "mpi": mpi,
    }
    return {name: fact for name, fact in result.items() if fact}


def compact(hosts: Sequence[str]) -> list[str]:
    """["a", "a", "b"] → ["a:2", "b"], as in an MPICH hostfile, in rank order."""
    runs = [(host, len(list(ranks))) for host, ranks in groupby(hosts)]
    return [f"{host}:{ranks}" if ranks > 1 else host for host, ranks in runs]


def shown_hosts(hosts: Sequence[str]) -> str:
    """Format the hosts for a line; "" for a single host outside of a batch job."""
    if len(hosts) < 2:
        return hosts[0].partition(":")[0] if this_job().batch else ""
    if len(hosts) <= MOST_SHOWN:
        return ", ".join(hosts)
    return f"{hosts[0]}, {hosts[1]} … {hosts[-1]}"


def processor_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
