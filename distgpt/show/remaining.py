"""How far a run is and how long it will take: by its steps, or by the clock that ends it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from distgpt.core.base.formatting import clock


class Remaining(Protocol):
    """The end of a run, in words for a line."""

    total: float  # of a bar
    width: int  # of a step in characters, at most

    def done(self, step: int) -> float:
        """Return how much of `total` is done."""

    def step(self, step: int) -> str:
        """Return the step, and of how many if that is known."""

    def elapsed(self) -> str:
        """Return the time that is over, of all there is; "" where only the steps are known."""

    def left(self, step: int, pace: float) -> str:
        """Return the time that is left. `pace`: the usual seconds of a step, 0 before the first one."""


class BySteps:
    """The end of a run after its last step."""

    def __init__(self, steps: int) -> None:
        self.total: float = steps
        self._steps, self.width = steps, len(f"{steps}/{steps}")

    def done(self, step: int) -> float:
        return step

    def step(self, step: int) -> str:
        return f"{step}/{self._steps}"

    def elapsed(self) -> str:
        return ""

    def left(self, step: int, pace: float) -> str:
        return f"left {clock(pace * (self._steps - step))}" if pace else "left --:--"


class ByClock:
    """The end of a run when its time is over: nobody knows its last step, so that steps have no total."""

    def __init__(
        self, seconds: float, left: float, steps: int, now: Callable[[], float] = time.monotonic
    ) -> None:
        """`seconds`: of the whole run, of which `left` are left; `steps`: about as many as it will take."""
        self.total = seconds
        self._now, self._end, self.width = now, now() + left, len(str(steps))

    def done(self, step: int) -> float:
        return max(0.0, self.total - self._seconds_left())

    def step(self, step: int) -> str:
        return str(step)

    def elapsed(self) -> str:
        whole = clock(self.total)
        return f"{clock(self.done(0)):>{len(whole)}} of {whole}"

    def left(self, step: int, pace: float) -> str:
        return f"left {clock(self._seconds_left())}"

    def _seconds_left(self) -> float:
        return max(0.0, self._end - self._now())


def remaining(facts: dict[str, Any]) -> Remaining:
    """Return the end of a run that has started with these facts (`core/train/announce.py`)."""
    if facts.get("seconds_left") is None:
        return BySteps(facts["steps"])
    return ByClock(facts["seconds"], facts["seconds_left"], facts["steps"])
