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
SLURM_MEMORY = {  # MiB, and what they are given for
    "SLURM_MEM_PER_NODE": "",
    "SLURM_MEM_PER_CPU": "SLURM_CPUS_ON_NODE",
    "SLURM_MEM_PER_GPU": "SLURM_GPUS_ON_NODE",
}


@dataclass(frozen=True, slots=True)
class BatchSystem:
    """The variables of a batch system's jobs. One that also says what it grants them derives from this."""

    name: str
    job: str  # the variable with the number of a job
    job_name: str
    sign: str  # a variable that no other system sets

    def end(self, environ: Environ) -> float | None:
        """Return when it ends the job, in seconds since 1970; None if it does not say."""
        return None

    def memory(self, environ: Environ) -> Iterator[tuple[int, str]]:
        """Yield bytes that it grants all ranks of this host, and the name of each limit."""
        yield from ()

    def cores(self, environ: Environ, ranks: int) -> tuple[float, str] | None:
        """Return cores that it grants each of some ranks on this host, and the limit's name, or None."""
        return None


class Slurm(BatchSystem):
    """Slurm, which also says when it ends a job, and what it grants one."""

    def end(self, environ: Environ) -> float | None:
        return _time(environ, "SLURM_JOB_END_TIME")

    def memory(self, environ: Environ) -> Iterator[tuple[int, str]]:
        """Yield what was asked for. Slurm may end a job that takes more, also without a control group."""
        for name, times in SLURM_MEMORY.items():
            given, many = environ.get(name, ""), environ.get(times, "") if times else "1"
            if given.isdigit() and many.isdigit() and int(given) and int(many):  # 0 is all of a node
                by = f"{name}={given}" + (f" × {times}={many}" if times else "")
                yield int(given) * int(many) * MIB, by

    def cores(self, environ: Environ, ranks: int) -> tuple[float, str] | None:
        # A batch script's own steps have it too, but are no task: what they may run on is their affinity.
        return _limit(environ, "SLURM_CPUS_PER_TASK") if STEP in environ else None


class Pbs(BatchSystem):
    """PBS, which binds no process where its hook for control groups is not installed."""

    def cores(self, environ: Environ, ranks: int) -> tuple[float, str] | None:
        # The job's ompthreads, which are of each process, or all ncpus of its first chunk. What that one's
        # processes share nobody tells: rather too few threads than several on a core.
        is_of_each = environ.get("OMP_NUM_THREADS") == environ.get("NCPUS")
        return _limit(environ, "NCPUS", 1 if is_of_each else ranks) if environ.get(self.sign) else None


class Lsf(BatchSystem):
    """LSF, whose slots are cores unless the job asked for an affinity, by which its processes are bound."""

    def cores(self, environ: Environ, ranks: int) -> tuple[float, str] | None:
        # "host slots host slots …": of several hosts, this one's name may be another than LSF's.
        hosts = environ.get("LSB_MCPU_HOSTS", "").split()
        is_bound = bool(environ.get("LSB_AFFINITY_HOSTFILE"))
        if len(hosts) != 2 or not hosts[1].isdecimal() or is_bound:
            return None
        return int(hosts[1]) / ranks, f"LSB_MCPU_HOSTS={hosts[0]} {hosts[1]}"


class GridEngine(BatchSystem):
    """Grid Engine, which binds no process by default, and tells how many slots all hosts have together."""

    def cores(self, environ: Environ, ranks: int) -> tuple[float, str] | None:
        return _limit(environ, "NSLOTS", ranks) if environ.get("NHOSTS") == "1" else None


def _time(environ: Environ, name: str) -> float | None:
    """Return a variable's seconds since 1970; None where it holds none."""
    known = environ.get(name, "")
    return int(known) if known.isdecimal() and len(known) < 16 else None


def _limit(environ: Environ, name: str, ranks: int = 1) -> tuple[float, str] | None:
    """Return a variable's number for each of the ranks that share it, and its text; None without one."""
    given = environ.get(name, "")
    return (int(given) / ranks, f"{name}={given}") if given.isdecimal() and int(given) else None


SLURM = Slurm("Slurm", "SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_JOB_ID")
PBS = Pbs("PBS", "PBS_JOBID", "PBS_JOBNAME", "PBS_JOBID")
LSF = Lsf("LSF", "LSB_JOBID", "LSB_JOBNAME", "LSB_JOBID")
GRID_ENGINE = GridEngine("Grid Engine", "JOB_ID", "JOB_NAME", "SGE_TASK_ID")
# In a batch job `flux run` starts a job of the batch job's own Flux, with a number that nobody else knows.
FLUX_BATCH = BatchSystem("Flux", "FLUX_ENCLOSING_ID", "", "FLUX_ENCLOSING_ID")
FLUX = BatchSystem("Flux", "FLUX_JOB_ID", "", "FLUX_JOB_ID")
SYSTEMS = (SLURM, PBS, LSF, GRID_ENGINE, FLUX_BATCH, FLUX)


def systems(environ: Environ) -> list[BatchSystem]:
    """Return the batch systems that have set variables of this process: those of one begin alike."""
    prefixes = {name.partition("_")[0] for name in environ}
    return [system for system in SYSTEMS if system.sign.partition("_")[0] in prefixes]


def batch_job(environ: Environ = os.environ) -> dict[str, str] | None:
    """Return "system", "id" and, if it has one, "name" of the job; None outside a batch system."""
    for system in systems(environ):
        if environ.get(system.sign) and environ.get(system.job):
            name = environ.get(system.job_name)
            named = {"name": name[:LONGEST_NAME]} if name else {}
            return {"system": system.name, "id": environ[system.job][:LONGEST_NAME], **named}
    return None


def job_end(seconds: float | None, environ: Environ = os.environ) -> float | None:
    """Return when to be gone: after these seconds, or before the batch job ends; None if no end is known."""
    # Scripts for systems that tell a job nothing of its end set JOB_END (jobs/batch/).
    ends = (_time(environ, JOB_END), *(system.end(environ) for system in systems(environ)))
    left = [end - time.time() for end in ends if end is not None]
    left = [each for each in left if each > 0]  # one that is past is another job's, or was prolonged
    left += [] if seconds is None else [seconds]
    return time.monotonic() + min(left) if left else None


class BatchGrants(Grants):
    """The limits of all batch systems that have set variables of this process."""

    def __init__(self, environ: Environ = os.environ) -> None:
        self._environ = environ

    def memory(self) -> Iterator[tuple[int, str]]:
        for system in systems(self._environ):
            yield from system.memory(self._environ)

    def cores(self, ranks: int) -> Iterator[tuple[float, str]]:
        yield from filter(None, (system.cores(self._environ, ranks) for system in systems(self._environ)))


GRANTS = BatchGrants()


# Launchers


@dataclass(frozen=True, slots=True)
class Launcher:
    """Starts the processes of a job, and tells each in variables how many they are and which one it is."""

    name: str
    size: str  # the variable with the number of processes
    rank: str = ""
    local_rank: str = ""  # among the processes of a host

    def refusal(self, vendor: str, library: str, environ: Environ) -> str:
        """Return why an MPI, by its vendor and version, cannot start under this launcher; "" if it may."""
        return ""

    def doubt(self, vendor: str, environ: Environ) -> str:
        """Return why an MPI may fail to start under this launcher; "" if nothing is known."""
        return ""


class Srun(Launcher):
    """Slurm's launcher. It lets ranks meet by PMI or by PMIx, and not every MPI can do both."""

    def refusal(self, vendor: str, library: str, environ: Environ) -> str:
        if vendor == "MPICH" and _protocols(environ) == {"PMIX"} and "pmix" not in library:
            return "launched by srun --mpi=pmix, which this MPICH is built without; use srun --mpi=pmi2"
        return ""

    def doubt(self, vendor: str, environ: Environ) -> str:
        if vendor == "Open MPI" and not _protocols(environ):  # one that is built with Slurm's own PMI starts
            return "launched by srun without PMIx, which Open MPI may need: if it fails, use srun --mpi=pmix"
        return ""


class FluxRun(Launcher):
    """Flux's launcher. It lets ranks meet by PMI-1, by PMIx if it has a plugin for that, or by both."""

    def refusal(self, vendor: str, library: str, environ: Environ) -> str:
        # Of both, MPICH does not know which to take. A module's PMIX_ROOT is no sign of either.
        has_pmix, has_pmi = "PMIX_NAMESPACE" in environ, "PMI_SIZE" in environ
        if vendor == "MPICH" and has_pmix and (has_pmi or "pmix" not in library):
            return "launched by flux run with PMIx, by which MPICH does not start; use flux run -o pmi=simple"
        return ""

    def doubt(self, vendor: str, environ: Environ) -> str:
        if vendor == "Open MPI" and not {"PMIX_NAMESPACE", "PMI_SIZE"} & environ.keys():
            return (
                "launched by flux run -o pmi=pmix, but Flux has no plugin for PMIx here: if it fails, use"
                " flux run -o pmi=simple,pmix"
            )
        return ""


def _protocols(environ: Environ) -> set[str]:
    """Return the protocols, PMI or PMIX, by which the launcher lets ranks meet."""
    names = (name for name in environ if not name.startswith("PMIX_MCA_"))  # those are users' settings
    return {name.split("_")[0].rstrip("2") for name in names if name.startswith("PMI")}


OPEN_MPI = Launcher(
    "Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"
)
MPICH = Launcher("mpirun of MPICH or a relative", "MPI_LOCALNRANKS", local_rank="MPI_LOCALRANKID")
SRUN = Srun("srun", STEP, "SLURM_PROCID", "SLURM_LOCALID")
FLUX_RUN = FluxRun("flux run", "FLUX_JOB_SIZE", "FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID")
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


def is_first_of_host() -> bool:
    """Return whether the launcher numbers this process 0 among those of its host."""
    return any(os.environ.get(launcher.local_rank) == "0" for launcher in (MPICH, OPEN_MPI, SRUN, FLUX_RUN))
