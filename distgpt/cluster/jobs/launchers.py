"""MPI and launchers: find the installed ones, and make the command that starts a job of multiple ranks."""

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
HOSTS_OPTION = {vendor: MPIS[vendor].hosts for vendor in ("MPICH", "Open MPI")}  # all others use MPICH's
_ASK_MPI = "from distgpt.cluster.jobs.launchers import report_mpi; report_mpi()"


@dataclass(frozen=True, slots=True)
class Launcher:
    """The words before a command that start it on multiple ranks, without the number of ranks."""

    words: tuple[str, ...]

    def command(self, ranks: int, words: Sequence[object]) -> list[str]:
        return [self.words[0], "-n", str(ranks), *self.words[1:], *map(str, words)]


def find_launcher(chosen: str | None, hostfile: Path | None) -> Launcher:
    """Find the launcher `chosen`, such as "srun --mpi=pmix", or this environment's mpirun."""
    try:
        words = [own_mpirun() or "mpirun"] if chosen is None else shlex.split(chosen)
    except ValueError as error:
        raise UsageError(f"--launcher {chosen}: {str(error).lower()}") from error
    if not words or not words[0]:
        raise UsageError('--launcher is empty; name a program, such as "srun --mpi=pmix", or omit the option')
    if (program := shutil.which(words[0])) is None:
        raise UsageError(f"{words[0]} not found in PATH; pip install 'distgpt[mpich]', or pass --launcher")
    return Launcher((program, *words[1:], *_hosts(program, hostfile)))


def _hosts(program: str, hostfile: Path | None) -> tuple[str, ...]:
    """Return the hostfile option, which differs between launchers."""
    if hostfile is None:
        return ()
    if Path(program).name == "srun":
        raise UsageError("srun takes its hosts from the allocation; omit --hostfile")
    if not hostfile.is_file():
        raise UsageError(f"--hostfile {hostfile} does not exist")
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
    """Return the resolved path of the MPI library in this process; "" if unknown."""
    with suppress(OSError):
        mapped = [line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
        return next((path for path in mapped if Path(path).name.startswith("libmpi")), "")
    return ""


def report_mpi() -> None:
    """Start MPI in this process and print a description as JSON."""
    try:
        open_stage("mpi")
        result = running_mpi()
    except UsageError as error:
        result = {"problem": str(error)}
    print(json.dumps(result), flush=True)


def distant_mpi() -> Facts:
    """Describe the MPI library from a child process: an MPI that cannot start may end its process."""
    try:
        child = subprocess.run(python_code(_ASK_MPI), capture_output=True, text=True, timeout=SECONDS_FOR_MPI)
    except subprocess.TimeoutExpired:
        return {"problem": f"MPI did not start within {SECONDS_FOR_MPI} s"}
    lines = [line for line in child.stdout.splitlines() if line.startswith("{")]  # libraries also print
    if child.returncode or not lines:
        said = " ".join(child.stderr.split())[:200]
        return {"problem": f"MPI failed to start ({said or 'no message'})"}
    result: Facts = json.loads(lines[-1])
    return result


def mpirun(where: str | None = None) -> Facts:
    """Find the mpirun that a user would call, or the one at `where`, and its MPI."""
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
    """Return whether one vendor's mpirun can start another's ranks: true for Hydra, not for Open MPI."""
    return bool(launcher) and (launcher == "Open MPI") == (vendor == "Open MPI")


def own_mpirun() -> str | None:
    """Return the mpirun installed next to this Python, if any."""
    return shutil.which("mpirun", path=str(Path(sys.executable).parent))


# Hostfiles. The rules follow tests with MPICH 5.0 and Open MPI 5.0; test_hostfile.py repeats the tests with
# MPICH. Lines that one of them would misread are rejected.

LARGEST_HOSTFILE = 1 << 20  # bytes
MOST_RANKS = 10_000  # per line; with many more, both mpiruns hang
_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}"  # no leading -, which ssh would parse as an option
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
    host: str = ""  # optionally USER@, in ssh's syntax
    slots: int = 0  # 0: not specified
    problem: str = ""


def parse_hostfile(content: bytes, vendor: str) -> list[HostLine]:
    """Return the lines of a hostfile, valid or not, parsed in the same way as this vendor's mpirun."""
    rows = enumerate(content.decode("utf-8", "replace").split("\n"), 1)
    known = vendor if vendor in _LINES else "MPICH"
    return [_line(number, text, known) for number, text in rows if text.strip() and text.strip()[0] != "#"]


def _line(number: int, text: str, vendor: str) -> HostLine:
    result = _LINES[vendor].fullmatch(text.strip(" \t"))
    slots = result and result["slots"]
    if not result or (slots and not 1 <= int(slots) <= MOST_RANKS):
        needed = f"{vendor} requires a host and its ranks, such as {_FORMS[vendor]}"
        return HostLine(text, problem=f"line {number}: {needed}, not {text!r:.60}")
    return HostLine(text, result["host"], int(slots or 0))


def hostfile_problems(vendor: str, lines: Sequence[HostLine]) -> list[str]:
    """Return why this vendor's mpirun would reject or misread a hostfile."""
    if not lines:
        return ["no host is listed" + ", so all ranks would run on this machine" * (vendor != "Open MPI")]
    return [line.problem for line in lines if line.problem]
