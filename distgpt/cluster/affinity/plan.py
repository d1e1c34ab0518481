"""Placement of the ranks and threads of a node, and the recommended number of both.

Pure functions of a `Machine`, so every rank computes the same plan without communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import ceil

from distgpt.cluster.affinity.machine import Core, Machine, is_flat

CROSSING = 0.75  # up to 25% of the cores may be idle to keep a rank's threads in one region


@dataclass(frozen=True, slots=True)
class Block:
    """The CPUs of one rank (of all its cores), and one CPU per thread."""

    cpus: tuple[int, ...]
    seats: tuple[int, ...]  # one CPU per core


@dataclass(frozen=True, slots=True)
class Advice:
    """Recommended number of ranks per node and threads per rank, and the reason."""

    ranks: int
    threads: int
    why: str


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank's data for the other ranks. Ranks that may run on the same CPUs have the same host."""

    host: str
    cpus: tuple[int, ...]  # CPUs allowed by the launch
    threads: int
    bind: str


@dataclass(frozen=True, slots=True)
class Place:
    """The block that a rank binds itself to or was bound to, and the CPUs of its threads."""

    block: Block
    binds: bool  # true if the launch has not bound the rank
    seats: tuple[int, ...] = ()  # if empty, threads run anywhere in the block


def region(core: Core) -> int:
    """Return the NUMA region of a core. Sockets are ignored: firmware and hypervisors invent them."""
    return core[0].region


def blocks(machine: Machine, ranks: int) -> list[Block]:
    """Divide the cores equally among ranks. Return nothing if there are fewer cores than ranks.

    Keep each block within one region if that costs no rank more than 25% of its cores.
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
    """Return how many ranks and threads to start. `granted`: the CPU quota in cores, if it is lower."""
    free = machine.cores
    ranks = regions = len({region(core) for core in free}) or 1
    most = max(1, int(min(granted or len(free), len(free))))
    why = "one rank per NUMA region" if regions > 1 else "all cores are in one NUMA region"
    if most < len(free):
        ranks, why = max(1, regions * most // len(free)), f"{most} of {len(free)} cores are granted"
    cut = blocks(machine, ranks)
    return Advice(ranks, max(1, min(len(cut[0].seats) if cut else 1, most // ranks)), why)


def place_of(machine: Machine, here: Sequence[Rank], me: int) -> Place | None:
    """Return the place of rank `me` of a host, or None if it keeps the launch's placement."""
    mine = here[me]
    others = [cores_of(machine, rank) for rank in here if rank.cpus != mine.cpus]
    # Ranks may share a set of cores, such as a socket. Any other overlap is a wrong binding.
    alike = [i for i, rank in enumerate(here) if rank.cpus == mine.cpus]
    if machine.doubts or any(used & cores_of(machine, mine) for used in others):
        return None
    if not (cut := blocks(machine, len(alike))):
        return None
    block = cut[alike.index(me)]
    # With fewer threads than cores (--threads, a quota), do not bind: other jobs would use the same CPUs.
    filled = mine.threads == len(block.seats)
    free = len(here) == 1 and is_flat(machine.usable)  # such as on a laptop: Linux schedules best
    return Place(block, len(alike) > 1, block.seats if filled and not free else ())


def cores_of(machine: Machine, rank: Rank) -> set[int]:
    """Return the cores that a rank may run on. CPUs of one core share its execution units."""
    cpus = set(rank.cpus)
    return {cpu.core for cpu in machine.cpus if cpu.number in cpus}
