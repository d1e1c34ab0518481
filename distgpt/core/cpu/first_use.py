"""Report that kernels are compiled, because no earlier start has left them."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

from distgpt.core.base.errors import Say, print_lines

COMPILING = "compiling kernels"  # how the line begins

_say: Say = partial(print_lines, err=True)
_has_compiled = False


def announce(say: Say | None = None) -> None:
    """Report to `say` from now on, once; without one to standard error."""
    global _say, _has_compiled
    _say = say or partial(print_lines, err=True)
    _has_compiled = False


def report(is_kept: bool) -> None:
    """Report that a kernel is going to be compiled. How long that takes, nobody knows before it is done."""
    global _has_compiled
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
