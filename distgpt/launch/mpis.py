"""MPI libraries, by the vendor that mpi4py names, and the launch lines that fit each of them."""

from __future__ import annotations

from dataclasses import dataclass

HELP = "distgpt help launch-lines"


@dataclass(frozen=True, slots=True)
class Mpi:
    """An MPI library's ways to start ranks: its own mpirun, and srun."""

    hosts: str  # mpirun's option for a file of hosts
    srun: tuple[str, ...]  # values of srun's --mpi by which its ranks find each other, the usual one first
    mpirun: str = "mpirun"

    def srun_line(self, offered: tuple[str, ...] = ()) -> str:
        """Return srun with the first way that is `offered`, or the usual one."""
        return f"srun --mpi={next(filter(offered.__contains__, self.srun), self.srun[0])}"


# As tried with the libraries that docs/how-to/launch-lines.md names; MVAPICH and Cray MPICH by their manuals.
MPIS = {
    "MPICH": Mpi("-f", ("pmi2",)),
    "Intel MPI": Mpi("-f", ("pmi2", "pmix")),
    "MVAPICH": Mpi("-f", ("pmi2",)),
    "MVAPICH2": Mpi("-f", ("pmi2",)),
    "Cray MPICH": Mpi("--hostfile", ("cray_shasta",), "mpiexec"),
    "Open MPI": Mpi("--hostfile", ("pmix",)),
}
