"""LSF's part of a batch script. Written from IBM's reference of LSF 10.1, and not run."""

from __future__ import annotations

import math

from distgpt.jobs.batch.job import Job, clock
from distgpt.jobs.batch.script import System


class Lsf(System):
    waits = "-w", "-w( |[^at])"  # not -wa and -wt, which are others
    name, word, sentinel = "LSF", "lsf", "#BSUB"
    submits, programs = ("bsub",), ("bsub",)
    element, elements = "$LSB_JOBINDEX", ("LSB_JOBINDEX",)
    array_flag = "-J"  # the name's: one without numbers would take the array's place
    least_element = 1
    example = "-q normal"
    advice = """\
Submit it with bsub < SCRIPT, whose options
# override the lines below."""
    signals = """\
# Every rank saves and leaves on USR1, which LSF sends before the limit (-wa, -wt). INT and TERM come before
# bkill kills: the job saves and ends."""
    rule = '75 is "saved, start me again"; LSF queues a job again that leaves with 99 (-Q).'
    ends = "INT TERM USR2"  # USR2 is what LSF sends at the limit itself
    repeated = ("-R",)

    def options(self, job: Job) -> list[str]:
        # Slots are cores: the affinity of tasks is not configured at every site.
        warning = clock(max(60, job.seconds_to_save))
        return [
            f'-J "{job.name}{self._array(job)}"',
            f"-n {job.nodes * job.cpus_per_node}",
            f'-R "span[ptile={job.cpus_per_node}]"',
            *([f'-R "rusage[mem={job.memory}/host]"'] if job.memory else []),
            *([f'-gpu "num={job.gpus_per_node}/host"'] if job.gpus_per_node else []),
            f"-W {clock(60 * math.ceil(job.seconds / 60))[:-3]}",  # in minutes, rounded up
            "-wa USR1",
            f"-wt {warning[:-3]}",
            '-Q "99"',
            "-r",
            f"-o {job.name}-{'%J.%I' if job.is_array else '%J'}.log",
        ]

    @staticmethod
    def _array(job: Job) -> str:
        numbers, percent, most = job.array.partition("%")
        return f"[{numbers}]{percent}{most}" if numbers else ""

    def number(self, job: Job) -> str:
        return "$LSB_JOBID.$LSB_JOBINDEX" if job.is_array else "$LSB_JOBID"

    def requeue(self, job: Job) -> str:
        return "  exit 99"

    def successor(self, job: Job) -> str:
        command = "bsub" + (f' -J "{job.name}[$LSB_JOBINDEX]"' if job.is_array else "")
        return self.shortened(job, command) or f'{command} < "$0"'


LSF = Lsf()
