"""Predicts the final held-out loss of a --within run from the run's own held-out curve."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from distgpt.core.base.checked import JsonObject
from distgpt.core.comm.api import SerialComm
from distgpt.core.train.assessment import Scorer, Validation
from distgpt.core.train.progress import Finished
from distgpt.core.train.run import Run

# Fractions of the time of all steps at which to measure, slightly before evaluations at 1/8, 1/4 and 1/2. The
# first only gives a slope.
MARKS = (0.12, 0.24, 0.48)
SAMPLED = 0.015  # held-out tokens per measurement, as a fraction of the training tokens
# Fitted to measured curves (docs/explanation/learning.md).
STEEPER = 1.2  # ratio of the remaining exponent to the measured one, because the learning rate decays
FLATTER = 1.5  # how much less of a large expected drop remains
USUAL = -0.04  # exponent if only one point is known
WITHIN = 0.06  # relative error if no drop is expected


class Forecast(AbstractContextManager["Forecast"]):
    """A callback that measures and predicts.

    On one rank on CPUs, it scores a sample of the held-out text. Otherwise, it waits for the evaluations.
    """

    def __init__(self, run: Run, validation: Validation) -> None:
        self._run, self._last_loss, t = run, run.progress.val_loss, run.settings
        self._begun = -1.0  # elapsed fraction of the run's time at the first steps
        self.curve: list[list[float]] = []  # fraction of the steps' time, and bits per byte
        self.predicted: tuple[float, float] | None = None  # bits per byte, and their relative error
        self._is_alone = run.comm.size == 1 and not run.model.kernels.capabilities.is_async
        most = SAMPLED * t.steps * t.batch_size * run.model.config.seq_len
        self._spans = validation.spans[:: math.ceil(validation.count / most)]

    def __exit__(self, *ended: object) -> None: ...

    def state(self) -> JsonObject:
        return {"begun": self._begun, "curve": [[*point] for point in self.curve]}

    def load(self, state: JsonObject) -> None:
        known: Any = state
        self._begun, self.curve = known["begun"], known["curve"]
        if self.curve and self.curve[-1][0] >= MARKS[1]:
            self.predicted = predicted(self.curve)

    def after_step(self, done: Finished) -> dict[str, float]:
        run = self._run
        elapsed, loss = run.budget.elapsed, run.progress.val_loss
        elapsed = run.progress.step / run.settings.steps if elapsed is None else elapsed
        is_new, self._last_loss = loss is not self._last_loss, loss
        if self._begun < 0:  # steps start after the text is tokenized; the first step has no time yet
            self._begun = elapsed or -1.0
            return {}
        fraction = (elapsed - self._begun) / max(1e-9, 1 - self._begun)
        passed = sum(mark <= self.curve[-1][0] for mark in MARKS) if self.curve else 0
        if passed == len(MARKS) or not MARKS[passed] <= fraction < 1 or not (is_new or self._is_alone):
            return {}
        if self._is_alone:
            sums = Scorer(run.model, SerialComm()).sums(self._spans)
            loss = float(sums.sum()) / sum(span.count for span in self._spans)
        if (bits := run.bits_per_byte(loss)) is not None:  # None on other ranks
            self.curve.append([fraction, bits])
            if fraction >= MARKS[1]:
                self.predicted = predicted(self.curve)
                now = f"after {fraction:.0%} of the training time: {bits:.2f} bits per byte on held-out text"
                run.report.note(f"--within: {now}, {bits_range(*self.predicted)} predicted at the end")
        return {}


def predicted(curve: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the final bits per byte, and their relative error, by a power law in time."""
    fraction, bits = curve[-1]
    exponent = USUAL
    if len(curve) > 1:
        before, then = curve[-2]
        exponent = min(0.0, math.log(bits / then) / math.log(fraction / before))  # the best weights are kept
    power = STEEPER * exponent * math.log(fraction)
    drop = power / (1 + FLATTER * power)
    return bits * math.exp(-drop), WITHIN + drop / 2


def bits_range(bits: float, within: float) -> str:
    return f"{bits * (1 - within):.2f} to {bits * (1 + within):.2f}"
