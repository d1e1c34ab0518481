"""Report that kernels are compiled, because no earlier start has left them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

from distgpt.core.base.errors import Say, print_lines

COMPILING = "compiling kernels"  # how the line begins

_say: Say = partial(print_lines, err=True)
_has_compiled = False
_helpers: list[Callable[[], None]] = []  # what starts them, at most one


def announce(say: Say | None = None) -> None:
    """Report to `say` from now on, once; without one to standard error."""
    global _say, _has_compiled
    _say = say or partial(print_lines, err=True)
    _has_compiled = False


@contextmanager
def with_help(start: Callable[[], Callable[[], None]]) -> Iterator[None]:
    """Call `start` once, if a kernel has to be compiled inside, and at the end what that returns."""
    ends: list[Callable[[], None]] = []
    _helpers.append(lambda: ends.append(start()))
    try:
        yield
    finally:
        _helpers.clear()
        for end in ends:
            end()


def report(is_kept: bool) -> None:
    """Report that a kernel is going to be compiled. How long that takes, nobody knows before it is done."""
    global _has_compiled
    with suppress(IndexError):  # none are left, or another thread of the pool has called them
        _helpers.pop()()
    if not _has_compiled:
        _has_compiled = True
        note(f"{COMPILING} (later starts load them)" if is_kept else COMPILING)


def note(text: str) -> None:
    """Report what became of a kernel, where others are reported."""
    with suppress(OSError, ValueError):  # of a stream that was closed
        _say(text)


def has_compiled() -> bool:
    """Return whether anything was compiled since `announce`."""
    return _has_compiled
