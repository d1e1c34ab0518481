"""Before a launch: what a hostfile means to each launcher, and whether its hosts are alike.

`distgpt doctor --hostfile FILE [--ssh]` prints that, as a page or as JSON. hostfile.py reads, remote.py asks.
"""

from __future__ import annotations

import json
import platform
import shlex
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from distgpt.comm.launched import launched_as
from distgpt.doctor.facts import Facts
from distgpt.doctor.launch_page import parts, said
from distgpt.doctor.page import print_page
from distgpt.doctor.remote import SECONDS_TO_RESOLVE, Answer, asked, is_here, own_facts, resolved
from distgpt.doctor.verdicts import foreign_mpirun, grouped
from distgpt.errors import UsageError, print_lines
from distgpt.files import read_small
from distgpt.formatting import count, duration, numbered
from distgpt.jobs import hostfile
from distgpt.jobs.hostfile import Line
from distgpt.jobs.launchers import HOSTS_OPTION, distant_mpi, mpirun
from distgpt.jobs.readings import Trouble

MOST_ASKED = 1000  # hosts
ONE_NAME = "give a host one name in the hostfile"
SECONDS_OFF = 1.0  # of a clock
ROUNDING = "compiled code may round in its own way there, and a run whose ranks drift apart ends by itself"


@dataclass(frozen=True, slots=True)
class Host:
    """A host of the file, by the name that ssh is given."""

    name: str
    lines: list[Line]
    addresses: list[str] | None  # None: not known in time
    answer: Answer | None  # None: not asked

    @property
    def here(self) -> bool:
        return bool(self.answer and self.answer.here)

    @property
    def ranks(self) -> int:
        return sum(line.slots or 1 for line in self.lines)


def report(path: Path, ssh: bool, as_json: bool) -> None:
    """Print what is found; an error if a job on these hosts would not start with the MPI that is here."""
    if launched_as() > 1:
        raise UsageError("--hostfile is looked at before a launch: leave out mpirun or srun")
    found = examine(path, ssh)
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        print_page(lambda narrow: parts(found, narrow))
    if found["missing"]:
        reasons = "; ".join(said(each) for each in found["missing"][:3])
        raise UsageError(f"a job on the hosts of {path} would not start as it should: {reasons}")


def write(path: Path, writer: str) -> None:
    """Print the same hosts as another launcher wants them."""
    lines = _read(path)
    rows = hostfile.written_for(writer, lines)
    if bare := [line.number for line in lines if line.slots is None]:
        print_lines(f"{numbered('line', bare)} without a number: a rank on each", err=True)
    if users := [line.number for line in lines if line.user and writer == "slurm"]:
        print_lines(f"{numbered('line', users)}: srun takes no users, so they are left out", err=True)
    print_lines("\n".join(rows))


def examine(path: Path, ssh: bool) -> Facts:
    """Everything, ready for JSON."""
    lines = _read(path)
    verdicts = {launcher: hostfile.verdict(launcher, lines) for launcher in hostfile.LAUNCHERS}
    here, mpi = mpirun(), distant_mpi()
    own = own_facts(here["path"] or "", mpi) | {"path": here["path"] or ""}
    installed = _installed(here)
    hosts = _hosts(lines, own, ssh)
    wrong = _of_lines(hostfile.wrong(lines))
    missing = [*_of_this_machine(installed, here, mpi), *wrong]
    missing += _of_lines(verdicts[installed].troubles) if installed else []
    if installed != "srun":  # which starts nothing through ssh
        missing += _of_hosts(hosts, own)
    return {
        "hostfile": str(path),
        "mpirun": here,
        "mpi": mpi,
        "installed": installed,
        "lines": [_plain(line) for line in lines],
        "launchers": {
            launcher: {
                "reads": not (verdict.troubles or wrong),
                "ranks": verdict.ranks,
                "missing": _of_lines(verdict.troubles),
                "command": "" if verdict.troubles or wrong else _command(launcher, path, verdict.ranks),
            }
            for launcher, verdict in verdicts.items()
        },
        "hosts": [_told(host) for host in hosts],
        "missing": missing,
        "warnings": [said(each) for each in _warnings(hosts, own, installed, ssh)],
    }


def _read(path: Path) -> list[Line]:
    return hostfile.parse(read_small(path, hostfile.LARGEST))


def _installed(here: Facts) -> str:
    """The launcher of this machine; "" if there is none."""
    if here["path"]:
        return "Open MPI" if here["vendor"] == "Open MPI" else "MPICH"
    return "srun" if shutil.which("srun") else ""


def _command(launcher: str, path: Path, ranks: int | None) -> str:
    """A job on these hosts. Without a number of ranks the launcher decides."""
    mpiruns = {name: ["mpirun", option] for name, option in HOSTS_OPTION.items()}
    start, *options = {**mpiruns, "srun": ["srun", "-m", "arbitrary", "-w"]}[launcher]
    file = str(path)
    if launcher == "srun" and "/" not in file:
        file = f"./{file}"  # a word without a slash would be the name of a node
    number = [] if ranks is None else ["-n", str(ranks)]
    return shlex.join([start, *number, *options, file, "distgpt", "train", "--stage", "mpi"])


def _hosts(lines: list[Line], own: Facts, ssh: bool) -> list[Host]:
    names = hostfile.names(lines)
    addresses = resolved(list(dict.fromkeys(same[0].host for same in names.values())))
    mine = {"localhost", platform.node()}
    here = {
        name
        for name, same in names.items()
        if same[0].host in mine or any(map(is_here, addresses.get(same[0].host, ())[:4]))
    }
    others = [name for name in names if name not in here][:MOST_ASKED]
    answers = asked(others, own["path"]) if ssh else {}
    answers |= dict.fromkeys(here, Answer(own, here=True))
    return [Host(name, same, addresses.get(same[0].host), answers.get(name)) for name, same in names.items()]


# What is in the way of a launch, and what is only worth a look.


def _trouble(trouble: Trouble, **where: Any) -> Facts:
    return {**asdict(trouble), **where}


def _of_this_machine(installed: str, here: Facts, mpi: Facts) -> Iterable[Facts]:
    if not installed:
        yield _trouble(Trouble("no mpirun was found", "pip install 'distgpt[mpich]'"))
    if mpi["problem"]:
        what, _, remedy = mpi["problem"].partition("; ")
        yield _trouble(Trouble(what, remedy))
    for what in foreign_mpirun({"mpirun": here}, mpi):
        yield _trouble(Trouble(what))


def _of_lines(found: list[tuple[Trouble, list[int]]]) -> list[Facts]:
    return [_trouble(trouble, lines=sorted(set(numbers))) for trouble, numbers in found]


def _of_hosts(hosts: list[Host], own: Facts) -> list[Facts]:
    return _grouped((trouble, host.name) for host in hosts for trouble in _stops(host, own))


def _grouped(found: Iterable[tuple[Trouble, str]]) -> list[Facts]:
    return [_trouble(trouble, hosts=names) for trouble, names in grouped(found).items()]


def _stops(host: Host, own: Facts) -> Iterable[Trouble]:
    answer = host.answer
    if answer and answer.trouble:
        yield answer.trouble
    elif answer:
        its, ours = answer.facts["versions"].get("distgpt", "missing"), own["versions"]["distgpt"]
        if its != ours:
            yield Trouble(f"distgpt {its}, and here {ours}", "install the same version on all hosts")
        if answer.facts["mpi"] != own["mpi"]:
            what = f"{answer.facts['mpi']}, and here {own['mpi']}"
            yield Trouble(what, "install the same MPI on all hosts")
        elif not answer.facts["mpirun"]:
            what = f"has no {own['path']}, beside which an mpirun looks for its helper"
            yield Trouble(what, "install the MPI there at the same path, or share that folder")
    elif host.addresses == []:
        yield Trouble("nobody knows this name", "correct it, or add it to DNS or /etc/hosts")


def _warnings(hosts: list[Host], own: Facts, installed: str, ssh: bool) -> list[Facts]:
    if ssh and (unasked := [host.name for host in hosts if host.answer is None]):
        first = Trouble(f"not asked: no more than {MOST_ASKED:,} hosts are", "split the file to ask all")
        return [_trouble(first, hosts=unasked), *_warnings(hosts, own, installed, False)]
    found = [(trouble, host.name) for host in hosts for trouble in _differences(host, own, installed)]
    return [*_grouped(found), *_same_hosts(hosts)]


def _differences(host: Host, own: Facts, installed: str) -> Iterable[Trouble]:
    if host.addresses is None:
        yield Trouble(f"not resolved within {SECONDS_TO_RESOLVE:g} s", "look at /etc/resolv.conf")
    answer = host.answer
    if answer is None or not answer.facts:
        return
    facts, alike = answer.facts, "install the same versions on all hosts"
    for name in ("python", "numpy", "numba", "mpi4py"):
        its, ours = (each["versions"].get(name, "missing") for each in (facts, own))
        if its != ours:
            why = f": {ROUNDING}" if name in ("numpy", "numba") else ""
            yield Trouble(f"{name} {its}, and here {ours}{why}", alike)
    if facts["processor"] != own["processor"]:
        remedy = "use hosts of one kind, or set NUMBA_CPU_NAME and NUMBA_CPU_FEATURES alike on all"
        yield Trouble(f"another processor ({_processors(facts, own)}): {ROUNDING}", remedy)
    if abs(answer.clock) - answer.doubt > SECONDS_OFF:
        off = f"{duration(abs(answer.clock))} {'ahead' if answer.clock > 0 else 'behind'}"
        what = f"the clock is {off}: times in files and time limits will disagree"
        yield Trouble(what, "start chrony or another time service there")
    if host.ranks > facts["cores"]:
        then = (
            "Open MPI refuses that without --bind-to none" if installed == "Open MPI" else "they share them"
        )
        what = f"{count(host.ranks, 'rank')} for {count(facts['cores'], 'core')}: {then}"
        yield Trouble(what, "give it no more ranks than cores")


def _processors(facts: Facts, own: Facts) -> str:
    """What differs, in a few words."""
    its, ours = (set(each["processor"].split(" ", 1)[-1].split(",")) for each in (facts, own))
    changed = sorted(word[1:] for word in its - ours if word.startswith("-"))
    changed = [f"without {word}" for word in changed]
    changed += [f"with {word[1:]}" for word in sorted(its - ours) if word.startswith("+")]
    return ", ".join([facts["cpu"] or facts["processor"].split(" ")[0], *changed[:4]])


def _same_hosts(hosts: list[Host]) -> Iterable[Facts]:
    """One host of several names: the launcher takes it for several."""
    known = [host for host in hosts if host.addresses or (host.answer and host.answer.facts)]
    for same in grouped((_identity(host), host) for host in known).values():
        if len({host.lines[0].host for host in same}) > 1:
            twice = Trouble("one host, whose cores and memory would be counted twice", ONE_NAME)
            yield _trouble(twice, hosts=[host.name for host in same])


def _identity(host: Host) -> str:
    if host.answer and host.answer.facts:
        return str(host.answer.facts["identity"])
    return " ".join(sorted(host.addresses or ()))


def _plain(line: Line) -> Facts:
    return {
        "line": line.number,
        "text": line.text.encode(errors="backslashreplace").decode(),
        "host": line.host,
        "user": line.user,
        "ranks": line.slots,
        "dialect": line.dialect,
        "problem": asdict(line.trouble) if line.trouble else None,
        "read_by": {launcher: asdict(reading) for launcher, reading in line.readings.items()},
    }


def _told(host: Host) -> Facts:
    answer = host.answer
    found: Facts = {"host": host.name, "ranks": host.ranks, "addresses": host.addresses, "here": host.here}
    if answer:
        found |= {"trouble": asdict(answer.trouble) if answer.trouble else None, "facts": answer.facts}
        found |= {"ssh_s": answer.seconds, "clock_s": answer.clock, "clock_doubt_s": answer.doubt}
    return found
