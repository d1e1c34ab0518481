"""A process of a job: what its launcher says of it, and how it leaves with one exit code for all ranks."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, TextIO

from distgpt.core.base.errors import DistgptError, StorageError, one_line
from distgpt.core.base.interrupts import ENDING, EXIT_CODES, Interrupted
from distgpt.core.base.tables import Table
from distgpt.core.comm.api import Comm
from distgpt.core.comm.batch import Environ, Launcher, systems

INTERNAL = 70

OPEN_MPI = Launcher(
    "Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"
)
MPICH = Launcher("mpirun of MPICH or a relative", "MPI_LOCALNRANKS", local_rank="MPI_LOCALRANKID")
# What an unknown launcher speaks, or one of those above.
PMI = Launcher("a launcher that speaks PMI", "PMI_SIZE", "PMI_RANK")
PMIX = Launcher("a launcher that speaks PMIx", "PMIX_SIZE", "PMIX_RANK")

# Errors that one line explains. Other errors print a traceback; in a job of several ranks only the clear ones
# do not.
_CLEAR = (DistgptError, MemoryError)
_EXPECTED = (*_CLEAR, OSError, SystemExit)

# Ctrl-C reaches all ranks of a terminal's job. Another rank reports it if rank 0 has not ended it by then.
SECONDS_FOR_RANK_0 = 1.0
SECONDS_TO_START = 5.0  # that rank 0 may start later than others


def launchers(environ: Environ = os.environ) -> list[Launcher]:
    """Return the launchers that have told this process how many it is one of, the most reliable first.

    An mpirun may itself use the launcher of a batch system, and both may speak a protocol.
    """
    known = (OPEN_MPI, MPICH, *_of_systems(environ), PMI, PMIX)
    return [launcher for launcher in known if environ.get(launcher.size, "").isdigit()]


def _of_systems(environ: Environ) -> list[Launcher]:
    return [system.launcher for system in systems(environ) if system.launcher]


def launched_as(environ: Environ = os.environ) -> int:
    """Return how many processes this one was started with; 1 outside a launcher."""
    return max((int(environ[launcher.size]) for launcher in launchers(environ)), default=1)


def launcher_name(environ: Environ = os.environ) -> str:
    """Return what has launched this process; "" if nothing has."""
    return next((launcher.name for launcher in launchers(environ)), "")


def shown_on_terminal(stream: TextIO) -> bool:
    """Return if output may reach a terminal: behind a launcher it is a pipe that may end in one."""
    return stream.isatty() or launched_as() > 1


def launched_rank() -> int:
    """Return this process's rank as its launcher gives it; 0 outside a launcher."""
    # A batch system's launcher last: an mpirun that uses it starts one process with it on each host.
    known = (PMI.rank, PMIX.rank, OPEN_MPI.rank, *(each.rank for each in _of_systems(os.environ)))
    return next((int(os.environ[key]) for key in known if os.environ.get(key, "").isdigit()), 0)


def is_first_of_host() -> bool:
    """Return whether the launcher numbers this process 0 among those of its host."""
    known = (MPICH, OPEN_MPI, *_of_systems(os.environ))
    return any(os.environ.get(launcher.local_rank) == "0" for launcher in known)


@dataclass(frozen=True, slots=True)
class Library:
    """A library between the ranks: a row of the table of those whose errors are a line."""

    name: str
    raised: Callable[[BaseException], str | None]  # what it says; None for errors of others
    blames_others: Callable[[str], bool]  # whether that tells of another rank or host that is gone
    fails_everywhere: bool = False  # so that rank 0 is let speak first
    hint: str = ""


def _raised_by_mpi(error: BaseException) -> str | None:
    return str(error) if type(error).__module__.startswith("mpi4py") else None


LIBRARIES: Table[Library] = Table(
    "libraries", "library", {"mpi": Library("MPI", _raised_by_mpi, blames_others=lambda what: True)}
)


def _raised(error: BaseException) -> tuple[Library, str] | None:
    """Return the library that has raised an error, and what it says; None if none has."""
    for _, library in LIBRARIES.rows():
        if (what := library.raised(error)) is not None:
            return library, what
    return None


def leave(error: BaseException, comm: Comm | None) -> int:
    """Report the error and return the exit code; an error that only this rank has ends the whole job here."""
    several = comm is not None and comm.size > 1
    if isinstance(error, DistgptError) and (error.shared or not several):
        if _rank(comm) == 0:
            say(str(error))
        return error.exit_code
    if _is_closed_pipe(error):
        drop_output(1)
    elif isinstance(error, KeyboardInterrupt):
        ignore_further()
        agreed = isinstance(error, Interrupted) and error.shared
        if _rank(comm) == 0 or (comm is not None and not agreed):
            _report_interrupt(_rank(comm), error)
        if agreed:
            return _exit_code(error)
        if comm is None and launched_as() > 1:
            _die_of(getattr(error, "number", signal.SIGINT))
    elif comm is not None and (found := _raised(error)):
        _report_library(comm.rank, *found, error)
    else:
        where = f"rank {_rank(comm)}: " if several or (comm is None and launched_as() > 1) else ""
        say(where + described(error))
        if isinstance(error, OSError):
            _drop_unwritten_output()
        if not isinstance(error, _EXPECTED) or (several and not isinstance(error, _CLEAR)):
            traceback.print_exception(error)
    code = _exit_code(error)
    if comm is not None and several:
        comm.abort(code)
    return code


def _report_library(rank: int, library: Library, what: str, error: BaseException) -> None:
    if rank and library.fails_everywhere:
        time.sleep(SECONDS_FOR_RANK_0)
    if library.blames_others(what):
        say(has_failed(rank, library.name, what))
        return
    say(f"rank {rank}: {library.name}: {what}{library.hint}")
    if "invalid" in what.lower():  # an argument, or a usage: our mistake
        traceback.print_exception(error)


def has_failed(rank: int, library: str, what: str) -> str:
    """Describe a failure to reach the other ranks."""
    return f"rank {rank}: {library} has failed, as it does when another rank or host dies: {what}"


def leave_at_once(error: Interrupted | DistgptError, comm: Comm) -> NoReturn:
    """End the whole job from any thread, while the main one is stuck."""
    say(_words(error))
    comm.abort(error.exit_code)
    os._exit(error.exit_code)


def let_rank_0_speak() -> None:
    """Sleep a moment before this rank exits, so that rank 0 can print the reason first.

    Open MPI's mpirun ends all ranks as soon as one has failed. MPICH's does not, and needs no sleep.
    """
    if OPEN_MPI.size in os.environ:
        time.sleep(SECONDS_TO_START)


def _die_of(number: signal.Signals) -> None:
    """Die of this signal, so that a launcher ends the other ranks, which wait before MPI has started."""
    sys.stdout.flush()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def ignore_further() -> None:
    """Ignore further signals: launchers repeat them, and so do impatient fingers."""
    for number in ENDING:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_IGN)


def _report_interrupt(rank: int, error: KeyboardInterrupt) -> None:
    if rank:
        time.sleep(SECONDS_FOR_RANK_0)
    where = f"rank {rank}: " if rank else ""
    say(where + _words(error))


def _words(error: KeyboardInterrupt | DistgptError) -> str:
    """Describe what ended the command, and how to resume."""
    return "; ".join([str(error) or "interrupted", *getattr(error, "__notes__", [])])


def _is_closed_pipe(error: BaseException) -> bool:
    """Return whether the reader of our output is gone, as in `| head`; rich turns that into a SystemExit."""
    return isinstance(error, BrokenPipeError) or isinstance(error.__context__, BrokenPipeError)


def _drop_unwritten_output() -> None:
    """Output that cannot be written now cannot be at exit either, where Python would leave with 120."""
    try:
        sys.stdout.flush()
    except OSError:
        drop_output(1)


def drop_output(descriptor: int) -> None:
    """Drop what is written here from now on. Python's flush at exit would leave with 120 otherwise."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def _rank(comm: Comm | None) -> int:
    return launched_rank() if comm is None or comm.size == 1 else comm.rank


def _exit_code(error: BaseException) -> int:
    if isinstance(error, DistgptError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return error.exit_code if isinstance(error, Interrupted) else EXIT_CODES[signal.SIGINT]
    if _is_closed_pipe(error):
        return StorageError.exit_code
    if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code:
        return error.code
    return StorageError.exit_code if isinstance(error, OSError) else INTERNAL


def described(error: BaseException) -> str:
    """Describe an error in a line."""
    if isinstance(error, SystemExit):
        return f"left with exit code {error.code} in the middle of a job"
    if isinstance(error, MemoryError):
        return f"not enough memory: {error} (distgpt help out-of-memory)"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) if isinstance(error, _EXPECTED) else "internal error"


def say(text: str) -> None:
    """Print a line of distgpt's to standard error."""
    try:
        print(f"distgpt: {one_line(text)}", file=sys.stderr, flush=True)
    except OSError:  # a terminal that was closed
        drop_output(2)
