"""One stage: its training run and then greedy inference, each a fresh process of the command line."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from distgpt.machine.environment import shown
from distgpt.machine.launchers import Launcher
from distgpt.machine.processes import Ended, distgpt_command, run, unlaunched
from distgpt.machine.stages import ON_GPU, WITH_MPI
from distgpt.measure.compare.folder import Folder
from distgpt.measure.compare.runnable import Jobs
from distgpt.measure.compare.workload import NEW_TOKENS
from distgpt.saved.rundir import RunDirectory

Heard = Callable[[str], None]
Facts = dict[str, Any]

TRAINING, INFERENCE = "training", "inference"
RUNNING, INTERRUPTED, DONE = "running", "interrupted", "done"  # a comparison; one of its stages


@dataclass(slots=True)
class Measured:
    """What one stage took and computed. A loss that is not finite is None."""

    stage: str
    ranks: int
    dtype: str
    threads: int | None = None
    commands: list[str] = field(default_factory=list)
    losses: list[float | None] = field(default_factory=list)
    training: Facts | None = None
    inference: Facts | None = None
    failed: Facts | None = None  # phase, code and last words

    @property
    def process_s(self) -> float:
        """Of all its processes, from start to end."""
        return float(sum(part["process_s"] for part in (self.training, self.inference) if part))


class Fault(Exception):
    """A child did not do what it was started for."""

    def __init__(self, phase: str, code: int | None, last_words: str) -> None:
        self.facts: Facts = {"phase": phase, "code": code, "last_words": shown(last_words)}


@dataclass(frozen=True, slots=True)
class Stand:
    """Where a stage is measured, and how its processes are started."""

    folder: Folder
    jobs: Jobs
    launcher: Launcher | None

    def measure(self, into: Measured, said: Callable[[str], None], heard: Heard) -> None:
        """Fill in what is found out, bit by bit, so that an interruption leaves what there is by then."""
        directory = RunDirectory(self.folder.of_stage(into.stage))
        phase = TRAINING
        try:
            said(phase)
            words = ["train", "--config", self.folder.config, "--progress", "plain", "--out", directory.path]
            ended = self._run(into, words, phase, heard)
            into.training = _summary(directory, ended)
            into.threads = into.training.pop("threads") or None
            _losses(directory, into)
            shutil.rmtree(directory.checkpoints, ignore_errors=True)  # nobody will go on from here
            phase = INFERENCE
            said(phase)
            words = ["infer", "--weights", directory.weights, "--prompt-file", self.folder.prompt]
            words += ["--max-new-tokens", NEW_TOKENS, "--json"]
            into.inference = _answer(self._run(into, words, phase, heard))
        except Fault as fault:
            into.failed = fault.facts
        except (KeyboardInterrupt, SystemExit):
            into.failed = {"phase": phase, "code": None, "last_words": INTERRUPTED}
            raise
        finally:
            if into.training is None:
                _losses(directory, into)  # of the steps that it got to

    def _run(self, into: Measured, words: Sequence[object], phase: str, heard: Heard) -> Ended:
        command, told = self._command(into.stage, words)
        into.commands.append(told)
        ended = run(command, env=unlaunched(), on_line=heard)
        if ended.code:
            raise Fault(phase, ended.code, ended.complaint())
        return ended

    def _command(self, stage: str, words: Sequence[object]) -> tuple[list[str], str]:
        """The words, and how a user would type them."""
        how: list[object] = ["--stage", stage, "--dtype", self.jobs.dtype_of(stage)]
        if self.jobs.threads is not None and stage not in ON_GPU:
            how += ["--threads", self.jobs.threads]
        own = [*words[:1], *how, *words[1:]]
        command, typed = distgpt_command(*own), ["distgpt", *map(str, own)]
        if stage not in WITH_MPI:
            return command, shown(shlex.join(typed))
        assert self.launcher is not None
        ranks = self.jobs.ranks
        return self.launcher.command(ranks, command), shown(self.launcher.shown(ranks, typed))


def _summary(directory: RunDirectory, ended: Ended) -> Facts:
    try:
        summary: Facts = json.loads(directory.summary.read_text())
    except (OSError, ValueError):
        where = f"left no {directory.summary.name}: does the first host write to this folder?"
        raise Fault(TRAINING, ended.code, where) from None
    keys = (
        *("threads", "train_s", "tokens_per_s", "step_s_median", "first_step_s", "peak_memory"),
        *("peak_gpu_memory", "allreduce", "parameters"),
    )
    return {key: summary[key] for key in keys} | {"process_s": ended.seconds}


def _losses(directory: RunDirectory, into: Measured) -> None:
    """As far as the lines are whole, in the order of the steps."""
    try:
        lines = directory.metrics.read_text(errors="replace").splitlines()
    except OSError:
        return
    into.losses = []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            return
        if "loss" in record:
            into.losses.append(record["loss"])


def _answer(ended: Ended) -> Facts:
    lines = [line for line in ended.output.splitlines() if line.startswith("{")]
    try:
        answer: Facts = json.loads(lines[-1])
    except (IndexError, ValueError):
        raise Fault(INFERENCE, ended.code, "gave no answer") from None
    keys = ("text", "tokens", "seconds", "tokens_per_s", "peak_memory")
    return {key: answer[key] for key in keys} | {"process_s": ended.seconds}
