"""Messages about the first-use compilation of kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

from distgpt.core.base.errors import Say, print_lines

COMPILING = "compiling kernels"  # start of the message

_say: Say = partial(print_lines, err=True)
_has_compiled = False
_helpers: list[Callable[[], None]] = []  # function that starts the helpers, at most one


def announce(say: Say | None = None) -> None:
    """Report later compilations to `say`, once. Default: standard error."""
    global _say, _has_compiled
    _say = say or partial(print_lines, err=True)
    _has_compiled = False


@contextmanager
def with_help(start: Callable[[], Callable[[], None]]) -> Iterator[None]:
    """If a kernel must be compiled inside the block, call `start`, and at the end the function it returns."""
    ends: list[Callable[[], None]] = []
    _helpers.append(lambda: ends.append(start()))
    try:
        yield
    finally:
        _helpers.clear()
        for end in ends:
            end()


def report(is_kept: bool) -> None:
    """Report, once, that kernels are being compiled. Start the helpers, if any."""
    global _has_compiled
    with suppress(IndexError):  # no helpers, or another thread has started them
        _helpers.pop()()
    if not _has_compiled:
        _has_compiled = True
        note(f"{COMPILING} (later starts load them)" if is_kept else COMPILING)


def note(text: str) -> None:
    """Print a message about kernels to the current `say`."""
    with suppress(OSError, ValueError):  # the stream was closed
        _say(text)


def has_compiled() -> bool:
    """Return whether any kernel was compiled since `announce`."""
    return _has_compiled
