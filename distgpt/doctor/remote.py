"""Other hosts: whether their names are known, and what distgpt says of itself there, asked through ssh.

What a host answers is not trusted: bytes and seconds are limited, and `_checked` takes only what it knows.
"""

from __future__ import annotations

import json
import os
import queue
import selectors
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from distgpt.checked import parse_json
from distgpt.comm.cores import usable_cores
from distgpt.doctor.facts import Facts, cpu, versions
from distgpt.jobs.launchers import distant_mpi
from distgpt.jobs.readings import Trouble
from distgpt.stages import identity

AT_ONCE = 32
SECONDS_TO_CONNECT = 8
SECONDS = 40.0  # for an answer: Python may load from a slow network disk
SECONDS_TO_RESOLVE = 20.0  # for all names
LARGEST = 1 << 16  # bytes of an answer
_TEXTS = ("identity", "cpu", "processor", "mpi")
# The first line is of any version of distgpt, the rest of this one.
_ASK = (
    "import json, distgpt; print(json.dumps({'distgpt': distgpt.__version__}), flush=True); "
    "from distgpt.doctor.remote import tell; tell()"
)

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True, slots=True)
class Answer:
    """What a host said of itself, or why it did not."""

    facts: Facts = field(default_factory=dict)
    trouble: Trouble | None = None
    here: bool = False  # it is this machine
    seconds: float = 0.0
    clock: float = 0.0  # by how much it is ahead of ours
    doubt: float = 0.0  # by how much that may be wrong


def own_facts(mpirun: str, mpi: Facts) -> Facts:
    """What has to be alike on all hosts of a job, and which host this is."""
    from distgpt.kernels.matmul.processor import processor

    name, features = processor()
    return {
        "identity": identity(),
        "cpu": cpu(),
        "processor": f"{name} {features}",
        "cores": len(usable_cores()),
        "mpi": mpi["problem"] or f"{mpi['vendor']} {mpi['version']}",
        "works": not mpi["problem"],
        "mpirun": Path(mpirun).exists(),
        "versions": versions(),
    }


def tell() -> None:
    """Print the facts, and the time once a line has come."""
    print(json.dumps(own_facts(sys.argv[1], distant_mpi())), flush=True)
    os.read(0, 1)
    print(json.dumps({"time": time.time()}), flush=True)


def resolved(hosts: list[str]) -> dict[str, list[str]]:
    """The addresses of each name: none where nobody knows it; without those that took too long."""
    return in_parallel(_addresses, hosts, SECONDS_TO_RESOLVE)


def _addresses(host: str) -> list[str]:
    try:
        return list(dict.fromkeys(str(found[4][0]) for found in socket.getaddrinfo(host, None)))
    except (OSError, UnicodeError):
        return []


def is_here(address: str) -> bool:
    """Whether it is one of this machine's: only those can be bound."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as trial:
            trial.bind(place)
        return True
    except OSError:
        return False


def in_parallel(act: Callable[[T], U], items: Iterable[T], seconds: float | None = None) -> dict[T, U]:
    """What `act` returns for each item, by some threads; without those not done after so many seconds."""
    waiting: queue.SimpleQueue[T] = queue.SimpleQueue()
    found: dict[T, U] = {}
    stopped = threading.Event()
    for item in items:
        waiting.put(item)

    def work() -> None:
        with suppress(queue.Empty):
            while not stopped.is_set():
                item = waiting.get_nowait()
                found[item] = act(item)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(AT_ONCE, waiting.qsize()))]
    end = time.monotonic() + (seconds or float("inf"))
    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads) and time.monotonic() < end:
            threads[0].join(0.02)
            threads.sort(key=threading.Thread.is_alive, reverse=True)
    finally:
        stopped.set()
    return dict(found)


def asked(logins: list[str], mpirun: str) -> dict[str, Answer]:
    """What the hosts answer through ssh, many at a time."""
    if shutil.which("ssh") is None:
        missing = Trouble("cannot be asked: there is no ssh here", "install an OpenSSH client")
        return dict.fromkeys(logins, Answer(trouble=missing))
    children: set[subprocess.Popen[bytes]] = set()
    try:
        return in_parallel(lambda login: _ask(login, mpirun, children), logins)
    finally:
        for child in list(children):  # some are left where this process is interrupted
            _kill(child)


def _ask(login: str, mpirun: str, children: set[subprocess.Popen[bytes]]) -> Answer:
    options = ("BatchMode=yes", f"ConnectTimeout={SECONDS_TO_CONNECT}", "ServerAliveInterval=10")
    flags = [word for option in options for word in ("-o", option)]
    program = shlex.join([sys.executable, "-P", "-c", _ASK, mpirun])
    begun = time.monotonic()
    try:
        child = subprocess.Popen(
            ["ssh", "-x", "-T", *flags, "--", login, program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        return Answer(trouble=Trouble(f"cannot be asked: ssh does not start ({error.strerror})"))
    children.add(child)
    talk = _Talk(child)
    try:
        end = talk.listen(begun + SECONDS)
    finally:
        _end(child)
        children.discard(child)
    if end:
        return Answer(trouble=end)
    if "time" not in talk.found:
        return Answer(trouble=_why(child.returncode, talk, login))
    facts = _checked(talk.found)
    if facts is None:
        return Answer(trouble=Trouble("answers what distgpt never says", _OTHER_VERSION))
    clock = talk.found["time"] - (talk.wall + talk.trip / 2)
    return Answer(facts, None, False, time.monotonic() - begun, clock, talk.trip / 2)


class _Talk:
    """The answers of one child as they come. When it has told its facts it is asked for the time."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self.found: Facts = {}
        self.errors = bytearray()
        self.wall = self.trip = 0.0  # when it was asked for the time, and until the answer
        self._said = bytearray()
        self._child = child

    def listen(self, deadline: float) -> Trouble | None:
        """Until it has said everything or ended; otherwise the reason to give up."""
        child = self._child
        assert child.stdout and child.stderr
        open_ends, came = 2, 0
        with selectors.DefaultSelector() as ends:
            ends.register(child.stdout, selectors.EVENT_READ, self._said)
            ends.register(child.stderr, selectors.EVENT_READ, self.errors)
            while open_ends and "time" not in self.found:
                if time.monotonic() > deadline:
                    return Trouble(f"gave no answer within {SECONDS:g} s", "try it by hand: see ssh -v")
                ready = ends.select(0.2)
                if not ready and child.poll() is not None:
                    break  # a process in its background keeps the pipe
                for key, _ in ready:
                    piece = os.read(key.fd, 4096)
                    key.data.extend(piece)
                    came += len(piece)
                    if not piece:
                        ends.unregister(key.fileobj)
                        open_ends -= 1
                if came > LARGEST:
                    return Trouble("prints without end", "what do its login scripts print?")
                self._understand()
        with suppress(subprocess.TimeoutExpired):
            child.wait(0.0 if "time" in self.found else 2.0)
        return None

    def _understand(self) -> None:
        """Lines that are JSON; login scripts print others."""
        while b"\n" in self._said:
            line, _, rest = bytes(self._said).partition(b"\n")
            self._said[:] = rest
            try:
                value = parse_json(line) if line.startswith(b"{") else None
            except ValueError:
                continue
            if not isinstance(value, dict):
                continue
            if isinstance(value.get("time"), float) and self.wall:
                self.trip = time.monotonic() - self._asked
                self.found["time"] = value["time"]
            elif "identity" in value and not self.wall:
                self.found |= {name: told for name, told in value.items() if name != "time"}
                self._ask_for_the_time()
            elif "distgpt" in value:
                self.found["distgpt"] = value["distgpt"]

    def _ask_for_the_time(self) -> None:
        assert self._child.stdin
        self._asked, self.wall = time.monotonic(), time.time()
        with suppress(OSError):
            self._child.stdin.write(b"\n")
            self._child.stdin.flush()


def _kill(child: subprocess.Popen[bytes]) -> None:
    """Also what it started, but not a shared connection that ssh leaves behind when it ends by itself."""
    with suppress(ProcessLookupError, PermissionError):
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)


def _end(child: subprocess.Popen[bytes]) -> None:
    _kill(child)
    child.wait()
    for end in (child.stdin, child.stdout, child.stderr):
        with suppress(OSError):
            if end:
                end.close()


def _checked(found: dict[str, Any]) -> Facts | None:
    """The facts among what a host said; None if they are none."""
    said = found.get("versions")
    texts = [found.get(name) for name in _TEXTS]
    if not isinstance(said, dict) or not all(isinstance(text, str) and len(text) < 8000 for text in texts):
        return None
    right = isinstance(found.get("cores"), int) and all(
        isinstance(found.get(k), bool) for k in ("works", "mpirun")
    )
    if not right or not all(isinstance(v, str) and len(v) < 100 for v in said.values()) or len(said) > 10:
        return None
    return {name: found[name] for name in (*_TEXTS, "cores", "works", "mpirun", "versions")}


_OTHER_VERSION = "install the same version on all hosts"
# What OpenSSH says, why, and the way out. {} is the host as ssh is given it.
_REFUSALS = (
    (
        "REMOTE HOST IDENTIFICATION HAS CHANGED",
        "has another host key than it used to have",
        "ask who runs it whether that is right, then forget the old key: ssh-keygen -R {}",
    ),
    (
        "Host key verification failed",
        "is not known to ssh",
        "log in once by hand and look at its key: ssh {}",
    ),
    ("Permission denied", "refuses your key", "ssh-copy-id {}; a key with a passphrase needs ssh-add first"),
    ("Could not resolve hostname", "has a name that nobody knows", "correct it, or add it to /etc/hosts"),
    ("Connection refused", "has no ssh daemon on its port", "start sshd there, or set Port in ~/.ssh/config"),
    ("timed out", "does not answer", "is it switched on, and does a firewall let ssh through?"),
    ("No route to host", "cannot be reached", "is it switched on and in the same network?"),
    ("Network is unreachable", "cannot be reached", "is it switched on and in the same network?"),
    ("kex_exchange_identification", "ends the connection", "what does its sshd log say?"),
    ("Connection closed", "ends the connection", "what does its sshd log say?"),
)


def _why(code: int | None, talk: _Talk, login: str) -> Trouble:
    said = talk.errors.decode(errors="replace")
    for sign, what, remedy in _REFUSALS if code == 255 else ():
        if sign in said:
            return Trouble(what, remedy.format(login))
    if isinstance(version := talk.found.get("distgpt"), str):
        return Trouble(f"has distgpt {version[:30]}, which cannot answer", _OTHER_VERSION)
    if code in (126, 127) or "No module named 'distgpt'" in said:
        remedy = "install it there at the same path, or share that folder"
        return Trouble(f"has no distgpt for {sys.executable}", remedy)
    last = (said.strip().splitlines() or ["without a word"])[-1]
    return Trouble(f"did not answer ({last[:200]})", "try it by hand: see ssh -v")
