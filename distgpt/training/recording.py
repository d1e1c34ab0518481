"""What rank 0 writes down of a run and shows while it goes on: steps, evaluations, bad steps."""

from __future__ import annotations

from typing import Any, Protocol

from distgpt.config import RunConfig
from distgpt.errors import StorageError
from distgpt.saved.rundir import RunDirectory
from distgpt.training.saving import Saver


class Listener(Protocol):
    """Shows or records the progress of a run. Called on rank 0 alone."""

    def started(self, facts: dict[str, Any]) -> None: ...
    def stepped(self, metrics: dict[str, Any]) -> None: ...
    def evaluated(self, metrics: dict[str, Any]) -> None: ...
    def noted(self, text: str) -> None: ...
    def sampled(self, step: int, text: str) -> None: ...


class Recorder:
    """Of rank 0. A disk that fails is borne as long as saving bears it."""

    def __init__(self, run: RunConfig, directory: RunDirectory, listener: Listener, saver: Saver) -> None:
        self._run, self._directory, self._listener, self._saver = run, directory, listener, saver

    def stepped(
        self, step: int, loss: float, norm: float, lr: float, seconds: float, more: dict[str, float]
    ) -> None:
        t = self._run.train
        if step % t.log_every and step != t.steps:
            return
        per_step = t.batch_size * self._run.model.seq_len
        metrics = {
            "step": step,
            "loss": loss,
            "lr": lr,
            "grad_norm": norm,
            "tokens": per_step * step,
            "tokens_per_s": per_step / seconds,
            "step_s": seconds,
            **more,
        }
        self._record(metrics)
        self._listener.stepped(metrics)

    def evaluated(self, metrics: dict[str, Any]) -> None:
        self._record(metrics)
        self._listener.evaluated(metrics)

    def left_out(self, step: int, what: str, skipped: int) -> None:
        """A bad step."""
        self._remember({"step": step, "bad": what, "skipped": skipped})
        self._listener.noted(f"{what}: it is left out")

    def went_back(self, step: int, what: str, skipped: int) -> None:
        """To this step, because of a bad one."""
        self._remember({"step": step, "bad": what, "back_to": step, "skipped": skipped})
        self._listener.noted(f"{what}: back to step {step}, and past these data")

    def _record(self, metrics: dict[str, Any]) -> None:
        try:
            self._directory.record(metrics)
        except StorageError as error:
            self._saver.bear(error)

    def _remember(self, event: dict[str, Any]) -> None:
        try:
            self._directory.remember(event)
        except StorageError as error:
            self._saver.bear(error)
