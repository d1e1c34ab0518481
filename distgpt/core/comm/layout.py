"""Where the ranks of a node and their threads run. The plain layout leaves that to the system."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from distgpt.core.comm.api import Comm
from distgpt.core.comm.resources import Grants, granted_cores
from distgpt.core.components import components


class Layout:
    """Where this rank runs. A stage calls these in their order, each thread of a pool calls `seat`."""

    def threads(self, comm: Comm) -> int:
        """Return the number of cores that this rank has, as many threads as pay."""
        return self.share(comm.cores, comm.local_size)

    def share(self, cores: float, ranks: int, grants: Grants | None = None) -> int:
        """Return as many threads as pay on one rank's share of this machine, which some ranks use."""
        return granted_cores(cores, ranks, grants=grants).whole

    def place(self, comm: Comm, threads: int, threads_given: bool) -> list[str]:
        """Decide where this rank and its threads run. Return lines about that on rank 0. Collective."""
        return []

    def bind(self) -> None:
        """Bind this process where it was placed. Texts are read before, on all CPUs that it was given."""

    def unbound(self) -> AbstractContextManager[None]:
        """Let this thread, and those it starts meanwhile, run where the process could before `bind`."""
        return nullcontext()

    def seat(self, thread: int, threads: int) -> None:
        """Put the calling thread in its place, which begins to serve as one of a pool's."""


def layout() -> Layout:
    """Return the layout of this process."""
    return components().layout()


PLAIN = Layout()
