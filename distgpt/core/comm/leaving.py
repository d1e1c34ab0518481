"""The end of a Python program under MPI: a rank that leaves alone by sys.exit ends the job.

MPI_Finalize would wait for the other ranks, and they for this one.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from typing import Any, NoReturn

from distgpt.core.comm.api import Comm
from distgpt.core.comm.launched import leave

GRACE = 10.0  # seconds after which a rank that has called sys.exit is taken to leave alone
CAUGHT = 2.0  # seconds after which a program that still goes on has caught that exit
PAUSE = 0.01

_watched: list[Comm] = []  # once a process


def watch_exit(comm: Comm) -> None:
    """Note calls of sys.exit with an error, and look at exit whether all ranks leave. Collective.

    `raise SystemExit` is not seen.
    """
    if _watched:
        return
    _watched.append(comm)
    from mpi4py import MPI

    former, calls, world = sys.exit, list[tuple[Any, float]](), MPI.COMM_WORLD.Dup()

    def noted(code: Any = None) -> NoReturn:
        if threading.current_thread() is threading.main_thread():
            calls.append((code, time.monotonic()))
        former(code)

    def wait_for_all() -> None:
        """Without an error this is what MPI_Finalize does: others may be at work for hours."""
        if MPI.Is_finalized():
            return
        arrived, begun = world.Ibarrier(), time.monotonic()
        code, called = calls[-1] if calls else (0, begun)
        while not arrived.Test():
            if code and begun < called + CAUGHT and time.monotonic() > begun + GRACE:
                leave(SystemExit(code if isinstance(code, int) else 1), comm)
            time.sleep(PAUSE)

    sys.exit = noted
    atexit.register(wait_for_all)
