"""LSF's part of a batch script, written from IBM's reference of LSF 10.1.

As tried with volclava 2.2, an open clone of LSF, which lacks -wa, -wt, -Q and -gpu: a signal comes to every
process group of the job, that of mpiexec and those of the ranks among them; at the limit (-W) all get USR2
and have ten minutes; `bkill` sends INT, TERM and KILL; a script that leaves with 99 is queued again, with the
same number.
"""

from __future__ import annotations

import math

from distgpt.jobs.batch.job import Job, clock
from distgpt.jobs.batch.script import System

# A signal of LSF comes to mpiexec and to all that it has started, too. By itself every program ignores URG.
# USR2 ends MPICH's mpiexec, and an ssh to another node; of an INT, Open MPI's mpiexec kills the ranks.
_SPARED = """\
asked=
trap '' USR2  # which comes to mpiexec, too, and might end it
"""
_PATIENT = """\
# Seconds that mpiexec leaves the ranks for a save after bkill: as Open MPI 4 calls them, and 5.
export OMPI_MCA_odls_base_sigkill_timeout=10 PRTE_MCA_odls_base_sigkill_timeout=10
"""


class Lsf(System):
    name, sentinel = "LSF", "#BSUB"
    waits = "-w( |[^at])"  # not -wa and -wt, which are others
    submits, programs = ("bsub",), ("bsub",)
    element, elements = "$LSB_JOBINDEX", ("LSB_JOBINDEX",)
    array_option = "-J(?!d)"  # the name's: one without numbers would take the array's place
    least_element = 1
    example = "-q normal"
    advice = """\
Submit it with bsub < SCRIPT, whose options
# override the lines below."""
    signals = """\
# Every rank saves and leaves on USR1. LSF sends URG before the limit (-wa, -wt), which only this shell heeds,
# and USR2 at the limit. INT and TERM come before bkill kills: the job saves and ends. A second USR1 would end
# the save."""
    rule = '75 is "saved, start me again"; LSF queues a job again that leaves with 99 (-Q).'
    announces, ends = "URG USR1 USR2", "INT TERM"
    passed_on = '[ "$asked" ] || kill -USR1 $ranks; asked=yes'

    def options(self, job: Job) -> list[str]:
        # Slots are cores: the affinity of tasks is not configured at every site.
        warning = clock(max(60, job.seconds_to_save))
        return [
            f'-J "{job.name}{self._array(job)}"',
            f"-n {job.nodes * job.cpus_per_node}",
            f'-R "span[ptile={job.cpus_per_node}]"',
            *([f'-R "rusage[mem={job.memory}/host]"'] if job.memory else []),
            *([f'-gpu "num={job.gpus_per_node}/host:j_exclusive=yes"'] if job.gpus_per_node else []),
            *(["-x"] if job.exclusive else []),
            f"-W {clock(60 * math.ceil(job.seconds / 60))[:-3]}",  # in minutes, rounded up
            "-wa URG",
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

    def launch(self, job: Job) -> str:
        # MPICH reads LSB_MCPU_HOSTS; Open MPI knows the nodes by this file, unless it has LSF's own library.
        named = ' ${LSB_DJOB_HOSTFILE:+--hostfile "$LSB_DJOB_HOSTFILE"}'
        return super().launch(job) + named * (job.mpi == "openmpi" and job.nodes > 1)

    def functions(self, job: Job) -> str:
        return _SPARED + _PATIENT * (job.mpi == "openmpi")

    def requeue(self, job: Job) -> str:
        return "  exit 99"

    def successor(self, job: Job) -> str:
        command = "bsub" + (f' -J "{job.name}[$LSB_JOBINDEX]"' if job.is_array else "")
        return self.shortened(job, command) or f'{command} < "$0"'


LSF = Lsf()
