"""MPI and what starts jobs of several ranks: what there is here, and the command for a job."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distgpt.cluster.launch.environment import MPIS
from distgpt.core.base.errors import UsageError
from distgpt.core.base.system import python_code
from distgpt.core.cpu.stages import open_stage

Facts = dict[str, Any]

SECONDS_FOR_MPI = 20
HOSTS_OPTION = {vendor: MPIS[vendor].hosts for vendor in ("MPICH", "Open MPI")}  # others have MPICH's
_ASK_MPI = "from distgpt.cluster.jobs.launchers import report_mpi; report_mpi()"


@dataclass(frozen=True, slots=True)
class Launcher:
    """Words before a command that start it on several ranks, without their number."""

    words: tuple[str, ...]

    def command(self, ranks: int, words: Sequence[object]) -> list[str]:
        """Return the command as `ranks` processes."""
        return [self.words[0], "-n", str(ranks), *self.words[1:], *map(str, words)]


def find_launcher(chosen: str | None, hostfile: Path | None) -> Launcher:
    """Find the launcher `chosen`, as in "srun --mpi=pmix", or this environment's mpirun."""
    try:
        words = [own_mpirun() or "mpirun"] if chosen is None else shlex.split(chosen)
    except ValueError as error:
        raise UsageError(f"--launcher {chosen}: {str(error).lower()}") from error
    if not words or not words[0]:
        raise UsageError('--launcher names no program; give one, as in "srun --mpi=pmix", or leave it out')
    if (program := shutil.which(words[0])) is None:
        raise UsageError(f"no {words[0]} was found: pip install 'distgpt[mpich]', or give --launcher")
    return Launcher((program, *words[1:], *_hosts(program, hostfile)))


def _hosts(program: str, hostfile: Path | None) -> tuple[str, ...]:
    """Return the option for a file of hosts, which differs between launchers."""
    if hostfile is None:
        return ()
    if Path(program).name == "srun":
        raise UsageError("srun takes its hosts from the allocation: leave --hostfile out")
    if not hostfile.is_file():
        raise UsageError(f"--hostfile {hostfile}: there is no such file")
    vendor = mpirun(program)["vendor"]
    return (HOSTS_OPTION.get(vendor, HOSTS_OPTION["MPICH"]), str(hostfile))


def running_mpi() -> Facts:
    """Describe the MPI library, which must have been started."""
    from mpi4py import MPI

    vendor, version = MPI.get_vendor()
    return {
        "problem": "",
        "vendor": vendor,
        "version": ".".join(map(str, version)),
        "library": library_file(),
    }


def library_file() -> str:
    """Return the file, without links, of the MPI library in this process; "" if unknown."""
    with suppress(OSError):
        mapped = [line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
        return next((path for path in mapped if Path(path).name.startswith("libmpi")), "")
    return ""


def report_mpi() -> None:
    """Start MPI in this process and print what it is, as JSON."""
    try:
        open_stage("mpi")
        found = running_mpi()
    except UsageError as error:
        found = {"problem": str(error)}
    print(json.dumps(found), flush=True)


def distant_mpi() -> Facts:
    """Describe the MPI library from a process of its own: an MPI that cannot start may end its process."""
    try:
        child = subprocess.run(python_code(_ASK_MPI), capture_output=True, text=True, timeout=SECONDS_FOR_MPI)
    except subprocess.TimeoutExpired:
        return {"problem": f"MPI did not start within {SECONDS_FOR_MPI} s"}
    lines = [line for line in child.stdout.splitlines() if line.startswith("{")]  # libraries print, too
    if child.returncode or not lines:
        said = " ".join(child.stderr.split())[:200]
        return {"problem": f"MPI ended the process that started it ({said or 'without a message'})"}
    found: Facts = json.loads(lines[-1])
    return found


def mpirun(where: str | None = None) -> Facts:
    """Find the mpirun that a user would call, or the one at `where`, and the MPI it belongs to."""
    where = where or shutil.which("mpirun") or own_mpirun()
    if where is None:
        return {"path": None, "vendor": ""}
    try:
        says = subprocess.run([where, "--version"], capture_output=True, text=True, timeout=5).stdout
    except (OSError, subprocess.TimeoutExpired):
        says = ""
    vendors = {"Open MPI": "Open MPI", "OpenRTE": "Open MPI", "HYDRA": "MPICH", "Intel": "Intel MPI"}
    return {"path": where, "vendor": next((vendors[sign] for sign in vendors if sign in says), "")}


def is_of_family(launcher: str, vendor: str) -> bool:
    """Return whether an mpirun of one vendor starts ranks of another's library: Hydra, but not Open MPI."""
    return bool(launcher) and (launcher == "Open MPI") == (vendor == "Open MPI")


def own_mpirun() -> str | None:
    """Return the mpirun installed beside this Python, if there is one."""
    return shutil.which("mpirun", path=str(Path(sys.executable).parent))


# Hostfiles. The rules are what MPICH 5.0 and Open MPI 5.0 did when they were tried; test_hostfile.py tries
# MPICH again. Lines that one of them would read as something else are rejected.

LARGEST_HOSTFILE = 1 << 20  # bytes
MOST_RANKS = 10_000  # on a line: both mpiruns hang with many more
_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}"  # never with a - in front, which ssh takes for an option
_HOST = rf"(?P<host>(?:{_NAME}@)?{_NAME})"
_OF_OPEN_MPI = r"slots[ \t]*=[ \t]*(?P<slots>[0-9]{1,5})|max[_-]slots=[0-9]+"
_LINES = {
    "MPICH": re.compile(rf"{_HOST}(?::(?P<slots>[0-9]{{1,5}}))?(?:\s+(?:user|binding)=\S+)*\s*"),
    "Open MPI": re.compile(rf"{_HOST}(?:[ \t]+(?:{_OF_OPEN_MPI}))*[ \t]*(?:#.*)?"),
}
_FORMS = {"MPICH": "node1:4", "Open MPI": "node1 slots=4"}


@dataclass(frozen=True, slots=True)
class HostLine:
    """A line of a hostfile that is neither empty nor a comment."""

    text: str
    host: str = ""  # with its user, as ssh takes it
    slots: int = 0  # 0: it gives no number
    problem: str = ""


def parse_hostfile(content: bytes, vendor: str) -> list[HostLine]:
    """Return the lines that name a host, or try to, as the mpirun of this vendor reads them."""
    rows = enumerate(content.decode("utf-8", "replace").split("\n"), 1)
    known = vendor if vendor in _LINES else "MPICH"
    return [_line(number, text, known) for number, text in rows if text.strip() and text.strip()[0] != "#"]


def _line(number: int, text: str, vendor: str) -> HostLine:
    found = _LINES[vendor].fullmatch(text.strip(" \t"))
    slots = found and found["slots"]
    if not found or (slots and not 1 <= int(slots) <= MOST_RANKS):
        needed = f"{vendor} needs a host and its ranks, as in {_FORMS[vendor]}"
        return HostLine(text, problem=f"line {number}: {needed}, not {text!r:.60}")
    return HostLine(text, found["host"], int(slots or 0))


def hostfile_problems(vendor: str, lines: Sequence[HostLine]) -> list[str]:
    """Return why the mpirun of this vendor would refuse a hostfile, or start something else."""
    if not lines:
        return ["it names no host" + ", so that all ranks run on this machine" * (vendor != "Open MPI")]
    return [line.problem for line in lines if line.problem]
