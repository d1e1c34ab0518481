"""Hostfiles: what is meant by their lines, whether a launcher reads that, and how each of them wants it.

What each launcher reads is in readings.py.
"""

from __future__ import annotations

import ipaddress
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from distgpt.errors import DataError, UsageError
from distgpt.formatting import numbered
from distgpt.jobs.readings import (
    NUMBER,
    Reading,
    Trouble,
    read_by_mpich,
    read_by_openmpi,
    read_by_srun,
)

LARGEST = 1 << 20  # bytes of a file
MOST_LINES = 10_000
LONGEST = 1000  # characters of a line
MOST_RANKS = 10_000  # of a line; both mpiruns hang with much more
WRITERS = {"mpich": "MPICH", "openmpi": "Open MPI", "slurm": "srun"}
LAUNCHERS = tuple(WRITERS.values())

_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}"  # never with a - in front, which ssh takes for an option
_LOGIN = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}"
_USER = rf"(?:(?P<user>{_LOGIN})@)?"
_USER_APART = re.compile(rf"\buser=({_LOGIN})(?!\S)")
_HOST = rf"{_USER}(?P<host>{_NAME}|\[[0-9A-Fa-f:.]{{2,45}}\])"
_FORMS = {
    "MPICH": re.compile(rf"{_HOST}:(?P<slots>\S*)(?P<more>.*)"),
    "srun": re.compile(rf"{_HOST}\*(?P<slots>\S*)(?P<more>.*)"),
    "Open MPI": re.compile(rf"{_HOST}(?P<more>\s+\S.*)"),
    "": re.compile(_HOST),
}
_SLOTS = re.compile(r"\b(?:slots|count|cpu)\s*=\s*(\S*)")


@dataclass(frozen=True, slots=True)
class Line:
    """A line that is neither empty nor a comment: what is meant, and what each launcher reads."""

    number: int
    text: str
    host: str = ""
    user: str = ""
    slots: int | None = None  # None: it gives no number
    dialect: str = ""  # whose way of giving the number
    trouble: Trouble | None = None  # no launcher can be meant to read this
    readings: dict[str, Reading] = field(default_factory=dict)

    @property
    def login(self) -> str:
        """As ssh wants it."""
        return f"{self.user}@{self.host}" if self.user else self.host


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of a whole file in the hands of one launcher. `ranks` is None if the cores decide."""

    ranks: int | None
    troubles: list[tuple[Trouble, list[int]]]  # each with the numbers of its lines


def parse(content: bytes) -> list[Line]:
    """The lines of a hostfile, whatever is in it."""
    rows = content.split(b"\n")
    if len(rows) > MOST_LINES:
        raise DataError(f"the hostfile has more than {MOST_LINES:,} lines")
    rows_of_text = ((number, row.decode("utf-8", "surrogateescape")) for number, row in enumerate(rows, 1))
    lines = [(number, text) for number, text in rows_of_text if _says_something(text)]
    return [_line(number, text) for number, text in lines]


def _says_something(text: str) -> bool:
    words = text.removeprefix("\ufeff").strip(" \t\r\v\f")
    return bool(words) and not words.startswith("#")


def _line(number: int, text: str) -> Line:
    plain = text.removesuffix("\r").removeprefix("\ufeff" if number == 1 else "")
    if len(plain) > LONGEST:
        trouble = Trouble(f"is longer than {LONGEST} characters", "write one host on a line")
        return Line(number, f"{plain[:40]}…", trouble=trouble)
    if not plain.isascii() or any(c != "\t" and not " " <= c <= "~" for c in plain):
        what = "holds control characters" if plain.isascii() else "holds characters other than ASCII"
        trouble = Trouble(what, "write names in ASCII, as the resolver knows them")
        return Line(number, plain, trouble=trouble)
    meant = _meant(number, plain)
    readings = {
        "MPICH": read_by_mpich(text.removesuffix("\r")),
        "Open MPI": read_by_openmpi(text),
        "srun": read_by_srun(text),
    }
    judged = {launcher: _judged(launcher, reading, meant) for launcher, reading in readings.items()}
    return Line(number, plain, meant.host, meant.user, meant.slots, meant.dialect, meant.trouble, judged)


def _meant(number: int, text: str) -> Line:
    """What a person means by it."""
    words = text.partition("#")[0].strip()
    first, *rest = words.split(None, 1)
    if _is_ipv6(first) and not first.startswith("["):
        return _with_slots(Line(number, text, first, dialect="Open MPI"), _slots_of("".join(rest)))
    found = ((dialect, form.fullmatch(words)) for dialect, form in _FORMS.items())
    dialect, match = next(((dialect, match) for dialect, match in found if match), ("", None))
    if match is None:
        return Line(number, text, trouble=_bad_name(first))
    parts = match.groupdict("")
    apart = _USER_APART.search(parts.get("more", ""))
    user = parts["user"] or (apart[1] if apart else "")
    line = Line(number, text, parts["host"].strip("[]"), user, dialect=dialect)
    stray = re.fullmatch(r"\s*:?\s*([0-9]+)", parts.get("more", ""))
    if stray and not parts.get("slots"):
        remedy = f"write {line.host}:{stray[1]} or {line.host} slots={stray[1]}"
        return replace(line, trouble=Trouble("has a space before its number", remedy))
    return _with_slots(
        line, _slots_of(parts["more"]) if dialect == "Open MPI" else match.groupdict().get("slots")
    )


def _with_slots(line: Line, given: str | None) -> Line:
    """With this number, if it is one."""
    if given is None:
        return replace(line, dialect="")
    trouble = _bad_number(given)
    return replace(line, trouble=trouble) if trouble else replace(line, slots=int(given))


def _is_ipv6(name: str) -> bool:
    try:
        ipaddress.IPv6Address(name.partition("]")[0].removeprefix("["))
    except ValueError:
        return False
    return not name.startswith("[") or name.endswith("]")


def _slots_of(words: str) -> str | None:
    found = _SLOTS.search(words)
    return found[1] if found else None


def _bad_number(given: str) -> Trouble | None:
    if not NUMBER.fullmatch(given):
        if re.fullmatch(r"[0-9]+", given):
            return _too_many()
        return Trouble("does not give a number of ranks", "write a number, as in node1:4 or node1 slots=4")
    if int(given) == 0:
        return Trouble("gives its host no ranks", "take the line out, or give it a number from 1 on")
    return _too_many() if int(given) > MOST_RANKS else None


def _too_many() -> Trouble:
    return Trouble(f"asks for more than {MOST_RANKS:,} ranks", "write as many as the host has cores")


def _bad_name(first: str) -> Trouble:
    if first.startswith("-"):
        return Trouble("begins with -, which ssh would take for an option", "write the name of a host")
    if "[" in first and not first.startswith("["):
        shown = first.partition(":")[0].partition("*")[0]
        listing = f"scontrol show hostnames {shlex.quote(shown)}"
        return Trouble("names several hosts by a range", f"write one host on a line: {listing}")
    if "," in first:
        return Trouble("names several hosts", "write one host on a line")
    return Trouble("names no host", "write names of letters, digits, - and ., as in node1:4")


def _judged(launcher: str, reading: Reading, meant: Line) -> Reading:
    """Trouble where that is not what is meant."""
    if reading.trouble or meant.trouble:
        return reading
    host = reading.host.rpartition("@")[2]
    writer = next(writer for writer, name in WRITERS.items() if name == launcher)
    remedy = f"--write-for {writer} writes what it reads"
    if host.startswith("\ufeff"):
        trouble = Trouble("takes the byte order mark for part of a name", "save the file without it")
    elif host != meant.host and ":" in meant.host:
        trouble = Trouble("cannot read an IPv6 address", "give the host a name, in DNS or /etc/hosts")
    elif host != meant.host:
        also = ", and starts a rank for each core of it" if reading.ranks is None else ""
        trouble = Trouble(f"takes all of it for the name of a host{also}", remedy)
    elif launcher == "srun" and _is_address(meant.host):
        trouble = Trouble(
            "knows nodes by Slurm's names, not by addresses", "write the names that sinfo -N shows"
        )
    elif meant.slots is not None and reading.ranks != meant.slots:
        trouble = Trouble("reads another number of ranks", remedy)
    else:
        return reading
    return Reading(reading.host, reading.ranks, trouble)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


# The whole file.


def verdict(launcher: str, lines: list[Line]) -> Verdict:
    """The ranks that a launcher would start if no number is given, and what stops it or misleads it."""
    if not lines:
        return Verdict(0, [(_EMPTY[launcher], [])])
    troubles: dict[Trouble, list[int]] = {}
    for line in lines:
        if (reading := line.readings.get(launcher)) and reading.trouble:
            troubles.setdefault(reading.trouble, []).append(line.number)
    ranks = {line.number: line.readings[launcher].ranks for line in lines if launcher in line.readings}
    if launcher == "Open MPI":
        for trouble, numbers in _named_again(lines, ranks):
            troubles.setdefault(trouble, []).extend(numbers)
    known = [each for each in ranks.values() if each is not None]
    total = sum(known) if len(known) == len(lines) and not troubles else None
    return Verdict(total, list(troubles.items()))


def wrong(lines: list[Line]) -> list[tuple[Trouble, list[int]]]:
    """What is no line of any hostfile, with the numbers of the lines."""
    found: dict[Trouble, list[int]] = {}
    for line in lines:
        if line.trouble:
            found.setdefault(line.trouble, []).append(line.number)
    return list(found.items())


_AGAIN = Trouble(
    "refuses a second number of slots for a host", "write each host once, as --write-for openmpi does"
)
_LIKE = Trouble("refuses names that differ only after the first dot", "use names that differ before it")
_EMPTY = {
    "MPICH": Trouble("names no host, so that all ranks run on this machine", "write a line for each host"),
    "Open MPI": Trouble("names no host: “No nodes are available for this job”", "write a line for each host"),
    "srun": Trouble("names no host: “Hostlist is empty!”", "write a line for each host"),
}


def _named_again(lines: list[Line], ranks: dict[int, int | None]) -> Iterable[tuple[Trouble, list[int]]]:
    """Open MPI knows hosts by their names before the first dot; each mention without a number adds a rank."""
    mentions: dict[str, list[Line]] = {}
    for line in lines:
        if "Open MPI" in line.readings and (host := line.readings["Open MPI"].host):
            known_as = host if _is_address(host) else host.partition(".")[0]
            mentions.setdefault(known_as, []).append(line)
    for same in mentions.values():
        for line in same if len(same) > 1 else ():
            if ranks[line.number] is None:
                ranks[line.number] = 1
            elif line is not same[0]:
                names = {line.readings["Open MPI"].host for line in same}
                yield (_LIKE if len(names) > 1 else _AGAIN), [line.number]


def names(lines: list[Line]) -> dict[str, list[Line]]:
    """The lines that can be understood, by what ssh would be given."""
    found: dict[str, list[Line]] = {}
    for line in lines:
        if line.host and line.trouble is None:
            found.setdefault(line.login, []).append(line)
    return found


def written_for(writer: str, lines: list[Line]) -> list[str]:
    """The lines of a hostfile with the same hosts for another launcher, each of them once."""
    if not lines:
        raise UsageError("the hostfile names no host: write a line for each")
    for trouble, numbers in wrong(lines):
        raise UsageError(f"{numbered('line', numbers)} of the hostfile: {trouble.what}; {trouble.remedy}")
    rows = []
    for login, same in names(lines).items():
        ranks = sum(line.slots or 1 for line in same)
        host = same[0].host
        if writer == "mpich" and ":" in host:
            raise UsageError(f"MPICH cannot read an IPv6 address such as {host}: give the host a name")
        if writer == "slurm" and (_is_address(host) or host.startswith("_")):
            raise UsageError(f"srun knows nodes by Slurm's names, not as {host}: write what sinfo -N shows")
        rows.append(
            {"mpich": f"{login}:{ranks}", "openmpi": f"{login} slots={ranks}", "slurm": f"{host}*{ranks}"}[
                writer
            ]
        )
    return rows
