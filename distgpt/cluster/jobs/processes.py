"""Child processes: run one to its end, read its output, and end it if this process is interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from distgpt.core.base.errors import StorageError
from distgpt.core.base.interrupts import signals_deferred, undisturbed
from distgpt.core.base.system import PACKAGE, python

SECONDS_TO_END = 5.0  # between SIGTERM and SIGKILL
TIMED_OUT = 124
OUR_LINE = "distgpt: "  # prefix of distgpt's error lines
MPICH_RANK = "EXIT STRING: "  # prefix of the line in which MPICH's mpirun reports how a rank was killed
_LAUNCHERS_NOISE = ("=", "This typically refers to", "Please see the FAQ")  # printed by MPICH

# Variables that launchers set for a rank. OMPI_MCA_*, PMIX_MCA_* and similar are the user's settings.
_OF_A_RANK = (
    *("OMPI_COMM_WORLD_", "OMPI_UNIVERSE_", "PMI_RANK", "PMI_SIZE", "PMI_ID", "PMI_FD", "PMI_PORT"),
    *("PMI_HOSTNAME", "PMIX_RANK", "PMIX_SIZE", "PMIX_NAMESPACE", "PMIX_SERVER_", "SLURM_STEP"),
    *("SLURM_PROCID", "MPI_LOCAL", "HYDI_", "FLUX_JOB_SIZE", "FLUX_TASK_"),
)


@dataclass(frozen=True, slots=True)
class Ended:
    """A child that has ended. Its peak memory is omitted, since the system includes the parent's."""

    code: int
    output: str
    errors: str
    seconds: float

    def complaint(self) -> str:
        """Return why it failed: a distgpt error line, the launcher's report of a killed rank, or the last
        line.

        The last line is from stderr if it has any, without a launcher's boilerplate.
        """
        ours = [line for line in self.errors.splitlines() if line.startswith(OUR_LINE)]
        if ours and not ours[-1].endswith("internal error"):  # a traceback follows an internal error
            return ours[-1].removeprefix(OUR_LINE)
        said = f"{self.output}\n{self.errors}"
        _, _, rank = said.partition(MPICH_RANK)
        if rank:
            return f"a rank ended: {rank.splitlines()[0].strip()}"
        lines = (line.strip() for line in reversed(said.splitlines()))
        return next((line for line in lines if line and not line.startswith(_LAUNCHERS_NOISE)), "")


def ending(code: int) -> str:
    if code == TIMED_OUT:
        return "timed out"
    known = {number.value: number.name for number in signal.Signals}
    if code < 0:
        return f"killed by {known.get(-code, f'signal {-code}')}"
    by_signal = known.get(code - 128)
    return f"killed by {by_signal}" if by_signal else f"exit code {code}"


def distgpt_command(*words: object) -> list[str]:
    return python(PACKAGE, *words)


def own_program() -> list[str]:
    """Return the words that run distgpt by its full path. In a job or on another host, PATH may differ."""
    own = Path(sys.executable).with_name("distgpt")
    return [str(own)] if own.is_file() else python(PACKAGE)


def run(
    command: Sequence[object],
    *,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
    output: IO[str] | None = None,
) -> Ended:
    """Run a command to its end. `output`: a file for its stdout, which stays readable after an interrupt.

    The child has its own process group, so that Ctrl-C reaches only this process, which then ends the group.
    Output goes to files: a pipe must be read continuously, and a grandchild may keep it open.
    """
    begun, child = time.perf_counter(), None
    with _temporary() as own, _temporary() as errors:
        printed = output or own
        try:
            with signals_deferred():  # until `child` is set
                child = _started(command, env, printed, errors)
            try:
                code = child.wait(timeout)
            except subprocess.TimeoutExpired:
                code = TIMED_OUT
                _end(child)
        except BaseException:
            if child is not None:
                with undisturbed():
                    _end(child)
            raise
        seconds = time.perf_counter() - begun
        for file in (printed, errors):
            file.seek(0)
        return Ended(code, printed.read(), errors.read(), seconds)


def _temporary() -> IO[str]:
    return TemporaryFile("w+", encoding="utf-8", errors="replace")


def _started(
    command: Sequence[object], env: Mapping[str, str] | None, output: IO[str], errors: IO[str]
) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            env=dict(env) if env is not None else None,
            start_new_session=True,
        )
    except OSError as error:
        raise StorageError(f"cannot start {command[0]}: {error.strerror or error}") from error


def _end(child: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM to the group, then SIGKILL if it does not end."""
    _signal(child, signal.SIGTERM)
    deadline = time.monotonic() + SECONDS_TO_END
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    _signal(child, signal.SIGKILL)
    child.wait()


def _signal(child: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, number)


def unlaunched(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment without a launcher's variables, for children that are not its ranks."""
    return {key: value for key, value in environ.items() if not key.startswith(_OF_A_RANK)}
