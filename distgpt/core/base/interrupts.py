"""Signals that end a command: Ctrl-C, SIGTERM, a closed terminal, and those that announce a preemption.

Each signal raises in the main thread. Python drops exceptions raised in finalizers and C callbacks, so we
send the signal again; an import in C may turn it into another error. A run finishes its step first, and
defers signals until then (`deferred_signals`).
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

AGAIN = 0.01  # seconds after which a dropped signal is sent again
IMPATIENT = 1.5  # seconds that a signal waits for code that it would break, before the process leaves at once
MEANT = 1.0  # seconds: a signal that comes sooner is the last one again, passed on by a launcher
# The first counts most, and has the highest code. SIGPIPE is never sent to us, since Python ignores it:
# it stands for output that nobody reads any more (`note`).
EXIT_CODES = {
    signal.SIGTERM: 143,
    signal.SIGINT: 130,
    signal.SIGHUP: 129,
    signal.SIGUSR1: 75,
    signal.SIGPIPE: 74,
}
# Batch systems announce the end of a job with these too. SIGXCPU comes every second until the job is killed.
ALIASES = {signal.SIGUSR2: signal.SIGUSR1, signal.SIGXCPU: signal.SIGUSR1}
ENDING = (*EXIT_CODES, *ALIASES)

_came: list[signal.Signals] = []  # since this command began
_noted_at: dict[int, float] = {}  # when a signal was last noted
_commanding = False  # this process is a command of ours, not a notebook
_noting: list[PendingSignals] = []
before_leaving: list[Callable[[], None]] = []  # called if a signal ends the process within C code


class Interrupted(KeyboardInterrupt):
    """A signal asked this command to end. `shared`: all ranks know, so each may leave on its own.

    `why` is the message where no signal came.
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
        known = {signal.SIGINT: "interrupted", signal.SIGPIPE: "nobody reads standard output any more"}
        return known.get(self.number) or f"ended by {self.number.name}"


def install_handlers() -> None:
    """Raise Interrupted for each of these signals from now on; for the main thread of a command.

    A signal that the parent ignores, or that has another handler, stays as it is.
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
    """Return the signal in EXIT_CODES that this one stands for."""
    return ALIASES.get(signal.Signals(number), signal.Signals(number))


def _handle(number: int, frame: FrameType | None) -> None:
    came = meaning(number)
    if time.monotonic() - _noted_at.get(came, -math.inf) < MEANT:
        return  # noted already, and passed on by a launcher once more
    _came.append(came)
    raise Interrupted(came)


def _dropped(report: sys.UnraisableHookArgs) -> None:
    """Send a signal again whose exception Python has dropped."""
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
    """Return the interrupt that became this internal error, or the error itself."""
    return Interrupted(_came[0]) if _came and isinstance(error, _BROKEN) else error


class PendingSignals:
    """Signals that came, and when. From the moment `deadline` on it is as if SIGUSR1 had come."""

    def __init__(self) -> None:
        self._came: dict[signal.Signals, float] = {}
        self.reasons: dict[signal.Signals, str] = {}  # of those that nobody sent
        self.deadline = math.inf
        self.late = False  # the deadline came, and no such signal before it

    @property
    def came(self) -> dict[signal.Signals, float]:
        now = time.monotonic()
        if now >= self.deadline and signal.SIGUSR1 not in self._came:
            self._came[signal.SIGUSR1] = now
            self.late = True
        return self._came

    @property
    def exit_code(self) -> int:
        """Return the exit code of the signal that counts most; 0 if none came."""
        return exit_code_of(self.came)

    def note(self, number: signal.Signals, why: str = "") -> bool:
        """Return whether it is the first of its kind, but for one that only stood for the deadline.

        `why` is said where nobody has sent it, in place of its name.
        """
        number = meaning(number)
        if number not in EXIT_CODES:  # no rank would hear of it
            raise ValueError(f"{number.name} ends no run")
        first = number not in self._came or (number == signal.SIGUSR1 and self.late)
        if first:
            self._came[number] = _noted_at[number] = time.monotonic()
            self.reasons[number] = why
            self.late = self.late and number != signal.SIGUSR1
        return first

    def counts(self) -> list[int]:
        """Return 1 for each that came, else 0, in the order of EXIT_CODES. Ranks add these."""
        return [int(number in self.came) for number in EXIT_CODES]


def exit_code_of(came: Collection[int]) -> int:
    """Return the code of the signal that counts most, 0 if there is none; `came` may grow meanwhile."""
    return max((code for number, code in EXIT_CODES.items() if number in came), default=0)


def signal_of(exit_code: int) -> signal.Signals:
    return next(number for number, code in EXIT_CODES.items() if code == exit_code)


def first_of(counts: Sequence[float]) -> signal.Signals | None:
    """Return the signal that counts most among those of all ranks, by the sum of their counts."""
    return next((number for number, count in zip(EXIT_CODES, counts, strict=True) if count), None)


@contextmanager
def deferred_signals(found: PendingSignals) -> Iterator[PendingSignals]:
    """Note the first signal of each kind in `found`; a second one is raised."""
    former = _handlers()

    def note_or_raise(number: int, frame: FrameType | None) -> None:
        came = meaning(number)
        is_second = not found.note(came) and number != signal.SIGXCPU
        if is_second and time.monotonic() - _noted_at[came] > MEANT:
            _noted_at.pop(came)  # or the former handler would take it for the same one
            former[number](number, frame)

    _noting.append(found)
    try:
        with _replaced(former, note_or_raise):
            yield found
    finally:
        _noting.remove(found)


def note(number: signal.Signals) -> bool:
    """Note a signal that nobody sent. Return whether anything here notes signals."""
    if _noting:
        _noting[-1].note(number)
    return bool(_noting)


@contextmanager
def signals_deferred() -> Iterator[Callable[[], None]]:
    """Defer a signal to the end of code that it would break, or to where that calls what this yields.

    Several become one. Where that takes long, the process leaves at once, unless it notes signals anyway.
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
        found = came.copy()
        came.clear()
        for _, timer in found:
            timer.cancel()
        for number, _ in found:
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
    """Ignore further signals, while this process ends because of one or has nothing left to do."""
    for number in ENDING:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_IGN)


@contextmanager
def default_signals() -> Iterator[None]:
    """Let signals end the process at once, in C code that may never return: no handler of ours runs there."""
    with _replaced(_handlers(), signal.SIG_DFL):
        yield


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ignore interrupts and requests to end, for something short that must be finished."""
    with _replaced(_handlers(), signal.SIG_IGN):
        yield


def _handlers() -> dict[int, Handler]:
    """Return the handlers of the signals that have one. Other threads may replace none."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: known for number in ENDING if callable(known := signal.getsignal(number))}


@contextmanager
def _replaced(former: dict[int, Handler], handler: Handler | signal.Handlers) -> Iterator[None]:
    """Let `handler` handle the signals of `former`, which gets them back."""
    for number in former:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, own in former.items():
            signal.signal(number, own)
