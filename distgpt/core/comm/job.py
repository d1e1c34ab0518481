"""The job that this process belongs to: connecting to the other ranks, and shutting down.

This class finds other ranks only through MPI. A component derives a job that also reads the environment
variables of launchers and batch systems.
"""

from __future__ import annotations

import os
import platform
import signal
import sys
import time
import traceback
from typing import TextIO

from distgpt.core.base.errors import DistgptError, StorageError, UsageError, first_line, one_line
from distgpt.core.base.interrupts import EXIT_CODES, Interrupted, ignore_further
from distgpt.core.comm.api import Comm, SerialComm
from distgpt.core.components import components
from distgpt.core.config import WITH_MPI

INTERNAL = 70

# Errors with a one-line explanation. Other errors print a traceback; in a job of multiple ranks, all except
# these do.
_CLEAR = (DistgptError, MemoryError)
_EXPECTED = (*_CLEAR, OSError, SystemExit)


class Job:
    """A job as seen by one process. Ranks first call `connect`, then `meet`."""

    @property
    def size(self) -> int:
        """Number of processes launched as one job."""
        return 1

    @property
    def rank(self) -> int:
        """This process's rank before MPI starts."""
        return 0

    @property
    def launcher(self) -> str:
        """Name of the launcher; "" if unknown."""
        return ""

    @property
    def batch(self) -> dict[str, str] | None:
        """System, id and, if set, name of the batch job; None outside of a batch job."""
        return None

    def end(self, seconds: float | None) -> float | None:
        """Convert seconds from now to a deadline of time.monotonic(); None stays None."""
        return None if seconds is None else time.monotonic() + seconds

    def connect(self, stage: str) -> Comm:
        """Return the job's ranks. A stage with multiple ranks starts MPI, which waits for all ranks."""
        if stage not in WITH_MPI:
            return SerialComm()
        require_mpi()
        from distgpt.core.comm.mpi import MpiComm

        return MpiComm()

    def meet(self, comm: Comm) -> None:
        """Raise an error on all ranks if one cannot do its part. The job's first collective call."""

    def notes(self, comm: Comm, stage: str, threads: int, threads_given: bool) -> list[str]:
        """Return lines for the user about how the ranks were launched. Collective."""
        return []

    def complain(self, complaint: str, code: int) -> int:
        """Report to the other ranks why this one exits before `connect`. Return the exit code of all."""
        return code

    def watch_exit(self, comm: Comm) -> None:
        """End the whole job if one rank leaves a Python program through sys.exit. Collective."""

    def leave(self, error: BaseException, comm: Comm | None) -> int:
        """Report an error and return the exit code. If only this rank has the error, abort the job."""
        several = comm is not None and comm.size > 1
        alone = several and not getattr(error, "shared", False)
        rank = comm.rank if comm is not None and several else self.rank
        if isinstance(error, KeyboardInterrupt):
            ignore_further()  # launchers and users repeat signals
        expected = isinstance(error, DistgptError | KeyboardInterrupt)
        if alone or not expected or rank == 0:
            is_one_of_several = alone or (comm is None and self.size > 1 and not expected)
            self.report(error, comm, rank, f"{rank_name(rank)}: " if is_one_of_several else "")
        code = exit_code(error)
        if comm is not None and alone:
            comm.abort(code)
        return code

    def report(self, error: BaseException, comm: Comm | None, rank: int, where: str) -> None:
        """Print the error on standard error. `where` names the rank if the error is not on all ranks."""
        if is_closed_pipe(error):
            drop_output(1)
        elif isinstance(error, KeyboardInterrupt):
            say((where if rank else "") + ending(error))
        else:
            say(where + described(error))
            if isinstance(error, OSError):
                try:
                    sys.stdout.flush()
                except OSError:  # nor at exit, and Python would exit with 120
                    drop_output(1)
            of_several = bool(where) and comm is not None
            if not isinstance(error, _EXPECTED) or (of_several and not isinstance(error, _CLEAR)):
                traceback.print_exception(error)


def this_job() -> Job:
    return components().job()


def rank_name(rank: int) -> str:
    """Name a rank; in a batch job with its host, which the log may not show otherwise."""
    return f"rank {rank} on {platform.node()}" if this_job().batch else f"rank {rank}"


PLAIN = Job()


def require_mpi() -> None:
    """Import mpi4py without starting MPI; raise a UsageError if that fails."""
    try:
        from distgpt.core.comm import mpi  # noqa: F401
    except (ImportError, RuntimeError) as error:
        if (library := os.environ.get("MPI4PY_LIBMPI")) and isinstance(error, RuntimeError):
            raise UsageError(
                f"mpi4py cannot load MPI4PY_LIBMPI={library}: load its module first (module load …),"
                " or unset the variable"
            ) from None
        raise UsageError(
            f"multiple ranks require mpi4py and an MPI library ({first_line(error)}); install them with "
            "pip install 'distgpt[mpich]', or for your cluster's own MPI with pip install mpi4py "
            "(distgpt help install)"
        ) from None


def shown_on_terminal(stream: TextIO) -> bool:
    """Return whether output may reach a terminal. Under a launcher it is a pipe that may end in one."""
    return stream.isatty() or this_job().size > 1


# How a process exits: a line on standard error, and an exit code.


def exit_code(error: BaseException) -> int:
    """Return a command's exit code for an error."""
    if isinstance(error, DistgptError | Interrupted):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return EXIT_CODES[signal.SIGINT]
    if isinstance(error, OSError) or is_closed_pipe(error):
        return StorageError.exit_code
    if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code:
        return error.code
    return INTERNAL


def described(error: BaseException) -> str:
    """Return a one-line description of an error."""
    if isinstance(error, SystemExit):
        return f"exited with code {error.code} during a job"
    if isinstance(error, MemoryError):
        return f"not enough memory: {error} (distgpt help out-of-memory)"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) if isinstance(error, _EXPECTED) else "internal error"


def ending(error: KeyboardInterrupt | DistgptError) -> str:
    """Describe why the command ended, and how to resume it."""
    return "; ".join([str(error) or "interrupted", *getattr(error, "__notes__", [])])


def is_closed_pipe(error: BaseException) -> bool:
    """Return whether the reader closed the output (`| head`), which rich turns into a SystemExit."""
    if isinstance(error, DistgptError):
        return False
    return isinstance(error, BrokenPipeError) or isinstance(error.__context__, BrokenPipeError)


def say(text: str) -> None:
    """Print a line to standard error with the prefix "distgpt:"."""
    try:
        print(f"distgpt: {one_line(text)}", file=sys.stderr, flush=True)
    except OSError:  # a closed terminal
        drop_output(2)


def drop_output(descriptor: int) -> None:
    """Discard later output of a descriptor; otherwise Python's flush at exit fails with 120."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
