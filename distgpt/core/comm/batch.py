"""Launchers and batch systems: what they tell a process in environment variables."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from distgpt.core.base.tables import Table

LONGEST = 200  # characters of a name

Environ = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Launcher:
    """Starts the processes of a job, and tells each in variables how many they are and which one it is."""

    name: str
    size: str  # the variable with the number of processes
    rank: str = ""
    local_rank: str = ""  # among the processes of a host

    def refusal(self, vendor: str, library: str, environ: Environ) -> str:
        """Return why an MPI, by its vendor and version, cannot start under this launcher; "" if it may."""
        return ""

    def doubt(self, vendor: str, environ: Environ) -> str:
        """Return why an MPI may fail to start under this launcher; "" if nothing is known."""
        return ""


@dataclass(frozen=True, slots=True)
class BatchSystem:
    """A row of the table of batch systems: the variables of its jobs, and what it grants them."""

    name: str
    job: str  # the variable with the number of a job
    job_name: str
    sign: str  # a variable that no other system sets
    launcher: Launcher | None = None  # its own

    def end(self, environ: Environ) -> float | None:
        """Return when it ends the job, in seconds since 1970; None if it does not say."""
        return None

    def memory(self, environ: Environ) -> Iterator[tuple[int, str]]:
        """Yield bytes that it grants all ranks of this host, and the name of each limit."""
        yield from ()

    def cores(self, environ: Environ) -> tuple[int, str] | None:
        """Return the cores that it grants this rank, and the name of the limit; None if it does not say."""
        return None


# By how the names of their variables begin: only the systems that have set some are imported.
SYSTEMS: Table[BatchSystem] = Table("batch systems", "batch system", {})


def systems(environ: Environ = os.environ) -> Iterator[BatchSystem]:
    """Yield the batch systems that have set variables of this process."""
    prefixes = tuple(SYSTEMS)
    found = (prefix for prefix in prefixes if any(name.startswith(prefix) for name in environ))
    yield from (system for _, system in SYSTEMS.rows(found))


def batch_job(environ: Environ = os.environ) -> dict[str, str] | None:
    """Return "system", "id" and, if it has one, "name" of the job; None outside a batch system."""
    for system in systems(environ):
        if environ.get(system.sign) and environ.get(system.job):
            name = environ.get(system.job_name)
            named = {"name": name[:LONGEST]} if name else {}
            return {"system": system.name, "id": environ[system.job][:LONGEST], **named}
    return None


def job_end(seconds: float | None, environ: Environ = os.environ) -> float | None:
    """Return when to be gone: after these seconds, else as the batch job ends; None if none is known."""
    now = time.monotonic()
    if seconds is not None:
        return now + seconds
    for system in systems(environ):
        end = system.end(environ)
        if end is not None and end > time.time():  # one that is past is another job's, or was prolonged
            return now + end - time.time()
    return None
