"""Environment variables that batch systems and launchers set for a process.

They contain the end of the job, granted resources, the number of ranks, and the rank of the process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from distgpt.core.comm.resources import Grants

Environ = Mapping[str, str]

JOB_END = "DISTGPT_JOB_END"  # seconds since 1970
LONGEST_NAME = 200  # characters
MIB = 1 << 20
STEP = "SLURM_STEP_NUM_TASKS"  # SLURM_NTASKS is also set if srun has not launched the process

# Batch systems

# Name, a variable that no other system sets, and the variables with a job's number and name. In a batch job,
# `flux run` starts a job in the batch job's own Flux instance, whose number is unknown elsewhere.
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
            result = {"system": system, "id": environ[number], "name": environ.get(job_name, "")}
            return {key: text[:LONGEST_NAME] for key, text in result.items() if text}
    return None


def job_end(seconds: float | None, environ: Environ = os.environ) -> float | None:
    """Return the deadline: after `seconds`, or before the batch job ends; None if no end is known."""
    # If a system does not provide the end of a job, its script sets JOB_END (jobs/systems.py).
    ends = (environ.get(name, "") for name in (JOB_END, "SLURM_JOB_END_TIME"))
    left = [int(end) - time.time() for end in ends if end.isdecimal() and len(end) < 16]
    left = [each for each in left if each > 0]  # a time in the past is from another job, or was extended
    left += [] if seconds is None else [seconds]
    return time.monotonic() + min(left) if left else None


class BatchGrants(Grants):
    """Resources that batch systems grant to jobs, in addition to limits that the kernel enforces."""

    def __init__(self, environ: Environ = os.environ) -> None:
        self._environ = environ

    def memory(self) -> Iterator[tuple[int, str]]:
        """Yield Slurm's limits. Slurm may end a job that uses more, even without a control group."""
        for name, times in (
            ("SLURM_MEM_PER_NODE", ""),
            ("SLURM_MEM_PER_CPU", "SLURM_CPUS_ON_NODE"),
            ("SLURM_MEM_PER_GPU", "SLURM_GPUS_ON_NODE"),
        ):
            given, many = self._environ.get(name, ""), self._environ.get(times, "") if times else "1"
            if given.isdigit() and many.isdigit() and int(given) and int(many):  # 0: all memory of a node
                by = f"{name}={given}" + (f" × {times}={many}" if times else "")
                yield int(given) * int(many) * MIB, by

    def cores(self, ranks: int) -> Iterator[tuple[float, str]]:
        environ = self._environ
        # Slurm also sets it in a batch script, which is not a task: its affinity is the limit.
        if STEP in environ:
            yield from self._limit("SLURM_CPUS_PER_TASK", 1)
        # Without its hook for control groups, PBS does not bind processes. NCPUS is either the ompthreads of
        # each process or all ncpus of the first chunk. The processes of that chunk are unknown, so assume
        # that all ranks share it: too few threads are better than multiple threads per core.
        if environ.get("PBS_JOBID"):
            is_of_each = environ.get("OMP_NUM_THREADS") == environ.get("NCPUS")
            yield from self._limit("NCPUS", 1 if is_of_each else ranks)
        # LSF's slots are cores, unless the job requested an affinity, to which its processes are bound. With
        # multiple hosts ("host slots host slots …") this host's name may differ from LSF's.
        hosts = environ.get("LSB_MCPU_HOSTS", "").split()
        if len(hosts) == 2 and hosts[1].isdecimal() and not environ.get("LSB_AFFINITY_HOSTFILE"):
            yield int(hosts[1]) / ranks, f"LSB_MCPU_HOSTS={hosts[0]} {hosts[1]}"
        # By default Grid Engine binds no process. Its number of slots is the total over all hosts.
        if "SGE_TASK_ID" in environ and environ.get("NHOSTS") == "1":
            yield from self._limit("NSLOTS", ranks)

    def _limit(self, name: str, ranks: int) -> Iterator[tuple[float, str]]:
        """Yield a variable's number divided by the ranks that share it, and its text."""
        given = self._environ.get(name, "")
        if given.isdecimal() and int(given):
            yield int(given) / ranks, f"{name}={given}"


GRANTS = BatchGrants()


# Launchers


@dataclass(frozen=True, slots=True)
class Launcher:
    """A launcher, and the variables in which each process finds the number of processes and its rank."""

    name: str
    size: str  # variable with the number of processes
    rank: str = ""
    local_rank: str = ""  # rank among the processes of a host


OPEN_MPI = Launcher(
    "Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"
)
MPICH = Launcher("an mpirun of MPICH or a derivative", "MPI_LOCALNRANKS", local_rank="MPI_LOCALRANKID")
SRUN = Launcher("srun", STEP, "SLURM_PROCID", "SLURM_LOCALID")
FLUX_RUN = Launcher("flux run", "FLUX_JOB_SIZE", "FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID")
# The protocol of an unknown launcher, or of one of the above.
PMI = Launcher("a PMI launcher", "PMI_SIZE", "PMI_RANK")
PMIX = Launcher("a PMIx launcher", "PMIX_SIZE", "PMIX_RANK")

# The most reliable first: an mpirun may use srun, and both may use a protocol.
LAUNCHERS = (OPEN_MPI, MPICH, SRUN, FLUX_RUN, PMI, PMIX)
# Batch systems last: an mpirun may use one to start one process per host.
BY_RANK = (PMI, PMIX, OPEN_MPI, SRUN, FLUX_RUN)


def launchers(environ: Environ = os.environ) -> list[Launcher]:
    """Return the launchers that set the number of processes, the most reliable first."""
    return [launcher for launcher in LAUNCHERS if environ.get(launcher.size, "").isdigit()]


def launched_as(environ: Environ = os.environ) -> int:
    """Return how many processes were launched; 1 outside a launcher."""
    return max((int(environ[launcher.size]) for launcher in launchers(environ)), default=1)


def launcher_name(environ: Environ = os.environ) -> str:
    """Return the name of this process's launcher; "" if there is none."""
    return next((launcher.name for launcher in launchers(environ)), "")


def launched_rank() -> int:
    """Return this process's rank from its launcher; 0 outside a launcher."""
    ranks = (os.environ.get(launcher.rank, "") for launcher in BY_RANK)
    return next((int(rank) for rank in ranks if rank.isdigit()), 0)


# MPI libraries, by mpi4py's vendor name, and their launch lines

HELP = "distgpt help launch-lines"


@dataclass(frozen=True, slots=True)
class Mpi:
    """An MPI library's options of mpirun, srun and flux run."""

    hosts: str  # mpirun's option for a hostfile
    srun: str  # value of srun's --mpi for its ranks
    flux: str = "simple"  # value of flux run's -o pmi=

    def line(self, launcher: str) -> str:
        """Return how a batch system's launcher starts ranks, with `flux run` or srun."""
        return f"flux run -o pmi={self.flux}" if launcher == FLUX_RUN.name else f"srun --mpi={self.srun}"


# Tested with the libraries in docs/how-to/ranks.md; MVAPICH and Cray MPICH follow their manuals.
MPIS = {
    "MPICH": Mpi("-f", "pmi2"),
    "Intel MPI": Mpi("-f", "pmi2"),
    "MVAPICH": Mpi("-f", "pmi2"),
    "MVAPICH2": Mpi("-f", "pmi2"),
    "Cray MPICH": Mpi("--hostfile", "cray_shasta", "cray-pals"),
    # Version 4 uses simple if Flux lacks its plugin for pmix; version 5 supports only pmix.
    "Open MPI": Mpi("--hostfile", "pmix", flux="simple,pmix"),
}
