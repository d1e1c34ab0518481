"""The batch system that this process is a job of: its name, the job's number and name, and when it ends."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

# The variables that hold a job's number and its name, and one that no other system sets.
SYSTEMS = {
    "Slurm": ("SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_JOB_ID"),
    "PBS": ("PBS_JOBID", "PBS_JOBNAME", "PBS_JOBID"),
    "LSF": ("LSB_JOBID", "LSB_JOBNAME", "LSB_JOBID"),
    "Grid Engine": ("JOB_ID", "JOB_NAME", "SGE_TASK_ID"),
}
LONGEST = 200  # characters of a name
SLURMS = "SLURM_JOB_END_TIME"  # environment variable: seconds since 1970


def batch_job(environ: Mapping[str, str] = os.environ) -> dict[str, str] | None:
    """Return "system", "id" and, if it has one, "name" of the job; None outside a batch system."""
    for system, (number, name, sign) in SYSTEMS.items():
        if environ.get(sign) and environ.get(number):
            named = {"name": environ[name][:LONGEST]} if environ.get(name) else {}
            return {"system": system, "id": environ[number][:LONGEST], **named}
    return None


def job_end(seconds: float | None, environ: Mapping[str, str] = os.environ) -> float | None:
    """Return when to be gone: after these seconds, else when Slurm ends the job; None if neither is known."""
    now = time.monotonic()
    if seconds is not None:
        return now + seconds
    known = environ.get(SLURMS, "")
    left = int(known) - time.time() if known.isdecimal() and len(known) < 16 else 0.0
    return now + left if left > 0 else None  # one that is past is another job's, or was prolonged
