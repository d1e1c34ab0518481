"""Policy for steps that must not change the weights: loss or gradient are not finite, or an outlier.

Loss and gradient norm are sums over all ranks, so all ranks decide identically. With --on-bad-step rollback
the run returns to the newest checkpoint and skips the bad data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean, pstdev

from distgpt.core.base.errors import NonFiniteError, OutlierError
from distgpt.core.base.formatting import count
from distgpt.core.comm.agree import collective_error, on_root
from distgpt.core.config import TrainConfig
from distgpt.core.saved.checkpoint import State, latest_valid_checkpoint, load_document
from distgpt.core.train.gathering import restore_gradient_sync
from distgpt.core.train.interfaces import StepPolicy, described, ending, not_finite
from distgpt.core.train.progress import Finished, Progress
from distgpt.core.train.run import BadStep, Run
from distgpt.core.train.setup import begin_anew, restore


class RollBack(BadStep):
    """A bad step that makes the run return to the newest checkpoint, or to the initial weights."""

    def recover(self, run: Run) -> None:
        """Restore the checkpoint. Batches up to the bad one are skipped. Collective."""
        used = self.step + run.batches.skipped
        run.checkpoints.wait()
        path, document = on_root(run.comm, lambda: _newest(run))
        state = State.from_json(document)
        if path:
            restore(run.comm, run.optimizer_state, Path(path))
        else:
            begin_anew(run.comm, run.optimizer_state, run.config.train, run.batches)
        restore_gradient_sync(run.comm, run.gradient_sync, run.model, Path(path) if path else None)
        run.load(replace(state, skipped=used - state.step))
        run.checkpoints.on_root(partial(_forget_later_steps, run, bool(path)))
        step, what = run.progress.step, f"{self.reason} at step {self.step}"
        run.report.remember({"step": step, "bad": what, "back_to": step, "skipped": run.batches.skipped})
        run.report.note(f"{what}: rolled back to step {step}, skipping this data")


def _newest(run: Run) -> tuple[str | None, Mapping[str, object]]:
    newest = latest_valid_checkpoint(run.directory.checkpoints, run.progress.step)
    path = newest[0] if newest else run.start
    return (str(path), load_document(path)) if path else (None, {"step": 0})


def _forget_later_steps(run: Run, was_saved: bool) -> None:
    run.directory.drop_metrics_after(run.progress.step, run.progress.evaluation_pending)
    if was_saved:  # otherwise an interrupted run would repeat the bad step
        run.checkpoints.write_now(run.state())


ENOUGH = 20  # steps of history before outliers are detected
LEAST_SPREAD = 1e-3  # fraction of the mean; avoids outliers if the loss is nearly constant


class BadSteps(StepPolicy):
    """Compares each step with the last good ones, counts bad ones, and skips or undoes them.

    The step policy (`core/train/interfaces.py`) of a run with spike_zscore, or with an --on-bad-step other
    than stop.
    """

    def __init__(self, config: TrainConfig, progress: Progress) -> None:
        super().__init__(config, progress)
        self.waits = bool(config.spike_zscore)  # kernels skip only steps that are not finite

    def check_step(self, done: Finished) -> str:
        """Return why a finished step has not changed the weights, "" if it has.

        Raise the error that ends the run, or BadStep.
        """
        reason = self.rejection_reason(done.loss, done.norm) if done.rejected is None else done.rejected
        if not reason:
            if self._config.spike_zscore:
                self._progress.recent.append((done.loss, done.norm))
            return ""
        step, c = self._progress.step + 1, self._config
        self._progress.bad_steps += 1
        kind = OutlierError if math.isfinite(done.loss) and math.isfinite(done.norm) else NonFiniteError
        what = described(reason, step, done.loss, done.norm)
        if c.on_bad_step == "stop":
            raise collective_error(kind(ending(what, c)))
        if self._progress.bad_steps > c.bad_steps_allowed:
            allowed = count(c.bad_steps_allowed, "bad step")
            raise collective_error(kind(f"{what}: more than {allowed} (bad_steps_allowed)"))
        if c.on_bad_step == "rollback":
            raise RollBack(reason, step)
        return reason

    def rejection_reason(self, loss: float, norm: float) -> str:
        """Return why a step is bad, "" if it is good."""
        if reason := not_finite(loss, norm):
            return reason
        result, recent = {"loss": loss, "gradient": norm}, self._progress.recent
        if self._config.spike_zscore and len(recent) >= ENOUGH:
            for (what, value), others in zip(result.items(), zip(*recent, strict=True), strict=True):
                mean, spread = fmean(others), pstdev(others)
                if value - mean > self._config.spike_zscore * max(spread, LEAST_SPREAD * abs(mean)):
                    return (
                        f"the {what} is an outlier: {value:.4g}, but {mean:.4g} ± {spread:.2g}"
                        f" in the last {len(others)} steps"
                    )
        return ""
