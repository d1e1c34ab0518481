"""The start of a job of several ranks: MPI, and a first exchange of what each rank was asked to do.

A rank that cannot do it joins as well, and says so there: the others would wait for it in MPI's start.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import click

from distgpt.cluster.launch.environment import (
    FLUX_RUN,
    MPICH,
    OPEN_MPI,
    SRUN,
    Launcher,
    is_first_of_host,
    launched_as,
    launched_rank,
    launchers,
)
from distgpt.cluster.launch.leaving import let_rank_0_speak
from distgpt.cluster.launch.mpis import HELP, MPIS
from distgpt.core.base.errors import UsageError, error_for
from distgpt.core.base.version import __version__
from distgpt.core.comm.agree import gather_texts, named_ranks, ranks_by_text, shared
from distgpt.core.comm.api import Comm
from distgpt.core.comm.job import require_mpi, say

# Options that each rank has for itself, and those of the display, which is rank 0's. All others are rank 0's
# for all ranks, or decide what is collective.
MAY_DIFFER = ("threads", "progress", "log_lines")
SECONDS_TO_JOIN = 60  # for the others to come; then nobody else may have started distgpt
# A shell's script: it prints its name if this process is gone, so that its input ends, before it has a line.
_WATCH = 'read -r started || echo "$0" >&2'

Introduction = dict[str, Any]  # what a rank is to do, or its complaint and exit code


def start_mpi(if_sure: bool = False) -> Comm:
    """Start MPI, which waits for all ranks; refuse an MPI that is not here, or not the launcher's.

    `if_sure`: also one that may fail to start, and then ends the process with pages of its own.
    """
    with warnings.catch_warnings():  # mpi4py's about the launcher: one line of ours replaces them
        warnings.simplefilter("ignore", RuntimeWarning)
        require_mpi()
        from distgpt.core.comm.mpi import MpiComm

        if problem := foreign_launcher() or (doubtful_launcher() if if_sure else ""):
            raise UsageError(problem)
        # Where MPI ends one rank it ends all, and each has a wall of text.
        if _launcher() and launched_rank() == 0:
            with _watched():
                return MpiComm()
        return MpiComm()


@contextmanager
def _watched() -> Iterator[None]:
    """Let a shell say which launcher fits, should this process not live to the end of this block.

    No code of ours survives an MPI that ends the process while it starts.
    """
    from distgpt.core.comm.mpi import library, vendor

    launcher, known = _launcher(), MPIS.get(vendor())
    fits = (known.line(launcher.name) if known and launcher else "") or f"the mpirun of {vendor()}"
    line = (
        f"distgpt: this process was ended while {library()} started, as it may be by a launcher that does"
        f" not fit; use {fits} ({HELP})"
    )
    shell = None
    with suppress(OSError):  # no line is no reason not to start
        shell = subprocess.Popen(["/bin/sh", "-c", _WATCH, line], stdin=subprocess.PIPE)
    try:
        yield
    finally:
        if shell:
            with suppress(OSError):  # a shell that a signal to all has ended
                shell.communicate(b"started\n")


def foreign_launcher() -> str:
    """Return what is wrong if the launcher belongs to another MPI; "" if nothing is.

    Called before MPI starts. A launcher that this cannot recognise, such as the srun of another MPI, is
    detected later: the world then has one rank.
    """
    from distgpt.core.comm import mpi

    launcher, vendor = _launcher(), mpi.vendor()
    if launcher is None:
        return ""
    if (launcher == OPEN_MPI and vendor != "Open MPI") or (launcher == MPICH and vendor == "Open MPI"):
        return f"launched by {launcher.name}, but mpi4py belongs to {vendor}; use the mpirun of {vendor}"
    if vendor != "MPICH":
        return ""
    # srun and flux run let ranks meet by PMI or by PMIx, and not every MPI can do both.
    has_pmix = "pmix" in mpi.configuration()
    if launcher == SRUN and _protocols() == {"PMIX"} and not has_pmix:
        return "launched by srun --mpi=pmix, which this MPICH is built without; use srun --mpi=pmi2"
    # Of both, MPICH does not know which to take. A module's PMIX_ROOT is no sign of either.
    if launcher == FLUX_RUN and "PMIX_NAMESPACE" in os.environ and ("PMI_SIZE" in os.environ or not has_pmix):
        return "launched by flux run with PMIx, by which MPICH does not start; use flux run -o pmi=simple"
    return ""


def doubtful_launcher() -> str:
    """Return why MPI may fail to start under this launcher; "" if nothing is known."""
    from distgpt.core.comm import mpi

    launcher = _launcher()
    if launcher is None or mpi.vendor() != "Open MPI":
        return ""
    if launcher == SRUN and not _protocols():  # one that is built with Slurm's own PMI starts
        return "launched by srun without PMIx, which Open MPI may need: if it fails, use srun --mpi=pmix"
    if launcher == FLUX_RUN and not {"PMIX_NAMESPACE", "PMI_SIZE"} & os.environ.keys():
        return (
            "launched by flux run -o pmi=pmix, but Flux has no plugin for PMIx here: if it fails, use"
            " flux run -o pmi=simple,pmix"
        )
    return ""


def _protocols() -> set[str]:
    """Return the protocols, PMI or PMIX, by which the launcher lets ranks meet."""
    names = (name for name in os.environ if not name.startswith("PMIX_MCA_"))  # those are users' settings
    return {name.split("_")[0].rstrip("2") for name in names if name.startswith("PMI")}


def _launcher() -> Launcher | None:
    """Return the launcher of this process, None if there is none, or nothing for it to get wrong."""
    found = launchers()
    return found[0] if found and (found[0] == OPEN_MPI or launched_as() > 1) else None


def meet(comm: Comm) -> None:
    """Raise on all ranks what one of them complains of, or that their commands differ.

    Collective, and the first exchange of a job: it also meets those ranks that `complain`.
    """
    ranks = _gather(comm, "", 0)
    if complaints := _complaints(ranks):
        raise shared(error_for(_exit_code(ranks))("; ".join(complaints.values())))
    if problem := _difference(ranks):
        raise shared(UsageError(problem))


def complain(complaint: str, code: int) -> int:
    """Join, if this rank can, to tell the others why it leaves. Return the exit code of all ranks.

    Rank 0 has printed its own complaint before: MPI may end a process that starts it.
    """
    comm, why, complaint = None, "", complaint or "internal error"
    former = signal.signal(signal.SIGALRM, signal.SIG_DFL)  # which ends MPI's code, too
    signal.alarm(SECONDS_TO_JOIN)
    try:
        comm = start_mpi(if_sure=True)
    except Exception as error:  # also of MPI itself: the complaint is what counts
        why = str(error)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, former)
    if comm is None or comm.size == 1:  # nobody is to be met here
        if launched_rank():
            let_rank_0_speak()
            if why == complaint and is_first_of_host():  # each host may lack an MPI of its own
                say(f"rank {launched_rank()} on {platform.node()}: {complaint}")
        return code
    ranks = _gather(comm, complaint, code)
    if comm.rank == 0 and (others := [text for own, text in _complaints(ranks).items() if own != complaint]):
        say("; ".join(others))
    return _exit_code(ranks)


def _gather(comm: Comm, complaint: str, code: int) -> list[Introduction]:
    context = click.get_current_context(silent=True)  # none in a program that uses distgpt as a library
    mine = {"complaint": complaint, "code": code, "version": __version__, "command": "", "options": {}}
    if context is not None and not complaint:
        default = (click.core.ParameterSource.DEFAULT, click.core.ParameterSource.DEFAULT_MAP)
        mine["command"] = context.command_path
        mine["options"] = {  # those that the user gave, by their first spelling
            param.opts[0]: str(context.params[name])
            for param in context.command.params
            if (name := param.name or "") in context.params and name not in MAY_DIFFER
            if context.get_parameter_source(name) not in default
        }
    return [json.loads(text) for text in gather_texts(comm, json.dumps(mine))]


def _complaints(ranks: list[Introduction]) -> dict[str, str]:
    """Return what some ranks complain of, each text with the ranks named in front of it."""
    owners = ranks_by_text(asked["complaint"] for asked in ranks)
    return {text: f"{named_ranks(those)}: {text}" for text, those in owners.items()}


def _exit_code(ranks: list[Introduction]) -> int:
    return max(int(asked["code"]) for asked in ranks)


def _difference(ranks: list[Introduction]) -> str:
    """Describe in what the first rank unlike rank 0 differs from it; "" if none does."""
    first = ranks[0]
    for rank, asked in enumerate(ranks):
        if (theirs := asked["version"]) != (ours := first["version"]):
            return f"rank {rank} has distgpt {theirs}, rank 0 has {ours}: install the same on all hosts"
        if asked["command"] != first["command"]:
            return f"rank 0 runs {first['command']}, rank {rank} {asked['command']}: a job runs one command"
        for option in {**first["options"], **asked["options"]}:
            here, there = (each["options"].get(option, "not given") for each in (asked, first))
            if here != there:
                return (
                    f"{option} is {here:.80} on rank {rank}, but {there:.80} on rank 0: all ranks of a job"
                    " need the same command line (only --threads and --progress may differ)"
                )
    return ""
