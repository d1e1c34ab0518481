"""Where the ranks of a job have room: the lines of its hostfile, in order, of which the last are spare."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from distgpt.cluster.jobs import hostfile
from distgpt.cluster.jobs.launchers import HOSTS_OPTION, mpirun
from distgpt.cluster.supervise.launch_line import LaunchLine
from distgpt.core.base.errors import UsageError
from distgpt.core.base.files import read_small

MOST_NAMED = 6  # hosts in a message


@dataclass(frozen=True, slots=True)
class Room:
    """A line of a hostfile: room for some ranks on a host."""

    host: str
    ranks: int
    text: str


def read_rooms(line: LaunchLine) -> list[Room]:
    """Return the lines of a launch's hostfile, none without one; refuse one without room for its ranks."""
    path = line.hosts
    if path is None:
        return []
    if not path.is_file():
        raise UsageError(f"{path}: there is no such hostfile")
    vendor = mpirun(line.mpirun)["vendor"]
    content = read_small(path, hostfile.LARGEST)
    lines, texts = hostfile.parse(content), content.decode("utf-8", "replace").split("\n")
    for problem in hostfile.problems(vendor, lines) if vendor in HOSTS_OPTION else ():
        raise UsageError(f"{path}: {problem}; see distgpt doctor --hostfile {path}")
    if vendor == "Open MPI" and any(each.slots is None for each in lines) and line.each is None:
        raise UsageError(f"{path}: say on each line how many ranks its host takes, as in node1 slots=4")
    rooms = [Room(each.host, each.slots or line.each or 1, texts[each.number - 1]) for each in lines]
    if (most := sum(room.ranks for room in rooms)) < line.ranks:
        raise UsageError(
            f"{path} has room for {most} of {line.ranks} ranks: say on each line how many its host takes"
        )
    return rooms


def chosen(rooms: Sequence[Room], there: Collection[str], ranks: int) -> list[Room]:
    """Return the first rooms on hosts that are there, as many as the ranks need or as there are."""
    found: list[Room] = []
    for room in rooms:
        if room.host in there and sum(each.ranks for each in found) < ranks:
            found.append(room)
    return found


def hosts_of(rooms: Sequence[Room]) -> list[str]:
    """Return each host once, in order."""
    return list(dict.fromkeys(room.host for room in rooms))


def listed(hosts: Sequence[str]) -> str:
    """Return hosts in words, the first ones of many."""
    more = f" and {len(hosts) - MOST_NAMED} more" if len(hosts) > MOST_NAMED else ""
    return ", ".join(hosts[:MOST_NAMED]) + more
