"""Where the ranks of a host run: they agree, and claim the cores before other jobs of the host do.

A rank alone on a node whose cores are all alike needs none of this (bind.py).
"""

from __future__ import annotations

import json
import platform
import secrets
import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from distgpt.cluster.affinity.machine import Machine, cpu_list, is_flat, listed
from distgpt.cluster.affinity.plan import Block, blocks, region
from distgpt.core.base.formatting import count
from distgpt.core.base.system import boot_id
from distgpt.core.comm.agree import gather_texts
from distgpt.core.comm.api import Comm

PREFIX = "distgpt-cores"
CORES_OF_A_NAME = 12  # that the name of a socket tells of: it may have 107 bytes
SOCKETS = Path("/proc/net/unix")
TAKEN = "another job of distgpt on this host runs on the same cores: threads are bound to none of them"
BOUND_TO_TAKEN = (
    "another job of distgpt on this host was bound to the same cores, so that both are slower: bind them to"
    " different ones, or leave both unbound (mpirun -bind-to none)"
)


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


class Claim:
    """A rank's claim on cores, which other jobs of the host can read.

    It is an abstract socket for some cores each, whose name tells which. It needs no folder that all users
    may write to, ends with its process however that ends, and is seen in all containers that share the host's
    network. Jobs claim before they read what others have claimed: of two, one notices.
    """

    def __init__(self, job: str, rank: int, cores: Iterable[int]) -> None:
        ordered = sorted(cores)
        with ExitStack() as sockets:
            for i in range(0, len(ordered), CORES_OF_A_NAME):
                some = listed(ordered[i : i + CORES_OF_A_NAME])
                each = sockets.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
                each.bind(f"\0{PREFIX}/{job}/{rank}/{some}")
            self._sockets = sockets.pop_all()

    def give_up(self) -> None:
        """End the claim."""
        self._sockets.close()


def claimed(job: str) -> frozenset[int]:
    """Return the cores that other jobs of this host have claimed."""
    found: set[int] = set()
    for line in SOCKETS.read_text(errors="replace").splitlines():
        name = line.rpartition(" ")[2].lstrip("@").split("/")
        if name[0] == PREFIX and len(name) == 4 and name[1] != job:
            with suppress(ValueError):  # of another version
                found |= cpu_list(name[3])
    return frozenset(found)


def placed(
    comm: Comm, machine: Machine, cpus: Sequence[int], threads: int, threads_given: bool, bind: str
) -> tuple[Place | None, Claim | None, list[str]]:
    """Return where this rank runs, its claim on the cores there, and on rank 0 lines about it. Collective.

    `cpus`: those that it may bind itself to; none: it cannot. Without a place it runs where its launch lets
    it.
    """
    host = boot_id() or platform.node()  # hosts of one kernel, as containers are, share its CPUs
    own = Rank(host, tuple(cpus), threads, bind, secrets.token_hex(4))
    found = map(json.loads, gather_texts(comm, json.dumps(asdict(own))))
    ranks = [Rank(**{**rank, "cpus": tuple(rank["cpus"])}) for rank in found]
    here = [i for i, rank in enumerate(ranks) if rank.host == host]
    of_host = [ranks[i] for i in here]
    place = None
    if cpus and all(rank.bind == "auto" for rank in of_host):
        place = place_of(machine, of_host, here.index(comm.rank))
    claim, refusal = _claimed(comm, machine, place, ranks[0].job)
    try:
        refusals = gather_texts(comm, refusal)
    except BaseException:  # an interrupt, after which a notebook goes on
        if claim:
            claim.give_up()
        raise
    lines = [refusals[i] for i in here if refusals[i]][:1]
    if lines and claim:
        claim.give_up()
        claim = None
    mine = None  # each host is described once, by its first rank
    if here[0] == comm.rank:
        mine = lines or list(about(machine, of_host, place, threads_given))
    hosts = [text for text in map(json.loads, gather_texts(comm, json.dumps(mine))) if text is not None]
    counts = Counter(line for host in hosts for line in host)
    where = {
        line: f"on {many} of {len(hosts)} hosts: " * (many < len(hosts)) for line, many in counts.items()
    }
    described = [] if comm.rank else [where[line] + line for line in counts]
    return None if lines else place, claim, described


def _claimed(comm: Comm, machine: Machine, place: Place | None, job: str) -> tuple[Claim | None, str]:
    """Claim the cores of a place; return why it cannot be taken, "" if it can. Collective."""
    needed = {cpu.core for cpu in machine.usable if place and cpu.number in place.block.seats}
    claim, failure, taken = None, "", frozenset[int]()
    try:
        if place and (place.binds or place.seats):
            claim = Claim(job, comm.rank, needed)
    except OSError as error:
        failure = str(error.strerror or error)  # Python's own have no number
    comm.barrier()  # all ranks have claimed before one of them looks
    try:
        taken = claimed(job) if claim else taken
    except OSError as error:
        failure = str(error.strerror or error)
    if place and taken & needed:
        return claim, TAKEN if place.binds or comm.size == 1 else BOUND_TO_TAKEN
    if failure:
        failure = f"jobs of this host cannot see each other ({failure}): threads are bound to no cores"
    return claim, failure


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
