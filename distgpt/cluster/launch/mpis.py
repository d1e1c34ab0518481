"""MPI libraries, by the vendor that mpi4py names, and the launch lines that fit each of them."""

from __future__ import annotations

from dataclasses import dataclass

HELP = "distgpt help launch-lines"


@dataclass(frozen=True, slots=True)
class Mpi:
    """An MPI library's ways to start ranks: its own mpirun, srun, and flux run."""

    hosts: str  # mpirun's option for a file of hosts
    srun: tuple[str, ...]  # values of srun's --mpi by which its ranks find each other, the usual one first
    mpirun: str = "mpirun"
    flux: str = "simple"  # flux run's -o pmi=: without it, what a site's Flux offers

    def srun_line(self, offered: tuple[str, ...] = ()) -> str:
        """Return srun with the first way that is `offered`, or the usual one."""
        return f"srun --mpi={next(filter(offered.__contains__, self.srun), self.srun[0])}"

    def line(self, launcher: str) -> str:
        """Return the way to start ranks by a batch system's launcher; "" for any other launcher."""
        flux = f"flux run -o pmi={self.flux}"
        return {"srun": self.srun_line(), "flux run": flux}.get(launcher, "")


# As tried with the libraries that docs/how-to/launch-lines.md names; MVAPICH and Cray MPICH by their manuals.
MPIS = {
    "MPICH": Mpi("-f", ("pmi2",)),
    "Intel MPI": Mpi("-f", ("pmi2", "pmix")),
    "MVAPICH": Mpi("-f", ("pmi2",)),
    "MVAPICH2": Mpi("-f", ("pmi2",)),
    "Cray MPICH": Mpi("--hostfile", ("cray_shasta",), "mpiexec", "cray-pals"),
    # Version 4 takes the first where Flux lacks its plugin for the second, which is all that 5 speaks.
    "Open MPI": Mpi("--hostfile", ("pmix",), flux="simple,pmix"),
}
