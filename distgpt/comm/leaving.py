"""The end of a Python program under MPI: a rank that leaves alone by sys.exit ends the job.

MPI_Finalize would wait for the other ranks, and they for this one.
"""

from __future__ import annotations

import atexit
import sys
import time
from typing import Any, NoReturn

from distgpt.comm.api import Comm
from distgpt.comm.launched import leave

GRACE = 3.0  # seconds after which a rank that has called sys.exit is taken to leave alone
PAUSE = 0.01

_watched: list[Comm] = []  # once a process


def watch_exit(comm: Comm) -> None:
    """Note calls of sys.exit with an error, and look at exit whether all ranks leave. Collective."""
    if _watched:
        return
    _watched.append(comm)
    from mpi4py import MPI

    former, codes, world = sys.exit, list[Any](), MPI.COMM_WORLD.Dup()

    def noted(code: Any = None) -> NoReturn:
        codes.append(code)
        former(code)

    def wait_for_all() -> None:
        """Without an error this is what MPI_Finalize does: others may be at work for hours."""
        if MPI.Is_finalized():
            return
        arrived, begun = world.Ibarrier(), time.monotonic()
        while not arrived.Test():
            if codes and codes[-1] and time.monotonic() > begun + GRACE:
                leave(SystemExit(codes[-1]), comm)
            time.sleep(PAUSE)

    sys.exit = noted
    atexit.register(wait_for_all)
