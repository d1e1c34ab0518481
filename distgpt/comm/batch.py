"""The batch system that this process is a job of: its name, and the job's number and name."""

from __future__ import annotations

import os
from collections.abc import Mapping

# The variables that hold a job's number and its name, and one that no other system sets.
SYSTEMS = {
    "Slurm": ("SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_JOB_ID"),
    "PBS": ("PBS_JOBID", "PBS_JOBNAME", "PBS_JOBID"),
    "LSF": ("LSB_JOBID", "LSB_JOBNAME", "LSB_JOBID"),
    "Grid Engine": ("JOB_ID", "JOB_NAME", "SGE_TASK_ID"),
}
LONGEST = 200  # characters of a name


def batch_job(environ: Mapping[str, str] = os.environ) -> dict[str, str] | None:
    """Return "system", "id" and, if it has one, "name" of the job; None outside a batch system."""
    for system, (number, name, sign) in SYSTEMS.items():
        if environ.get(sign) and environ.get(number):
            named = {"name": environ[name][:LONGEST]} if environ.get(name) else {}
            return {"system": system, "id": environ[number][:LONGEST], **named}
    return None
