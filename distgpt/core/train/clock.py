"""The end of a run: after its steps, or when its time is over."""

from __future__ import annotations

from dataclasses import dataclass

from distgpt.core.config import TrainConfig

# The share of the time in which steps are taken: the last checkpoint and the weights are written in the rest.
KEPT = 0.985


@dataclass(frozen=True, slots=True)
class Times:
    """The moment from which this process counts, and what was used up by then."""

    begun: float  # of time.monotonic()
    spent: float  # seconds of the processes before this one


def is_over(seconds: float, t: TrainConfig) -> bool:
    """Return whether the time of a run that ends by the clock is over after this many seconds of it."""
    return seconds >= KEPT * 60 * t.train_minutes


class Clock:
    """Says which step is the last one. This one counts steps; `timed.py` has one that goes by the time."""

    def __init__(self, last: int | None, elapsed: float | None = None) -> None:
        self.last = last  # the last step; None: not known yet
        self.elapsed = elapsed  # the fraction of the run's time that is over; None: it has no time

    def seconds(self) -> float:
        """Return the seconds that count for the run's time."""
        return 0.0

    def ahead(self) -> float:
        """Return the fraction of the time that is over with the next step, which rank 0 sends with a step."""
        return 0.0

    def hear(self, elapsed: float, launched: int) -> None:
        """Go by what rank 0 has sent."""
