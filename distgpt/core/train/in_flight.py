"""Steps that were launched and whose results were not read yet. A GPU computes one while it gets the next."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from distgpt.core.train.step import StepResult


@dataclass(frozen=True, slots=True)
class Finished:
    """A step that is done on this rank."""

    result: StepResult
    loss: float  # the mean over all ranks
    norm: float  # of the gradients
    seconds: float  # since the step before it was done


class InFlight:
    """At most `depth` steps may be under way when the next one is launched."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._results: deque[StepResult] = deque()
        self.restart_clock()

    def __len__(self) -> int:
        return len(self._results)

    def add(self, result: StepResult) -> None:
        self._results.append(result)

    def wait(self) -> Finished:
        """Wait for the oldest step."""
        result = self._results.popleft()
        loss, norm = result.read()
        seconds = -self._finished_at
        self.restart_clock()
        return Finished(result, loss, norm, seconds + self._finished_at)

    def restart_clock(self) -> None:
        """Count the next step's time from now on."""
        self._finished_at = time.perf_counter()
