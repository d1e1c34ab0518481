"""Slurm's part of a batch script.

Which signals reach whom, as tried with Slurm 22.05 and read in its sources up to 25.11:

| | ranks | the script's shell |
|---|---|---|
| `--signal=USR1@…`, `scancel --signal=USR1` | USR1 | |
| the same with `--signal=B:…`, `--batch` | | USR1 |
| `scancel`, `scontrol requeue`, preemption, the time limit itself | TERM, KILL after KillWait | the same |
| preemption in a partition with GraceTime | TERM; then the job may end by itself | |

On TERM srun kills all ranks, and `scancel --full` sends that to the shell's whole process group: srun has one
of its own. A rank that leaves with 75 must not make srun kill the others, which are still on their way out;
one that was killed ends all after 60 s.
"""

from __future__ import annotations

from distgpt.jobs.batch.job import Job, clock
from distgpt.jobs.batch.script import System
from distgpt.launch.mpis import MPIS

PMI = {vendor: mpi.srun[0] for vendor, mpi in MPIS.items()}


class Slurm(System):
    name, sentinel = "Slurm", "#SBATCH"
    array_option = r"--array\b|-a"
    submits, programs = ("sbatch",), ("sbatch",)
    element, elements = "$SLURM_ARRAY_TASK_ID", ("SLURM_ARRAY_TASK_ID",)
    launches_by_mpi = False
    example = "--partition=gpu"
    advice = """\
Submit it with sbatch, whose options
# override the lines below: sbatch --nodes=1 --ntasks-per-node=… resumes the run on other nodes."""
    signals = """\
# Every rank saves and leaves on USR1, which Slurm sends them before the time limit. What only this shell gets
# is passed on; after a TERM Slurm ends or requeues the job itself."""
    rule = (
        '75 is "saved, start me again". A preempted job that ends within its grace time is not requeued by'
        " Slurm."
    )

    def options(self, job: Job) -> list[str]:
        return [
            f"--job-name={job.name}",
            f"--nodes={job.nodes}",
            f"--ntasks-per-node={job.ranks_per_node}",
            f"--cpus-per-task={job.cpus_per_task}",
            *(["--hint=nomultithread"] if job.counts_cores else []),
            *([f"--gpus-per-node={job.gpus_per_node}"] if job.gpus_per_node else []),
            *([f"--mem={job.memory}"] if job.memory else []),
            *(["--exclusive"] if job.exclusive else []),
            f"--time={slurm_time(job.seconds)}",
            f"--signal=USR1@{job.seconds_to_save}",
            "--requeue",
            "--open-mode=append",
            f"--output={job.name}-{'%A_%a' if job.is_array else '%j'}.log",
            *([f"--array={job.array}"] if job.array else []),
        ]

    def number(self, job: Job) -> str:
        """Return the job's number. SLURM_JOB_ID of an array's element may stand for the whole array."""
        return "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" if job.is_array else "$SLURM_JOB_ID"

    def begin(self, job: Job) -> str:
        return "attempt=${SLURM_RESTART_COUNT:-0}\n"

    def functions(self, job: Job) -> str:
        show = f'scontrol show job "{self.number(job)}"'
        return f"preempted() {{ {show} | grep -q 'PreemptTime=[0-9]'; }}\n"

    def launch(self, job: Job) -> str:
        """Return srun. --hint excludes --cpu-bind, which it sets itself."""
        binding = (
            "--hint=nomultithread --distribution=block:block" if job.counts_cores else "--cpu-bind=cores"
        )
        return (
            f'srun --mpi={job.mpi} --cpus-per-task="$SLURM_CPUS_PER_TASK" {binding} \\\n'
            "  --kill-on-bad-exit=0 --wait=60"
        )

    def begins_again(self, job: Job) -> str:
        return "[ $code = 75 ] || { [ $code != 0 ] && preempted; }"

    def requeue(self, job: Job) -> str:
        return f'  scontrol requeue "{self.number(job)}" && exit 0'

    def successor(self, job: Job) -> str:
        return f'sbatch {"--array=$SLURM_ARRAY_TASK_ID " * job.is_array}"$0"'

    def shown_number(self, is_array: bool) -> str:
        return "JOB_ELEMENT" if is_array else "JOB"

    def mpi(self, vendor: str) -> str | None:
        return PMI.get(vendor)


def slurm_time(seconds: float) -> str:
    """14400 → "04:00:00", 90000 → "1-01:00:00"."""
    hours, _, rest = clock(seconds).partition(":")
    days, hour = divmod(int(hours), 24)
    return (f"{days}-" if days else "") + f"{hour:02}:{rest}"


SLURM = Slurm()
