"""Metrics of a training run for Prometheus; textfile.py writes them into a file, port.py answers with them.

An exporter is a listener, so rank 0 alone has one. The label `run` is the absolute path of the run's
directory: two files with the same labels would let node_exporter refuse all metrics of its host.
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from distgpt.core.base.errors import StorageError
from distgpt.core.base.version import __version__
from distgpt.core.comm.job import exit_code, this_job
from distgpt.core.saved.checkpoint import MANIFEST, saved_checkpoints
from distgpt.core.train.lines import Facts, Metrics
from distgpt.fleet.prometheus import Family, Labels, page
from distgpt.fleet.recorder import Recorder

# By their names in metrics.jsonl. What is not here is a gauge of its own name, and needs no line. Help has to
# stay as it is: node_exporter leaves out metrics that files of two versions explain in different words.
FAMILIES = {
    "loss": ("loss", "gauge", "Training loss of the last step, in nats per token."),
    "val_loss": ("validation_loss", "gauge", "Loss of the last evaluation, in nats per token."),
    "train_bits_per_byte": ("bpb", "gauge", "Training loss of the last step, in bits per byte."),
    "bits_per_byte": ("validation_bpb", "gauge", "Loss of the last evaluation, in bits per byte."),
    "epoch": ("epoch", "gauge", "How many times the text was read."),
    "lr": ("learning_rate", "gauge", "Learning rate of the last step."),
    "grad_norm": ("gradient_norm", "gauge", "Norm of the gradients of the last step."),
    "step": ("step", "gauge", "Steps that are finished."),
    "tokens": ("tokens_total", "counter", "Tokens of all steps so far, of earlier starts too."),
    "tokens_per_s": ("tokens_per_second", "gauge", "Speed of the last step."),
    "step_s": ("step_seconds", "gauge", "Duration of the last step."),
    "late_s": ("slowest_rank_late_seconds", "gauge", "By how much the slowest rank was later than others."),
    "val_s": ("validation_seconds", "gauge", "Duration of the last evaluation."),
    "elapsed_s": ("elapsed_seconds", "gauge", "Elapsed of the time that the run has."),
    "time": ("step_timestamp_seconds", "gauge", "When the last step was finished."),
}


class Exporter(Recorder):
    """Holds what a run has reported so far, as metrics: written in the main thread, read in any."""

    def __init__(self) -> None:
        self._run: Labels = {}
        self._about: Labels = {}
        self._checkpoints = Path()
        self._began = 0.0
        self._last_step: int | None = None
        self._step: Metrics = {}
        self._evaluation: Metrics = {}
        self._skipped = 0
        self._exit_code: int | None = None

    def started(self, facts: Facts) -> None:
        directory = Path(facts["directory"]).absolute()
        self._checkpoints = directory / "checkpoints"
        self._began = time.time()
        self._last_step = None if facts.get("seconds") else facts["steps"]
        job = (this_job().batch or {}).get("id", "")
        self._about = {"stage": facts["stage"], "ranks": facts["ranks"], "version": __version__, "job": job}
        self._run = {"run": directory, "host": platform.node(), "rank": 0}

    def stepped(self, metrics: Metrics) -> None:
        self._skipped += int(metrics.get("skipped", 0))
        self._step = metrics

    def evaluated(self, metrics: Metrics) -> None:
        self._evaluation = metrics

    def close(self) -> None:
        """Take note how the run ended. Called while the error that ends it is being handled, if one does."""
        if self._run and self._exit_code is None:
            self._exit_code = 0
            if (error := sys.exception()) is not None:
                self._exit_code = exit_code(error)

    def page(self) -> str:
        """Return the metrics; nothing before the run has started."""
        return page(self._families()) if self._run else ""

    def _families(self) -> Iterator[Family]:
        def of(name: str, kind: str, help: str, value: float, **more: object) -> Family:
            return Family(f"train_{name}", kind, help, [("", {**self._run, **more}, value)])

        is_running = int(self._exit_code is None)
        yield of("info", "gauge", "What runs here, in labels.", 1, **self._about)
        yield of("running", "gauge", "1 while the run goes on, 0 once it has ended.", is_running)
        if self._exit_code is not None:
            yield of("exit_code", "gauge", "How the run ended: 0 finished, 75 start again.", self._exit_code)
        yield of("start_timestamp_seconds", "gauge", "When this start began to train.", self._began)
        if self._last_step is not None:
            yield of("last_step", "gauge", "The step after which the run ends.", self._last_step)
        yield of("skipped_steps_total", "counter", "Steps of this start that were left out.", self._skipped)
        for key, value in {
            **self._evaluation,
            **self._step,
        }.items():  # both have a step: that of steps counts
            if key != "skipped":
                usual = (key, "gauge", f"{key} of the last line with it in metrics.jsonl.")
                yield of(*FAMILIES.get(key, usual), value)
        # The moment and not the age: an age in a file would stand still as soon as its run does.
        if saved := self._saved():
            yield of("checkpoint_timestamp_seconds", "gauge", "When the newest checkpoint was saved.", saved)

    def _saved(self) -> float | None:
        """Return the moment when the newest checkpoint was finished; None without one."""
        with suppress(OSError, StorageError):
            return next(
                ((path / MANIFEST).stat().st_mtime for path in saved_checkpoints(self._checkpoints)), None
            )
        return None
