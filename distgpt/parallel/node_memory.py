"""Sums over the ranks of one node, in shared memory: a matrix with a row per rank.

The memory is an anonymous file (memfd_create), which the ranks of a node open through /proc. It disappears
when the last rank ends in any way. MPI's windows use /dev/shm, which has 64 MB in containers. If that is too
small, MPICH 5.0 ends with a bus error at the first write.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Sequence
from mmap import PAGESIZE, mmap
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from distgpt.core.base.errors import Say, UsageError
from distgpt.core.comm.agree import gather, on_every_rank, on_root
from distgpt.core.comm.api import Comm, SerialComm
from distgpt.core.model.memory import FlatBuffer, Layout
from distgpt.core.ops.api import Array
from distgpt.core.ops.kernels import Kernels
from distgpt.core.train.parallel_strategy import Reduction

LINE = 16  # elements of a cache line; ranks' parts start at multiples
GRAIN = 4096  # minimum elements per worker

Each = Callable[[Callable[[int], None], int], None]  # like `Kernels.each`
T = TypeVar("T")


class SharedGradients(FlatBuffer):
    """The gradients of a rank in its row of a matrix (ranks of the node, at least as many columns)."""

    def __init__(self, layout: Layout, flags: int, rows: Array, local_rank: int) -> None:
        self.rows = rows
        super().__init__(layout, lambda count: rows[local_rank, :count], flags)


def gradients_in_node(comm: Comm, kernels: Kernels, say: Say, layout: Layout, flags: int) -> FlatBuffer:
    """Return a rank's gradients, in shared memory if multiple ranks of its node can share it. Collective."""
    node: Comm | None = comm
    if comm.size != comm.local_size:  # None if there is no sum within nodes first
        levels = comm.split_by_node()
        node = levels and levels[0]
    lack = ""
    if node is not None:
        try:
            rows = shared_rows(node, layout.size + flags, np.dtype(kernels.accum_dtype))
        except UsageError as error:
            lack = str(error)
    lacks = [text for text in gather(comm, lack) if text]
    if node is None or lacks:
        if lacks:
            say(f"MPI sums gradients within a node, because its ranks cannot share memory ({lacks[0]})")
        return FlatBuffer(layout, kernels.accum_zeros, flags)
    return SharedGradients(layout, flags, rows, node.rank)


class _File(NamedTuple):
    """The path at which other processes find the first rank's file, and its identity."""

    path: str
    device: int
    inode: int


def shared_rows(node: Comm, columns: int, dtype: np.dtype) -> Array:
    """Return zeros (ranks of the node, at least `columns`) shared by these ranks. Collective.

    Rows start at pages. Each page is near the rank that touches it first. If a rank cannot share memory,
    raise a UsageError on all ranks.
    """
    pages = -(-columns * dtype.itemsize // PAGESIZE)
    shape = node.size, pages * PAGESIZE // dtype.itemsize
    made: list[int] = []  # the first rank's descriptor

    def create() -> _File:
        if not hasattr(os, "memfd_create"):  # only on Linux
            raise UsageError("this system has no memfd_create")
        made.append(os.memfd_create("gradients"))
        os.ftruncate(made[0], node.size * pages * PAGESIZE)
        about = os.fstat(made[0])
        return _File(f"/proc/{os.getpid()}/fd/{made[0]}", about.st_dev, about.st_ino)

    def open_and_map(file: _File) -> Array:
        if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
            # Each rank maps all rows, which no estimate of a rank's memory includes.
            raise UsageError("ulimit -v limits their address space")
        opened = os.open(file.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            about = os.fstat(opened)
            if (about.st_dev, about.st_ino) != file[1:]:  # containers may have the same process IDs
                raise UsageError("their containers have separate process IDs")
            return np.frombuffer(mmap(opened, 0), dtype).reshape(shape)
        finally:
            os.close(opened)

    try:
        file = on_root(node, lambda: _explained(create))
        return on_every_rank(node, lambda: _explained(lambda: open_and_map(file)))
    finally:
        for descriptor in made:  # all ranks have opened it, or none will
            os.close(descriptor)


def _explained(act: Callable[[], T]) -> T:
    """Call act(). Turn system errors into an error that ranks share."""
    try:
        return act()
    except OSError as error:
        raise UsageError(error.strerror or str(error)) from None


# -- the sum


def bounds_of(start: int, stop: int, parts: int, line: int = LINE) -> list[int]:
    """Return the start of each part of a range, and the end of the last one.

    All parts have the same length, as NCCL requires, except that the last one also has the remainder.
    """
    each = (stop - start) // line // parts * line
    return [*(start + each * part for part in range(parts)), stop]


def spread(count: int, each: Each, workers: int, loop: Callable[..., object], *args: object) -> None:
    """Call a loop on equal ranges of elements, one per worker."""
    parts = min(workers, -(-count // GRAIN))
    bounds = bounds_of(0, count, parts or 1)

    def stretch(i: int) -> None:
        loop(bounds[i], bounds[i + 1], *args)

    each(stretch, parts)


def one_by_one(work: Callable[[int], object], count: int) -> None:
    """Like `Kernels.each`, but in the calling thread."""
    for part in range(count):
        work(part)


class InParts(Reduction, Protocol):
    """Sums in two halves, between which other nodes may add their sums."""

    def reduce(self, bounds: Sequence[int], step: int) -> None:
        """Replace this rank's part, between two of the bounds, by its sum over ranks. Collective."""

    def gather(self, bounds: Sequence[int]) -> None:
        """Send every rank's part to all. Collective."""


class SharedSum(InParts):
    """Sums ranges of gradients in memory shared by the ranks of a node, without messages.

    Each rank sums a part of all rows, piece by piece, and writes the sums to all rows. So all ranks have
    bitwise identical sums, ((g₀ + g₁) + g₂) + … or, by twos, (g₀ + g₁) + (g₂ + g₃) + …. MPI's Allreduce
    moves several times as many bytes, and chooses the order of additions.
    """

    name = "shared memory"

    def __init__(self, node: Comm, rows: Array, each: Each, workers: int, by_twos: bool = False) -> None:
        """`rows`: the flat buffers of the node's ranks. `each` runs loops on `workers` workers."""
        self._node, self._rows, self._by_twos = node, rows, by_twos
        self._each, self._workers = each, workers

    def sum(self, start: int, stop: int, step: int) -> None:
        self._add(bounds_of(start, stop, self._node.size), 1, self._node.size)
        self._node.barrier()  # all sums are written, and none is read while the next pass writes

    def reduce(self, bounds: Sequence[int], step: int) -> None:
        rank = self._node.rank
        self._add(bounds, rank, rank + 1 if rank else 0)

    def gather(self, bounds: Sequence[int]) -> None:
        from distgpt.parallel.loops import sums

        self._over(bounds, sums.copy_rows, self._rows, self._node.rank)
        self._node.barrier()

    def _add(self, bounds: Sequence[int], low: int, high: int) -> None:
        """Sum this rank's part into row 0, and copy the sums to rows low … high - 1."""
        from distgpt.parallel.loops import sums

        self._node.barrier()  # all gradients are written
        self._over(bounds, sums.add_rows, self._rows, self._by_twos, low, high)

    def _over(self, bounds: Sequence[int], loop: Callable[..., object], *args: object) -> None:
        start, stop = bounds[self._node.rank], bounds[self._node.rank + 1]

        def stretch(first: int, last: int) -> None:
            loop(start + first, start + last, *args)

        spread(stop - start, self._each, self._workers, stretch)


def rehearse_shared_sum(kernels: Kernels) -> None:
    """Compile every loop that a sum in shared memory may call."""
    in_memory = SharedSum(SerialComm(), kernels.accum_zeros(1, LINE), one_by_one, 1)
    in_memory.sum(0, LINE, 0)
    in_memory.gather([0, LINE])
