"""Start a job, watch its hosts, and start it again from its last checkpoint where ranks still have room."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from distgpt.core.base.errors import DistgptError, MismatchError, NonFiniteError, StorageError, UsageError
from distgpt.core.base.formatting import count, long_duration
from distgpt.core.base.interrupts import PendingSignals, deferred_signals, signal_of
from distgpt.core.comm.job import say
from distgpt.core.saved.checkpoint import newest_step
from distgpt.core.saved.rundir import RunDirectory
from distgpt.jobs.processes import OUR_LINE, Ended, ending
from distgpt.jobs.reach import Answer, Line, clean, clean_here, is_here
from distgpt.show.metrics import parse_metrics, whole_lines
from distgpt.supervise.launch_line import LaunchLine, Room, chosen, hosts_of, listed, read_rooms

# Ends that would come again, of distgpt, sysexits.h and shells. A host that errs is not to go on unseen. A
# lost rank is 70 where MPI tells the others, so that all of 70 is tried again.
FINAL = (2, 64, 65, MismatchError.exit_code, NonFiniteError.exit_code, 126, 127)
KILLED = (signal.SIGKILL, 128 + signal.SIGKILL, -signal.SIGKILL)  # codes of mpirun, a shell, Python
MOST_DEATHS = 3  # without a step more than before
SECONDS_BETWEEN_LOOKS = 0.2
SECONDS_BETWEEN_QUESTIONS = 5.0  # to a host that is there and refuses ssh, or for which a job waits
PAUSE = 5.0  # before a third attempt at a step: a disk that was away may be back
LAST_LINES = 40  # that are kept of a job's errors
VARIABLE = "DISTGPT_SUPERVISED"  # in the environment of all that a supervisor starts


@dataclass(slots=True)
class Attempt:
    """A start of the job, and how it ended."""

    rooms: list[Room]
    ranks: int
    code: int = 0
    gone: list[str] = field(default_factory=list)  # hosts that did not answer any more while it ran
    stalled: float = 0.0  # seconds without a step, after which it was ended; 0: it was not
    errors: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))

    def why(self) -> str:
        """Return what ended it, in words."""
        if self.gone:
            return f"{listed(self.gone)} did not answer any more"
        if self.stalled:
            return f"no step for {long_duration(self.stalled)}"
        is_killed = self.code in KILLED
        how = "a rank was killed" if is_killed else ending(self.code)
        errors = "".join(self.errors)
        if is_killed and OUR_LINE not in errors:  # the last line may be of its progress
            return how
        said = Ended(self.code, "", errors, 0.0).complaint()
        return f"{how}: {said[:300]}" if said else how


@dataclass(frozen=True, slots=True)
class Limits:
    """When a job starts again, and on what."""

    least: int = 1  # ranks: wait for hosts rather than run on fewer
    restarts: int | None = None  # None: any number
    stall: float | None = None  # seconds without a step; None: any number


class Supervisor:
    """Keeps a run going that a launch trains in the directory `out`."""

    def __init__(self, line: LaunchLine, out: Path, on_gpu: bool, limits: Limits) -> None:
        self._line, self._run, self._on_gpu, self._limits = line, RunDirectory(out), on_gpu, limits
        if limits.least > line.ranks:
            raise UsageError(f"--min-ranks {limits.least}: the launch line has only {line.ranks}")
        self._rooms = read_rooms(line)
        self._variable = f"{VARIABLE}={platform.node()}-{os.getpid()}-{time.time_ns()}"
        self._signals = PendingSignals()
        self._names: dict[str, str] = {}  # what hosts that have answered call themselves
        self._answers: dict[str, Answer] = {}  # of this restart
        self._lost: set[str] = set()  # hosts that were, at any time
        self._furthest, self._deaths, self._starts = -1, 0, 0

    def run(self) -> int:
        """Return the exit code of the command."""
        with deferred_signals(self._signals):
            try:
                while (placed := self._place()) is not None:
                    attempt = self._attempt(placed)
                    self._starts += 1
                    if attempt.code or attempt.gone:
                        self._clean(known_gone=attempt.gone)
                    code = self._judge(attempt)
                    if code is not None:
                        return code
            finally:
                clean_here(self._variable)
        return self._signals.exit_code

    # Where it runs

    def _clean(self, known_gone: Sequence[str] = ()) -> None:
        """Kill what an attempt has left, on all hosts that answer; note which do."""
        clean_here(self._variable)
        asked = [host for host in hosts_of(self._rooms) if host not in known_gone]  # that would cost 5 s
        self._answers = dict.fromkeys(known_gone, Answer(problem="no answer")) | clean(asked, self._variable)
        self._names |= {host: answer.name for host, answer in self._answers.items() if answer.name}

    def _place(self) -> Attempt | None:
        """Choose hosts, as soon as enough of them answer; None if a signal came before."""
        wanted, has_waited = self._line.ranks, False
        if self._rooms and not self._answers:
            self._clean()
        while not self._signals.came:
            there = {host for host, answer in self._answers.items() if answer.name}
            rooms = chosen(self._rooms, there, wanted)
            ranks = min(wanted, sum(room.ranks for room in rooms)) if self._rooms else wanted
            least = self._limits.least if self._run.config.exists() else wanted
            if least <= ranks < wanted:
                ranks = self._dividing(ranks)
                rooms = chosen(self._rooms, there, ranks)
            silent = [host for host in hosts_of(self._rooms) if host not in there]
            if ranks >= least:
                # At first a host that only lets no ssh in may have another's job, in good health.
                lost = [host for host in silent if self._starts or not self._answers[host].is_there]
                self._take_over(lost)
                self._announce(rooms, ranks, silent)
                return Attempt(rooms, ranks)
            if not self._starts and not self._run.config.exists():
                raise UsageError(
                    f"{listed(silent)} cannot be used ({self._answers[silent[0]].problem}), and a new run"
                    f" needs room for all {wanted} ranks: see distgpt doctor --hostfile FILE --ssh"
                )
            if not has_waited:
                has_waited = True
                say(f"waiting for {listed(silent)}: there is room for {ranks} ranks, and {least} are needed")
            self._sleep(SECONDS_BETWEEN_QUESTIONS)
            self._clean()
        return None

    def _dividing(self, most: int) -> int:
        """Return the largest number of ranks, of so many at most, that the run's settings allow."""
        from distgpt.core.train.plan import refuse_unsuited

        saved = self._run.saved()
        assert saved
        refusal: UsageError | None = None
        for ranks in range(most, 0, -1):
            try:
                refuse_unsuited(saved.train, ranks, self._on_gpu)
                return ranks
            except UsageError as error:
                refusal = refusal or error
        assert refusal
        raise refusal

    def _take_over(self, lost: Sequence[str]) -> None:
        """Free the directory from a process on a lost host, whose lock a network disk may still keep."""
        names = {self._names.get(host, host.rpartition("@")[2].partition(".")[0]) for host in lost}
        holder = self._run.lock.holder()
        if holder and holder.host in names and self._run.lock.is_held():
            say(f"taking {self._run.path} over from {holder}, whose host cannot be used")
            self._run.lock.path.unlink(missing_ok=True)

    def _announce(self, rooms: Sequence[Room], ranks: int, silent: Sequence[str]) -> None:
        hosts = hosts_of(rooms)
        spare = [host for host in hosts_of(self._rooms) if host not in hosts and host not in silent]
        where = f"{count(ranks, 'rank')} on {listed(hosts)}"
        for what, those in (("spare", spare), ("not to be used", silent)):
            where += f"; {what}: {listed(those)}" * bool(those)
        if self._starts:
            say(f"start {self._starts + 1}, from {self._saved()}" + f": {where}" * bool(hosts))
        elif hosts:
            say(where)

    # An attempt

    def _attempt(self, attempt: Attempt) -> Attempt:
        """Run the job to its end, or to that of one of its hosts."""
        with tempfile.TemporaryDirectory(prefix="distgpt-hosts-") as folder:
            hosts = Path(folder) / "hosts" if attempt.rooms else None
            if hosts:
                hosts.write_text("".join(f"{room.text}\n" for room in attempt.rooms))
            words = self._line.moved(hosts, attempt.ranks).words(self._variable)
            name, _, value = self._variable.partition("=")
            try:
                child = subprocess.Popen(
                    words,
                    stdin=subprocess.DEVNULL,  # a terminal is not read from
                    stderr=subprocess.PIPE,
                    env={**os.environ, name: value},
                    start_new_session=True,  # a Ctrl-C is passed on once
                )
            except OSError as error:
                raise UsageError(f"cannot start {words[0]}: {error.strerror or error}") from error
            reader = threading.Thread(target=_pass_on, args=(child.stderr, attempt.errors), daemon=True)
            reader.start()
            watch = Watch([host for host in hosts_of(attempt.rooms) if not is_here(host)])
            try:
                self._wait(child, watch, attempt)
            finally:
                watch.close()
                if child.poll() is None:
                    with suppress(ProcessLookupError, PermissionError):
                        os.killpg(child.pid, signal.SIGKILL)
                clean_here(self._variable)  # also the launcher's ssh, and what has left its group
                attempt.code = child.wait()
                reader.join(1.0)
        return attempt

    def _wait(self, child: subprocess.Popen[bytes], watch: Watch, attempt: Attempt) -> None:
        passed: set[int] = set()
        moved_at, was = time.monotonic(), self._progress()
        while child.poll() is None:
            for number in [each for each in self._signals.came if each not in passed]:
                passed.add(number)
                # mpirun kills its ranks on a SIGHUP.
                child.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)
            attempt.gone = watch.gone()
            now, stall = time.monotonic(), self._limits.stall
            if (found := self._progress()) != was:
                moved_at, was = now, found
            if stall is not None and now - moved_at > stall:
                attempt.stalled = now - moved_at
            if attempt.gone or attempt.stalled:
                return
            time.sleep(SECONDS_BETWEEN_LOOKS)

    def _progress(self) -> tuple[int, int]:
        """Return what changes as soon as a step stands in the metrics."""
        with suppress(OSError):
            found = self._run.metrics.stat()
            return found.st_mtime_ns, found.st_size
        return 0, 0

    # What comes after it

    def _judge(self, attempt: Attempt) -> int | None:
        """Return the exit code if the run is over; None if it is to start again."""
        step = self._step()
        if attempt.code == 0 and not attempt.gone:
            return 0
        if self._signals.came:
            code = self._signals.exit_code
            if attempt.gone or attempt.code in (StorageError.exit_code, DistgptError.exit_code):
                say(f"ended by {signal_of(code).name}, with {self._saved()} saved: {attempt.why()}")
            return code
        if attempt.code in FINAL:
            say(f"not started again, as it would end so again: {attempt.why()}")
            return attempt.code
        attempt.gone = attempt.gone or [
            host for host in hosts_of(attempt.rooms) if not self._answers[host].name
        ]
        newly_lost = set(attempt.gone) - self._lost
        self._lost |= newly_lost
        if step > self._furthest:
            self._furthest, self._deaths = step, 1
        elif not newly_lost:
            self._deaths += 1
        say(f"the job has ended after step {step:,}: {attempt.why()}")
        own_code = attempt.code if attempt.code > 0 else 128 - attempt.code  # a launcher's may be a signal's
        if self._deaths >= MOST_DEATHS:
            times = f"it ended {MOST_DEATHS} times without a step beyond {self._furthest:,}"
            say(f"not started again: {times}: {attempt.why()}")
            return own_code
        if self._limits.restarts is not None and self._starts > self._limits.restarts:
            say(f"not started again: that was --restarts {self._limits.restarts}")
            return own_code
        if self._deaths == MOST_DEATHS - 1:
            self._sleep(PAUSE)
        return None

    def _step(self) -> int:
        """Return the last step that stands in the metrics."""
        with suppress(DistgptError, IndexError):
            lines = whole_lines(self._run.metrics)
            return parse_metrics(lines[-1], len(lines), self._run.metrics).step
        return 0

    def _saved(self) -> str:
        with suppress(DistgptError):
            if (step := newest_step(self._run.checkpoints)) is not None:
                return f"step {step:,}"
        return "the beginning"

    def _sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self._signals.came:
            time.sleep(SECONDS_BETWEEN_LOOKS)


class Watch:
    """A line to each of some hosts, opened again where the host is there and the line has broken."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._lines = {host: Line(host) for host in hosts}
        self._asked_at = dict.fromkeys(hosts, 0.0)

    def gone(self) -> list[str]:
        """Return the hosts that do not answer any more. Takes seconds where a line has broken."""
        now = time.monotonic()
        broken = [
            host
            for host, line in self._lines.items()
            if not line.is_open and now > self._asked_at[host] + SECONDS_BETWEEN_QUESTIONS
        ]
        if not broken:
            return []
        answers = clean(broken, f"{VARIABLE}=none")  # which nothing has: a question only
        self._asked_at |= dict.fromkeys(broken, time.monotonic())
        for host in broken:
            if answers[host].name:
                self._lines[host].close()
                self._lines[host] = Line(host)
        return [host for host in broken if not answers[host].is_there]

    def close(self) -> None:
        for line in self._lines.values():
            line.close()


def _pass_on(stream: IO[bytes] | None, kept: deque[str]) -> None:
    """Show a job's errors as they come, and keep the last lines."""
    assert stream
    for line in stream:
        with suppress(OSError):
            os.write(2, line)
        kept.append(_as_text(line.decode(errors="replace")))


def _as_text(line: str) -> str:
    """Return a line as it is without --log-format json, by which the line of an end is an object."""
    with suppress(ValueError, TypeError, KeyError):
        found = json.loads(line)
        return f"{OUR_LINE * (found['event'] == 'end')}{found['message']}\n"
    return line
