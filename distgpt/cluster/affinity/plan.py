"""Where each rank of a node and each of its threads runs, and how many of both suit a node.

Pure functions of a `Machine`: every rank computes the same plan alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import ceil

from distgpt.cluster.affinity.machine import Core, Machine, is_flat

CROSSING = 0.75  # leave up to a quarter of the cores idle rather than put a rank's threads into two regions


@dataclass(frozen=True, slots=True)
class Block:
    """The CPUs of one rank: all of its cores', and one for each thread."""

    cpus: tuple[int, ...]
    seats: tuple[int, ...]  # a CPU of each core


@dataclass(frozen=True, slots=True)
class Advice:
    """How many ranks of a node, of how many threads each, and why in a few words."""

    ranks: int
    threads: int
    why: str


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank as the others see it. Ranks that may run on the same CPUs have the same host."""

    host: str
    cpus: tuple[int, ...]  # that its launch lets it run on
    threads: int
    bind: str


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank runs: within a block, to which it binds itself or was bound; its threads on the seats."""

    block: Block
    binds: bool  # itself: the launch has left it unbound
    seats: tuple[int, ...] = ()  # none: its threads run anywhere in the block


def region(core: Core) -> int:
    """Return the NUMA region of a core. Sockets do not count: firmware and hypervisors make them up."""
    return core[0].region


def blocks(machine: Machine, ranks: int) -> list[Block]:
    """Cut the cores among ranks, equally; none where there are fewer cores than ranks.

    Each block is within one region if that costs none more than a quarter of its cores.
    """
    free = machine.cores
    most = len(free) // ranks
    if not most:
        return []
    cut = [free[i * most : (i + 1) * most] for i in range(ranks)]
    regions = [list(cores) for _, cores in groupby(free, region)]
    for size in range(most, max(1, ceil(CROSSING * most)) - 1, -1):
        near = [each[i : i + size] for each in regions for i in range(0, len(each) - size + 1, size)]
        if len(near) >= ranks:
            cut = near[:ranks]
            break
    return [
        Block(
            tuple(sorted(cpu.number for core in each for cpu in core)), tuple(core[0].number for core in each)
        )
        for each in cut
    ]


def recommended(machine: Machine, granted: float = 0.0) -> Advice:
    """Return how many ranks and threads to start. `granted`: cores' worth of time, if a quota grants less."""
    free = machine.cores
    ranks = regions = len({region(core) for core in free}) or 1
    most = max(1, int(min(granted or len(free), len(free))))
    why = "a rank for each NUMA region" if regions > 1 else "all cores are in one NUMA region"
    if most < len(free):
        ranks, why = max(1, regions * most // len(free)), f"{most} of {len(free)} cores are granted"
    cut = blocks(machine, ranks)
    return Advice(ranks, max(1, min(len(cut[0].seats) if cut else 1, most // ranks)), why)


def place_of(machine: Machine, here: Sequence[Rank], me: int) -> Place | None:
    """Return the place of one of the ranks of a host, or None if it stays where its launch put it."""
    mine = here[me]
    others = [cores_of(machine, rank) for rank in here if rank.cpus != mine.cpus]
    # Ranks of one socket may share its cores, for example. Ranks whose cores overlap otherwise were misbound.
    alike = [i for i, rank in enumerate(here) if rank.cpus == mine.cpus]
    if machine.doubts or any(used & cores_of(machine, mine) for used in others):
        return None
    if not (cut := blocks(machine, len(alike))):
        return None
    block = cut[alike.index(me)]
    # Threads fewer than cores, by --threads or a quota, may run on any: other jobs would take the same seats.
    filled = mine.threads == len(block.seats)
    free = len(here) == 1 and is_flat(machine.usable)  # as on a laptop, where Linux schedules best
    return Place(block, len(alike) > 1, block.seats if filled and not free else ())


def cores_of(machine: Machine, rank: Rank) -> set[int]:
    """Return the cores that a rank may run on: CPUs of one core share what computes."""
    cpus = set(rank.cpus)
    return {cpu.core for cpu in machine.cpus if cpu.number in cpus}
