"""How arrays on GPUs are summed and shared: NCCL, page-locked memory and MPI, or an MPI that knows GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from distgpt.comm.api import Array, Comm
from distgpt.gpu.api import Device, Mirror

PIECE_BYTES = 32 << 20  # of a staged array: while one is summed, the next is on its way


class Exchange(Protocol):
    """Collective, and in the order of the device's stream."""

    name: str

    def sum(self, array: Array, chunked: bool) -> None:
        """array ← Σ over ranks of array"""

    def broadcast(self, array: Array) -> None:
        """array ← rank 0's"""


class DeviceComm:
    """The ranks of a job, whose arrays may lie on the host or on their GPUs."""

    def __init__(self, host: Comm, exchange: Exchange) -> None:
        self._host, self.exchange = host, exchange
        self.rank, self.size = host.rank, host.size
        self.local_rank, self.local_size, self.cores = host.local_rank, host.local_size, host.cores
        self.largest, self.broadcast_bytes = host.largest, host.broadcast_bytes
        self.barrier, self.abort = host.barrier, host.abort

    def sum(self, array: Array) -> None:
        if isinstance(array, np.ndarray):
            self._host.sum(array)
        else:
            self.exchange.sum(array, chunked=False)

    def sum_chunked(self, array: Array) -> None:
        if isinstance(array, np.ndarray):
            self._host.sum_chunked(array)
        else:
            self.exchange.sum(array, chunked=True)

    def broadcast(self, array: Array) -> None:
        if isinstance(array, np.ndarray):
            self._host.broadcast(array)
        else:
            self.exchange.broadcast(array)


class HostStaged:
    """Through page-locked memory and the ranks' MPI: works everywhere, and where ranks share a GPU."""

    name = "host"

    def __init__(self, comm: Comm, device: Device) -> None:
        self._comm, self._device = comm, device
        self._summed: Array = None
        self._mirrors: list[Mirror] = []

    def sum(self, array: Array, chunked: bool) -> None:
        """It is always the same array that is summed, so its twins are kept."""
        if array is not self._summed:
            parts = _pieces(array, PIECE_BYTES if chunked else array.nbytes)
            self._summed, self._mirrors = array, [self._device.mirror(part) for part in parts]
        for mirror in self._mirrors:
            mirror.fetch()
        for mirror in self._mirrors:
            mirror.ready()
            self._comm.sum(mirror.host)
            mirror.send()

    def broadcast(self, array: Array) -> None:
        for part in _pieces(array, PIECE_BYTES):
            mirror = self._device.mirror(part)
            mirror.fetch()
            mirror.ready()
            self._comm.broadcast(mirror.host.view(np.uint8))
            mirror.send()
            mirror.ready()


def _pieces(array: Array, most_bytes: int) -> list[Array]:
    flat, step = array.reshape(-1), max(1, most_bytes // array.itemsize)
    return [flat[start : start + step] for start in range(0, flat.size, step)]


class CudaAware:
    """By an MPI that reads the GPUs' memory itself."""

    name = "cuda-aware"

    def __init__(self, device: Device) -> None:
        from mpi4py import MPI

        self._device, self._mpi = device, MPI

    def sum(self, array: Array, chunked: bool) -> None:
        self._device.synchronize()
        self._mpi.COMM_WORLD.Allreduce(self._mpi.IN_PLACE, array)

    def broadcast(self, array: Array) -> None:
        self._device.synchronize()
        self._mpi.COMM_WORLD.Bcast(array)


class Nccl:
    """From GPU to GPU, without the hosts and without waiting."""

    name = "nccl"

    def __init__(self, comm: Comm, stream: int, address: Callable[[Array], int], nccl: Any) -> None:
        """`nccl` is CuPy's module of that name."""
        self._stream, self._address, self._nccl = stream, address, nccl
        own = nccl.get_unique_id() if comm.rank == 0 else None
        self._ranks = nccl.NcclCommunicator(comm.size, comm.broadcast_bytes(own), comm.rank)
        self._types = {
            "float32": nccl.NCCL_FLOAT32,
            "float64": nccl.NCCL_FLOAT64,
            "uint16": nccl.NCCL_BFLOAT16,
        }

    def sum(self, array: Array, chunked: bool) -> None:
        at, kind = self._address(array), self._types[array.dtype.name]
        self._ranks.allReduce(at, at, array.size, kind, self._nccl.NCCL_SUM, self._stream)

    def broadcast(self, array: Array) -> None:
        at = self._address(array)
        self._ranks.broadcast(at, at, array.nbytes, self._nccl.NCCL_UINT8, 0, self._stream)
