"""distgpt slurm: the word of distgpt submit --system slurm"""

from __future__ import annotations

from typing import Any

from distgpt.commands.help import command
from distgpt.commands.submit import Asked, describes_a_job, make_job
from distgpt.jobs.batch.script import SYSTEMS


@command(
    context_settings={"allow_interspersed_args": False},
    example="distgpt slurm --nodes 2 --ranks-per-node 4 --time 4h -- train --preset gpt2 > job.sh",
)
@describes_a_job
def slurm(**options: Any) -> None:
    """Print a batch script for Slurm that trains, or submit it: distgpt submit --system slurm.

    Whatever ends an attempt early, the time limit, a preemption or a lost node, the job is queued again and
    resumes.

    In a job array, as with --array 1-4, each element trains in a directory of its own, and
    '$SLURM_ARRAY_TASK_ID' is its number in any option of train.
    """
    make_job(SYSTEMS["slurm"], Asked(**options))
