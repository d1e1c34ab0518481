"""Which way arrays on GPUs take between ranks: what was asked for, or the best that all ranks have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from distgpt.comm.agree import gather_bytes, shared
from distgpt.comm.api import Array, Comm
from distgpt.errors import UsageError
from distgpt.gpu import libraries
from distgpt.gpu.api import Device
from distgpt.gpu.exchange import CudaAware, Exchange, HostStaged, Nccl


class PlacedDevice(Protocol):
    place: str  # no other GPU of the job has the same


def sharing(comm: Comm, device: PlacedDevice) -> int:
    """How many ranks use this rank's GPU, itself included, however each counts its GPUs. Collective."""
    place = device.place.encode()
    return gather_bytes(comm, place).count(place)


def exchange(
    how: str, comm: Comm, device: Device, stream: int, address: Callable[[Array], int], sharing: int
) -> Exchange:
    """`how` is auto, nccl, host or cuda-aware; `sharing` ranks use this one's GPU. Collective."""
    crowded = _anywhere(comm, sharing > 1)
    nccl = nccl_module()
    without = _anywhere(comm, nccl is None)
    if how == "nccl" and crowded:
        raise shared(UsageError("--allreduce nccl needs a GPU for every rank: start fewer, or use host"))
    if how == "nccl" and without:
        raise shared(UsageError("--allreduce nccl needs NCCL: pip install nvidia-nccl-cu13 (or -cu12)"))
    if how == "nccl" or (how == "auto" and not crowded and not without):
        return Nccl(comm, stream, address, nccl)
    if how == "cuda-aware":
        return _probed(comm, device)
    return HostStaged(comm, device)


def nccl_module() -> Any:
    """CuPy's, where the library behind it can be loaded; else None."""
    if libraries.find(["libnccl.so.2"]) is None:
        return None
    from cupy.cuda import nccl

    return nccl if nccl.available else None


def _probed(comm: Comm, device: Device) -> Exchange:
    """An MPI that does not know GPUs would crash on their memory, so it is asked first, and then tried."""
    from distgpt.comm.mpi import is_cuda_aware, library

    if _anywhere(comm, not is_cuda_aware()):
        raise shared(
            UsageError(f"--allreduce cuda-aware: {library()} says that it can't read GPUs; use auto or host")
        )
    chosen, ones = CudaAware(device), device.zeros((1000,), np.dtype(np.float32))
    device.upload(ones, np.ones(1000, np.float32))
    chosen.sum(ones, chunked=False)
    if _anywhere(comm, not (device.download(ones) == comm.size).all()):
        raise shared(UsageError("--allreduce cuda-aware: MPI sums arrays on GPUs wrongly; use auto or host"))
    return chosen


def _anywhere(comm: Comm, here: bool) -> bool:
    """Whether this is so on any rank."""
    return comm.largest(int(here)) == 1
