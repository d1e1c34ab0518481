"""Placement of ranks and threads on cores. The default leaves it to the system."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from distgpt.core.comm.api import Comm
from distgpt.core.comm.resources import Grants, granted_cores
from distgpt.core.components import components


class Affinity:
    """The placement of this rank. A stage calls the methods in this order.

    Each pool thread calls `pin_thread`.
    """

    def threads(self, comm: Comm) -> int:
        """Return the number of cores that this rank may use, which is the number of useful threads."""
        return self.share(comm.cores, comm.local_size)

    def share(self, cores: float, ranks: int, grants: Grants | None = None) -> int:
        """Return the number of useful threads per rank if `ranks` ranks share this machine."""
        return granted_cores(cores, ranks, grants=grants).whole

    def place(self, comm: Comm, threads: int, threads_given: bool) -> list[str]:
        """Choose cores for this rank and its threads. Return lines for the user on rank 0. Collective."""
        return []

    def bind(self) -> None:
        """Bind this process to its cores. Text is read before, on all available cores."""

    def unbound(self) -> AbstractContextManager[None]:
        """Return a context in which this thread, and threads that it starts, run on all original cores."""
        return nullcontext()

    def pin_thread(self, thread: int, threads: int) -> None:
        """Bind the calling pool thread to its core."""


def affinity() -> Affinity:
    return components().affinity()


PLAIN = Affinity()
