"""How long a run may take, and by when it has to begin its last checkpoint to be gone in time."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

STEPS, SAVES = 2.0, 1.5  # how much slower than the slowest so far the last step and the last save may be
LEAVING = 2.0  # seconds: writing the summary, ending MPI
BYTES_PER_SECOND = 1e8  # of the disk, until a checkpoint was written
SLURMS = "SLURM_JOB_END_TIME"  # seconds since 1970


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """Of rank 0. `end` is a moment of time.monotonic()."""

    end: float
    checkpoint_bytes: float

    def latest(self, step_seconds: Sequence[float], save_seconds: float | None, saves: int = 1) -> float:
        """The moment after which no further step should begin, if so many checkpoints are to be written.

        `step_seconds`: of recent steps.
        """
        step = max(step_seconds, default=0.0)
        save = self.checkpoint_bytes / BYTES_PER_SECOND if save_seconds is None else save_seconds
        return self.end - LEAVING - saves * SAVES * save - STEPS * step


def ending(seconds: float | None, environ: Mapping[str, str] = os.environ) -> float | None:
    """When to be gone: so many seconds from now, else when Slurm ends the job; None if neither is known."""
    now = time.monotonic()
    if seconds is not None:
        return now + seconds
    known = environ.get(SLURMS, "")
    left = int(known) - time.time() if known.isdecimal() and len(known) < 16 else 0.0
    return now + left if left > 0 else None  # one that is past is another job's, or was prolonged
