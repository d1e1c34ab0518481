"""Exchange between GPUs by NCCL: every call returns without waiting, in the order of a stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

from distgpt.comm.api import Array, Comm
from distgpt.gpu.api import address
from distgpt.gpu.device import CupyDevice
from distgpt.kernels.api import Work


class Cut(NamedTuple):
    """An array in parts, as NCCL wants it: addresses, and elements of its `kind`."""

    begin: int
    own: int  # this rank's part
    end: int  # of the elements all parts have: the last one's others begin here
    each: int  # elements that all parts have
    rest: int  # and that the last one has beyond them
    kind: int


class Nccl:
    """The ranks of a job, each with a GPU of its own."""

    name = "nccl"

    def __init__(self, comm: Comm, device: CupyDevice, nccl: Any) -> None:
        """`nccl`: CuPy's module of that name."""
        self._device, self._nccl = device, nccl
        self._second = device.second_stream()
        self._rank, self._size = comm.rank, comm.size
        own = nccl.get_unique_id() if comm.rank == 0 else None
        self._ranks = nccl.NcclCommunicator(comm.size, comm.broadcast_bytes(own), comm.rank)
        self._types = {
            "float32": nccl.NCCL_FLOAT32,
            "float64": nccl.NCCL_FLOAT64,
            "uint16": nccl.NCCL_BFLOAT16,
        }

    def sum(self, array: Array, chunked: bool) -> None:
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
        """Reduce in one call for the elements all parts have, and one for the last part's others."""
        cut, total = self._cut(array, bounds), self._nccl.NCCL_SUM
        with self._together():
            if cut.each:
                self._ranks.reduceScatter(cut.begin, cut.own, cut.each, cut.kind, total, self._stream)
            if cut.rest:
                last = self._size - 1
                self._ranks.reduce(cut.end, cut.end, cut.rest, cut.kind, total, last, self._stream)

    def all_gather(self, array: Array, bounds: Sequence[int]) -> None:
        cut = self._cut(array, bounds)
        with self._together():
            if cut.each:
                self._ranks.allGather(cut.own, cut.begin, cut.each, cut.kind, self._stream)
            if cut.rest:
                self._ranks.broadcast(cut.end, cut.end, cut.rest, cut.kind, self._size - 1, self._stream)

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
        except Exception as error:  # as of a CuPy that does not know the number of what has failed
            return f"{type(error).__name__}: {error}"
        return ""

    @property
    def _stream(self) -> int:
        """The current stream."""
        return int(self._device.stream.ptr)

    def _cut(self, array: Array, bounds: Sequence[int]) -> Cut:
        each, rest = _even(bounds)
        places = (bounds[0], bounds[self._rank], bounds[-1] - rest)
        begin, own, end = (address(array[place:]) for place in places)
        return Cut(begin, own, end, each, rest, self._types[array.dtype.name])

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Group calls, so that none waits for another."""
        self._nccl.groupStart()
        try:
            yield
        finally:
            self._nccl.groupEnd()


def _even(bounds: Sequence[int]) -> tuple[int, int]:
    """Return the elements that all parts have, and those that the last one has beyond them."""
    sizes = [stop - start for start, stop in pairwise(bounds)]
    each = sizes[0]
    if any(size != each for size in sizes[:-1]) or sizes[-1] < each:
        raise ValueError(
            f"parts of {sizes} elements: all but the last one must be alike, and none longer than it"
        )
    return each, sizes[-1] - each
