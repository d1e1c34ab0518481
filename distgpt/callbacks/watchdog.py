"""Detects stuck ranks, with a thread next to each rank's main thread.

The thread reports the rank's activity to rank 0. Rank 0's thread prints which ranks are stuck, and each rank
prints its position in the code. The thread also receives signals while the main thread waits in MPI, where
Python cannot handle signals. It polls NCCL for errors, which otherwise would leave the main thread waiting
forever.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import secrets
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from distgpt.core.base.checked import parse_json
from distgpt.core.base.errors import DistgptError, print_lines
from distgpt.core.base.formatting import long_duration
from distgpt.core.base.interrupts import ENDING, MEANT, Interrupted, exit_code_of, meaning, signal_of
from distgpt.core.base.system import boot_id
from distgpt.core.comm.agree import on_root
from distgpt.core.comm.api import Comm
from distgpt.core.comm.job import ending, rank_name, say
from distgpt.core.train.progress import EVALUATING, EXCHANGING, Activity, Finished
from distgpt.core.train.run import Limits, Run
from distgpt.core.train.summary import how_to_resume, write_stopped

SECONDS_BETWEEN = 1.0  # between reports
QUIET = 3  # missing reports before a rank counts as silent
LEAST_STALL = 120.0  # seconds without progress before a report
STEPS_OF_STALL = 10  # minimum stall, in typical steps
SECONDS_FOR_SIGNAL = 10.0  # a signal waits this long, plus STEPS_FOR_SIGNAL typical steps, for a step to end
STEPS_FOR_SIGNAL = 3
SECONDS_TO_LEAVE = 3.0  # timeout of the main thread after a second signal
SECONDS_TO_HEAR = 3.0  # timeout of rank 0 to end the job after another rank's failure
FRAMES, LONGEST_STACK = 8, 5000
LARGEST = 8192  # bytes of a message
SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
Address = tuple[str, int]


class Reports:
    """A rank's socket for datagrams to rank 0, which may be lost. Datagrams without the secret are dropped.

    Creation is collective. Afterwards any thread may use it.
    """

    def __init__(self, comm: Comm) -> None:
        self.rank = comm.rank
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.setblocking(False)
        self.socket.bind(("", 0))
        known = on_root(comm, self._introduce)
        here = ["127.0.0.1"] if known["boot"] == boot_id() else []
        self._to_root: list[Address] = [(host, known["port"]) for host in (*here, *known["hosts"])]
        self._secret: str = known["secret"]

    def _introduce(self) -> dict[str, Any]:
        port, hosts = self.socket.getsockname()[1], list(_own_addresses())
        return {"port": port, "hosts": hosts, "secret": secrets.token_hex(16), "boot": boot_id()}

    def to_root(self, message: dict[str, Any]) -> None:
        """Send to rank 0's last address; before its first answer, to all its possible addresses."""
        for address in self._to_root:
            self.send(message, address)

    def send(self, message: dict[str, Any], address: Address) -> None:
        text = json.dumps({**message, "rank": self.rank, "secret": self._secret}).encode()
        with suppress(OSError):
            self.socket.sendto(text[:LARGEST], address)

    def received(self) -> Iterator[tuple[dict[str, Any], Address]]:
        """Yield the received messages, each with its sender."""
        for _ in range(1000):  # a flood must not block the caller
            try:
                text, address = self.socket.recvfrom(LARGEST)
            except OSError:
                return
            with suppress(ValueError):
                message = parse_json(text)
                if isinstance(message, dict) and self._is_ours(message.get("secret")):
                    if message["rank"] == 0:
                        self._to_root = [address]
                    yield message, address

    def _is_ours(self, secret: object) -> bool:
        return isinstance(secret, str) and secrets.compare_digest(secret.encode(), self._secret.encode())

    def close(self) -> None:
        self.socket.close()


def _own_addresses() -> Iterator[str]:
    """Yield this host's addresses without loopback. Other hosts try which ones they reach."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                result = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if not (host := socket.inet_ntoa(result[20:24])).startswith("127."):
                    yield host


class Watchdog:
    """Watches progress and signals in a thread, while its context is open."""

    def __init__(
        self,
        comm: Comm,
        activity: Activity,
        limits: Limits,
        usual: Callable[[], float],
        say: Callable[[str], None],
        end_job: Callable[[Interrupted | DistgptError], None],
    ) -> None:
        """`usual`: seconds of a step. `say` prints on rank 0. `end_job` ends the job from this thread."""
        self._rank, self._size, self._activity, self._limits = comm.rank, comm.size, activity, limits
        self._nccl = comm.queued
        self._usual, self._say, self._end_job = usual, say, end_job
        self._reports = Reports(comm) if comm.size > 1 else None
        self._seen: dict[int, tuple[float, Address, dict[str, Any]]] = {}  # each rank's last report
        self._came: dict[int, list[float]] = {}  # times of each signal
        self._count, self._moved_at = -1, time.monotonic()
        self._reported_at, self._failed_at = self._moved_at, 0.0
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

    def __exit__(self, *ended: object) -> None:
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
        """Add nothing to a step's metrics, since `Activity` tracks progress."""
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
                self._say(f"continuing after {long_duration(now - moved_at)} without progress")
        if self._reports and self._rank:
            self._report(self._reports, now)
        elif self._reports:
            self._listen(self._reports, now)
        if not moved:  # a rank that has just progressed is not stuck
            if self._rank == 0:
                self._check_progress(now)
            self._exit_on_second_signal(now)
        if self._nccl and (trouble := self._nccl.trouble()):
            from distgpt.cluster.launch.job import has_failed

            self._give_up(now, has_failed(self._rank, "NCCL", trouble))

    def _give_up(self, now: float, why: str) -> None:
        """Report the failure to rank 0, which ends the job. If it does not, end the job here."""
        self._failed_at = self._failed_at or now
        if self._rank and self._reports and now - self._failed_at < SECONDS_TO_HEAR:
            self._reports.to_root({"failed": why})
        else:
            self._end_job(DistgptError(why))

    def _exit_on_second_signal(self, now: float) -> None:
        """End the process if a signal was sent twice and the main thread cannot exit."""
        for number, times in self._came.items():
            twice = times[-1] - times[0] > MEANT
            if twice and now - times[-1] > SECONDS_TO_LEAVE and self._moved_at < times[-1]:
                ended = Interrupted(number)
                os.write(2, f"distgpt: {ended}\n".encode())
                os._exit(ended.exit_code)

    def _report(self, reports: Reports, now: float) -> None:
        if any(message.get("stuck") for message, _ in reports.received()):
            self._show_stack()
        if now - self._reported_at >= SECONDS_BETWEEN:
            self._reported_at, own = now, self._activity
            where = {"step": own.step, "doing": own.doing, "seconds": now - own.since}
            who = {"host": platform.node(), "pid": os.getpid(), "asked": exit_code_of(self._came)}
            reports.to_root({**where, **who})

    def _listen(self, reports: Reports, now: float) -> None:
        for message, address in reports.received():
            if "failed" in message:
                self._end_job(DistgptError(message["failed"]))
            elif message["rank"]:
                self._seen[message["rank"]] = now, address, message
                reports.send({}, address)

    def _check_progress(self, now: float) -> None:
        idle, usual, limits = now - self._moved_at, self._usual(), self._limits
        heard = (QUIET + 1) * SECONDS_BETWEEN * (self._size > 1)  # after this, stopped ranks are silent
        timeout = limits.stall_timeout
        timeout = max(LEAST_STALL, STEPS_OF_STALL * usual) if timeout is None else timeout
        if not self._is_reported and idle > max(heard, timeout):
            self._is_reported = True
            self._say(self._account(now, idle))
            self._show_stack()
            for _, address, _ in self._seen.values():
                assert self._reports
                self._reports.send({"stuck": True}, address)
        asked = max(exit_code_of(self._came), *(said["asked"] for _, _, said in self._seen.values()), 0)
        if asked and idle > SECONDS_FOR_SIGNAL + STEPS_FOR_SIGNAL * usual:
            self._end_job(Interrupted(signal_of(asked)))
        if limits.stall_abort is not None and idle > limits.stall_abort:
            self._end_job(Interrupted(signal.SIGUSR1, why=f"no progress for {long_duration(idle)}"))

    def _account(self, now: float, idle: float) -> str:
        own = self._activity
        doing = f"{own.doing} for {long_duration(now - own.since)}"
        rows = {0: f"{platform.node()} (process {os.getpid()}): {doing}"}
        for rank, (at, _, seen) in self._seen.items():
            silent, step = now - at, f"at step {seen['step'] + 1}"
            where = f"{seen['doing']} for {long_duration(seen['seconds'])}, {step}"
            if silent > QUIET * SECONDS_BETWEEN:
                where = f"silent for {long_duration(silent)}, last {seen['doing']} {step}"
            rows[rank] = f"{seen['host']} (process {seen['pid']}): {where}"
        ranks = (f"  rank {rank} on {rows.get(rank, 'an unknown host')}" for rank in range(self._size))
        return "\n".join([f"no progress for {long_duration(idle)}, at step {own.step + 1}:", *ranks])

    def _show_stack(self) -> None:
        """Print the main thread's stack on this rank's stderr."""
        frame = sys._current_frames().get(self._main)
        stack = traceback.format_stack(frame)[-FRAMES:] if frame else ["  it has ended"]
        print_lines(f"{rank_name(self._rank)} is at\n{''.join(stack).rstrip()[-LONGEST_STACK:]}", err=True)


def save_and_exit(run: Run, ended: Interrupted | DistgptError) -> None:
    """Save the last finished step from the watchdog's thread, and end the job.

    During an exchange, the weights are from the last finished step. No thread changes them afterwards.
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
        ended.add_note(f"the last step was not saved: {error}")
    say(ending(ended))
    run.comm.abort(ended.exit_code)
    os._exit(ended.exit_code)  # if MPI does not end the process
