"""A batch script for Slurm: `distgpt train` on the nodes of a job, begun again until it is done.

Which signals reach whom, as tried with Slurm 22.05 and read in its sources up to 25.11:

| | ranks | the script's shell |
|---|---|---|
| `--signal=USR1@…`, `scancel --signal=USR1` | USR1 | |
| the same with `--signal=B:…`, `--batch` | | USR1 |
| `scancel`, `scontrol requeue`, preemption, the time limit itself | TERM, KILL after KillWait | the same |
| preemption in a partition with GraceTime | TERM; then the job may end by itself | |

A shell runs its traps only while it waits for a process in the background. On TERM srun kills all ranks, and
`scancel --full` sends that to the shell's whole process group: srun has one of its own. A rank that leaves
with 75 must not make srun kill the others, which are still on their way out; one that was killed ends all
after 60 s.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from distgpt.core.base.errors import UsageError, escape
from distgpt.jobs import array
from distgpt.jobs.array import ELEMENT

WIDTH = 100  # of a line of the command
SECONDS_TO_SAVE = 120  # by which USR1 comes before the time limit
PMI = {"MPICH": "pmi2", "Intel MPI": "pmi2", "MVAPICH": "pmi2", "MVAPICH2": "pmi2", "Open MPI": "pmix"}

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True, slots=True)
class Job:
    """Parameters of a script. `command` trains, `made_by` is the command that made the script."""

    name: str
    nodes: int
    ranks_per_node: int
    cpus_per_task: int
    gpus_per_node: int  # 0: none
    seconds: float
    mpi: str  # for srun
    lines: Sequence[str]  # further options of sbatch
    out: Path
    command: Sequence[str]
    made_by: str
    is_array: bool = False  # whose elements each have their number in place of ELEMENT

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise UsageError(f"--name {self.name}: a job's name is of letters, digits, dots, - and _")
        if not _NAME.fullmatch(self.mpi):
            raise UsageError(f"--mpi {self.mpi}: srun knows names like pmi2 and pmix, see srun --mpi=list")
        for line in self.lines:
            if not line.startswith("-"):
                raise UsageError(
                    f'--sbatch {line}: give an option of sbatch, as in --sbatch "--partition=gpu"'
                )
        for word in (*self.lines, *self.command, str(self.out), self.made_by):
            if escape(word) != word:
                raise UsageError(f"{word} has characters that cannot stand in a script")

    @property
    def options(self) -> list[str]:
        """Options of sbatch, the user's last: of two equal ones sbatch takes the last."""
        given = [
            f"--job-name={self.name}",
            f"--nodes={self.nodes}",
            f"--ntasks-per-node={self.ranks_per_node}",
            f"--cpus-per-task={self.cpus_per_task}",
            *([f"--gpus-per-node={self.gpus_per_node}"] if self.gpus_per_node else []),
            f"--time={slurm_time(self.seconds)}",
            f"--signal=USR1@{max(1, min(SECONDS_TO_SAVE, int(self.seconds / 4)))}",
            "--requeue",
            "--open-mode=append",
            f"--output={self.name}-{'%A_%a' if self.is_array else '%j'}.log",
        ]
        return [*given, *self.lines]

    @property
    def number(self) -> str:
        """The job's number. SLURM_JOB_ID of an array's element may stand for the whole array."""
        return "${SLURM_ARRAY_JOB_ID}_" + ELEMENT if self.is_array else "$SLURM_JOB_ID"


def slurm_time(seconds: float) -> str:
    """14400 → "04:00:00", 90000 → "1-01:00:00"."""
    minutes, second = divmod(math.ceil(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return (f"{days}-" if days else "") + f"{hour:02}:{minute:02}:{second:02}"


def script(job: Job) -> str:
    """Return the whole script."""
    quote = array.quoted if job.is_array else shlex.quote
    return _SCRIPT.format(
        made_by=job.made_by,
        options="\n".join(f"#SBATCH {option}" for option in job.options),
        name=job.name,
        number=job.number,
        checkpoints=quote(str(job.out / "checkpoints")),
        mpi=job.mpi,
        command=" \\\n  ".join(_wrapped(job.command, quote)),
    )


def _wrapped(words: Sequence[str], quote: Callable[[str], str]) -> list[str]:
    """Quote the words and break them into lines; an option stays with its value."""
    lines = [""]
    previous = ""
    for word in words:
        quoted = quote(word)
        is_value = previous.startswith("--") and "=" not in previous and not word.startswith("-")
        if lines[-1] and not is_value and len(lines[-1]) + len(quoted) >= WIDTH - 20:
            lines.append("")
        lines[-1] = f"{lines[-1]} {quoted}".lstrip()
        previous = word
    return lines


_SCRIPT = """\
#!/bin/bash
# Train, and begin again where it stopped until all steps are done. Submit it with sbatch, whose options
# override the lines below: sbatch --nodes=1 --ntasks-per-node=… resumes the run on other nodes.
# {made_by}
{options}

# What this site needs before a program starts goes here: module load …, export …

attempt=${{SLURM_RESTART_COUNT:-0}}
log={name}-{number}.$attempt.log
newest() {{ ls {checkpoints} 2>/dev/null | tail -n 1; }}
preempted() {{ scontrol show job "{number}" | grep -q 'PreemptTime=[0-9]'; }}
before=$(newest)

set -m  # srun in a process group of its own: on a TERM that is meant for this shell it would kill the ranks
srun --mpi={mpi} --cpus-per-task="$SLURM_CPUS_PER_TASK" --cpu-bind=cores --kill-on-bad-exit=0 --wait=60 \\
  {command} \\
  >>"$log" 2>&1 &
ranks=$!

# Every rank saves and leaves on USR1, which Slurm sends them before the time limit. What only this shell gets
# is passed on; after a TERM Slurm ends or requeues the job itself.
trap 'came=USR1; kill -USR1 $ranks' USR1
trap 'came=TERM; ending=yes; kill -USR1 $ranks' TERM
while came=; wait $ranks; code=$?; [ "$came" ]; do :; done
echo "attempt $attempt left with $code; newest checkpoint: $(newest)"

# 75 is "saved, start me again". A preempted job that ends within its grace time is not requeued by Slurm.
again=
if [ $code = 75 ] && [ "$(newest)" = "$before" ]; then
  echo "no step was finished in this attempt: not queued again, as that might never end"
elif [ $code = 75 ] || {{ [ $code != 0 ] && preempted; }}; then
  again=yes
fi
if [ "$again" ] && [ -z "$ending" ]; then
  scontrol requeue "{number}" && exit 0
fi
exit $code
"""
