"""The hosts of a hostfile before a launch: `distgpt doctor --hostfile FILE [--ssh]`, a page or JSON.

What a host answers over ssh is not trusted: only `HostFacts` is read from it.
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
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

from rich.console import RenderableType
from rich.text import Text

from distgpt.core.base.checked import Count, checked, parse_json
from distgpt.core.base.errors import UsageError
from distgpt.core.base.files import read_small
from distgpt.core.base.formatting import count
from distgpt.core.base.system import host_id, python
from distgpt.core.comm.resources import granted_cores
from distgpt.core.train.whereabouts import processor_name
from distgpt.doctor.facts import Facts, versions
from distgpt.doctor.launches import AS_ROOT, foreign_mpirun, is_refused_as_root
from distgpt.doctor.report import MOST_ROWS, cells, headed, indented, pairs, print_page
from distgpt.doctor.verdicts import grouped
from distgpt.jobs import hostfile
from distgpt.jobs.launchers import HOSTS_OPTION, distant_mpi, mpirun
from distgpt.jobs.processes import own_program
from distgpt.jobs.reach import AT_ONCE, SSH, addresses, is_here
from distgpt.launch.environment import launched_as

SECONDS = 40.0  # for their answers: Python may load from a slow network disk
MOST_PROBLEMS = 12  # on the page
ROUNDING = "compiled code may round in its own way there, and a run whose ranks drift apart ends by itself"
_ASK = "from distgpt.doctor.hosts import tell; tell"
_SSH = (*SSH, "-o", "ConnectTimeout=8")


@dataclass(frozen=True, slots=True)
class HostFacts:
    """One host: what should be alike on all hosts of a job, its identity, and the ranks it can take."""

    identity: str
    processor: str
    mpi: str
    versions: dict[str, str]
    cores: Count
    gpus: Count
    calls: list[str] = field(default_factory=list)  # addresses at which it has reached the asking machine


@dataclass(slots=True)
class Host:
    """A host of the file, by the name that ssh is given, and what is known of it."""

    name: str
    ranks: int
    addresses: list[str]
    is_here: bool = False
    facts: HostFacts | None = None
    problem: str = ""


def report(path: Path, ssh: bool, as_json: bool) -> None:
    """Print what is found; a UsageError if a job on these hosts would not start with the MPI that is here."""
    if launched_as() > 1:
        raise UsageError("--hostfile is looked at before a launch: leave out mpirun or srun")
    found = examine(path, ssh)
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        print_page(_page(found))
    if found["problems"]:
        reasons = "; ".join(found["problems"][:3])
        raise UsageError(f"a job on the hosts of {path} would not start as it should: {reasons}")


def examine(path: Path, ssh: bool) -> Facts:
    """Return everything, ready for JSON."""
    lines = hostfile.parse(read_small(path, hostfile.LARGEST))
    here, mpi = mpirun(), distant_mpi()
    vendor = "Open MPI" if here["vendor"] == "Open MPI" else "MPICH"
    own = own_facts(mpi)
    hosts = _hosts(lines, own)
    if ssh:
        if shutil.which("ssh") is None:
            raise UsageError("--ssh: there is no ssh here; install an OpenSSH client, or leave --ssh out")
        with ThreadPoolExecutor(AT_ONCE) as pool, _listening() as back:
            list(pool.map(partial(_ask, back), (host for host in hosts if not host.is_here)))
    problems = [] if here["path"] else ["no mpirun was found: pip install 'distgpt[mpich]'"]
    problems += [mpi["problem"]] if mpi["problem"] else []
    problems += [*foreign_mpirun({"mpirun": here}, mpi), *hostfile.problems(vendor, lines)]
    problems += [f"{host.name}: {problem}" for host in hosts for problem in _stops(host, own)]
    localhost, unreached = _way_back(hosts) if vendor == "MPICH" else ("", [])
    problems += unreached
    ranks = sum(host.ranks for host in hosts)
    # Open MPI looks for a program in the PATH that ssh gives there, MPICH in the one that is here.
    program = own_program() if vendor == "Open MPI" else ["distgpt"]
    as_root = [AS_ROOT.strip()] * (vendor == "Open MPI" and is_refused_as_root())
    named = ["-localhost", localhost] if localhost else []
    start = ["mpirun", *as_root, *named, "-n", ranks, HOSTS_OPTION[vendor], path]
    return {
        "hostfile": str(path),
        "launcher": vendor,
        "command": "" if problems else shlex.join(map(str, [*start, *program, "train", "--stage", "mpi"])),
        "hosts": [asdict(host) for host in hosts],
        "problems": problems,
        "warnings": [*_differences(hosts, own), *_named_twice(hosts), *_crowded(hosts)],
    }


def _hosts(lines: list[hostfile.Line], own: HostFacts) -> list[Host]:
    """Return each host once, with all its ranks; those that are this machine have its facts."""
    ranks: dict[str, int] = {}
    for line in lines:
        if not line.problem:
            ranks[line.host] = ranks.get(line.host, 0) + (line.slots or 1)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        hosts = [Host(*each) for each in zip(ranks, ranks.values(), pool.map(addresses, ranks), strict=True)]
    for host in hosts:
        if is_here(host.name):
            host.is_here, host.facts = True, own
    return hosts


# What they answer over ssh.


def own_facts(mpi: Facts) -> HostFacts:
    from distgpt.core.cpu.compiling.processor import processor
    from distgpt.gpu.probe import driver

    name, features = processor()
    gpus = found.gpus if (found := driver()) else ()
    works = mpi["problem"] or f"{mpi['vendor']} {mpi['version']}"
    cores = granted_cores().whole
    return HostFacts(host_id(), f"{processor_name()}, {name} {features}", works, versions(), cores, len(gpus))


def tell(name: str, port: int, token: str) -> None:
    """Print the facts of this machine for a doctor that asks over ssh, and how it can be reached from here.

    A launcher tells other hosts its own `name`; ssh says from which address it has come.
    """
    addresses = dict.fromkeys([name, os.environ.get("SSH_CONNECTION", "").partition(" ")[0]])
    calls = [address for address in addresses if address and _answers(address, port, token)]
    print(json.dumps(asdict(replace(own_facts(distant_mpi()), calls=calls))), flush=True)


def _answers(address: str, port: int, token: str) -> bool:
    with suppress(OSError), socket.create_connection((address, port), timeout=5) as server:
        server.settimeout(5)
        return server.recv(len(token)) == token.encode()
    return False


@contextmanager
def _listening() -> Iterator[tuple[str, int, str]]:
    """Answer connections; the name of this machine, the port, and what is answered."""
    token = secrets.token_hex(8)

    def answer() -> None:
        with suppress(OSError):  # it is closed
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


def _ask(back: tuple[str, int, str], host: Host) -> None:
    words = [*_SSH, "--", host.name, shlex.join(python("-c", f"{_ASK}{back}"))]
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=SECONDS)
        _read_answer(host, done.stdout, done.stderr)
    except subprocess.TimeoutExpired:
        host.problem = f"gave no answer within {SECONDS:g} s: try ssh -v {host.name}"


def _read_answer(host: Host, said: bytes, errors: bytes) -> None:
    """Take the facts from the last line: login scripts may print others before."""
    try:
        host.facts = checked(HostFacts, parse_json((said.splitlines() or [b""])[-1]))
    except ValueError:
        words = errors.decode(errors="replace").strip().splitlines() or ["it printed no facts"]
        remedy = f"it must run {sys.executable} with this distgpt over ssh, without a password"
        host.problem = f"{words[-1][:200]}; {remedy}"


# What stops a job, and what is only worth a look.


def _stops(host: Host, own: HostFacts) -> Iterator[str]:
    if host.facts is None and not host.addresses:
        yield "nobody knows this name: correct it, or add it to DNS or /etc/hosts"
    elif host.facts is None and host.problem:
        yield host.problem
    elif host.facts:
        its, ours = host.facts.versions.get("distgpt"), own.versions["distgpt"]
        if its != ours:
            yield f"distgpt {its}, and here {ours}: install the same version on all hosts"
        if host.facts.mpi != own.mpi:
            yield f"{host.facts.mpi}, and here {own.mpi}: install the same MPI on all hosts"


def _way_back(hosts: list[Host]) -> tuple[str, list[str]]:
    """Return the address by which all hosts reach this machine, "" if its name is one; and problems."""
    name, asked = platform.node(), [host for host in hosts if host.facts and not host.is_here]
    calls = [set(host.facts.calls) if host.facts else set() for host in asked]
    lost = [host.name for host, reached in zip(asked, calls, strict=True) if name not in reached]
    if not lost:
        return "", []
    # What hosts answer is not trusted, and this becomes a part of a command.
    if common := [each for each in set.intersection(*calls) if re.fullmatch(r"[\da-f.:]+", each)]:
        return min(common), []
    return "", [f"{', '.join(lost)}: cannot connect to {name}, this machine: correct DNS or the firewall"]


def _differences(hosts: list[Host], own: HostFacts) -> Iterator[str]:
    found = []
    for host in hosts:
        if host.facts is None:
            continue
        for name in ("python", "numpy", "numba", "mpi4py"):
            its, ours = (each.versions.get(name, "missing") for each in (host.facts, own))
            if its != ours:
                found.append((f"{name} {its}, and here {ours}", host.name))
        if host.facts.processor != own.processor:
            model = host.facts.processor.partition(",")[0]
            found.append((f"another processor or other features of it ({model}): {ROUNDING}", host.name))
    yield from (f"{', '.join(names)}: {what}" for what, names in grouped(found).items())


def _named_twice(hosts: list[Host]) -> Iterator[str]:
    """Report a host of several names, which a launcher takes for several hosts."""
    known = ((host.facts.identity if host.facts else " ".join(host.addresses), host.name) for host in hosts)
    for who, names in grouped(known).items():
        if who and len(names) > 1:
            yield f"{', '.join(names)}: one host, whose cores would be counted twice; give it one name"


def _crowded(hosts: list[Host]) -> Iterator[str]:
    for host in hosts:
        if host.facts and host.ranks > host.facts.cores:
            what = f"{count(host.ranks, 'rank')} for {count(host.facts.cores, 'core')}"
            yield f"{host.name}: {what}: give it no more ranks than cores"
        elif host.facts and 0 < host.facts.gpus < host.ranks:
            what = f"{count(host.ranks, 'rank')} for {count(host.facts.gpus, 'GPU')}"
            yield f"{host.name}: {what}, which ranks of a GPU stage would share"


def _page(found: Facts) -> Iterable[RenderableType]:
    hosts = found["hosts"]
    what = f"{count(len(hosts), 'host')}, {count(sum(host['ranks'] for host in hosts), 'rank')}"
    yield Text.assemble(*cells(found["hostfile"]), ": ", (what, "bold"), "\n")
    table = headed("ranks", "cores", left=("host", "distgpt", "Python", "MPI"))
    for host in hosts[:MOST_ROWS]:
        facts = host["facts"] or {"versions": {}, "cores": "", "mpi": "not asked"}
        seen = [facts["versions"].get(name, "") for name in ("distgpt", "python")]
        table.add_row(*cells(host["ranks"], facts["cores"], host["name"], *seen, facts["mpi"]))
    if hosts:
        yield indented(table)
    for title, texts in (
        ("[red]a job cannot run", found["problems"]),
        ("[yellow]worth a look", found["warnings"]),
    ):
        if texts:
            more = [f"and {len(texts) - MOST_PROBLEMS} more: --json lists all"] * (len(texts) > MOST_PROBLEMS)
            yield title
            yield indented(pairs(("•", text) for text in [*texts[:MOST_PROBLEMS], *more]))
    if found["command"]:
        yield Text.assemble((f"{found['launcher']} reads it", "green"), f"  → {found['command']}")
