"""Where the ranks of a host run by what each tells of itself, and what a user should know of that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from distgpt.core.base.formatting import count
from distgpt.layout.machine import Machine, is_flat, listed
from distgpt.layout.plan import Block, blocks, region


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank as it tells the others of itself. Ranks that may run on the same CPUs have the same host."""

    host: str
    cpus: tuple[int, ...]  # that its launch lets it run on
    threads: int
    bind: str
    job: str = ""  # rank 0's is the id of all


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank runs: within a block, to which it binds itself or was bound; its threads on the seats."""

    block: Block
    binds: bool  # itself: the launch has left it unbound
    seats: tuple[int, ...] = ()  # none: its threads run anywhere in the block


def place_of(machine: Machine, here: Sequence[Rank], me: int) -> Place | None:
    """Return the place of one of the ranks of a host; None where it stays where it is."""
    mine = here[me]
    others = [_cores(machine, rank) for rank in here if rank.cpus != mine.cpus]
    # Ranks of one socket may share its cores, for example. Ranks whose cores overlap otherwise were misbound.
    alike = [i for i, rank in enumerate(here) if rank.cpus == mine.cpus]
    if machine.doubts or any(used & _cores(machine, mine) for used in others):
        return None
    if not (cut := blocks(machine, len(alike))):
        return None
    block = cut[alike.index(me)]
    # Threads fewer than cores, by --threads or a quota, may run on any: other jobs would take the same seats.
    filled = mine.threads == len(block.seats)
    free = len(here) == 1 and is_flat(
        machine.usable
    )  # as on a laptop, where Linux evades other programs best
    return Place(block, len(alike) > 1, block.seats if filled and not free else ())


def _cores(machine: Machine, rank: Rank) -> set[int]:
    """Return the cores that a rank may run on: CPUs of one core share what computes."""
    cpus = set(rank.cpus)
    return {cpu.core for cpu in machine.cpus if cpu.number in cpus}


def about(machine: Machine, here: Sequence[Rank], place: Place | None, threads_given: bool) -> Iterator[str]:
    """Say how the ranks of a host run, where it matters, and how their launch fights itself.

    `place` is the first one's.
    """
    mine = here[0]
    if machine.doubts:
        if len(mine.cpus) > 1 and mine.bind == "auto":
            yield f"{machine.doubts[0]}: threads run where Linux puts them"
        return
    if not (place and place.binds):
        yield from _fights(machine, here)
    if place is None:
        return
    seats = len(place.block.seats)
    if threads_given and seats < mine.threads <= len(place.block.cpus):
        yield (
            f"--threads {mine.threads} on {count(seats, 'core')}: CPUs of one core share what computes, so a"
            " thread for each core is as fast, or faster"
        )
    elif not is_flat(machine.cpus if len(here) > 1 else machine.usable):
        yield _found(machine, here, place)


def _found(machine: Machine, here: Sequence[Rank], place: Place) -> str:
    regions = len({region(core) for core in machine.cores if core[0].number in place.block.seats})
    sit = ", a thread on each" if place.seats else ""
    lie = f"{regions} NUMA regions" if regions > 1 else "one NUMA region"
    if len(here) > 1:
        how = "binds itself to" if place.binds else "was bound to"
        return (
            f"each of {len(here)} ranks of a host {how} {count(len(place.block.seats), 'core')} in {lie}{sit}"
        )
    return f"{count(here[0].threads, 'thread')} on {count(len(place.block.seats), 'core')} in {lie}{sit}"


def _fights(machine: Machine, here: Sequence[Rank]) -> Iterator[str]:
    """Say which ranks take each other's cores, and which lie in more NUMA regions than they must."""
    region_of = {cpu.number: cpu.region for cpu in machine.cpus}
    own = [_cores(machine, rank) for rank in here]
    users = Counter(core for each in own for core in each)
    apart = len({rank.cpus for rank in here}) > 1
    if apart and (shared := {core for core, many in users.items() if many > 1}):
        who = [i for i, each in enumerate(own) if each & shared]
        yield (
            f"{len(who)} ranks of a host share cores ({listed(shared)}): bind each to cores of its own"
            " (mpirun -bind-to core, srun --cpu-bind=cores)"
        )
    largest = max(Counter(region_of[core] for core in {cpu.core for cpu in machine.cpus}).values())
    torn = [each for each in own if len({region_of[core] for core in each}) > -(-len(each) // largest)]
    if apart and len(torn) > 1:
        yield (
            f"the cores of {len(torn)} ranks of a host lie in more NUMA regions than they must: bind each"
            " within one, whose memory is near (mpirun -bind-to numa, srun --distribution=block:block)"
        )
