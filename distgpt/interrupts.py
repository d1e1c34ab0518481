"""Ctrl-C that always ends the command: also where Python drops an exception, or other code breaks by one.

Python raises it wherever the main thread stands. In a finalizer or a callback from C that is written to
standard error and forgotten; from within an import in C it may come out as another error.
"""

from __future__ import annotations

import _thread
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

AGAIN = 0.01  # seconds after which a dropped interrupt is sent again

_came: list[int] = []


def heed() -> None:
    """Make sure of every interrupt from now on; for the main thread of a command."""
    _came.clear()
    sys.unraisablehook = _dropped
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _handle)


def _handle(number: int, frame: Any) -> None:
    _came.append(number)
    raise KeyboardInterrupt


def _dropped(what: Any) -> None:
    if issubclass(what.exc_type, KeyboardInterrupt):
        _thread.start_new_thread(_send_again, ())  # without the locks of threading, which may be held here
    else:
        sys.__unraisablehook__(what)


def _send_again() -> None:
    time.sleep(AGAIN)
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


_BROKEN = (ImportError, RuntimeError, SystemError)  # in which an interrupt of C code comes out


def meant(error: BaseException) -> BaseException:
    """Return the interrupt that became this internal error, or the error itself."""
    return KeyboardInterrupt() if _came and isinstance(error, _BROKEN) else error


@contextmanager
def held() -> Iterator[None]:
    """Put off an interrupt until the end of code that it would break; it is still one interrupt."""
    former = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(former):
        yield
        return
    came: list[tuple[int, Any]] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)
        if came:
            former(*came[0])
