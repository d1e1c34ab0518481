"""The nodes of a launch as drawings: sockets, NUMA regions, third-level caches, a character for each core."""

from __future__ import annotations

import json
import string
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import groupby, pairwise

from distgpt.core.base.formatting import count
from distgpt.core.comm.resources import usable_cores
from distgpt.doctor.facts import Facts
from distgpt.doctor.verdicts import grouped, hosts
from distgpt.layout.machine import Cpu, Machine, cpu_list, listed, read_machine
from distgpt.layout.places import Rank, about, place_of
from distgpt.layout.plan import blocks, recommended

WIDTH = 43  # characters for the cores of a region, so that the page has 80
MOST_REGIONS = 16
RANKS = string.digits + string.ascii_letters
MORE, SEVERAL, IDLE, SLOW, ELSEWHERE = "*", "!", "-", "~", "."
LEGEND = {
    MORE: f"a rank behind {len(RANKS)}",
    SEVERAL: "several ranks",
    IDLE: "idle",
    SLOW: "slow, so idle",
    ELSEWHERE: "not given",
}


def of_host() -> Facts | None:
    """Describe this host's CPUs, ready for JSON; None where no Linux tells of them.

    `caches` of a NUMA region lists its cores, each by its CPUs, as in "0,128 1,129".
    """
    if sys.platform != "linux":
        return None
    machine = read_machine(allowed=usable_cores())
    regions = []
    for (socket, region), cpus in groupby(sorted(machine.cpus, key=_place), _place):
        caches = grouped((cpu.cache, cpu) for cpu in cpus).values()
        regions.append({"socket": socket, "region": region, "caches": [_cores(cache) for cache in caches]})
    slow = listed(cpu.number for cpu in machine.cpus if not cpu.fast)
    return {"regions": regions, "slow": slow, "doubts": list(machine.doubts)}


def _place(cpu: Cpu) -> tuple[int, int]:
    return cpu.socket, cpu.region


def _cores(cpus: Iterable[Cpu]) -> str:
    return " ".join(listed(cores) for cores in grouped((cpu.core, cpu.number) for cpu in cpus).values())


def _machine(node: Facts, allowed: frozenset[int]) -> Machine:
    """Return what `of_host` has described."""
    slow, cpus = cpu_list(node["slow"]), []
    for region in node["regions"]:
        for cache in region["caches"]:
            cores = [sorted(cpu_list(core)) for core in cache.split()]
            first = min(min(core) for core in cores)
            cpus += [
                Cpu(cpu, core[0], first, region["region"], region["socket"], cpu not in slow)
                for core in cores
                for cpu in core
            ]
    return Machine(tuple(sorted(cpus, key=lambda cpu: cpu.number)), allowed, tuple(node["doubts"]))


def nodes(ranks: list[Facts], launched: bool) -> list[Facts]:
    """Return the nodes of these ranks with where each rank's threads run; of nodes that are alike, one.

    A process that nothing has launched gets what suits its node.
    """
    found = []
    for users in hosts(ranks):
        if users[0]["node"] is None:
            continue
        here = [_rank(rank) for rank in users]
        machine = _machine(users[0]["node"], frozenset(cpu for rank in here for cpu in rank.cpus))
        suits = recommended(machine, granted=sum(rank["granted_cores"]["number"] for rank in users))
        if launched:
            seats, notes, sit = _launched(machine, here)
        else:
            cut = blocks(machine, suits.ranks)
            seats, notes, sit = [block.seats[: suits.threads] for block in cut], [], False
        node = {"cpus": listed(machine.allowed), "seats": [listed(seat) for seat in seats], "notes": notes}
        told = {**users[0]["node"], **node, "sit": sit, "suits": asdict(suits)}
        found.append((users[0]["host"], told))
    alike = grouped((json.dumps(node), host) for host, node in found)
    return [{"hosts": names, **json.loads(node)} for node, names in alike.items()]


def _rank(rank: Facts) -> Rank:
    threads = max(1, int(rank["granted_cores"]["number"] + 1e-6))
    return Rank(rank["host"], tuple(sorted(cpu_list(rank["cpus"]))), threads, rank["bind"])


def _launched(machine: Machine, here: Sequence[Rank]) -> tuple[list[tuple[int, ...]], list[str], bool]:
    """Return CPUs for each rank's threads, what a run would note of that, and whether they stay there."""
    seats, notes, sit = [], [], True
    binds = all(rank.bind == "auto" for rank in here)
    for i, rank in enumerate(here):
        own = replace(machine, allowed=frozenset(rank.cpus))
        place = place_of(own, here, i) if binds else None
        sit = sit and bool(place and place.seats)
        if place:
            seats.append(place.block.seats[: rank.threads])
        else:  # it takes its cores from others, has none of its own, or is not to be bound
            seats.append(next((block.seats for block in blocks(own, 1)), ()))
        if i == 0:
            mine = replace(rank, threads=min(rank.threads, len(seats[0])))
            notes = list(about(own, [mine, *here[1:]], place, threads_given=False))
    return seats, notes, sit


def summary(node: Facts) -> str:
    """Describe a node in a line."""
    if node["doubts"]:
        return f"not drawn: {'; '.join(node['doubts'])}"
    cores = [
        cpu_list(core) for region in node["regions"] for cache in region["caches"] for core in cache.split()
    ]
    sockets, regions = ({region[name] for region in node["regions"]} for name in ("socket", "region"))
    parts = [count(len(sockets), "socket"), count(len(regions), "NUMA region"), count(len(cores), "core")]
    cpus = sum(map(len, cores))
    return ", ".join([*parts, *([count(cpus, "CPU")] if cpus > len(cores) else [])])


def advice(node: Facts) -> str:
    """Describe how many ranks and threads suit a node, and how they are started."""
    ranks, threads, why = node["suits"].values()
    if ranks == 1:
        return f"a process of {count(threads, 'thread')} ({why}): distgpt train"
    each = count(threads, "thread")
    # Open MPI binds each rank to one core by itself, and a launch that binds is obeyed.
    how = f"mpirun -n {ranks} distgpt train --stage mpi (Open MPI: mpirun --bind-to none -n {ranks} …)"
    return f"{ranks} ranks of {each} ({why}): {how}"


def rows(node: Facts) -> Iterator[tuple[str, str, str, str]]:
    """Draw a node: socket, NUMA region, the numbers of its cores, and a character for each of these."""
    marks = _marks(node)
    for region in node["regions"][:MOST_REGIONS]:
        cores = [[cpu_list(core) for core in cache.split()] for cache in region["caches"]]
        drawn = " ".join("".join(marks[min(core)] for core in cache) for cache in cores)
        numbers = _strided([min(core) for cache in cores for core in cache])
        first, *rest = textwrap.wrap(drawn, WIDTH, break_on_hyphens=False)
        yield str(region["socket"]), str(region["region"]), numbers, first
        yield from (("", "", "", line) for line in rest)


def legend(node: Facts) -> str:
    """Explain the characters of a drawing."""
    marks = {*_marks(node).values()}
    known = [f"{mark} {LEGEND[mark]}" for mark in LEGEND if mark in marks]
    more = len(node["regions"]) - MOST_REGIONS
    rest = [f"{more} more NUMA regions: --json"] if more > 0 else []
    who = "the rank whose thread runs there" if node["sit"] else "the rank that it would suit"
    return "; ".join([f"a character is a core, and {who}", *known, *rest])


def _marks(node: Facts) -> dict[int, str]:
    """Return a character for each core, by its lowest CPU."""
    usable, slow = cpu_list(node["cpus"]), cpu_list(node["slow"])
    users = grouped((cpu, i) for i, seat in enumerate(node["seats"]) for cpu in cpu_list(seat))
    found = {}
    for region in node["regions"]:
        for core in (cpu_list(core) for cache in region["caches"] for core in cache.split()):
            ranks = {rank for cpu in core for rank in users.get(cpu, ())}
            if len(ranks) > 1:
                mark = SEVERAL
            elif ranks:
                mark = (RANKS + MORE)[min(*ranks, len(RANKS))]
            else:
                mark = (SLOW if core & slow else IDLE) if core & usable else ELSEWHERE
            found[min(core)] = mark
    return found


def _strided(numbers: list[int]) -> str:
    """[0, 2, 4, 6] → "0-6:2", as taskset writes it; otherwise as /sys does."""
    steps = {after - before for before, after in pairwise(numbers)}
    step = steps.pop() if len(steps) == 1 else 1
    return f"{numbers[0]}-{numbers[-1]}:{step}" if step > 1 else listed(numbers)
