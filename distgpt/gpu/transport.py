"""Transports of arrays between GPUs (sum, broadcast, gather, all-to-all), and the choice of one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np

from distgpt.core.base.errors import UsageError
from distgpt.core.comm.agree import collective_error, gather_bytes
from distgpt.core.comm.api import Array, Comm, QueuedComm
from distgpt.core.ops.api import Work
from distgpt.gpu import probe
from distgpt.gpu.device import CupyDevice, Mirror, address

PIECE_BYTES = 32 << 20  # per piece of a broadcast, so that the host needs no copy of the whole array

SHARED_GPU = "DISTGPT_NCCL_SHARED"  # 1: use NCCL even if ranks share a GPU (slow, for tests)
MULTI_RANK_NCCL = 23000  # first version that allows ranks to share a GPU on request


class DeviceComm:
    """A communicator for arrays on the host and on GPUs."""

    def __init__(self, host: Comm, transport: Transport) -> None:
        self._host, self.transport = host, transport
        self.queued: QueuedComm | None = transport if isinstance(transport, Nccl) else None
        self.rank, self.size = host.rank, host.size
        self.local_rank, self.local_size, self.cores = host.local_rank, host.local_size, host.cores
        self.allreduce_max, self.broadcast_bytes = host.allreduce_max, host.broadcast_bytes
        self.barrier, self.abort = host.barrier, host.abort
        # Only on the host:
        self.send, self.is_threadsafe, self.dup_sleeping = host.send, host.is_threadsafe, host.dup_sleeping
        self.split_by_node = host.split_by_node

    def sum(self, array: Array) -> None:
        self._for(array).sum(array)

    def broadcast(self, array: Array) -> None:
        self._for(array).broadcast(array)

    def all_to_all(self, received: Array, sent: Array, starts: Sequence[int], counts: Sequence[int]) -> None:
        self._for(sent).all_to_all(received, sent, starts, counts)

    def all_gather(self, array: Array, bounds: Sequence[int]) -> None:
        self._for(array).all_gather(array, bounds)

    def _for(self, array: Array) -> Comm | Transport:
        return self._host if isinstance(array, np.ndarray) else self.transport


class HostStaged:
    """Transport through page-locked memory and MPI. Works everywhere, even if ranks share a GPU."""

    name = "host"

    def __init__(self, comm: Comm, device: CupyDevice) -> None:
        self._comm, self._device = comm, device

    def sum(self, array: Array) -> None:
        mirror = self._mirror(array)
        mirror.fetch()
        mirror.ready()
        self._comm.sum(mirror.host)
        mirror.send()

    def broadcast(self, array: Array) -> None:
        flat, piece = array.reshape(-1), max(1, PIECE_BYTES // array.itemsize)
        for start in range(0, flat.size, piece):
            mirror = self._device.mirror(flat[start : start + piece])
            mirror.fetch()
            mirror.ready()
            self._comm.broadcast(mirror.host.view(np.uint8))
            mirror.send()
            mirror.ready()

    def all_to_all(self, received: Array, sent: Array, starts: Sequence[int], counts: Sequence[int]) -> None:
        going, coming = self._mirror(sent), self._mirror(received)
        for start, count in zip(starts, counts, strict=True):
            going.fetch(start, start + count)
        going.ready()
        rows = coming.host.reshape(received.shape)
        self._comm.all_to_all(rows, going.host, starts, counts)
        for row in range(len(rows)):
            begin = row * received.shape[1]
            coming.send(begin, begin + counts[self._comm.rank])

    def all_gather(self, array: Array, bounds: Sequence[int]) -> None:
        mirror = self._mirror(array)
        own = self._comm.rank
        mirror.fetch(bounds[own], bounds[own + 1])
        mirror.ready()
        self._comm.all_gather(mirror.host, bounds)
        mirror.send(bounds[0], bounds[own])
        mirror.send(bounds[own + 1], bounds[-1])

    def _mirror(self, array: Array) -> Mirror:
        return self._device.mirror(array.reshape(-1))


class Nccl:
    """Transport through NCCL, with a separate GPU per rank."""

    name = "nccl"

    def __init__(self, comm: Comm, device: CupyDevice, nccl: Any) -> None:
        """`nccl`: CuPy's module of that name."""
        self._device, self._nccl = device, nccl
        self._second = device.xp.cuda.Stream(non_blocking=True)
        self._rank = comm.rank
        own = nccl.get_unique_id() if comm.rank == 0 else None
        self._ranks = nccl.NcclCommunicator(comm.size, comm.broadcast_bytes(own), comm.rank)
        self._types = {
            "float32": nccl.NCCL_FLOAT32,
            "float64": nccl.NCCL_FLOAT64,
            "uint16": nccl.NCCL_BFLOAT16,
        }

    def sum(self, array: Array) -> None:
        at, kind = address(array), self._types[array.dtype.name]
        self._ranks.allReduce(at, at, array.size, kind, self._nccl.NCCL_SUM, self._stream)

    def on_side_stream(self, work: Work) -> None:
        self._device.after(self._second, self._device.stream)
        with self._device.on(self._second):
            work()

    def join(self) -> None:
        self._device.after(self._device.stream, self._second)

    def broadcast(self, array: Array) -> None:
        at = address(array)
        self._ranks.broadcast(at, at, array.nbytes, self._nccl.NCCL_UINT8, 0, self._stream)

    def reduce(self, array: Array, bounds: Sequence[int]) -> None:
        """Use one call for the elements that all parts have, and one for the rest of each part."""
        each, kind, total = _common(bounds), self._types[array.dtype.name], self._nccl.NCCL_SUM
        begin, own = (address(array[place:]) for place in (bounds[0], bounds[self._rank]))
        with self._together():
            if each:
                self._ranks.reduceScatter(begin, own, each, kind, total, self._stream)
            for rank, at, count in _rest(array, bounds, each):
                self._ranks.reduce(at, at, count, kind, total, rank, self._stream)

    def all_gather(self, array: Array, bounds: Sequence[int]) -> None:
        each, kind = _common(bounds), self._types[array.dtype.name]
        begin, own = (address(array[place:]) for place in (bounds[0], bounds[self._rank]))
        with self._together():
            if each:
                self._ranks.allGather(own, begin, each, kind, self._stream)
            for rank, at, count in _rest(array, bounds, each):
                self._ranks.broadcast(at, at, count, kind, rank, self._stream)

    def all_to_all(self, received: Array, sent: Array, starts: Sequence[int], counts: Sequence[int]) -> None:
        kind, own = self._types[sent.dtype.name], counts[self._rank]
        with self._together():
            for other, (start, count) in enumerate(zip(starts, counts, strict=True)):
                if count:
                    self._ranks.send(address(sent[start:]), count, kind, other, self._stream)
                if own:
                    self._ranks.recv(address(received[other]), own, kind, other, self._stream)

    def trouble(self) -> str:
        try:
            self._ranks.check_async_error()
        except self._nccl.NcclError as error:
            return str(error)
        except Exception as error:  # such as a KeyError of a CuPy version without this error code
            return f"{type(error).__name__}: {error}"
        return ""

    @property
    def _stream(self) -> int:
        return int(self._device.stream.ptr)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Group calls, so that none waits for another."""
        self._nccl.groupStart()
        try:
            yield
        finally:
            self._nccl.groupEnd()


Transport = HostStaged | Nccl  # collective, and in the order of the device's stream


def _common(bounds: Sequence[int]) -> int:
    """Return the length of all parts, with a possibly longer last one; 0 if other lengths differ."""
    *lengths, last = (stop - start for start, stop in pairwise(bounds))
    each = min(lengths, default=last)
    return each if all(length == each for length in lengths) and last >= each else 0


def _rest(array: Array, bounds: Sequence[int], each: int) -> Iterator[tuple[int, int, int]]:
    """Yield rank, address and length of each part's elements after its first `each`."""
    for rank, (start, stop) in enumerate(pairwise(bounds)):
        if start + each < stop:
            yield rank, address(array[start + each :]), stop - start - each


# -- the choice


def sharing(comm: Comm, device: CupyDevice) -> int:
    """Count the ranks that use this rank's GPU, including this one. Collective."""
    place = device.place.encode()
    return gather_bytes(comm, place).count(place)


def choose_transport(how: str, comm: Comm, device: CupyDevice) -> Transport:
    """Choose a transport that all ranks support. `how`: auto, nccl or host. Collective."""
    crowded = _anywhere(comm, device.sharing > 1 and os.environ.get(SHARED_GPU) != "1")
    nccl = nccl_module()
    without = _anywhere(comm, nccl is None)
    if how == "nccl" and crowded:
        raise collective_error(
            UsageError("--allreduce nccl requires a GPU per rank; start fewer ranks, or use host")
        )
    if how == "nccl" and without:
        raise collective_error(
            UsageError("--allreduce nccl requires NCCL: pip install nvidia-nccl-cu13 (or -cu12)")
        )
    if how == "nccl" or (how == "auto" and not crowded and not without):
        if _anywhere(comm, device.sharing > 1):
            _let_ranks_share(nccl, comm.rank)
        return Nccl(comm, device, nccl)
    return HostStaged(comm, device)


def _let_ranks_share(nccl: Any, rank: int) -> None:
    """Allow ranks to share a GPU. NCCL reads each variable once, at its first use, so call this before.

    Older versions reject two ranks with the same host and GPU. Each rank then sets a different host, and
    they connect through sockets on this machine.
    """
    result = {"NCCL_MAX_CTAS": "4", "NCCL_NVLS_ENABLE": "0", "NCCL_RAS_ENABLE": "0"}
    if nccl.get_version() >= MULTI_RANK_NCCL:
        result |= {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NET_GDR_LEVEL": "LOC"}
    else:
        result |= {"NCCL_HOSTID": f"rank {rank}", "NCCL_MNNVL_ENABLE": "0", "NCCL_IB_DISABLE": "1"}
        result |= {"NCCL_NET": "Socket", "NCCL_NET_PLUGIN": "none"}
        result |= {"NCCL_SOCKET_IFNAME": "lo", "NCCL_SOCKET_FAMILY": "AF_INET"}
    for name, value in result.items():
        os.environ.setdefault(name, value)


def nccl_module() -> Any:
    """Return CuPy's module of NCCL, or None if the library cannot be loaded."""
    if probe.load_library(["libnccl.so.2"]) is None:
        return None
    from cupy.cuda import nccl

    return nccl if nccl.available else None


def _anywhere(comm: Comm, here: bool) -> bool:
    return comm.allreduce_max(int(here)) == 1
