"""How a process leaves: one exit code for the whole job, and no rank left waiting for another."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback

from distgpt.comm.api import Comm
from distgpt.errors import DistgptError, StorageError

INTERNAL, INTERRUPTED = 70, 130

# What one line explains; of the others the traceback is told too, and in a job of several ranks, where such
# an error was not meant to get this far, of all but the clear ones.
_CLEAR = (DistgptError, MemoryError)
_EXPECTED = (*_CLEAR, OSError, SystemExit)

# Ctrl-C reaches all ranks of a terminal's job: rank 0 tells it, unless it has not heard of it by then.
SECONDS_FOR_RANK_0 = 1.0

# The rank as launchers tell it, for messages before MPI has started.
_RANKS = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")


def leave(error: BaseException, comm: Comm | None) -> int:
    """Say what happened and give the exit code; an error that this rank has alone ends the job from here."""
    several = comm is not None and comm.size > 1
    if isinstance(error, DistgptError) and (error.shared or not several):
        if _rank(comm) == 0:
            _say(str(error))
        return error.exit_code
    if _is_closed_pipe(error):
        _forget_output()
    elif isinstance(error, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # launchers repeat it, and so do impatient fingers
        if comm is not None or _rank(comm) == 0:
            _tell_interrupt(_rank(comm), getattr(error, "__notes__", []))
    else:
        where = f"rank {comm.rank}: " if comm is not None and several else ""
        _say(where + _line(error))
        if isinstance(error, OSError):
            _forget_unwritten()
        if not isinstance(error, _EXPECTED) or (several and not isinstance(error, _CLEAR)):
            traceback.print_exception(error)
    code = _exit_code(error)
    if comm is not None and several:
        comm.abort(code)
    return code


def _tell_interrupt(rank: int, notes: list[str]) -> None:
    """`notes` say how to go on, from whoever knew."""
    if rank:
        time.sleep(SECONDS_FOR_RANK_0)
    where = f"rank {rank}: " if rank else ""
    _say(where + "; ".join(["interrupted", *notes]))


def _is_closed_pipe(error: BaseException) -> bool:
    """Whether the reader of our output has gone, as in `| head`; rich makes a SystemExit of it."""
    return isinstance(error, BrokenPipeError) or isinstance(error.__context__, BrokenPipeError)


def _forget_unwritten() -> None:
    """What could not be written now can't be at the end either, where Python would leave with 120."""
    try:
        sys.stdout.flush()
    except OSError:
        _forget_output()


def _forget_output() -> None:
    """Let Python's flush at the end find a place to write to."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def launched_rank() -> int:
    """This process's rank as its launcher tells it; 0 outside a launcher."""
    return next((int(os.environ[key]) for key in _RANKS if os.environ.get(key, "").isdigit()), 0)


def _rank(comm: Comm | None) -> int:
    return launched_rank() if comm is None or comm.size == 1 else comm.rank


def _exit_code(error: BaseException) -> int:
    if isinstance(error, DistgptError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if _is_closed_pipe(error):
        return StorageError.exit_code
    if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code:
        return error.code
    return StorageError.exit_code if isinstance(error, OSError) else INTERNAL


def _line(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"left with exit code {error.code} in the middle of a job"
    if isinstance(error, MemoryError):
        return f"not enough memory: {error}"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) if isinstance(error, _EXPECTED) else "internal error"


def _say(text: str) -> None:
    print(f"distgpt: {text}", file=sys.stderr, flush=True)
