"""Programs that this one starts, waits for, and takes with it when it is interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn

from distgpt.errors import StorageError

SECONDS_TO_END = 5.0  # from the request to end until it is enforced
TIMED_OUT = 124
_SAME_FOR_ALL = ("OMPI_", "PMI", "SLURM_STEP", "MPI_LOCAL", "HYDI_")  # what a launcher told this process


@dataclass(frozen=True, slots=True)
class Ended:
    """A program that is over.

    Its memory is not told here: what the system counts of a child begins with what its parent had.
    """

    code: int
    output: str
    errors: str
    seconds: float

    def last_words(self) -> str:
        """The last line that says something, of the errors if there are any."""
        lines = [line.strip() for text in (self.output, self.errors) for line in text.splitlines()]
        return next((line for line in reversed(lines) if line), "")


def distgpt_command(*words: object) -> list[str]:
    """This very program, as a command of its own."""
    return [sys.executable, "-m", "distgpt", *map(str, words)]


def run(
    command: Sequence[object],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float | None = None,
    on_line: Callable[[str], None] | None = None,
) -> Ended:
    """Run a command to its end; `on_line` hears each line of its output as it comes.

    It has a process group of its own, so that Ctrl-C reaches this process alone, which then ends the group.
    """
    begun = time.perf_counter()
    try:
        child = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(env) if env is not None else None,
            cwd=cwd,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise StorageError(f"cannot start {command[0]}: {error.strerror or error}") from error
    timed_out = threading.Event()
    with _ended_with_us(child):
        with _alarm(child, timeout, timed_out):
            readers = [_Reader(child.stdout, on_line), _Reader(child.stderr, None)]
            child.wait()
        for reader in readers:
            reader.join(SECONDS_TO_END)  # a grandchild may have kept the pipe
    output, errors = ("".join(reader.lines) for reader in readers)
    code = TIMED_OUT if timed_out.is_set() else child.returncode
    return Ended(code, output, errors, time.perf_counter() - begun)


class _Reader(threading.Thread):
    """Takes in one of a child's streams, so that the child never waits for us."""

    def __init__(self, stream: IO[str] | None, heard: Callable[[str], None] | None) -> None:
        super().__init__(daemon=True)
        self.lines: list[str] = []
        self._stream, self._heard = stream, heard
        self.start()

    def run(self) -> None:
        assert self._stream is not None
        for line in self._stream:
            self.lines.append(line)
            if self._heard is not None:
                self._heard(line.rstrip("\n"))


@contextmanager
def _ended_with_us(child: subprocess.Popen[str]) -> Iterator[None]:
    """Whatever takes us out of here takes the child along, a request to end among them."""
    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, _leave) if main else None
    try:
        yield
    except BaseException:
        _end(child)
        raise
    finally:
        if main:
            signal.signal(signal.SIGTERM, before)


@contextmanager
def _alarm(child: subprocess.Popen[str], seconds: float | None, rang: threading.Event) -> Iterator[None]:
    if seconds is None:
        yield
        return

    def ring() -> None:
        rang.set()
        _signal(child, signal.SIGTERM)
        killer.start()

    killer = threading.Timer(SECONDS_TO_END, lambda: _signal(child, signal.SIGKILL))
    timer = threading.Timer(seconds, ring)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        killer.cancel()


def _end(child: subprocess.Popen[str]) -> None:
    """Ask the group to end, and see to it."""
    _signal(child, signal.SIGTERM)
    deadline = time.monotonic() + SECONDS_TO_END
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    _signal(child, signal.SIGKILL)
    child.wait()


def _leave(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def _signal(child: subprocess.Popen[str], number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, number)


def unlaunched(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment without what a launcher put into it, for children that are not its ranks."""
    return {key: value for key, value in environ.items() if not key.startswith(_SAME_FOR_ALL)}
