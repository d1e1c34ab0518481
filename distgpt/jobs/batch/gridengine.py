"""Grid Engine's part of a batch script.

As tried with Son of Grid Engine 8.1.9: at s_rt the shell's process group gets USR1; `-notify` sends USR2
before `qdel` kills; a script that leaves with 99 is queued again, with the same number.
"""

from __future__ import annotations

from distgpt.core.base.errors import UsageError
from distgpt.jobs.batch import array
from distgpt.jobs.batch.job import Job, clock
from distgpt.jobs.batch.script import System


class GridEngine(System):
    name, sentinel = "Grid Engine", "#$"
    submits, programs = ("qsub",), ("qsub", "qconf")
    element, elements = "$SGE_TASK_ID", ("SGE_TASK_ID",)
    array_option, limit_option, least_element = r"-t\s", r"-l\s*h_rt", 1
    refused_names = r"\d.*|(?i:none|all|template)"
    example = "-q all.q"
    advice = """\
Submit it with qsub, whose options
# override the lines below. `qconf -spl` lists the parallel environments that -pe may name."""
    signals = """\
# Every rank saves and leaves on USR1, which this shell gets at s_rt, before the limit h_rt. USR2 comes before
# qdel kills (-notify): the job saves and ends."""
    rule = '75 is "saved, start me again"; Grid Engine queues a job again that leaves with 99.'
    ends = "USR2 TERM"

    def options(self, job: Job) -> list[str]:
        slots = job.nodes * job.cpus_per_node
        if job.memory:
            raise UsageError(
                "--memory: sites of Grid Engine name it differently, as in"
                ' --directive "-l h_vmem=4G" for a slot'
            )
        return [
            f"-N {job.name}",
            "-S /bin/bash",
            "-cwd",
            *([f"-pe mpi {slots}"] if slots > 1 else []),
            *([f"-l gpu={job.gpus_per_node}"] if job.gpus_per_node else []),
            *(["-l exclusive=true"] if job.exclusive else []),
            f"-l h_rt={clock(job.seconds)}",
            f"-l s_rt={clock(job.seconds - job.seconds_to_save)}",
            "-notify",
            "-r y",
            "-j y",
            f"-o {job.name}-$JOB_ID{'.$TASK_ID' if job.is_array else ''}.log",
            *self._array(job),
        ]

    def _array(self, job: Job) -> list[str]:
        numbers, most = array.one_range(job.array, self.name)
        return [*([f"-t {numbers}"] if numbers else []), *([f"-tc {most}"] if most else [])]

    def number(self, job: Job) -> str:
        return "$JOB_ID.$SGE_TASK_ID" if job.is_array else "$JOB_ID"

    def requeue(self, job: Job) -> str:
        return "  exit 99"

    def successor(self, job: Job) -> str:
        return f'qsub {"-t $SGE_TASK_ID " * job.is_array}"$0"'


GRID_ENGINE = GridEngine()
