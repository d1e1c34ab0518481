"""Launchers, and what they tell a process in environment variables: the number of ranks, and its own."""

from __future__ import annotations

import os
from dataclasses import dataclass

from distgpt.launch.batch import Environ

STEP = "SLURM_STEP_NUM_TASKS"  # SLURM_NTASKS is also set where srun has launched nothing


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
FLUX = FluxRun("flux run", "FLUX_JOB_SIZE", "FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID")
# What an unknown launcher speaks, or one of those above.
PMI = Launcher("a launcher that speaks PMI", "PMI_SIZE", "PMI_RANK")
PMIX = Launcher("a launcher that speaks PMIx", "PMIX_SIZE", "PMIX_RANK")

# The most reliable first: an mpirun may itself use srun, and both may speak a protocol.
LAUNCHERS = (OPEN_MPI, MPICH, SRUN, FLUX, PMI, PMIX)
# Those of batch systems last: an mpirun that uses one starts one process with it on each host.
BY_RANK = (PMI, PMIX, OPEN_MPI, SRUN, FLUX)


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
    return any(os.environ.get(launcher.local_rank) == "0" for launcher in (MPICH, OPEN_MPI, SRUN, FLUX))
