"""How an MPI's own launcher starts the ranks of a batch job, where the batch system has none."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass

from distgpt.core.base.errors import UsageError
from distgpt.jobs.batch.job import Job
from distgpt.jobs.launchers import mpirun, own_mpirun


@dataclass(frozen=True, slots=True)
class RankLauncher:
    """An mpiexec: the vendors whose MPI it starts, and its options for a job."""

    vendors: tuple[str, ...]
    options: Callable[[Job], str]
    program: str = "mpiexec"


def _mpich(job: Job) -> str:
    return f"-n {job.ranks} -ppn {job.ranks_per_node}{f' -bind-to core:{job.cpus_per_task}' * job.binds}"


def _intel(job: Job) -> str:
    domain = f" -genv I_MPI_PIN_DOMAIN {job.cpus_per_task}:compact"
    return f"-n {job.ranks} -ppn {job.ranks_per_node}{domain * job.binds}"


def _openmpi(job: Job) -> str:
    # By itself it binds each rank to a core: all threads would share that one.
    placed = f"ppr:{job.ranks_per_node}:node"
    bound = f":pe={job.cpus_per_task} --bind-to core" if job.binds else " --bind-to none"
    return f"-n {job.ranks} --map-by {placed}{bound}"


def _pals(job: Job) -> str:
    bound = " --cpu-bind=depth" if job.binds else ""
    return f"-n {job.ranks} --ppn {job.ranks_per_node} --depth={job.cpus_per_task}{bound}"


# By the value of --mpi.
LAUNCHERS = {
    "mpich": RankLauncher(("MPICH", "MVAPICH", "MVAPICH2"), _mpich),
    "openmpi": RankLauncher(("Open MPI",), _openmpi),
    "intel": RankLauncher(("Intel MPI",), _intel),
    "pals": RankLauncher(("Cray MPICH",), _pals),
}


def launched(job: Job) -> str:
    """Return the words before the command; "" for a job of one rank, which needs no launcher."""
    if job.mpi == "none":
        return ""
    row = LAUNCHERS.get(job.mpi)
    if row is None:
        raise UsageError(f"--mpi {job.mpi}: ranks are started here by one of {', '.join(LAUNCHERS)}")
    own = own_mpirun()
    # One that belongs to another MPI than the one asked for would refuse these options.
    is_its = own and mpirun(own)["vendor"] in row.vendors
    return f"{shlex.quote(own) if own and is_its else row.program} {row.options(job)}"
