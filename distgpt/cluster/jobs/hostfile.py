"""Hostfiles: the hosts and ranks on their lines, and where an mpirun would read something else.

MPICH reads `node1:4`, Open MPI `node1 slots=4`. The rules are what MPICH 5.0 and Open MPI 5.0 did when they
were tried; tests/cluster/test_hostfile.py tries MPICH again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

LARGEST = 1 << 20  # bytes of a file
MOST_RANKS = 10_000  # on a line: both mpiruns hang with many more
_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}"  # never with a - in front, which ssh takes for an option
_LINE = re.compile(rf"(?P<host>(?:{_NAME}@)?{_NAME})(?::(?P<slots>\S*))?(?P<rest>(?:\s.*)?)")
_KNOWN = {  # words that may stand behind a host
    "MPICH": re.compile(r"(user|binding)=\S+"),
    "Open MPI": re.compile(r"(slots|max_slots|max-slots)=\d+"),
}


@dataclass(frozen=True, slots=True)
class Line:
    """A line that is neither empty nor a comment."""

    number: int
    host: str = ""  # with its user, as ssh takes it
    slots: int | None = None  # None: it gives no number
    dialect: str = ""  # the MPI that writes the number so
    rest: str = ""  # what stands behind the host
    problem: str = ""  # why no launcher can read it


def parse(content: bytes) -> list[Line]:
    """Return the lines that name a host, or try to."""
    rows = enumerate(content.decode("utf-8", "replace").split("\n"), 1)
    return [_line(number, text) for number, text in rows if text.strip() and text.strip()[0] != "#"]


def _line(number: int, text: str) -> Line:
    found = _LINE.fullmatch(text.strip(" \t\r"))
    if found is None:
        return Line(number, problem="names no host: write a name of letters, digits, - and ., as in node1:4")
    host, rest, given = found["host"], found["rest"] + "\r" * ("\r" in text), found["slots"]
    dialect = "MPICH" if given is not None else ""
    if given is None and (apart := re.search(r"\sslots\s*=\s*(\S*)", rest)):
        given, dialect = apart[1], "Open MPI"
    if given is None and re.match(r"\s*[:0-9]", rest):
        return Line(number, host, problem=f"has a space before its number: write {host}:4 or {host} slots=4")
    if given is None:
        return Line(number, host, rest=rest)
    if not re.fullmatch("[0-9]{1,9}", given) or not 1 <= int(given) <= MOST_RANKS:
        words = f"gives no number of ranks from 1 to {MOST_RANKS:,}: write {host}:4 or {host} slots=4"
        return Line(number, host, problem=words)
    return Line(number, host, int(given), dialect, rest)


def problems(vendor: str, lines: list[Line]) -> list[str]:
    """Return where the mpirun of this vendor would refuse the file, or start something else."""
    if not lines:
        return ["it names no host" + ", so that all ranks run on this machine" * (vendor == "MPICH")]
    found = [(line, line.problem or _misread(vendor, line)) for line in lines]
    seen: set[str] = set()
    for line in lines if vendor == "Open MPI" else ():
        known_as = line.host if re.fullmatch(r"[0-9.]+", line.host) else line.host.partition(".")[0]
        if known_as in seen and line.slots is not None:
            found.append((line, f"Open MPI refuses a second number of slots for {line.host}: write it once"))
        seen.add(known_as)
    return [f"line {line.number}: {problem}" for line, problem in found if problem]


def _misread(vendor: str, line: Line) -> str:
    """Return why an mpirun would not read what this line means; "" where it does."""
    if line.dialect not in ("", vendor):
        ours = f"{line.host}:{line.slots}" if vendor == "MPICH" else f"{line.host} slots={line.slots}"
        return f"{vendor} does not read the number of another MPI: write {ours}"
    if "\r" in line.rest and vendor == "Open MPI":
        return r"Open MPI refuses the line ends of Windows: sed -i 's/\r$//' writes those of Unix"
    options = line.rest if vendor == "MPICH" else re.sub(r"\s*=\s*", "=", line.rest.partition("#")[0])
    if not all(map(_KNOWN[vendor].fullmatch, options.split())):
        return f"{vendor} refuses {options.strip():.40}: write one host on a line, with its number"
    return ""
