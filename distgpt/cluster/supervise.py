"""`distgpt supervise`: restart a run after a lost rank or host, from outside of mpirun.

It starts a launch line such as `mpirun -n 8 -f hosts distgpt train …`, monitors its hosts, and restarts it
from its last checkpoint on hosts that still answer. In batch systems, the job script does this.
"""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from distgpt.cluster.jobs.launchers import (
    LARGEST_HOSTFILE,
    HostLine,
    hostfile_problems,
    mpirun,
    parse_hostfile,
)
from distgpt.cluster.jobs.processes import ending
from distgpt.cluster.jobs.reach import Answer, clean, clean_here, connect, is_here
from distgpt.core.base.errors import DistgptError, MismatchError, NonFiniteError, UsageError
from distgpt.core.base.files import read_small
from distgpt.core.base.formatting import count, long_duration
from distgpt.core.base.interrupts import PendingSignals, deferred_signals
from distgpt.core.comm.job import say
from distgpt.core.saved.checkpoint import newest_step
from distgpt.core.saved.rundir import RunDirectory, parse_metrics, whole_lines

TRAINS = ("train", "tune")
# Options of MPICH, Intel MPI and Open MPI, with one dash or two, and their meaning.
OPTIONS = {
    **dict.fromkeys(("n", "np", "c"), "ranks"),
    **dict.fromkeys(("f", "hostfile", "machinefile", "default-hostfile"), "hostfile"),
    **dict.fromkeys(("ppn", "perhost", "N", "npernode"), "each"),
    **dict.fromkeys(("hosts", "host", "H"), "hosts"),
}
LAUNCHERS = ("mpirun", "mpiexec", "orterun", "prterun")
MOST_NAMED = 6  # hosts in a message
# Exit codes that would repeat (distgpt, sysexits.h, shells), including a host that computes wrongly. A lost
# rank is 70 if MPI notifies the others, so 70 is always retried.
FINAL = (2, 64, 65, MismatchError.exit_code, NonFiniteError.exit_code, 126, 127)
KILLED = (signal.SIGKILL, 128 + signal.SIGKILL, -signal.SIGKILL)  # codes from mpirun, a shell, Python
MOST_DEATHS = 3  # failures in a row without progress
SECONDS_BETWEEN_LOOKS = 0.2
SECONDS_BETWEEN_QUESTIONS = 5.0  # between checks of a host that rejects ssh, or that a job waits for
PAUSE = 5.0  # before the third attempt, since a missing disk may be back
VARIABLE = "DISTGPT_SUPERVISED"  # set in all processes that a supervisor starts


@dataclass(frozen=True, slots=True)
class LaunchLine:
    """The parts of a launch line. `launcher` is empty if a single process starts without one."""

    launcher: tuple[str, ...]
    program: tuple[str, ...]  # distgpt
    command: tuple[str, ...]  # train, and its options
    mpirun: str | None  # the program that starts the ranks, if it is an mpirun
    at: Mapping[str, int]  # indexes in `launcher` of option values, by OPTIONS
    ranks: int

    def value(self, option: str) -> str | None:
        return self.launcher[self.at[option]] if option in self.at else None

    def words(self, variable: str, ranks: int, hosts: Path | None) -> list[str]:
        """Return the launch line for `ranks` on another hostfile, with `variable` in every environment.

        It uses env, because Open MPI does not pass variables to other hosts by default.
        """
        words = list(self.launcher)
        for option, value in (("ranks", ranks), ("hostfile", hosts)):
            if value and option in self.at:
                words[self.at[option]] = str(value)
        return [*words, *(["env", variable] if words else []), *self.program, *self.command]


def parse(words: Sequence[str]) -> LaunchLine:
    result = (i for i in range(1, len(words)) if words[i] in TRAINS and Path(words[i - 1]).name == "distgpt")
    if (train := next(result, None)) is None:
        raise UsageError("pass the launch line after --, such as -- mpirun -n 8 -f hosts distgpt train …")
    if ":" in words:
        raise UsageError("only one program can be supervised; remove the : and the programs after it")
    begin = train - 3 if train > 2 and words[train - 2] in ("-m", "-P") else train - 1  # python -m distgpt
    launcher: list[str] = []
    for word in words[:begin]:
        option, equals, value = word.partition("=")
        launcher += [option, value] if equals and _option(option) else [word]
    starts = (i for i, word in enumerate(launcher) if Path(word).name.startswith(LAUNCHERS))
    mpirun = next(starts, None)
    after = range(len(launcher) if mpirun is None else mpirun + 1, len(launcher) - 1)
    at = {option: i + 1 for i in after if (option := _option(launcher[i]))}
    if "hosts" in at:
        named = launcher[at["hosts"] - 1]
        raise UsageError(f"{named} is not supported; list the hosts in a file: mpirun -n 8 -f hosts …")
    ranks = launcher[at["ranks"]] if "ranks" in at else "1" if mpirun is None else ""
    if not ranks.isdecimal() or not int(ranks):
        raise UsageError("the launch line has no number of ranks; set it, such as mpirun -n 8 …")
    program, command = tuple(words[begin:train]), tuple(words[train:])
    name = None if mpirun is None else launcher[mpirun]
    return LaunchLine(tuple(launcher), program, command, name, at, int(ranks))


def _option(word: str) -> str:
    """Return the meaning of an mpirun option; "" for any other word."""
    return OPTIONS.get(word.lstrip("-"), "") if word.startswith("-") else ""


def read_rooms(line: LaunchLine) -> list[HostLine]:
    """Return the lines of a launch's hostfile with their slots. Reject one with fewer slots than ranks."""
    if (given := line.value("hostfile")) is None:
        return []
    path = Path(given)
    if not path.is_file():
        raise UsageError(f"hostfile {path} does not exist")
    vendor = mpirun(line.mpirun)["vendor"]
    lines = parse_hostfile(read_small(path, LARGEST_HOSTFILE), vendor)
    if problems := hostfile_problems(vendor, lines):
        raise UsageError(f"{path}: {problems[0]}")
    each = line.value("each") or ""
    usual = int(each) if each.isdecimal() else 0
    if vendor == "Open MPI" and not usual and not all(one.slots for one in lines):
        raise UsageError(f"{path}: set the slots of each host, such as node1 slots=4")
    rooms = [replace(one, slots=one.slots or usual or 1) for one in lines]
    if (most := sum(room.slots for room in rooms)) < line.ranks:
        raise UsageError(f"{path} has only {most} slots for {line.ranks} ranks; set the slots of each host")
    return rooms


def chosen(rooms: Sequence[HostLine], there: Collection[str], ranks: int) -> list[HostLine]:
    """Return the first lines on hosts that answer, as many as the ranks need or as there are."""
    result: list[HostLine] = []
    for room in rooms:
        if room.host in there and sum(each.slots for each in result) < ranks:
            result.append(room)
    return result


def hosts_of(rooms: Sequence[HostLine]) -> list[str]:
    """Return each host once, in order."""
    return list(dict.fromkeys(room.host for room in rooms))


def listed(hosts: Sequence[str]) -> str:
    more = f" and {len(hosts) - MOST_NAMED} more" if len(hosts) > MOST_NAMED else ""
    return ", ".join(hosts[:MOST_NAMED]) + more


@dataclass(slots=True)
class Attempt:
    """A start of the job, and how it ended."""

    rooms: list[HostLine]
    ranks: int
    code: int = 0
    gone: list[str] = field(default_factory=list)  # hosts that stopped answering
    stalled: float = 0.0  # seconds without a step before it was ended; 0: no stall

    def why(self) -> str:
        if self.gone:
            return f"{listed(self.gone)} stopped answering"
        if self.stalled:
            return f"no step for {long_duration(self.stalled)}"
        return "a rank was killed" if self.code in KILLED else ending(self.code)


class Supervisor:
    """Restarts a run in the directory `out`.

    `least`: minimum number of ranks. `restarts`: maximum number of restarts. `stall`: maximum seconds
    without a step. None: no limit.
    """

    def __init__(
        self, line: LaunchLine, out: Path, on_gpu: bool, least: int, restarts: int | None, stall: float | None
    ) -> None:
        self._line, self._run, self._on_gpu = line, RunDirectory(out), on_gpu
        self._least, self._restarts, self._stall = least, restarts, stall
        if least > line.ranks:
            raise UsageError(f"--min-ranks {least} exceeds the {line.ranks} ranks of the launch line")
        self._rooms = read_rooms(line)
        self._variable = f"{VARIABLE}={platform.node()}-{os.getpid()}-{time.time_ns()}"
        self._signals = PendingSignals()
        self._names: dict[str, str] = {}  # hosts' own names, once they have answered
        self._answers: dict[str, Answer] = {}  # answers at this restart
        self._lost: set[str] = set()  # hosts lost at any time
        self._furthest, self._deaths, self._starts = -1, 0, 0

    def run(self) -> int:
        with deferred_signals(self._signals):
            try:
                while (attempt := self.place()) is not None:
                    self._run_once(attempt)
                    self._starts += 1
                    if attempt.code or attempt.gone:
                        self._clean(known_gone=attempt.gone)
                    if (code := self._judge(attempt)) is not None:
                        return code
            finally:
                clean_here(self._variable)
        return self._signals.exit_code

    # Hosts

    def _clean(self, known_gone: Sequence[str] = ()) -> None:
        """Kill leftover processes on all hosts that answer, and store the answers."""
        clean_here(self._variable)
        asked = [host for host in hosts_of(self._rooms) if host not in known_gone]  # a lost host takes 5 s
        self._answers = dict.fromkeys(known_gone, Answer(problem="no answer")) | clean(asked, self._variable)
        self._names |= {host: answer.name for host, answer in self._answers.items() if answer.name}

    def place(self) -> Attempt | None:
        """Choose hosts as soon as enough of them answer. Return None if a signal arrives first."""
        wanted, has_waited = self._line.ranks, False
        if self._rooms and not self._answers:
            self._clean()
        while not self._signals.came:
            there = {host for host, answer in self._answers.items() if answer.name}
            rooms = chosen(self._rooms, there, wanted)
            ranks = min(wanted, sum(room.slots for room in rooms)) if self._rooms else wanted
            least = self._least if self._run.config.exists() else wanted
            if least <= ranks < wanted:
                ranks = self._dividing(ranks)
                rooms = chosen(self._rooms, there, ranks)
            silent = [host for host in hosts_of(self._rooms) if host not in there]
            if ranks >= least:
                # At the first start, a host that is up but rejects ssh may be running a healthy job.
                lost = [host for host in silent if self._starts or not self._answers[host].is_there]
                self._take_over(lost)
                begin = f"start {self._starts + 1}, from {self._saved()}" if self._starts else ""
                where = f"{count(ranks, 'rank')} on {listed(hosts_of(rooms))}" if rooms else ""
                if text := ": ".join(filter(None, (begin, where))):
                    say(text + f"; not to be used: {listed(silent)}" * bool(silent))
                return Attempt(rooms, ranks)
            if not self._starts and not self._run.config.exists():
                raise UsageError(
                    f"{listed(silent)} cannot be used ({self._answers[silent[0]].problem}), and a new run"
                    f" requires all {wanted} ranks; run distgpt doctor --hostfile FILE --ssh"
                )
            if not has_waited:
                has_waited = True
                say(f"waiting for {listed(silent)}: {ranks} of at least {least} ranks available")
            self._sleep(SECONDS_BETWEEN_QUESTIONS)
            self._clean()
        return None

    def _dividing(self, most: int) -> int:
        """Return the largest number of ranks, up to `most`, that the run's settings allow."""
        from distgpt.core.train.plan import reject_unsuited

        saved = self._run.saved()
        assert saved
        for ranks in range(most, 1, -1):
            with suppress(UsageError):
                reject_unsuited(saved.train, ranks, self._on_gpu)
                return ranks
        reject_unsuited(saved.train, 1, self._on_gpu)
        return 1

    def _take_over(self, lost: Sequence[str]) -> None:
        """Remove the lock of a process on a lost host, which a network disk may still have."""
        names = {self._names.get(host, host.rpartition("@")[2].partition(".")[0]) for host in lost}
        holder = self._run.lock.holder()
        if holder and holder.host in names and self._run.lock.is_held():
            say(f"taking over {self._run.path} from {holder}, whose host is not available")
            self._run.lock.path.unlink(missing_ok=True)

    # An attempt

    def _run_once(self, attempt: Attempt) -> None:
        """Run the job until it ends, one of its hosts is lost, or it stalls."""
        with tempfile.TemporaryDirectory(prefix="distgpt-hosts-") as folder:
            hosts = Path(folder) / "hosts" if attempt.rooms else None
            if hosts:
                hosts.write_text("".join(f"{room.text}\n" for room in attempt.rooms))
            words = self._line.words(self._variable, attempt.ranks, hosts)
            name, _, value = self._variable.partition("=")
            try:
                child = subprocess.Popen(
                    words,
                    stdin=subprocess.DEVNULL,  # does not read from a terminal
                    env={**os.environ, name: value},
                    start_new_session=True,  # otherwise Ctrl-C would be delivered twice
                )
            except OSError as error:
                raise UsageError(f"cannot start {words[0]}: {error.strerror or error}") from error
            lines = {host: connect(host) for host in hosts_of(attempt.rooms) if not is_here(host)}
            try:
                self._wait(child, lines, attempt)
            finally:
                for line in lines.values():
                    line.kill()
                    line.communicate()
                if child.poll() is None:
                    with suppress(ProcessLookupError, PermissionError):
                        os.killpg(child.pid, signal.SIGKILL)
                clean_here(self._variable)  # also ends the launcher's ssh, and processes outside its group
                attempt.code = child.wait()

    def _wait(
        self, child: subprocess.Popen[bytes], lines: dict[str, subprocess.Popen[bytes]], attempt: Attempt
    ) -> None:
        passed: set[int] = set()
        asked_at, moved_at, was = 0.0, time.monotonic(), self._progress()
        while child.poll() is None:
            for number in [each for each in self._signals.came if each not in passed]:
                passed.add(number)
                # mpirun kills its ranks on SIGHUP.
                child.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)
            broken = [host for host, line in lines.items() if line.poll() is not None]
            if broken and time.monotonic() > asked_at + SECONDS_BETWEEN_QUESTIONS:
                answers = clean(broken, f"{VARIABLE}=none")  # matches nothing: only a check
                attempt.gone = [host for host in broken if not answers[host].is_there]
                lines |= {host: connect(host) for host in broken if answers[host].name}
                asked_at = time.monotonic()
            now = time.monotonic()
            if (result := self._progress()) != was:
                moved_at, was = now, result
            if self._stall is not None and now - moved_at > self._stall:
                attempt.stalled = now - moved_at
            if attempt.gone or attempt.stalled:
                return
            time.sleep(SECONDS_BETWEEN_LOOKS)

    def _progress(self) -> tuple[int, int]:
        """Return the time and size of the metrics, which change with each step."""
        with suppress(OSError):
            result = self._run.metrics.stat()
            return result.st_mtime_ns, result.st_size
        return 0, 0

    # After an attempt

    def _judge(self, attempt: Attempt) -> int | None:
        """Return the exit code if the run is over, or None to restart it."""
        step = self._step()
        if attempt.code == 0 and not attempt.gone:
            return 0
        if self._signals.came:
            return self._signals.exit_code
        if attempt.code in FINAL:
            say(f"not restarted, because it would fail again: {attempt.why()}")
            return attempt.code
        if not attempt.gone:
            attempt.gone = [host for host in hosts_of(attempt.rooms) if not self._answers[host].name]
        newly_lost = set(attempt.gone) - self._lost
        self._lost |= newly_lost
        if step > self._furthest:
            self._furthest, self._deaths = step, 1
        elif not newly_lost:
            self._deaths += 1
        say(f"the job ended after step {step:,}: {attempt.why()}")
        own_code = attempt.code if attempt.code > 0 else 128 - attempt.code  # a launcher's may be a signal
        if self._deaths >= MOST_DEATHS:
            say(f"not restarted: it ended {MOST_DEATHS} times without a step beyond {self._furthest:,}")
            return own_code
        if self._restarts is not None and self._starts > self._restarts:
            say(f"not restarted: reached --restarts {self._restarts}")
            return own_code
        if self._deaths == MOST_DEATHS - 1:
            self._sleep(PAUSE)
        return None

    def _step(self) -> int:
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
