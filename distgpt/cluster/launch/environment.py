"""Environment variables by which batch systems and launchers inform a process.

Of its job: the end, and what it is granted; of the ranks: how many they are, and which one it is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from distgpt.core.comm.resources import Grants

Environ = Mapping[str, str]

JOB_END = "DISTGPT_JOB_END"  # in seconds since 1970
LONGEST_NAME = 200  # characters
MIB = 1 << 20
STEP = "SLURM_STEP_NUM_TASKS"  # SLURM_NTASKS is also set where srun has launched nothing

# Batch systems

# Name, a variable that no other system sets, and those with the number and the name of a job. In a batch job
# `flux run` starts a job of the batch job's own Flux, with a number that nobody else knows.
SYSTEMS = (
    ("Slurm", "SLURM_JOB_ID", "SLURM_JOB_ID", "SLURM_JOB_NAME"),
    ("PBS", "PBS_JOBID", "PBS_JOBID", "PBS_JOBNAME"),
    ("LSF", "LSB_JOBID", "LSB_JOBID", "LSB_JOBNAME"),
    ("Grid Engine", "SGE_TASK_ID", "JOB_ID", "JOB_NAME"),
    ("Flux", "FLUX_ENCLOSING_ID", "FLUX_ENCLOSING_ID", ""),
    ("Flux", "FLUX_JOB_ID", "FLUX_JOB_ID", ""),
)


def batch_job(environ: Environ = os.environ) -> dict[str, str] | None:
    """Return "system", "id" and, if it has one, "name" of the job; None outside a batch system."""
    for system, sign, number, job_name in SYSTEMS:
        if environ.get(sign) and environ.get(number):
            found = {"system": system, "id": environ[number], "name": environ.get(job_name, "")}
            return {key: text[:LONGEST_NAME] for key, text in found.items() if text}
    return None


def job_end(seconds: float | None, environ: Environ = os.environ) -> float | None:
    """Return when to be gone: after these seconds, or before the batch job ends; None if no end is known."""
    # Scripts for systems that tell a job nothing of its end set JOB_END (jobs/systems.py).
    ends = (environ.get(name, "") for name in (JOB_END, "SLURM_JOB_END_TIME"))
    left = [int(end) - time.time() for end in ends if end.isdecimal() and len(end) < 16]
    left = [each for each in left if each > 0]  # one that is past is another job's, or was prolonged
    left += [] if seconds is None else [seconds]
    return time.monotonic() + min(left) if left else None


class BatchGrants(Grants):
    """What batch systems grant to their jobs, beside what the system enforces."""

    def __init__(self, environ: Environ = os.environ) -> None:
        self._environ = environ

    def memory(self) -> Iterator[tuple[int, str]]:
        """Yield what Slurm was asked for: it may end a job that takes more, also without a control group."""
        for name, times in (
            ("SLURM_MEM_PER_NODE", ""),
            ("SLURM_MEM_PER_CPU", "SLURM_CPUS_ON_NODE"),
            ("SLURM_MEM_PER_GPU", "SLURM_GPUS_ON_NODE"),
        ):
            given, many = self._environ.get(name, ""), self._environ.get(times, "") if times else "1"
            if given.isdigit() and many.isdigit() and int(given) and int(many):  # 0 is all of a node
                by = f"{name}={given}" + (f" × {times}={many}" if times else "")
                yield int(given) * int(many) * MIB, by

    def cores(self, ranks: int) -> Iterator[tuple[float, str]]:
        environ = self._environ
        # A batch script of Slurm has it, too, but is no task: what it may run on is its affinity.
        if STEP in environ:
            yield from self._limit("SLURM_CPUS_PER_TASK", 1)
        # PBS binds no process where its hook for control groups is not installed. NCPUS are the job's
        # ompthreads, which are of each process, or all ncpus of its first chunk. What that one's processes
        # share nobody tells: rather too few threads than several on a core.
        if environ.get("PBS_JOBID"):
            is_of_each = environ.get("OMP_NUM_THREADS") == environ.get("NCPUS")
            yield from self._limit("NCPUS", 1 if is_of_each else ranks)
        # LSF's slots are cores unless the job asked for an affinity, by which its processes are bound. Of
        # several hosts ("host slots host slots …") this one's name may be another than LSF's.
        hosts = environ.get("LSB_MCPU_HOSTS", "").split()
        if len(hosts) == 2 and hosts[1].isdecimal() and not environ.get("LSB_AFFINITY_HOSTFILE"):
            yield int(hosts[1]) / ranks, f"LSB_MCPU_HOSTS={hosts[0]} {hosts[1]}"
        # Grid Engine binds no process by default, and tells how many slots all hosts have together.
        if "SGE_TASK_ID" in environ and environ.get("NHOSTS") == "1":
            yield from self._limit("NSLOTS", ranks)

    def _limit(self, name: str, ranks: int) -> Iterator[tuple[float, str]]:
        """Yield a variable's number for each of the ranks that share it, and its text."""
        given = self._environ.get(name, "")
        if given.isdecimal() and int(given):
            yield int(given) / ranks, f"{name}={given}"


GRANTS = BatchGrants()


# Launchers


@dataclass(frozen=True, slots=True)
class Launcher:
    """Starts the processes of a job, and tells each in variables how many they are and which one it is."""

    name: str
    size: str  # the variable with the number of processes
    rank: str = ""
    local_rank: str = ""  # among the processes of a host


OPEN_MPI = Launcher(
    "Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"
)
MPICH = Launcher("mpirun of MPICH or a relative", "MPI_LOCALNRANKS", local_rank="MPI_LOCALRANKID")
SRUN = Launcher("srun", STEP, "SLURM_PROCID", "SLURM_LOCALID")
FLUX_RUN = Launcher("flux run", "FLUX_JOB_SIZE", "FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID")
# What an unknown launcher speaks, or one of those above.
PMI = Launcher("a launcher that speaks PMI", "PMI_SIZE", "PMI_RANK")
PMIX = Launcher("a launcher that speaks PMIx", "PMIX_SIZE", "PMIX_RANK")

# The most reliable first: an mpirun may itself use srun, and both may speak a protocol.
LAUNCHERS = (OPEN_MPI, MPICH, SRUN, FLUX_RUN, PMI, PMIX)
# Those of batch systems last: an mpirun that uses one starts one process with it on each host.
BY_RANK = (PMI, PMIX, OPEN_MPI, SRUN, FLUX_RUN)


def launchers(environ: Environ = os.environ) -> list[Launcher]:
    """Return the launchers that have told this process how many it is one of, the most reliable first."""
    return [launcher for launcher in LAUNCHERS if environ.get(launcher.size, "").isdigit()]


def launched_as(environ: Environ = os.environ) -> int:
    """Return how many processes this one was started with; 1 outside a launcher."""
    return max((int(environ[launcher.size]) for launcher in launchers(environ)), default=1)


def launcher_name(environ: Environ = os.environ) -> str:
    """Return what has launched this process; "" if nothing has."""
    return next((launcher.name for launcher in launchers(environ)), "")


def launched_rank() -> int:
    """Return this process's rank as its launcher gives it; 0 outside a launcher."""
    ranks = (os.environ.get(launcher.rank, "") for launcher in BY_RANK)
    return next((int(rank) for rank in ranks if rank.isdigit()), 0)


# MPI libraries, by the vendor that mpi4py names, and the launch lines that fit each of them

HELP = "distgpt help launch-lines"


@dataclass(frozen=True, slots=True)
class Mpi:
    """An MPI library's ways to start ranks: mpirun, srun, and flux run."""

    hosts: str  # mpirun's option for a file of hosts
    srun: str  # the value of srun's --mpi by which its ranks find each other
    flux: str = "simple"  # flux run's -o pmi=: without it, what a site's Flux offers

    def line(self, launcher: str) -> str:
        """Return how a batch system's launcher starts ranks: `flux run`, or srun."""
        return f"flux run -o pmi={self.flux}" if launcher == FLUX_RUN.name else f"srun --mpi={self.srun}"


# As tried with the libraries that docs/how-to/launch-lines.md names; MVAPICH and Cray MPICH by their manuals.
MPIS = {
    "MPICH": Mpi("-f", "pmi2"),
    "Intel MPI": Mpi("-f", "pmi2"),
    "MVAPICH": Mpi("-f", "pmi2"),
    "MVAPICH2": Mpi("-f", "pmi2"),
    "Cray MPICH": Mpi("--hostfile", "cray_shasta", "cray-pals"),
    # Version 4 takes the first where Flux lacks its plugin for the second, which is all that 5 speaks.
    "Open MPI": Mpi("--hostfile", "pmix", flux="simple,pmix"),
}
