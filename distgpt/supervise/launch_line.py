"""A launch as a user types it, `mpirun -n 8 -f hosts distgpt train …`, and where its ranks have room."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from distgpt.core.base.errors import UsageError
from distgpt.core.base.files import read_small
from distgpt.jobs import hostfile
from distgpt.jobs.launchers import HOSTS_OPTION, mpirun

TRAINS = ("train", "tune")
# Options as MPICH, Intel MPI and Open MPI have them, with one dash or two.
RANKS = ("n", "np", "c")
HOSTS = ("f", "hostfile", "machinefile", "default-hostfile")
EACH = ("ppn", "perhost", "N", "npernode")  # ranks on each host
NAMED = ("hosts", "host", "H")  # hosts themselves
LAUNCHERS = ("mpirun", "mpiexec", "orterun", "prterun")
MOST_NAMED = 6  # hosts in a message


@dataclass(frozen=True, slots=True)
class LaunchLine:
    """A launch in its parts. `launcher` has no words where a single process starts without one."""

    launcher: tuple[str, ...]
    program: tuple[str, ...]  # distgpt
    command: tuple[str, ...]  # train, and its options

    @property
    def mpirun(self) -> str | None:
        """The program that starts the ranks, if it is an mpirun."""
        return next((word for word in self.launcher if Path(word).name.startswith(LAUNCHERS)), None)

    @property
    def ranks(self) -> int:
        given = self._value(RANKS)
        if given is None:
            if self.mpirun:
                raise UsageError("say how many ranks there are: mpirun -n 8 …")
            return 1
        if not given.isdecimal() or not int(given):
            raise UsageError(f"{given} is no number of ranks: mpirun -n 8 …")
        return int(given)

    @property
    def hosts(self) -> Path | None:
        """The hostfile, if there is one."""
        given = self._value(HOSTS)
        return None if given is None else Path(given)

    @property
    def each(self) -> int | None:
        """How many ranks a host gets whose line does not say."""
        given = self._value(EACH)
        return int(given) if given and given.isdecimal() and int(given) else None

    def moved(self, hosts: Path | None, ranks: int) -> LaunchLine:
        """Return the launch on as many ranks on the hosts of another file."""
        words = list(self.launcher)
        if (at := self._at(RANKS)) is not None:
            words[at] = str(ranks)
        if hosts and (at := self._at(HOSTS)) is not None:
            words[at] = str(hosts)
        return replace(self, launcher=tuple(words))

    def with_options(self, more: Sequence[str]) -> LaunchLine:
        """Return the launch with further options of train."""
        return replace(self, command=(*self.command, *more))

    def words(self, variable: str) -> list[str]:
        """Return all words, for a process and ranks that each have `variable` in their environment.

        By way of env: Open MPI passes no variable on to another host unasked.
        """
        marked = ["env", variable] if self.launcher else []
        return [*self.launcher, *marked, *self.program, *self.command]

    def _value(self, names: Collection[str]) -> str | None:
        at = self._at(names)
        return None if at is None else self.launcher[at]

    def _at(self, names: Collection[str]) -> int | None:
        """Return where the last value of an option stands; None where it is not given."""
        if self.mpirun is None:
            return None
        begin = self.launcher.index(self.mpirun) + 1
        found = [i for i in range(begin, len(self.launcher) - 1) if _option(self.launcher[i]) in names]
        return found[-1] + 1 if found else None


def _option(word: str) -> str:
    """Return the name of an option; "" of another word."""
    return word.lstrip("-") if word.startswith("-") else ""


def parse(words: Sequence[str]) -> LaunchLine:
    """Read the words of a launch of distgpt train."""
    words = list(words)
    found = (i for i in range(1, len(words)) if words[i] in TRAINS and Path(words[i - 1]).name == "distgpt")
    at = next(found, None)
    if at is None:
        raise UsageError("give the whole line after --, as in -- mpirun -n 8 -f hosts distgpt train …")
    if ":" in words:
        raise UsageError("one program is supervised: leave out what follows the :")
    begin = at - 3 if at > 2 and words[at - 2] in ("-m", "-P") else at - 1  # python -m distgpt
    launcher: list[str] = []
    for word in words[:begin]:
        option, equals, value = word.partition("=")
        is_ours = equals and _option(option) in (*RANKS, *HOSTS, *EACH, *NAMED)
        launcher += [option, value] if is_ours else [word]
    line = LaunchLine(tuple(launcher), tuple(words[begin:at]), tuple(words[at:]))
    if line.mpirun and (named := [word for word in launcher if _option(word) in NAMED]):
        raise UsageError(f"write the hosts of {named[0]} into a file, and name that: mpirun -n 8 -f hosts …")
    return line


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
