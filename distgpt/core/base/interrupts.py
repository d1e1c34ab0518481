"""Signals that end a command: Ctrl-C, SIGTERM, a closed terminal, and preemption warnings.

Each signal raises an exception in the main thread. Python drops exceptions raised in finalizers and C
callbacks, so the signal is sent again. Imports in C may turn the exception into another error. A run finishes
its step first and defers signals until then (`deferred_signals`).
"""

from __future__ import annotations

import _thread
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

Handler = Callable[[int, FrameType | None], object]

AGAIN = 0.01  # seconds until a dropped signal is sent again
IMPATIENT = 1.5  # seconds to defer a signal in critical code before the process exits
MEANT = 1.0  # seconds: an earlier repeat is the same signal, forwarded by a launcher
# The first has the highest priority and code. Python ignores SIGPIPE, so the process never receives it. Here
# it represents a closed output (`note`).
EXIT_CODES = {
    signal.SIGTERM: 143,
    signal.SIGINT: 130,
    signal.SIGHUP: 129,
    signal.SIGUSR1: 75,
    signal.SIGPIPE: 74,
}
# Batch systems also announce the end of a job with these signals. SIGXCPU repeats every second.
ALIASES = {signal.SIGUSR2: signal.SIGUSR1, signal.SIGXCPU: signal.SIGUSR1}
ENDING = (*EXIT_CODES, *ALIASES)

_came: list[signal.Signals] = []  # received since this command started
_noted_at: dict[int, float] = {}  # the time when each signal was last noted
_commanding = False  # whether this process is a distgpt command, not a notebook
_noting: list[PendingSignals] = []
before_leaving: list[Callable[[], None]] = []  # called if a signal ends the process within C code


class Interrupted(KeyboardInterrupt):
    """Request by a signal to end this command. If `shared`, every rank has it and may exit on its own.

    `why` is the message if there was no signal.
    """

    def __init__(self, number: int, shared: bool = False, why: str = "") -> None:
        super().__init__()
        self.number, self.shared, self.why = signal.Signals(number), shared, why

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.number]

    def __str__(self) -> str:
        if self.why:
            return self.why
        known = {signal.SIGINT: "interrupted", signal.SIGPIPE: "standard output was closed"}
        return known.get(self.number) or f"ended by {self.number.name}"


def install_handlers() -> None:
    """Raise Interrupted for each of these signals. For the main thread of a command.

    A signal that the parent process ignores, or that has another handler, is not changed.
    """
    global _commanding
    _commanding = True
    _came.clear()
    _noted_at.clear()
    sys.unraisablehook = _dropped
    for number in ENDING:
        if signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL):
            signal.signal(number, _handle)


def meaning(number: int) -> signal.Signals:
    """Map an alias to its signal in EXIT_CODES."""
    return ALIASES.get(signal.Signals(number), signal.Signals(number))


def _handle(number: int, frame: FrameType | None) -> None:
    came = meaning(number)
    if time.monotonic() - _noted_at.get(came, -math.inf) < MEANT:
        return  # A launcher forwarded the same signal.
    _came.append(came)
    raise Interrupted(came)


def _dropped(report: sys.UnraisableHookArgs) -> None:
    """Send a signal again if Python dropped its exception."""
    if issubclass(report.exc_type, KeyboardInterrupt):
        number = getattr(report.exc_value, "number", signal.SIGINT)
        _thread.start_new_thread(_send_again, (number,))  # without threading's locks, which may be held here
    else:
        sys.__unraisablehook__(report)


def _send_again(number: int) -> None:
    time.sleep(AGAIN)
    signal.pthread_kill(threading.main_thread().ident or 0, number)


_BROKEN = (ImportError, RuntimeError, SystemError)  # C code turns an interrupt into one of these


def as_interrupt(error: BaseException) -> BaseException:
    """Return the interrupt that caused this internal error, or the error itself."""
    return Interrupted(_came[0]) if _came and isinstance(error, _BROKEN) else error


class PendingSignals:
    """The received signals and their times. After `deadline`, SIGUSR1 counts as received."""

    def __init__(self) -> None:
        self._came: dict[signal.Signals, float] = {}
        self.reasons: dict[signal.Signals, str] = {}  # messages for signals that this process created
        self.deadline = math.inf
        self.late = False  # whether the deadline passed before a SIGUSR1

    @property
    def came(self) -> dict[signal.Signals, float]:
        now = time.monotonic()
        if now >= self.deadline and signal.SIGUSR1 not in self._came:
            self._came[signal.SIGUSR1] = now
            self.late = True
        return self._came

    @property
    def exit_code(self) -> int:
        """Return the exit code of the signal with the highest priority; 0 if none was received."""
        return exit_code_of(self.came)

    def note(self, number: signal.Signals, why: str = "") -> bool:
        """Record a signal. Return whether it is the first of its kind, apart from an expired deadline.

        `why` is the message if this process created the signal.
        """
        number = meaning(number)
        if number not in EXIT_CODES:  # the ranks' shared flags do not include it
            raise ValueError(f"{number.name} does not end a run")
        first = number not in self._came or (number == signal.SIGUSR1 and self.late)
        if first:
            self._came[number] = _noted_at[number] = time.monotonic()
            self.reasons[number] = why
            self.late = self.late and number != signal.SIGUSR1
        return first

    def counts(self) -> list[int]:
        """Return 1 for each received signal and 0 otherwise, in the order of EXIT_CODES. Ranks sum these."""
        return [int(number in self.came) for number in EXIT_CODES]


def exit_code_of(came: Collection[int]) -> int:
    """Return the highest exit code, 0 if `came` is empty. Thread-safe: `came` may grow concurrently."""
    return max((code for number, code in EXIT_CODES.items() if number in came), default=0)


def signal_of(exit_code: int) -> signal.Signals:
    return next(number for number, code in EXIT_CODES.items() if code == exit_code)


def first_of(counts: Sequence[float]) -> signal.Signals | None:
    """Return the signal with the highest priority, from counts summed over the ranks."""
    return next((number for number, count in zip(EXIT_CODES, counts, strict=True) if count), None)


@contextmanager
def deferred_signals(found: PendingSignals) -> Iterator[PendingSignals]:
    """Record the first signal of each kind in `found`; raise a second one."""
    former = _handlers()

    def note_or_raise(number: int, frame: FrameType | None) -> None:
        came = meaning(number)
        is_second = not found.note(came) and number != signal.SIGXCPU
        if is_second and time.monotonic() - _noted_at[came] > MEANT:
            _noted_at.pop(came)  # otherwise the previous handler ignores it as a repeat
            former[number](number, frame)

    _noting.append(found)
    try:
        with _replaced(former, note_or_raise):
            yield found
    finally:
        _noting.remove(found)


def note(number: signal.Signals) -> bool:
    """Record a signal that this process creates. Return whether a `PendingSignals` is active."""
    if _noting:
        _noting[-1].note(number)
    return bool(_noting)


@contextmanager
def signals_deferred() -> Iterator[Callable[[], None]]:
    """Defer signals to the end of critical code, or until it calls the yielded function.

    If the code takes long, the process exits, unless it records signals.
    """
    former = _handlers()
    came: list[tuple[int, threading.Timer]] = []

    def defer(number: int, frame: FrameType | None) -> None:
        timer = threading.Timer(IMPATIENT, _leave_at_once, (number,))
        timer.daemon = True
        if _commanding and not _noting:
            timer.start()
        came.append((number, timer))

    def deliver() -> None:
        result = came.copy()
        came.clear()
        for _, timer in result:
            timer.cancel()
        for number, _ in result:
            former[number](number, None)

    try:
        with _replaced(former, defer):
            yield deliver
    finally:
        deliver()


def _leave_at_once(number: int) -> None:
    ending = Interrupted(number)
    for clean_up in before_leaving:
        clean_up()
    os.write(2, f"distgpt: {ending}\n".encode())
    os._exit(ending.exit_code)


def ignore_further() -> None:
    """Ignore further signals while this process ends."""
    for number in ENDING:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_IGN)


@contextmanager
def default_signals() -> Iterator[None]:
    """Let signals end the process immediately, in C code that may never return to Python's handlers."""
    with _replaced(_handlers(), signal.SIG_DFL):
        yield


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ignore signals during a short operation that must finish."""
    with _replaced(_handlers(), signal.SIG_IGN):
        yield


def _handlers() -> dict[int, Handler]:
    """Return the handlers of the signals that have one; none except in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: known for number in ENDING if callable(known := signal.getsignal(number))}


@contextmanager
def _replaced(former: dict[int, Handler], handler: Handler | signal.Handlers) -> Iterator[None]:
    """Handle signals with `handler`, and restore the handlers in `former` afterwards."""
    for number in former:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, own in former.items():
            signal.signal(number, own)
