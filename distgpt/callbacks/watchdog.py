"""Guard against ranks that are stuck: a thread beside each rank's main thread.

It reports to rank 0 what its rank is doing; rank 0's thread tells the user who is stuck, and each rank prints
where in the code it is. It also sees signals while the main thread waits in MPI, where Python cannot handle
them. And it asks NCCL for errors, which NCCL reports to nobody, so that the main thread would wait for ever.
"""

from __future__ import annotations

import os
import platform
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from distgpt.core.base.errors import DistgptError, print_lines
from distgpt.core.base.formatting import long_duration
from distgpt.core.base.interrupts import (
    ENDING,
    EXIT_CODES,
    MEANT,
    Interrupted,
    exit_code_of,
    meaning,
    signal_of,
)
from distgpt.core.comm.api import Comm
from distgpt.core.comm.job import ending, rank_name, say
from distgpt.core.train.progress import EVALUATING, EXCHANGING, Activity, Finished
from distgpt.core.train.run import Run
from distgpt.core.train.summary import how_to_resume, write_stopped

if TYPE_CHECKING:
    from distgpt.callbacks.reports import Address, Reports

SECONDS_BETWEEN = 1.0  # between reports
QUIET = 3  # reports that are missing, after which a rank counts as silent
LEAST_STALL = 120.0  # seconds without progress, after which it is reported
STEPS_OF_STALL = 10  # but at least so many usual steps
SECONDS_FOR_SIGNAL = 10.0  # for a signal to wait for a step that does not end, and this many usual steps
STEPS_FOR_SIGNAL = 3
SECONDS_TO_LEAVE = 3.0  # for the main thread to leave after a second signal
SECONDS_TO_HEAR = 3.0  # for rank 0 to end the job after another rank reports a failure
SECONDS_APART, MOST_APART = 0.5, 20  # then ranks end it themselves, staggered, so that one does it for all
FRAMES, LONGEST_STACK = 8, 5000


@dataclass(frozen=True, slots=True)
class Stall:
    """Seconds without progress after which a run is reported (None: automatic) and ended (None: never)."""

    timeout: float | None = None
    abort: float | None = None

    def timeout_for(self, usual: float) -> float:
        """Return the seconds without progress after which it is reported. `usual`: of a step."""
        return max(LEAST_STALL, STEPS_OF_STALL * usual) if self.timeout is None else self.timeout


@dataclass(slots=True)
class Seen:
    """A rank's last report."""

    at: float
    step: int
    doing: str
    seconds: float
    host: str
    pid: int
    asked: int  # the exit code of a signal that came there; 0: none
    address: Address


class Watchdog:
    """A context, while which the thread runs."""

    def __init__(
        self,
        comm: Comm,
        activity: Activity,
        stall: Stall,
        usual: Callable[[], float],
        slowest: Callable[[], str],
        say: Callable[[str], None],
        end_job: Callable[[Interrupted | DistgptError], None],
    ) -> None:
        """`usual`: seconds of a step. `slowest`: a sentence about the slowest rank. `say` prints, on rank 0.
        `end_job` ends the job from this thread."""
        self._rank, self._size, self._activity, self._stall = comm.rank, comm.size, activity, stall
        self._nccl = comm.queued
        self._usual, self._slowest, self._say, self._end_job = usual, slowest, say, end_job
        self._reports: Reports | None = None
        if comm.size > 1:
            from distgpt.callbacks.reports import Reports  # a rank alone has nobody to report to

            self._reports = Reports(comm)
        self._seen: dict[int, Seen] = {}
        self._came: dict[int, list[float]] = {}  # signals
        self._count, self._moved_at = -1, time.monotonic()
        self._root_heard_at = self._reported_at = self._moved_at
        self._failed_at: float | None = None
        self._is_reported = self._stopped = False
        self._former, self._sees_signals = -1, False
        self._woken, self._wakes = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._main = threading.current_thread().ident or 0

    def __enter__(self) -> Watchdog:
        self._woken.setblocking(False)
        self._wakes.setblocking(False)
        self._sees_signals = threading.current_thread() is threading.main_thread()
        if self._sees_signals:
            self._former = signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stopped = True
        if self._sees_signals:
            signal.set_wakeup_fd(self._former)
        self._wakes.send(b"\0")
        self._thread.join(SECONDS_BETWEEN)
        if self._reports:
            self._reports.close()
        for end in (self._woken, self._wakes):
            end.close()

    def after_step(self, done: Finished) -> dict[str, float]:
        """Add nothing to a step's metrics: the activity says how far the run is."""
        return {}

    def _run(self) -> None:
        ends = [self._woken, *([self._reports.socket] if self._reports else [])]
        while not self._stopped:
            select.select(ends, [], [], SECONDS_BETWEEN / 2)
            if self._stopped:
                return
            with suppress(OSError):
                for number in filter(ENDING.__contains__, self._woken.recv(4096)):
                    times = self._came.setdefault(meaning(number), [])
                    if number != signal.SIGXCPU or not times:
                        times.append(time.monotonic())
            self._look()

    def _look(self) -> None:
        now = time.monotonic()
        moved = self._activity.count != self._count
        if moved:
            self._count, moved_at, self._moved_at = self._activity.count, self._moved_at, now
            if self._is_reported:
                self._is_reported = False
                if self._rank == 0:
                    self._say(f"going on after {long_duration(now - moved_at)} without progress")
        if self._rank:
            self._report(now)
        elif self._reports:
            self._listen(self._reports, now)
        if not moved:  # whoever has just moved is not stuck
            if self._rank == 0:
                self._check_progress(now)
            self._exit_on_second_signal(now)
        if self._nccl and (trouble := self._nccl.trouble()):
            from distgpt.cluster.launch.job import has_failed

            self._give_up(now, has_failed(self._rank, "NCCL", trouble))

    def _give_up(self, now: float, why: str) -> None:
        """Leave it to rank 0 to end the job, unless it does not: all ranks may see the same failure."""
        self._failed_at = self._failed_at or now
        heard_by = SECONDS_TO_HEAR + SECONDS_APART * min(self._rank, MOST_APART)
        if self._rank and self._reports and now - self._failed_at < heard_by:
            self._reports.to_root({"failed": why})
        else:
            self._end_job(DistgptError(why))

    def _exit_on_second_signal(self, now: float) -> None:
        """End the process where the main thread cannot leave after a signal has come twice."""
        for number, times in self._came.items():
            twice = times[-1] - times[0] > MEANT
            if twice and now - times[-1] > SECONDS_TO_LEAVE and self._moved_at < times[-1]:
                ended = Interrupted(number)
                os.write(2, f"distgpt: {ended}\n".encode())
                os._exit(ended.exit_code)

    # Other ranks

    def _report(self, now: float) -> None:
        assert self._reports
        for message, _ in self._reports.received():
            if message["rank"] == 0:
                self._root_heard_at = now
                if message.get("stuck") is True:
                    self._show_stack()
        if now - self._root_heard_at > QUIET * SECONDS_BETWEEN:
            self._reports.root = None
        if now - self._reported_at >= SECONDS_BETWEEN:
            self._reported_at = now
            own = self._activity
            where = {"step": own.step, "doing": own.doing, "seconds": now - own.since}
            who = {"host": platform.node(), "pid": os.getpid(), "asked": exit_code_of(self._came)}
            self._reports.to_root({**where, **who})
        silent, patience = now - self._root_heard_at, self._stall.timeout_for(self._usual())
        if self._rank == 1 and not self._is_reported and min(silent, now - self._moved_at) > patience:
            self._is_reported = True
            waiting = f"rank 1 is {self._activity.doing} at step {self._activity.step + 1}"
            print_lines(f"no word from rank 0 for {long_duration(silent)}, and {waiting}", err=True)

    # Rank 0

    def _listen(self, reports: Reports, now: float) -> None:
        for message, address in reports.received():
            rank = message["rank"]
            if not 0 < rank < self._size:
                continue
            if isinstance(message.get("failed"), str):
                self._end_job(DistgptError(message["failed"]))
            elif seen := _seen(message, now, address):
                self._seen[rank] = seen
                reports.send({}, address)

    def _check_progress(self, now: float) -> None:
        idle, usual = now - self._moved_at, self._usual()
        heard = (QUIET + 1) * SECONDS_BETWEEN * (self._size > 1)  # by then a stopped rank counts as silent
        if not self._is_reported and idle > max(heard, self._stall.timeout_for(usual)):
            self._is_reported = True
            self._say(self._account(now, idle))
            self._show_stack()
            for seen in self._seen.values():
                assert self._reports
                self._reports.send({"stuck": True}, seen.address)
        asked = max([exit_code_of(self._came), *(seen.asked for seen in self._seen.values())])
        if asked and idle > SECONDS_FOR_SIGNAL + STEPS_FOR_SIGNAL * usual:
            self._end_job(Interrupted(signal_of(asked)))
        if self._stall.abort is not None and idle > self._stall.abort:
            self._end_job(Interrupted(signal.SIGUSR1, why=f"no progress for {long_duration(idle)}"))

    def _account(self, now: float, idle: float) -> str:
        """Return what every rank is doing."""
        own = self._activity
        lines = [f"no progress for {long_duration(idle)}, at step {own.step + 1}:"]
        here = f"{own.doing} for {long_duration(now - own.since)}"
        lines.append(f"  rank 0 on {platform.node()} (process {os.getpid()}): {here}")
        for rank in range(1, self._size):
            seen = self._seen.get(rank)
            if seen is None:
                lines.append(f"  rank {rank}: never heard of")
                continue
            who = f"  rank {rank} on {seen.host} (process {seen.pid}): "
            silent = now - seen.at
            if silent > QUIET * SECONDS_BETWEEN:
                lines.append(
                    f"{who}silent for {long_duration(silent)}, last {seen.doing} at step {seen.step + 1}:"
                    " is it stopped, or its host gone?"
                )
            else:
                lines.append(f"{who}{seen.doing} for {long_duration(seen.seconds)}, at step {seen.step + 1}")
        if slow := self._slowest():
            lines.append(f"  {slow}")
        return "\n".join(lines)

    def _show_stack(self) -> None:
        """Print where in the code the main thread of this rank is, on its own standard error."""
        frame = sys._current_frames().get(self._main)
        stack = traceback.format_stack(frame)[-FRAMES:] if frame else ["  it has ended"]
        print_lines(f"{rank_name(self._rank)} is at\n{''.join(stack).rstrip()[-LONGEST_STACK:]}", err=True)


def _seen(message: dict[str, Any], now: float, address: Address) -> Seen | None:
    """Return a report; None if the message is none."""
    kinds = {"step": int, "doing": str, "seconds": float, "host": str, "pid": int, "asked": int}
    if any(type(message.get(name)) is not kind for name, kind in kinds.items()):
        return None
    asked = message["asked"] if message["asked"] in EXIT_CODES.values() else 0
    known = {name: message[name] for name in kinds} | {"asked": asked}
    return Seen(now, **known, address=address)


def save_and_exit(run: Run, ended: Interrupted | DistgptError) -> None:
    """Save the last finished step from the watchdog's thread, and end the job.

    In an exchange the weights are those of the last finished step. From here on nobody changes them.
    """
    try:
        is_locked = not run.model.kernels.capabilities.is_async and run.step.weights_lock.acquire(timeout=1)
        if is_locked and run.checkpoints.has_all and run.activity.doing in (EXCHANGING, EVALUATING):
            run.progress.evaluation_pending |= run.activity.doing == EVALUATING
            run.checkpoints.write_now(run.state())
            run.directory.write_metrics()
        ended.add_note(how_to_resume(run))
        write_stopped(run, ended)
        run.directory.lock.release()
    except Exception as error:
        ended.add_note(f"nothing more was saved: {error}")
    say(ending(ended))
    run.comm.abort(ended.exit_code)
    os._exit(ended.exit_code)  # where MPI is not what ends it
