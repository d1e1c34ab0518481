"""Steps that must not change the weights: their loss or gradient is not finite, or an outlier."""

from __future__ import annotations

import math
from statistics import fmean, pstdev

from distgpt.config import TrainConfig
from distgpt.errors import DistgptError, NonFiniteError, OutlierError
from distgpt.training.progress import Progress
from distgpt.units import count

ENOUGH = 20  # steps that one is compared with, at least
LEAST_SPREAD = 1e-3  # of the mean, so that a loss that hardly moves has no outliers


class BadSteps:
    """Compares each step with the last good ones, and counts bad ones. The same on all ranks."""

    def __init__(self, config: TrainConfig, progress: Progress) -> None:
        self._config, self._progress = config, progress

    def wrong(self, loss: float, norm: float) -> str:
        """What is wrong with a step; "" if nothing is."""
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

    def was_good(self, loss: float, norm: float) -> None:
        if self._config.spike_zscore:
            self._progress.recent.append((loss, norm))

    def refuse(self, why: str, step: int, loss: float, norm: float) -> DistgptError | None:
        """Count a bad step. Returns the error if it ends the run, None if the run goes on."""
        c = self._config
        self._progress.bad_steps += 1
        kind = OutlierError if math.isfinite(loss) and math.isfinite(norm) else NonFiniteError
        said = f"{why} at step {step} (loss {loss}, gradient norm {norm})"
        if c.on_bad_step == "stop":
            clip = "a smaller --clip" if c.clip else "--clip 1"
            hint = f"; a lower --lr, a longer --warmup or {clip} may help, or --on-bad-step skip"
            return kind(f"{said}{hint}; earlier checkpoints are kept")
        if self._progress.bad_steps > c.bad_steps_allowed:
            allowed = count(c.bad_steps_allowed, "bad step")
            return kind(f"{said}: more than the {allowed} that --bad-steps-allowed bears")
        return None
