"""How long a run may take, and by when it has to begin its last checkpoint to be gone in time."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence

STEPS, SAVES = 2.0, 1.5  # how much slower than the slowest so far the last step and the last save may be
LEAVING = 2.0  # seconds: writing the summary, ending MPI
RECENT = 100  # steps that count
BYTES_PER_SECOND = 1e8  # of the disk, until a checkpoint was written
SLURMS = "SLURM_JOB_END_TIME"  # seconds since 1970


class TimeLimit:
    """Of rank 0. `end` is a moment of time.monotonic()."""

    def __init__(self, end: float, checkpoint_bytes: float) -> None:
        self._end = end
        self._save = checkpoint_bytes / BYTES_PER_SECOND

    def saved(self, seconds: float) -> None:
        self._save = seconds

    def latest(self, step_seconds: Sequence[float]) -> float:
        """The moment after which no further step should begin."""
        step = max(step_seconds[-RECENT:], default=0.0)
        return self._end - LEAVING - SAVES * self._save - STEPS * step


def ending(seconds: float | None, environ: Mapping[str, str] = os.environ) -> float | None:
    """When to be gone: so many seconds from now, else when Slurm ends the job; None if neither is known."""
    now = time.monotonic()
    if seconds is not None:
        return now + seconds
    known = environ.get(SLURMS, "")
    left = int(known) - time.time() if known.isdecimal() and len(known) < 16 else 0.0
    return now + left if left > 0 else None  # one that is past is another job's, or was prolonged
