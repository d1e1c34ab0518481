"""The job of this process according to its launcher and batch system: how ranks join and leave it."""

from __future__ import annotations

import atexit
import os
import platform
import signal
import sys
import threading
import time
import warnings
from typing import Any, NoReturn

import click

from distgpt.cluster.launch.environment import (
    FLUX_RUN,
    HELP,
    LAUNCHERS,
    MPICH,
    MPIS,
    OPEN_MPI,
    SRUN,
    batch_job,
    job_end,
    launched_as,
    launched_rank,
    launcher_name,
    launchers,
)
from distgpt.core.base import __version__
from distgpt.core.base.errors import UsageError, error_for
from distgpt.core.comm.agree import collective_error, gather, named_ranks, ranks_by_text
from distgpt.core.comm.api import Comm, SerialComm
from distgpt.core.comm.job import Job, is_closed_pipe, rank_name, require_mpi, say
from distgpt.core.comm.resources import granted_cores
from distgpt.core.config import SEVERAL, WITH_MPI

# Options that may differ between ranks, including rank 0's display. Rank 0's value of any other option
# applies to all ranks, or decides which calls are collective.
MAY_DIFFER = ("threads", "progress", "log_lines")
SECONDS_TO_JOIN = 60  # timeout for other ranks to join; they may not have started distgpt at all
# Ctrl-C reaches all ranks in a terminal. Another rank reports it if rank 0 has not after this time.
SECONDS_FOR_RANK_0 = 1.0
SECONDS_TO_START = 5.0  # maximum delay of rank 0's start
GRACE = 10.0  # seconds after sys.exit before a rank counts as the only one to leave
CAUGHT = 2.0  # if a program still runs after these seconds, it has caught the exit
PAUSE = 0.01

Introduction = dict[str, Any]  # a rank's options, or its error message and exit code


class Launched(Job):
    """A job with a known launcher and batch system, whose ranks compare their commands."""

    def __init__(self) -> None:
        self._watches_exit = False  # set once per process

    @property
    def size(self) -> int:
        return launched_as()

    @property
    def rank(self) -> int:
        return launched_rank()

    @property
    def launcher(self) -> str:
        return launcher_name()

    @property
    def batch(self) -> dict[str, str] | None:
        return batch_job()

    def end(self, seconds: float | None) -> float | None:
        return job_end(seconds)

    def connect(self, stage: str) -> Comm:
        """Also reject a launch whose processes would not work together."""
        launched = launched_as()
        if stage not in WITH_MPI:
            if launched > 1:
                raise UsageError(
                    f"--stage {stage} was launched as {launched} processes, which would all do the same work;"
                    f" use --stage {SEVERAL[stage]}, or run without mpirun"
                )
            return SerialComm()
        comm = start_mpi()
        if launched > 1 and comm.size == 1:
            from distgpt.core.comm.mpi import library, vendor

            known = MPIS.get(vendor())
            raise UsageError(
                f"launched as {launched} processes, but mpi4py found only one: the launcher does not match "
                f"mpi4py's {library()}; use the mpirun of {vendor()}"
                + (f", or {known.line(launcher_name())}" if known else "")
                + f" ({HELP})"
            )
        return comm

    def meet(self, comm: Comm) -> None:
        """Also meet ranks that call `complain`. If their commands differ, raise an error on all ranks."""
        if comm.size == 1:
            return
        ranks = _gather(comm, "", 0)
        if complaints := _complaints(ranks):
            raise collective_error(error_for(_exit_code(ranks))("; ".join(complaints.values())))
        if problem := _difference(ranks):
            raise collective_error(UsageError(problem))

    def complain(self, complaint: str, code: int) -> int:
        """Rank 0 has printed its own message already, since starting MPI may end its process."""
        if launched_as() == 1:
            return code
        comm, why, complaint = None, "", complaint or "internal error"
        former = signal.signal(signal.SIGALRM, signal.SIG_DFL)  # it also ends MPI's code
        signal.alarm(SECONDS_TO_JOIN)
        try:
            comm = start_mpi()
        except Exception as error:  # including MPI's own errors, since only the message matters
            why = str(error)
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, former)
        if comm is not None and comm.size > 1:
            ranks = _gather(comm, complaint, code)
            others = [text for own, text in _complaints(ranks).items() if own != complaint]
            if comm.rank == 0 and others:
                say("; ".join(others))
            return _exit_code(ranks)
        if launched_rank():
            # Open MPI's mpirun ends all ranks as soon as one fails. Let rank 0 print the reason first.
            if OPEN_MPI.size in os.environ:
                time.sleep(SECONDS_TO_START)
            is_first_of_host = any(os.environ.get(launcher.local_rank) == "0" for launcher in LAUNCHERS)
            if why == complaint and is_first_of_host:  # each host may lack MPI separately
                say(f"rank {launched_rank()} on {platform.node()}: {complaint}")
        return code

    def notes(self, comm: Comm, stage: str, threads: int, threads_given: bool) -> list[str]:
        own = _about_cores(comm, threads, threads_given)
        if comm.size == 1:
            alone = f"--stage {stage} runs as one process; to start two: mpirun -n 2 distgpt …"
            return [note for note in (alone * (stage in WITH_MPI), own) if note]
        result = ranks_by_text(gather(comm, own)).items()
        of_all = [f"{named_ranks(ranks)}: " * (len(ranks) < comm.size) + text for text, ranks in result]
        return [] if comm.rank else of_all

    def watch_exit(self, comm: Comm) -> None:
        """Record calls of sys.exit with an error, and check at exit whether all ranks leave.

        Otherwise MPI_Finalize would wait for the other ranks, and they for this one. `raise SystemExit` is
        not recorded.
        """
        if self._watches_exit:
            return
        self._watches_exit = True
        from mpi4py import MPI

        former, calls, world = sys.exit, list[tuple[Any, float]](), MPI.COMM_WORLD.Dup()

        def noted(code: Any = None) -> NoReturn:
            if threading.current_thread() is threading.main_thread():
                calls.append((code, time.monotonic()))
            former(code)

        def wait_for_all() -> None:
            """Wait for all ranks like MPI_Finalize, for hours if necessary. After an error, leave."""
            if MPI.Is_finalized():
                return
            arrived, begun = world.Ibarrier(), time.monotonic()
            code, called = calls[-1] if calls else (0, begun)
            while not arrived.Test():
                if code and begun < called + CAUGHT and time.monotonic() > begun + GRACE:
                    self.leave(SystemExit(code if isinstance(code, int) else 1), comm)
                time.sleep(PAUSE)

        sys.exit = noted
        atexit.register(wait_for_all)

    def leave(self, error: BaseException, comm: Comm | None) -> int:
        code = super().leave(error, comm)
        if isinstance(error, KeyboardInterrupt) and comm is None and launched_as() > 1:
            # End with the signal, so that a launcher ends the other ranks, which wait before MPI has started.
            number = getattr(error, "number", signal.SIGINT)
            sys.stdout.flush()
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        return code

    def report(self, error: BaseException, comm: Comm | None, rank: int, where: str) -> None:
        if isinstance(error, KeyboardInterrupt):
            if rank:
                time.sleep(SECONDS_FOR_RANK_0)
        elif comm is not None and not is_closed_pipe(error) and (library := _raised_by(error)):
            if library == "NCCL" and comm.rank:  # fails on all ranks
                time.sleep(SECONDS_FOR_RANK_0)
            say(has_failed(comm.rank, library, str(error)))
            return
        super().report(error, comm, rank, where)


def start_mpi() -> Comm:
    """Start MPI, which waits for all ranks. Reject a missing MPI, and one that is not the launcher's."""
    with warnings.catch_warnings():  # one line of distgpt replaces mpi4py's warning about the launcher
        warnings.simplefilter("ignore", RuntimeWarning)
        require_mpi()
        from distgpt.core.comm.mpi import MpiComm

        if problem := foreign_launcher():
            raise UsageError(problem)
        return MpiComm()


def foreign_launcher() -> str:
    """Return the problem if the launcher belongs to another MPI, otherwise "".

    Called before MPI starts. If this function does not recognize a launcher, such as the srun of another
    MPI, the world has only one rank, which is detected later.
    """
    from distgpt.core.comm import mpi

    result, vendor = launchers(), mpi.vendor()
    if not result or (result[0] != OPEN_MPI and launched_as() < 2):  # any launcher can start one process
        return ""
    launcher = result[0]
    if (launcher == OPEN_MPI and vendor != "Open MPI") or (launcher == MPICH and vendor == "Open MPI"):
        return f"launched by {launcher.name}, but mpi4py belongs to {vendor}; use the mpirun of {vendor}"
    if vendor != "MPICH":
        return ""
    # srun and flux run connect ranks through PMI or PMIx, and not every MPI supports both. PMIX_MCA_… are the
    # user's settings.
    pmi = [name for name in os.environ if name.startswith("PMI") and not name.startswith("PMIX_MCA_")]
    only_pmix = bool(pmi) and all(name.startswith("PMIX") for name in pmi)
    has_pmix = "pmix" in mpi.configuration()
    if launcher == SRUN and only_pmix and not has_pmix:
        return "launched by srun --mpi=pmix, which this MPICH does not support; use srun --mpi=pmi2"
    # If both exist, MPICH cannot decide which to use. PMIX_ROOT of a module implies neither.
    if launcher == FLUX_RUN and "PMIX_NAMESPACE" in os.environ and ("PMI_SIZE" in os.environ or not has_pmix):
        return "launched by flux run with PMIx, which MPICH does not support; use flux run -o pmi=simple"
    return ""


def _gather(comm: Comm, complaint: str, code: int) -> list[Introduction]:
    """Return each rank's options. The first communication of a job. Collective."""
    context = click.get_current_context(silent=True)  # None in a program that uses distgpt as a library
    does = {"the version of distgpt": __version__}
    if context is not None and not complaint:
        default = (click.core.ParameterSource.DEFAULT, click.core.ParameterSource.DEFAULT_MAP)
        does["the command"] = context.command_path
        does |= {  # options set by the user, by their first spelling
            param.opts[0]: str(context.params[name])
            for param in context.command.params
            if (name := param.name or "") in context.params and name not in MAY_DIFFER
            if context.get_parameter_source(name) not in default
        }
    mine = {"complaint": complaint, "code": code, "does": does}
    return gather(comm, mine)


def _complaints(ranks: list[Introduction]) -> dict[str, str]:
    """Return the ranks' error messages, each prefixed with its ranks."""
    owners = ranks_by_text(each["complaint"] for each in ranks)
    return {text: f"{named_ranks(those)}: {text}" for text, those in owners.items()}


def _exit_code(ranks: list[Introduction]) -> int:
    return max(int(each["code"]) for each in ranks)


def _difference(ranks: list[Introduction]) -> str:
    """Describe how the first rank that differs from rank 0 does so; "" if none does."""
    for rank, each in enumerate(ranks):
        for name in {**ranks[0]["does"], **each["does"]}:
            here, there = (one["does"].get(name, "not given") for one in (each, ranks[0]))
            if here != there:
                return (
                    f"{name} is {here:.80} on rank {rank}, but {there:.80} on rank 0: all ranks of a job"
                    " need the same command line (only --threads and --progress may differ)"
                )
    return ""


def _raised_by(error: BaseException) -> str:
    """Return the communication library that raised an error, "" for other errors."""
    if type(error).__module__.startswith("mpi4py"):
        return "MPI"
    return "NCCL" if type(error).__name__ == "NcclError" else ""  # class of CuPy, which may not be installed


def has_failed(rank: int, library: str, what: str) -> str:
    why = "; for details, set NCCL_DEBUG=INFO" * (library == "NCCL")
    return f"{rank_name(rank)}: {library} failed, possibly because another rank or host died: {what}{why}"


def _about_cores(comm: Comm, threads: int, threads_given: bool) -> str:
    """Return how this rank's threads do not match its cores; "" if they do."""
    granted, ranks = granted_cores(comm.cores, comm.local_size), comm.local_size
    by = f" ({granted.limit})" * bool(granted.limit)
    if threads_given and threads > granted.whole:
        own = f"more than the {granted.number:.3g} CPUs of the rank{by}"
        return f"--threads {threads} is {own}; threads without a core slow the others down"
    if ranks > 1 and granted.number < 1 - 1e-6:
        return f"{ranks} ranks share {granted.number * ranks:.3g} CPUs{by}; fewer ranks are as fast or faster"
    return ""


LAUNCHED = Launched()
