"""Lines about a run's progress where no bar is: how often one comes, and the time of day in front of it."""

from __future__ import annotations

import time
from datetime import datetime

from distgpt.core.comm.batch import batch_job

# Seconds between lines: for a person who watches how it begins, for one who looks now and then, and in the
# log of a batch job, which is read once it is over.
AT_FIRST, LATER, IN_A_JOB = 2.0, 10.0, 30.0
FIRST = 30.0  # seconds that count as the beginning


class LogLines:
    """The lines of one run. A batch job is one whose output is no terminal: people work in others."""

    def __init__(self, seconds: float | None, is_terminal: bool) -> None:
        """`seconds`: between two lines; None: as above."""
        self._seconds, self._begun = seconds, time.monotonic()
        self._is_job = not is_terminal and batch_job() is not None

    def interval(self) -> float:
        """Return the seconds that have to pass between two lines now."""
        if self._seconds is not None:
            return self._seconds
        if self._is_job:
            return IN_A_JOB
        return AT_FIRST if time.monotonic() - self._begun < FIRST else LATER

    def stamped(self, text: str) -> str:
        """Return a line with the time of day, in a batch job."""
        return f"{datetime.now():%Y-%m-%d %H:%M:%S}  {text}" if self._is_job else text
