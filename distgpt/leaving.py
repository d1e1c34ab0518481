"""How a process leaves: one exit code for the whole job, and no rank left waiting for another."""

from __future__ import annotations

import os
import sys
import traceback

from distgpt.comm.api import Comm
from distgpt.errors import DistgptError, StorageError

INTERNAL, INTERRUPTED = 70, 130

# The rank as launchers tell it, for messages before MPI has started.
_RANKS = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")


def leave(error: BaseException, comm: Comm | None) -> int:
    """Say what happened and give the exit code; an error that this rank has alone ends the job from here."""
    several = comm is not None and comm.size > 1
    if isinstance(error, DistgptError) and (error.shared or not several):
        if _rank(comm) == 0:
            _say(str(error))
        return error.exit_code
    code = _exit_code(error)
    if isinstance(error, KeyboardInterrupt):
        if _rank(comm) == 0:
            _say("interrupted; a run with checkpoints goes on with --resume auto")
    elif isinstance(error, DistgptError | OSError | SystemExit):
        where = f"rank {comm.rank}: " if comm is not None and several else ""
        _say(f"{where}{_one_line(error)}")
        if isinstance(error, SystemExit) and several:
            traceback.print_exception(error)
    else:
        _say(f"internal error on rank {_rank(comm)}")
        traceback.print_exception(error)
    if comm is not None and several:
        comm.abort(code)
    return code


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
    if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code:
        return error.code
    return StorageError.exit_code if isinstance(error, OSError) else INTERNAL


def _one_line(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"left with exit code {error.code} in the middle of a job"
    return str(error)


def _say(text: str) -> None:
    print(f"distgpt: {text}", file=sys.stderr, flush=True)
