"""`distgpt doctor --hostfile FILE [--ssh]`: check the hosts of a hostfile before a launch.

The answers of hosts over ssh are not trusted. Only `HostFacts` are parsed.
"""

from __future__ import annotations

import json
import os
import platform
import re
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

from distgpt.cluster.jobs.launchers import (
    HOSTS_OPTION,
    LARGEST_HOSTFILE,
    HostLine,
    distant_mpi,
    hostfile_problems,
    mpirun,
    parse_hostfile,
)
from distgpt.cluster.jobs.processes import own_program
from distgpt.cluster.jobs.reach import AT_ONCE, SSH, addresses, is_here
from distgpt.cluster.launch.environment import launched_as
from distgpt.core.base.checked import Count, checked, parse_json
from distgpt.core.base.errors import UsageError, print_lines
from distgpt.core.base.files import read_small
from distgpt.core.base.formatting import count
from distgpt.core.base.system import python
from distgpt.core.comm.resources import granted_cores
from distgpt.core.train.report import processor_name
from distgpt.measure.doctor.facts import Facts, versions
from distgpt.measure.doctor.report import AS_ROOT, MOST_HOSTS, foreign_mpirun, is_refused_as_root, rows
from distgpt.show.page import terminal_table

SECONDS = 40.0  # timeout of an answer; Python may load from a slow network disk
MOST_PROBLEMS = 12  # shown on the page
ROUNDING = "compiled code may round differently there, and a run stops if its ranks diverge"
_ASK = "from distgpt.measure.doctor.hosts import tell; tell"


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Facts about one host: properties that must match on all hosts of a job, and the ranks it can take."""

    processor: str
    mpi: str
    versions: dict[str, str]
    cores: Count
    calls: list[str] = field(default_factory=list)  # addresses at which it reaches the launching host


@dataclass(slots=True)
class Host:
    """A host of the file, under the name passed to ssh, and the facts about it."""

    name: str
    ranks: int
    is_here: bool = False
    facts: HostFacts | None = None
    problem: str = ""


def report(path: Path, ssh: bool, as_json: bool) -> None:
    """Print the report. Raise a UsageError if a job on these hosts would not start with this MPI."""
    if launched_as() > 1:
        raise UsageError("--hostfile must be checked before a launch; omit mpirun or srun")
    result = examine(path, ssh)
    if as_json:
        print(json.dumps(result, indent=1))
    else:
        print_lines("\n".join(_lines(result)))
    if result["problems"]:
        reasons = "; ".join(result["problems"][:3])
        raise UsageError(f"a job on the hosts of {path} would not start correctly: {reasons}")


def examine(path: Path, ssh: bool) -> Facts:
    here, mpi = mpirun(), distant_mpi()
    vendor = "Open MPI" if here["vendor"] == "Open MPI" else "MPICH"
    lines = parse_hostfile(read_small(path, LARGEST_HOSTFILE), vendor)
    own = own_facts(mpi)
    hosts = _hosts(lines, own)
    if ssh:
        if shutil.which("ssh") is None:
            raise UsageError("--ssh: ssh not found; install an OpenSSH client, or omit --ssh")
        with ThreadPoolExecutor(AT_ONCE) as pool, _listening() as back:
            list(pool.map(partial(_ask, back), (host for host in hosts if not host.is_here)))
    problems = [] if here["path"] else ["mpirun not found: pip install 'distgpt[mpich]'"]
    problems += [mpi["problem"]] if mpi["problem"] else []
    problems += [*foreign_mpirun(here, mpi), *hostfile_problems(vendor, lines)]
    warnings: list[str] = []
    for host in hosts:
        for result, texts in zip((problems, warnings), _judged(host, own), strict=True):
            result += [f"{host.name}: {text}" for text in texts]
    localhost, unreached = _way_back(hosts) if vendor == "MPICH" else ("", [])
    problems += unreached
    ranks = sum(host.ranks for host in hosts)
    # Open MPI searches the PATH of the remote ssh session for a program, MPICH the local PATH.
    program = own_program() if vendor == "Open MPI" else ["distgpt"]
    as_root = [AS_ROOT] * (vendor == "Open MPI" and is_refused_as_root())
    named = ["-localhost", localhost] if localhost else []
    start = ["mpirun", *as_root, *named, "-n", ranks, HOSTS_OPTION[vendor], path]
    return {
        "hostfile": str(path),
        "launcher": vendor,
        "command": "" if problems else shlex.join(map(str, [*start, *program, "train", "--stage", "mpi"])),
        "hosts": [asdict(host) for host in hosts],
        "problems": problems,
        "warnings": warnings,
    }


def _hosts(lines: list[HostLine], own: HostFacts) -> list[Host]:
    """Return each host once, with all its ranks. Hosts that are this machine get its facts."""
    ranks: dict[str, int] = {}
    for line in lines:
        if not line.problem:
            ranks[line.host] = ranks.get(line.host, 0) + (line.slots or 1)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(addresses, ranks))  # fills a cache
        here = dict(zip(ranks, pool.map(is_here, ranks), strict=True))
    return [Host(name, n, here[name], own if here[name] else None) for name, n in ranks.items()]


# Answers over ssh


def own_facts(mpi: Facts) -> HostFacts:
    from distgpt.core.cpu.compiling.processor import processor

    name, features = processor()
    works = mpi["problem"] or f"{mpi['vendor']} {mpi['version']}"
    return HostFacts(f"{processor_name()}, {name} {features}", works, versions(), granted_cores().whole)


def tell(name: str, port: int, token: str) -> None:
    """Print the facts of this machine over ssh, and the addresses at which it reaches the launching host.

    A launcher passes its own `name` to other hosts. The other candidate is the client's address in ssh.
    """
    result = dict.fromkeys([name, os.environ.get("SSH_CONNECTION", "").partition(" ")[0]])
    calls = [address for address in result if address and _answers(address, port, token)]
    print(json.dumps(asdict(replace(own_facts(distant_mpi()), calls=calls))), flush=True)


def _answers(address: str, port: int, token: str) -> bool:
    with suppress(OSError), socket.create_connection((address, port), timeout=5) as server:
        server.settimeout(5)
        return server.recv(len(token)) == token.encode()
    return False


@contextmanager
def _listening() -> Iterator[tuple[str, int, str]]:
    """Answer connections. Yield the name of this machine, the port, and the answer."""
    token = secrets.token_hex(8)

    def answer() -> None:
        with suppress(OSError):  # the server is closed
            while True:
                client, _ = server.accept()
                with client:
                    client.sendall(token.encode())

    with socket.create_server(("", 0)) as server:
        threading.Thread(target=answer, daemon=True).start()
        try:
            yield platform.node(), server.getsockname()[1], token
        finally:
            server.shutdown(socket.SHUT_RDWR)


def _way_back(hosts: list[Host]) -> tuple[str, list[str]]:
    """Return the address at which all hosts reach this machine ("": its name works), and problems."""
    asked = [(host.name, host.facts) for host in hosts if host.facts and not host.is_here]
    name, calls = platform.node(), {host: set(facts.calls) for host, facts in asked}
    lost = [host for host, reached in calls.items() if name not in reached]
    if not lost:
        return "", []
    # The hosts' answers are not trusted, and this becomes part of a command.
    if common := [each for each in set.intersection(*calls.values()) if re.fullmatch(r"[\da-f.:]+", each)]:
        return min(common), []
    return "", [f"{', '.join(lost)}: cannot connect to this machine ({name}); fix DNS or the firewall"]


def _ask(back: tuple[str, int, str], host: Host) -> None:
    words = [*SSH, "-o", "ConnectTimeout=8", "--", host.name, shlex.join(python("-c", f"{_ASK}{back}"))]
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=SECONDS)
        # The facts are the last line. Login scripts may print other lines first.
        host.facts = checked(HostFacts, parse_json((done.stdout.splitlines() or [b""])[-1]))
    except subprocess.TimeoutExpired:
        host.problem = f"did not answer within {SECONDS:g} s; try ssh -v {host.name}"
    except ValueError:
        said = done.stderr.decode(errors="replace").strip().splitlines() or ["no facts printed"]
        remedy = f"it must run {sys.executable} with this distgpt over ssh, without a password"
        host.problem = f"{said[-1][:200]}; {remedy}"


# Problems that stop a job, and warnings.


def _judged(host: Host, own: HostFacts) -> tuple[list[str], list[str]]:
    """Return the problems that stop a job on a host, and the warnings."""
    facts = host.facts
    if facts is None and not addresses(host.name):
        return ["unknown host name; fix it, or add it to DNS or /etc/hosts"], []
    if facts is None:
        return [host.problem] * bool(host.problem), []
    stops: list[str] = []
    differs: list[str] = []
    if facts.mpi != own.mpi:
        stops.append(f"{facts.mpi}, but {own.mpi} on this machine; install the same MPI on all hosts")
    for name in ("distgpt", "python", "numpy", "numba", "mpi4py"):
        its, ours = (each.versions.get(name, "missing") for each in (facts, own))
        if its != ours:
            result = f"{name} {its}, but {ours} on this machine; install the same version on all hosts"
            (stops if name == "distgpt" else differs).append(result)
    if facts.processor != own.processor:
        model = facts.processor.partition(",")[0]
        differs.append(f"different processor or processor features ({model}): {ROUNDING}")
    if host.ranks > facts.cores:
        what = f"{count(host.ranks, 'rank')} for {count(facts.cores, 'core')}"
        differs.append(f"{what}; start at most one rank per core")
    return stops, differs


def _lines(found: Facts) -> Iterator[str]:
    hosts = found["hosts"]
    ranks = count(sum(host["ranks"] for host in hosts), "rank")
    yield f"{found['hostfile']}: {count(len(hosts), 'host')}, {ranks}"
    table = []
    for host in hosts[:MOST_HOSTS]:
        facts = host["facts"] or {"versions": {}, "cores": "", "mpi": "not checked"}
        seen = [facts["versions"].get(name, "") for name in ("distgpt", "python")]
        table.append([host["name"], str(host["ranks"]), str(facts["cores"]), *seen, facts["mpi"]])
    if table:
        yield terminal_table(("host", "ranks", "cores", "distgpt", "Python", "MPI"), table)
    for title, texts in (("problems", found["problems"]), ("warnings", found["warnings"])):
        if texts:
            yield title
            yield from rows(("•", text) for text in texts[:MOST_PROBLEMS])
        if len(texts) > MOST_PROBLEMS:
            yield f"  and {len(texts) - MOST_PROBLEMS} more; --json lists all"
    if found["command"]:
        yield f"{found['launcher']} reads it → {found['command']}"
