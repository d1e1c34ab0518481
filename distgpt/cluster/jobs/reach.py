"""Hosts by name: recognize this machine, check hosts over ssh, and kill leftover processes."""

from __future__ import annotations

import platform
import shlex
import shutil
import socket
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

SSH = ("ssh", "-xT", "-o", "BatchMode=yes")
AT_ONCE = 32  # hosts
SECONDS_TO_ANSWER = 5
# Use a separate connection, since a shared one would not test the host. Log level ERROR prints failures.
ALONE = (
    *("-o", "ControlMaster=no", "-o", "ControlPath=none", "-o", "LogLevel=ERROR"),
    *("-o", f"ConnectTimeout={SECONDS_TO_ANSWER}"),
)
# Ends a connection after 6 s without an answer from the host.
KEPT_ALIVE = ("-o", "ServerAliveInterval=2", "-o", "ServerAliveCountMax=2")
# Messages of ssh if a host is up but rejects the connection.
REFUSED = ("refused", "denied", "closed by", "reset by")
_SIGN = "distgpt-host"
# Kills processes with this variable in their environment, and prints the host's name. A killed process may
# take a moment to end, and may have started another one. The script is one line: the login shell may be csh,
# which cannot quote multiple lines.
_CLEAN = """
for turn in 1 2 3 4 5 6 7 8 9 10; do
  left=;
  for file in $(grep -lszxF {variable} /proc/[0-9]*/environ 2>/dev/null); do
    number=${{file#/proc/}};
    kill -9 "${{number%/environ}}" 2>/dev/null && left=yes;
  done;
  [ "$left" ] || break;
  sleep 0.1;
done;
echo {sign} "$(uname -n)"
"""


@dataclass(frozen=True, slots=True)
class Answer:
    """A host's answer, with its own name if a job can start there."""

    name: str = ""
    problem: str = ""

    @property
    def is_there(self) -> bool:
        """Whether anything answers at the host's address."""
        return bool(self.name) or any(word in self.problem for word in REFUSED)


@cache
def addresses(name: str) -> list[str]:
    """Return the addresses of a host, given as HOST or USER@HOST."""
    try:
        result = socket.getaddrinfo(name.rpartition("@")[2], None)
    except (OSError, UnicodeError):
        return []
    return sorted({str(each[4][0]) for each in result})


def has_address(address: str) -> bool:
    """Return whether this machine has the address, since only local addresses can be bound."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as trial:
            trial.bind(place)
        return True
    except OSError:
        return False


def is_here(host: str) -> bool:
    """Return whether the host is this machine."""
    name = host.rpartition("@")[2]
    return name in ("localhost", platform.node()) or any(map(has_address, addresses(host)[:4]))


def clean(hosts: Iterable[str], variable: str) -> dict[str, Answer]:
    """Kill processes with this `NAME=value` in their environment on each host. Return the answers by host."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(pool.map(lambda host: (host, _clean(host, variable)), dict.fromkeys(hosts)))


def clean_here(variable: str) -> Answer:
    """Kill processes with this `NAME=value` in their environment on this machine."""
    return _answer(["sh", "-c", _script(variable)])


def _clean(host: str, variable: str) -> Answer:
    if is_here(host):
        return clean_here(variable)
    if shutil.which("ssh") is None:
        return Answer(problem="ssh not found; install an OpenSSH client")
    # Use sh, because the login shell may be a different one.
    return _answer([*SSH, *ALONE, *KEPT_ALIVE, "--", host, shlex.join(["sh", "-c", _script(variable)])])


def _script(variable: str) -> str:
    script = " ".join(line.strip() for line in _CLEAN.splitlines())
    return script.format(variable=shlex.quote(variable), sign=_SIGN)


def _answer(words: list[str]) -> Answer:
    """Take the name from the last line. Login scripts may print other lines first."""
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, timeout=3 * SECONDS_TO_ANSWER
        )
    except subprocess.TimeoutExpired:
        return Answer(problem="no answer")
    sign, _, name = (done.stdout.decode(errors="replace").splitlines() or [""])[-1].partition(" ")
    if sign == _SIGN and name:
        return Answer(name)
    said = done.stderr.decode(errors="replace").strip().splitlines() or ["no answer"]
    return Answer(problem=said[-1][:200])


def connect(host: str) -> subprocess.Popen[bytes]:
    """Open a connection that ends soon after the host stops answering."""
    words = [*SSH, *ALONE, *KEPT_ALIVE, "--", host, "cat"]  # cat ends with this process
    nothing = subprocess.DEVNULL
    return subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=nothing, stderr=nothing, start_new_session=True
    )
