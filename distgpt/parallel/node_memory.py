"""Memory that the ranks of one node share: a matrix with a row for each of them.

It is a file without a name (memfd_create), which the ranks of a node open through /proc: nothing is left of
it once the last rank has ended, however it ends. MPI's windows lie in /dev/shm, for which containers have
64 MB: where that does not suffice, MPICH 5.0 ends with a bus error at the first write.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from mmap import PAGESIZE, mmap
from typing import NamedTuple, TypeVar

import numpy as np

from distgpt.core.base.errors import Say, UsageError
from distgpt.core.comm.agree import gather_texts, on_every_rank, on_root
from distgpt.core.comm.api import Comm
from distgpt.core.model.memory import FlatBuffer, Layout
from distgpt.core.ops.api import Array
from distgpt.core.ops.kernels import Kernels

T = TypeVar("T")


class SharedGradients(FlatBuffer):
    """The gradients of a rank in its row of a matrix (ranks of the node, at least as many columns)."""

    def __init__(self, layout: Layout, flags: int, rows: Array, local_rank: int) -> None:
        self.rows = rows
        super().__init__(layout, lambda count: rows[local_rank, :count], flags)


def gradients_in_node(comm: Comm, kernels: Kernels, say: Say, layout: Layout, flags: int) -> FlatBuffer:
    """Return a rank's gradients, in memory that its node shares if several of its ranks can. Collective."""
    node: Comm | None = comm
    if comm.size != comm.local_size:  # None where the ranks of a node do not sum before others
        levels = comm.split_by_node()
        node = levels and levels[0]
    lack = ""
    if node is not None:
        try:
            rows = shared_rows(node, layout.size + flags, np.dtype(kernels.wide))
        except UsageError as error:
            lack = str(error)
    lacks = [text for text in gather_texts(comm, lack) if text]
    if node is None or lacks:
        if lacks:
            say(f"MPI sums gradients within a node: its ranks cannot share memory ({lacks[0]})")
        return FlatBuffer(layout, kernels.wide_zeros, flags)
    return SharedGradients(layout, flags, rows, node.rank)


class _File(NamedTuple):
    """Where other processes find the first rank's file, and what tells it from all other files."""

    path: str
    device: int
    inode: int


def shared_rows(node: Comm, columns: int, dtype: np.dtype) -> Array:
    """Return zeros (ranks of the node, at least `columns`) that these ranks share. Collective.

    Rows begin at pages, each of which lies near the rank that touches it first. Raises a UsageError on all
    ranks if one of them cannot share memory.
    """
    pages = -(-columns * dtype.itemsize // PAGESIZE)
    shape = node.size, pages * PAGESIZE // dtype.itemsize
    made: list[int] = []  # the first rank's descriptor

    def create() -> list[object]:
        if not hasattr(os, "memfd_create"):  # Linux has it
            raise UsageError("this system has no memfd_create")
        made.append(os.memfd_create("gradients"))
        os.ftruncate(made[0], node.size * pages * PAGESIZE)
        about = os.fstat(made[0])
        return [f"/proc/{os.getpid()}/fd/{made[0]}", about.st_dev, about.st_ino]

    def open_and_map(file: _File) -> Array:
        if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
            # Each rank maps the rows of all, which no estimate of a rank's own memory counts.
            raise UsageError("ulimit -v limits what they may map")
        opened = os.open(file.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            about = os.fstat(opened)
            if (about.st_dev, about.st_ino) != file[1:]:  # containers number their processes alike
                raise UsageError("their containers see processes of their own alone")
            return np.frombuffer(mmap(opened, 0), dtype).reshape(shape)
        finally:
            os.close(opened)

    try:
        file = _File(*on_root(node, lambda: _explained(create)))
        return on_every_rank(node, lambda: _explained(lambda: open_and_map(file)))
    finally:
        for descriptor in made:  # all have opened it, or none will
            os.close(descriptor)


def _explained(act: Callable[[], T]) -> T:
    """Call act(), and turn what the system refuses into an error that ranks share."""
    try:
        return act()
    except OSError as error:
        raise UsageError(error.strerror or str(error)) from None
