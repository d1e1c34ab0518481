"""Report kernels that are compiled because no earlier start has left them, and what for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial

from distgpt.core.base.errors import Say, print_lines

COMPILING = "compiling kernels"  # how the line begins

_say: Say = partial(print_lines, err=True)
_purpose = ""  # of all threads: those of the pool compile what the main one calls for
_reported: set[str] = set()


def announce(say: Say | None = None) -> None:
    """Report to `say` from now on, once for each purpose; without one to standard error."""
    global _say
    _say = say or partial(print_lines, err=True)
    _reported.clear()


def begin(purpose: str) -> None:
    """Name what is compiled from now on, as in "training in float32"."""
    global _purpose
    _purpose = purpose


@contextmanager
def compiling_for(purpose: str) -> Iterator[None]:
    """Name what is compiled inside for something else."""
    global _purpose
    before, _purpose = _purpose, purpose
    try:
        yield
    finally:
        _purpose = before


def report(is_kept: bool) -> None:
    """Report that a kernel is going to be compiled. How long that takes, nobody knows before it is done."""
    if _purpose in _reported:
        return
    _reported.add(_purpose)
    what = f"{COMPILING} for {_purpose}" if _purpose else COMPILING
    note(f"{what} (later starts load them)" if is_kept else what)


def note(text: str) -> None:
    """Report what became of a kernel, where others are reported."""
    with suppress(OSError, ValueError):  # of a stream that was closed
        _say(text)


def has_compiled() -> bool:
    """Return whether anything was compiled since `announce`."""
    return bool(_reported)
