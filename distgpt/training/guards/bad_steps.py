"""Guard against steps that must not change the weights: their loss or gradient is not finite, or an outlier.

Loss and gradient norm are sums over all ranks, so all ranks judge alike.
"""

from __future__ import annotations

import math
from statistics import fmean, pstdev

from distgpt.comm.agree import shared
from distgpt.config import TrainConfig
from distgpt.errors import DistgptError, NonFiniteError, OutlierError
from distgpt.formatting import count
from distgpt.training.in_flight import Finished
from distgpt.training.progress import Progress

ENOUGH = 20  # steps of history before outliers are detected
LEAST_SPREAD = 1e-3  # of the mean, so that a loss that hardly moves has no outliers


class RollBack(Exception):
    """A bad step has to be undone: raised on all ranks, for --on-bad-step rollback."""

    def __init__(self, reason: str, step: int) -> None:
        super().__init__(reason)
        self.reason, self.step = reason, step


class BadSteps:
    """Compares each step with the last good ones, and counts bad ones. The same on all ranks."""

    def __init__(self, config: TrainConfig, progress: Progress) -> None:
        self._config, self._progress = config, progress

    def judge(self, done: Finished) -> str:
        """Return why a finished step has not changed the weights, "" if it has.

        Raises the error that ends the run, or RollBack.
        """
        rejected = done.result.rejected
        reason = self.reason(done.loss, done.norm) if rejected is None else rejected
        if not reason:
            self.remember_good(done.loss, done.norm)
            return ""
        step = self._progress.step + 1
        if error := self.refuse(reason, step, done.loss, done.norm):
            raise shared(error)
        if self._config.on_bad_step == "rollback":
            raise RollBack(reason, step)
        return reason

    def reason(self, loss: float, norm: float) -> str:
        """Return why a step is bad, "" if it is good."""
        found = {"loss": loss, "gradient": norm}
        for what, value in found.items():
            if not math.isfinite(value):
                return f"the {what} is not finite"
        recent = self._progress.recent
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
        what = f"{reason} at step {step} (loss {loss}, gradient norm {norm})"
        if c.on_bad_step == "stop":
            clip = "a smaller --clip" if c.clip else "--clip 1"
            hint = f"; a lower --lr, a longer --warmup or {clip} may help, or --on-bad-step skip"
            return kind(f"{what}{hint}; earlier checkpoints are kept")
        if self._progress.bad_steps > c.bad_steps_allowed:
            allowed = count(c.bad_steps_allowed, "bad step")
            return kind(f"{what}: more than the {allowed} that --bad-steps-allowed permits")
        return None
