"""The stages: which kernels compute and which communicator connects. The only file that names backends.

| stage      | kernels | communicator |
|------------|---------|--------------|
| `serial`   | CPU     | one process  |
| `mpi`      | CPU     | MPI          |
| `cuda`     | GPU     | one process  |
| `mpi-cuda` | GPU     | NCCL or MPI  |
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass

from distgpt.comm.api import Comm
from distgpt.config import DTYPES, nearest
from distgpt.errors import UsageError
from distgpt.kernels.api import Kernels

MOST_THREADS = 1024
STAGES = ("serial", "mpi", "cuda", "mpi-cuda")

# How launchers tell a process that it is one of several; SLURM_NTASKS is also set where nothing was launched.
_LAUNCHED = ("PMI_SIZE", "PMIX_SIZE", "OMPI_COMM_WORLD_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_NUM_TASKS")


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage that is ready to compute. `threads` is what each rank uses."""

    name: str
    comm: Comm
    threads: int

    def kernels(self, dtype: str) -> Kernels:
        from distgpt.kernels.cpu import CpuKernels

        if dtype not in DTYPES:
            raise UsageError(f"unknown dtype {dtype!r}{nearest(dtype, DTYPES)}")
        if dtype == "bfloat16":
            raise UsageError(f"--dtype bfloat16 needs a GPU: stage {self.name} computes in float32 or float64")
        return CpuKernels(dtype, self.threads)


class _Opened:
    """Opens a stage for a command, and remembers its communicator for the way out."""

    comm: Comm | None = None

    def __call__(self, name: str, threads: int | None) -> Stage:
        stage = open_stage(name, threads)
        self.comm = stage.comm
        return stage


opened = _Opened()


def open_stage(name: str, threads: int | None = None) -> Stage:
    """Start the stage's backends; refuses launches that would not do what they look like."""
    if name not in STAGES:
        raise UsageError(f"unknown stage {name!r}{nearest(name, STAGES)}")
    if name in ("cuda", "mpi-cuda"):
        raise UsageError(f"stage {name!r} needs a GPU backend, which this version does not have yet")
    if threads is not None and not 1 <= threads <= MOST_THREADS:
        raise UsageError(f"--threads is {threads}: it must be at least 1 and at most {MOST_THREADS}")
    comm = _communicator(name)
    return Stage(name, comm, threads or max(1, int(comm.cores + 1e-6)))


def _communicator(name: str) -> Comm:
    launched = max(
        (int(os.environ[key]) for key in _LAUNCHED if os.environ.get(key, "").isdigit()), default=1
    )
    if name == "serial":
        if launched > 1:
            raise UsageError(
                f"--stage serial was launched as {launched} processes, which would all do the same work; "
                "use --stage mpi, or run without mpirun"
            )
        from distgpt.comm.serial import SerialComm

        return SerialComm()
    try:
        with warnings.catch_warnings():  # mpi4py's about the launcher: said below, in one line
            warnings.simplefilter("ignore", RuntimeWarning)
            from distgpt.comm.mpi import MpiComm, library
    except (ImportError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UsageError(
            f"--stage {name} needs mpi4py and an MPI library ({reason}); install them with "
            "pip install 'distgpt[mpich]', or with pip install mpi4py beside your cluster's own MPI"
        ) from None
    comm = MpiComm()
    if launched > 1 and comm.size == 1:
        raise UsageError(
            f"launched as {launched} processes, but mpi4py found itself alone: the launcher belongs to "
            f"another MPI than mpi4py's {library()}; use the mpirun of that MPI"
        )
    return comm
