"""A line for a process that MPI ends while it starts, which no code of ours survives."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from distgpt.core.comm.mpi import library, vendor
from distgpt.launch.environment import launcher_name
from distgpt.launch.mpis import HELP, MPIS

# It speaks if this process is gone, by which its input ends, before it has had a line.
_WATCH = 'read -r started || echo "$0" >&2'


@contextmanager
def watched() -> Iterator[None]:
    """Let a shell say which launcher fits, should this process not live to the end of this block."""
    try:
        shell = subprocess.Popen(["/bin/sh", "-c", _WATCH, f"distgpt: {_doubt()}"], stdin=subprocess.PIPE)
    except OSError:
        yield  # no line is no reason not to start
        return
    try:
        yield
    finally:
        with suppress(OSError):  # a shell that a signal to all has ended
            shell.communicate(b"started\n")


def _doubt() -> str:
    known = MPIS.get(vendor())
    fits = (known.line(launcher_name()) if known else "") or f"the mpirun of {vendor()}"
    return (
        f"this process was ended while {library()} started, as it may be by a launcher that does not fit; use"
        f" {fits} ({HELP})"
    )
