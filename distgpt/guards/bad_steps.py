"""Guard against steps that must not change the weights: their loss or gradient is not finite, or an outlier.

Loss and gradient norm are sums over all ranks, so all ranks judge alike.
"""

from __future__ import annotations

import math
from statistics import fmean, pstdev

from distgpt.core.base.errors import DistgptError, NonFiniteError, OutlierError
from distgpt.core.base.formatting import count
from distgpt.core.comm.agree import shared
from distgpt.core.config import TrainConfig
from distgpt.core.train.progress import Finished, Progress
from distgpt.core.train.seams import Judge, described, ending, not_finite
from distgpt.guards.rollback import RollBack

ENOUGH = 20  # steps of history before outliers are detected
LEAST_SPREAD = 1e-3  # of the mean, so that a loss that hardly moves has no outliers


class BadSteps(Judge):
    """Compares each step with the last good ones, counts bad ones, and skips or undoes them.

    The judge (`core/train/seams.py`) of a run with --spike-zscore or another --on-bad-step than stop.
    """

    def __init__(self, config: TrainConfig, progress: Progress) -> None:
        super().__init__(config, progress)
        self.waits = bool(config.spike_zscore)  # kernels themselves leave out only what is not finite

    def judge_step(self, done: Finished) -> str:
        """Return why a finished step has not changed the weights, "" if it has.

        Raises the error that ends the run, or BadStep.
        """
        reason = self.objection(done.loss, done.norm) if done.rejected is None else done.rejected
        if not reason:
            self.remember_good(done.loss, done.norm)
            return ""
        step = self._progress.step + 1
        if error := self.refuse(reason, step, done.loss, done.norm):
            raise shared(error)
        if self._config.on_bad_step == "rollback":
            raise RollBack(reason, step)
        return reason

    def objection(self, loss: float, norm: float) -> str:
        """Return why a step is bad, "" if it is good."""
        if reason := not_finite(loss, norm):
            return reason
        found, recent = {"loss": loss, "gradient": norm}, self._progress.recent
        if self._config.spike_zscore and len(recent) >= ENOUGH:
            for (what, value), others in zip(found.items(), zip(*recent, strict=True), strict=True):
                mean, spread = fmean(others), pstdev(others)
                if value - mean > self._config.spike_zscore * max(spread, LEAST_SPREAD * abs(mean)):
                    return (
                        f"the {what} is an outlier, {value:.4g} after {mean:.4g} ± {spread:.2g}"
                        f" in the last {len(others)} steps"
                    )
        return ""

    def remember_good(self, loss: float, norm: float) -> None:
        if self._config.spike_zscore:
            self._progress.recent.append((loss, norm))

    def refuse(self, reason: str, step: int, loss: float, norm: float) -> DistgptError | None:
        """Count a bad step. Return the error if it ends the run, None if the run continues."""
        c = self._config
        self._progress.bad_steps += 1
        kind = OutlierError if math.isfinite(loss) and math.isfinite(norm) else NonFiniteError
        what = described(reason, step, loss, norm)
        if c.on_bad_step == "stop":
            return kind(ending(what, c))
        if self._progress.bad_steps > c.bad_steps_allowed:
            allowed = count(c.bad_steps_allowed, "bad step")
            return kind(f"{what}: more than the {allowed} that --bad-steps-allowed permits")
        return None
