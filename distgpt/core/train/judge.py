"""The judge of steps, as it is by default: one whose loss or gradient is not finite ends the run.

Loss and gradient norm are sums over all ranks, so all ranks judge alike.
"""

from __future__ import annotations

import math
from typing import NoReturn

from distgpt.core.base.errors import NonFiniteError
from distgpt.core.comm.agree import shared
from distgpt.core.config import TrainConfig
from distgpt.core.train.in_flight import Finished
from distgpt.core.train.progress import Progress
from distgpt.core.train.run import BadStep, Run


class FiniteJudge:
    """Ends the run at the first step that is not finite. It changes no weights."""

    waits = False

    def __init__(self, config: TrainConfig, progress: Progress) -> None:
        self._config, self._progress = config, progress

    def objection(self, loss: float, norm: float) -> str:
        """Return why a step must not change the weights, "" if it may."""
        return not_finite(loss, norm)

    def judge(self, done: Finished) -> str:
        """Return "" for a good step; raise the error that ends the run for another one."""
        rejected = done.result.rejected
        # None where nothing waits for a step's result: then the kernels themselves have left out its update.
        reason = self.objection(done.loss, done.norm) if rejected is None else rejected
        if reason:
            bad = described(reason, self._progress.step + 1, done.loss, done.norm)
            raise shared(NonFiniteError(ending(bad, self._config)))
        return ""

    def recover(self, run: Run, bad: BadStep) -> NoReturn:
        """Raise it: nothing here is undone."""
        raise bad


def not_finite(loss: float, norm: float) -> str:
    """Return what of a step is not finite, "" if all is."""
    for what, value in {"loss": loss, "gradient": norm}.items():
        if not math.isfinite(value):
            return f"the {what} is not finite"
    return ""


def described(reason: str, step: int, loss: float, norm: float) -> str:
    """Return a line about a bad step."""
    return f"{reason} at step {step} (loss {loss}, gradient norm {norm})"


def ending(bad: str, config: TrainConfig) -> str:
    """Return the message of a run that ends at a bad step."""
    clip = "a smaller --clip" if config.clip else "--clip 1"
    hint = f"; a lower --lr, a longer --warmup or {clip} may help, or --on-bad-step skip"
    return f"{bad}{hint}; earlier checkpoints are kept"
