"""The job that this process belongs to: how it meets the other ranks, and how it leaves them.

The plain job knows of other ranks by MPI alone. What launchers and batch systems say of a process in its
environment is a component's, whose job derives from this one.
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

# Errors that one line explains. Other errors print a traceback; in a job of several ranks only the clear ones
# do not.
_CLEAR = (DistgptError, MemoryError)
_EXPECTED = (*_CLEAR, OSError, SystemExit)


class Job:
    """A job as one process knows it. Ranks call `connect` and `meet` in this order before all else."""

    @property
    def size(self) -> int:
        """How many processes were launched as one job."""
        return 1

    @property
    def rank(self) -> int:
        """This process's rank before MPI has started."""
        return 0

    @property
    def launcher(self) -> str:
        """The name of what has launched this process; "" where nothing is known to have."""
        return ""

    @property
    def batch(self) -> dict[str, str] | None:
        """The system, the id and, if it has one, the name of the batch job; None outside of one."""
        return None

    def end(self, seconds: float | None) -> float | None:
        """Return the moment of time.monotonic() by which to be gone: after `seconds`, if they are given."""
        return None if seconds is None else time.monotonic() + seconds

    def connect(self, stage: str) -> Comm:
        """Return the ranks of this job; start MPI, which waits for all of them, if the stage has several."""
        if stage not in WITH_MPI:
            return SerialComm()
        require_mpi()
        from distgpt.core.comm.mpi import MpiComm

        return MpiComm()

    def meet(self, comm: Comm) -> None:
        """Refuse, on all ranks, what one of them cannot do. The first exchange of a job. Collective."""

    def notes(self, comm: Comm, stage: str, threads: int, threads_given: bool) -> list[str]:
        """Return lines for the user about how the ranks were launched. Collective."""
        return []

    def complain(self, complaint: str, code: int) -> int:
        """Tell the other ranks why this one leaves before `connect`. Return the exit code of all."""
        return code

    def watch_exit(self, comm: Comm) -> None:
        """Let a rank that leaves a Python program alone, by sys.exit, end the whole job. Collective."""

    def leave(self, error: BaseException, comm: Comm | None) -> int:
        """Report the error and return the exit code; an error that only this rank has ends the job here."""
        several = comm is not None and comm.size > 1
        alone = several and not getattr(error, "shared", False)
        rank = comm.rank if comm is not None and several else self.rank
        if isinstance(error, KeyboardInterrupt):
            ignore_further()  # launchers repeat a signal, and so do impatient fingers
        expected = isinstance(error, DistgptError | KeyboardInterrupt)
        if alone or not expected or rank == 0:
            is_one_of_several = alone or (comm is None and self.size > 1 and not expected)
            self.report(error, comm, rank, f"{rank_name(rank)}: " if is_one_of_several else "")
        code = exit_code(error)
        if comm is not None and alone:
            comm.abort(code)
        return code

    def report(self, error: BaseException, comm: Comm | None, rank: int, where: str) -> None:
        """Say on standard error what ends this rank. `where` names the rank, if others end otherwise."""
        if is_closed_pipe(error):
            drop_output(1)
        elif isinstance(error, KeyboardInterrupt):
            say((where if rank else "") + ending(error))
        else:
            say(where + described(error))
            if isinstance(error, OSError):
                try:
                    sys.stdout.flush()
                except OSError:  # nor can it be written at exit, where Python would leave with 120
                    drop_output(1)
            of_several = bool(where) and comm is not None
            if not isinstance(error, _EXPECTED) or (of_several and not isinstance(error, _CLEAR)):
                traceback.print_exception(error)


def this_job() -> Job:
    """Return the job of this process."""
    return components().job()


def rank_name(rank: int) -> str:
    """Return what a line calls this rank: in the log of a batch job with its host, which is gone by then."""
    return f"rank {rank} on {platform.node()}" if this_job().batch else f"rank {rank}"


PLAIN = Job()


def require_mpi() -> None:
    """Import mpi4py, which does not start MPI yet; refuse several ranks where it is not installed."""
    try:
        from distgpt.core.comm import mpi  # noqa: F401
    except (ImportError, RuntimeError) as error:
        if (library := os.environ.get("MPI4PY_LIBMPI")) and isinstance(error, RuntimeError):
            raise UsageError(
                f"mpi4py cannot load MPI4PY_LIBMPI={library}: load the module of this MPI first"
                " (module load …), or unset the variable"
            ) from None
        raise UsageError(
            f"several ranks need mpi4py and an MPI library ({first_line(error)}); install them with "
            "pip install 'distgpt[mpich]', or with pip install mpi4py beside your cluster's own MPI "
            "(distgpt help install)"
        ) from None


def shown_on_terminal(stream: TextIO) -> bool:
    """Return if output may reach a terminal: behind a launcher it is a pipe that may end in one."""
    return stream.isatty() or this_job().size > 1


# How a process ends: a line on standard error, and an exit code


def exit_code(error: BaseException) -> int:
    """Return the code with which a command ends that this error has stopped."""
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
    """Describe an error in a line."""
    if isinstance(error, SystemExit):
        return f"left with exit code {error.code} in the middle of a job"
    if isinstance(error, MemoryError):
        return f"not enough memory: {error} (distgpt help out-of-memory)"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) if isinstance(error, _EXPECTED) else "internal error"


def ending(error: KeyboardInterrupt | DistgptError) -> str:
    """Describe what ended the command, and how to resume."""
    return "; ".join([str(error) or "interrupted", *getattr(error, "__notes__", [])])


def is_closed_pipe(error: BaseException) -> bool:
    """Return whether the reader of our output is gone, as in `| head`; rich turns that into a SystemExit."""
    if isinstance(error, DistgptError):
        return False
    return isinstance(error, BrokenPipeError) or isinstance(error.__context__, BrokenPipeError)


def say(text: str) -> None:
    """Print a line of distgpt's to standard error."""
    try:
        print(f"distgpt: {one_line(text)}", file=sys.stderr, flush=True)
    except OSError:  # a terminal that was closed
        drop_output(2)


def drop_output(descriptor: int) -> None:
    """Drop what is written here from now on. Python's flush at exit would leave with 120 otherwise."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
