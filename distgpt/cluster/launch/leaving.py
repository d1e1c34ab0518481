"""Ranks that leave before the others: what a line tells of it, and the end of a Python program under MPI."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
import traceback
from typing import Any, NoReturn

from distgpt.cluster.launch.environment import OPEN_MPI
from distgpt.core.comm.api import Comm
from distgpt.core.comm.job import rank_name, say, this_job

# Ctrl-C reaches all ranks of a terminal's job. Another rank reports it if rank 0 has not ended it by then.
SECONDS_FOR_RANK_0 = 1.0
SECONDS_TO_START = 5.0  # that rank 0 may start later than others
GRACE = 10.0  # seconds after which a rank that has called sys.exit is taken to leave alone
CAUGHT = 2.0  # seconds after which a program that still goes on has caught that exit
PAUSE = 0.01

_watched: list[Comm] = []  # once a process


def report_library(error: BaseException, rank: int) -> bool:
    """Report an error of MPI or NCCL, between the ranks, in a line; return whether it is one."""
    if type(error).__module__.startswith("mpi4py"):
        say(has_failed(rank, "MPI", str(error)))
        return True
    what = _raised_by_nccl(error)
    if what is None:
        return False
    if rank:  # it fails on all ranks
        time.sleep(SECONDS_FOR_RANK_0)
    if "remote" in what.lower():
        say(has_failed(rank, "NCCL", what))
        return True
    say(f"{rank_name(rank)}: NCCL: {what}; with NCCL_DEBUG=INFO in the environment it says why")
    if "invalid" in what.lower():  # an argument, or a usage: our mistake
        traceback.print_exception(error)
    return True


def _raised_by_nccl(error: BaseException) -> str | None:
    """Return what NCCL has raised; None for errors of others. CuPy is not needed to recognise them."""
    if type(error).__name__ == "NcclError" and "nccl" in type(error).__module__:  # CuPy's
        return str(error)
    # CuPy's NcclError may not know a status, and then is a KeyError.
    where = list(traceback.walk_tb(error.__traceback__))
    if not isinstance(error, KeyError) or not where or "nccl" not in where[-1][0].f_code.co_filename:
        return None
    return {6: "remote error", 7: "in progress"}.get(error.args[0], f"status {error.args[0]}")


def has_failed(rank: int, library: str, what: str) -> str:
    """Describe a failure to reach the other ranks."""
    return f"{rank_name(rank)}: {library} has failed, as it does when another rank or host dies: {what}"


def let_rank_0_speak() -> None:
    """Sleep a moment before this rank exits, so that rank 0 can print the reason first.

    Open MPI's mpirun ends all ranks as soon as one has failed. MPICH's does not, and needs no sleep.
    """
    if OPEN_MPI.size in os.environ:
        time.sleep(SECONDS_TO_START)


def die_of(number: signal.Signals) -> None:
    """Die of this signal, so that a launcher ends the other ranks, which wait before MPI has started."""
    sys.stdout.flush()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def watch_exit(comm: Comm) -> None:
    """Note calls of sys.exit with an error, and look at exit whether all ranks leave. Collective.

    MPI_Finalize would wait for the other ranks, and they for this one. `raise SystemExit` is not seen.
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
                this_job().leave(SystemExit(code if isinstance(code, int) else 1), comm)
            time.sleep(PAUSE)

    sys.exit = noted
    atexit.register(wait_for_all)
