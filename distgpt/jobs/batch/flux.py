"""Flux's part of a batch script.

A batch job is a Flux instance of its own, whose brokers get the job's signals. As tried with flux-core 0.88:

| | ranks | the script's shell |
|---|---|---|
| `flux job kill -s USR1 JOB` on one node | USR1 | USR1 |
| the same on several nodes, also by `--signal` of `flux batch` | USR1, but all brokers but the first end | |
| `flux cancel` | nothing until the shell has ended, then TERM | TERM and HUP; KILL 5 s later |
| the time limit itself | ALRM, of which they die | ALRM and HUP; KILL 5 s later |

There are no arrays of batch jobs: the script is submitted once for each element.
"""

from __future__ import annotations

from distgpt.core.base.errors import UsageError
from distgpt.jobs.batch import array
from distgpt.jobs.batch.job import Job
from distgpt.jobs.batch.script import System
from distgpt.launch.mpis import MPIS

SECONDS_TO_SUBMIT = 20  # from when the run has left until its successor has been submitted
# The limit as Flux knows it: the job began before its script. `--signal` would end brokers (above).
_END = """\
# In seconds since 1970: the limit above, less what it takes to submit a successor.
export DISTGPT_JOB_END=$(($(date +%s) + $(flux job timeleft) - {}))
"""
# Of --mpi, also by the words for other systems. A site may have another default, which MPICH could not speak.
_PMI = {"mpich": "simple", "intel": "simple", "openmpi": MPIS["Open MPI"].flux, "pals": "cray-pals"}


class Flux(System):
    name, sentinel = "Flux", "# flux:"
    submits, programs = ("flux", "batch"), ("flux",)
    element, elements = "$ELEMENT", ()
    limit_option = "--time-limit|-t"
    launches_by_mpi = False
    example = "--queue=batch"
    advice = """\
Submit it with flux batch. Of an array
# each element is submitted alone: flux batch --env=ELEMENT=1 SCRIPT."""
    signals = """\
# Every rank saves and leaves on USR1. The run knows the time limit by DISTGPT_JOB_END. TERM and HUP come
# 5 seconds before `flux cancel` kills: the job saves and ends."""
    ends = "TERM HUP"
    passed_on = "flux job kill -s USR1 $(flux job last)"  # flux run itself would be killed by it

    def options(self, job: Job) -> list[str]:
        if job.memory:
            raise UsageError("--memory: Flux gives cores, and no part of a node's memory: leave it out")
        if "%" in job.array:
            raise UsageError(
                f"--array {job.array}: Flux starts all that fit at once: leave out % and its number"
            )
        return [
            f"--job-name={job.name}",
            f"--nodes={job.nodes}",
            f"--nslots={job.nodes}",  # a node's part each: ranks may be more than GPUs, which are given whole
            f"--cores-per-slot={job.cpus_per_node}",
            *([f"--gpus-per-slot={job.gpus_per_node}"] if job.gpus_per_node else []),
            *(["--exclusive"] if job.exclusive else []),
            f"--time-limit={int(job.seconds)}s",
            f"--output={job.name}-{{{{id.f58plain}}}}.log",  # letters and digits: without its sign, ƒ
        ]

    def number(self, job: Job) -> str:
        return "$number"

    def begin(self, job: Job) -> str:
        return (
            f"{_END.format(min(SECONDS_TO_SUBMIT, int(job.seconds / 4)))}"
            f'number=$(flux job id --to=f58plain "$(flux getattr jobid)")\n{super().begin(job)}'
        )

    def launch(self, job: Job) -> str:
        gpus = " --exclusive" if job.gpus_per_node else ""  # all that the job has: ranks choose among them
        pmi = "" if job.mpi == "none" else f" -o pmi={_PMI.get(job.mpi, job.mpi)}"
        return (
            f"flux run --nodes={job.nodes} --ntasks={job.ranks} --cores-per-task={job.cpus_per_task}"
            f"{gpus} \\\n  -o cpu-affinity=per-task{pmi}"
        )

    def shown_number(self, is_array: bool) -> str:
        return "JOB"  # each element is a job

    def successor(self, job: Job) -> str:
        return f'flux --parent batch {"--env=ELEMENT=$ELEMENT " * job.is_array}"$0"'

    def mpi(self, vendor: str) -> str | None:
        return {"Open MPI": "openmpi", "Cray MPICH": "cray-pals"}.get(vendor, "simple")

    def submissions(self, job: Job) -> list[list[str]]:
        numbers = array.elements(job.array)
        return [["flux", "batch", f"--env=ELEMENT={number}"] for number in numbers] or [["flux", "batch"]]


FLUX = Flux()
