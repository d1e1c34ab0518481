"""The ranks of a host bind themselves to cores of their own, and their threads to a core each.

A launch that has bound its ranks is obeyed. Whatever is in doubt is left to Linux.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from distgpt.core.base.errors import UsageError
from distgpt.core.comm.agree import gather_texts, on_every_rank
from distgpt.core.comm.api import Comm
from distgpt.core.comm.layout import Layout
from distgpt.core.comm.resources import Grants, usable_cores
from distgpt.launch.notes import boot_id
from distgpt.layout.claims import Claim, claimed
from distgpt.layout.machine import SYS, Machine, read_machine
from distgpt.layout.places import Place, Rank, about, place_of
from distgpt.layout.plan import blocks

VARIABLE = "DISTGPT_BIND"
CHOICES = ("auto", "off")
TAKEN = "another job of distgpt on this host runs on the same cores: threads are bound to none of them"
BOUND_TO_TAKEN = (
    "another job of distgpt on this host was bound to the same cores, so that both are slower: bind them to"
    " different ones, or leave both unbound (mpirun -bind-to none)"
)


class Placed(Layout):
    """The layout of a node whose cores are known, on a system that can bind."""

    def __init__(self, root: Path = SYS) -> None:
        self._root = root
        self._block: tuple[int, ...] = ()  # to which `bind` is to bind
        self._bound: tuple[int, ...] = ()  # to which it has bound
        self._given: frozenset[int] = frozenset()  # where this process could run before
        self._ranks = 1  # of the job that was placed last
        self._seats: tuple[int, ...] = ()
        self._claim: Claim | None = None

    def share(self, cores: float, ranks: int, grants: Grants | None = None) -> int:
        """Return one for each core of a rank's share, as far as they are granted."""
        granted = super().share(cores, ranks, grants)
        if os.environ.get(VARIABLE) == "off" or not hasattr(os, "sched_setaffinity"):
            return granted
        machine = self._machine(ranks)
        cut = blocks(machine, max(1, round(len(machine.allowed) / cores)))
        return min(granted, len(cut[0].seats)) if cut else granted

    def place(self, comm: Comm, threads: int, threads_given: bool) -> list[str]:
        bind = on_every_rank(comm, wanted)
        if comm.size == 1 < self._ranks:  # a stage of its own beside a job's keeps what the job has
            return []
        self.forget()
        self._ranks = comm.size
        machine = self._machine(comm.size)
        cpus = sorted(machine.allowed) if hasattr(os, "sched_setaffinity") else ()
        own = Rank(_host(), tuple(cpus), threads, bind, secrets.token_hex(4))
        ranks = [_rank(text) for text in gather_texts(comm, json.dumps(asdict(own)))]
        here = [i for i, rank in enumerate(ranks) if rank.host == own.host]
        of_host = [ranks[i] for i in here]
        place = None
        if cpus and all(rank.bind == "auto" for rank in of_host):
            place = place_of(machine, of_host, here.index(comm.rank))
        refusals = gather_texts(comm, self._refusal(comm, machine, place, ranks[0].job))
        lines = [refusals[i] for i in here if refusals[i]][:1]
        if lines:
            self.forget()
        elif place:
            self._block, self._seats = place.block.cpus if place.binds else (), place.seats
        if here[0] == comm.rank:  # each host is described once
            return _merged(comm, lines or list(about(machine, of_host, place, threads_given)))
        return _merged(comm, None)

    def bind(self) -> None:
        block, self._block = self._block, ()
        if not block or block == self._bound:  # helpers of a pool would lose their seats
            return
        self._given = self._given or frozenset(usable_cores())
        for thread in Path("/proc/self/task").iterdir():  # MPI has begun some
            with suppress(OSError):  # one that has ended meanwhile
                os.sched_setaffinity(int(thread.name), block)
        self._bound = block

    @contextmanager
    def unbound(self) -> Iterator[None]:
        if not self._given:
            yield
            return
        before = usable_cores()
        with suppress(OSError):  # the launch's CPUs have gone since
            os.sched_setaffinity(0, self._given)
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)

    def seat(self, thread: int, threads: int) -> None:
        """Bind a helper to its seat. The caller, worker 0, goes to its own and may leave it.

        Threads and processes that the caller starts later would be bound with it otherwise.
        """
        if threads != len(self._seats):
            return
        with suppress(OSError):  # a CPU that has gone since
            before = os.sched_getaffinity(0)
            os.sched_setaffinity(0, {self._seats[thread]})
            if thread == 0:
                os.sched_setaffinity(0, before)

    def _machine(self, ranks: int) -> Machine:
        """Return the CPUs that the launch gave, also where this process has bound itself to a part."""
        if ranks > 1:
            return read_machine(self._root, self._given or usable_cores())
        return read_machine(self._root, usable_cores())

    def _refusal(self, comm: Comm, machine: Machine, place: Place | None, job: str) -> str:
        """Claim the cores of a place; return why it cannot be taken, "" if it can. Collective."""
        needed = {cpu.core for cpu in machine.usable if place and cpu.number in place.block.seats}
        failure, taken = "", frozenset[int]()
        try:
            if place and (place.binds or place.seats):
                self._claim = Claim(job, comm.rank, needed)
        except OSError as error:
            failure = str(error.strerror or error)  # Python's own have no number
        comm.barrier()  # all ranks have claimed before one of them looks
        try:
            taken = claimed(job) if self._claim else taken
        except OSError as error:
            failure = str(error.strerror or error)  # Python's own have no number
        if place and taken & needed:
            return TAKEN if place.binds or comm.size == 1 else BOUND_TO_TAKEN
        return (
            failure and f"jobs of this host cannot see each other ({failure}): threads are bound to no cores"
        )

    def forget(self) -> None:
        """Give up what was claimed, and seat no thread that begins later."""
        self._block = self._seats = ()
        if self._claim:
            self._claim.give_up()
            self._claim = None

    def inherit(self) -> None:
        """Begin anew in a child: its parent has bound it, and keeps the seats."""
        self.forget()
        self._bound, self._given, self._ranks = (), frozenset(), 1


def wanted() -> str:
    """Return what the variable says, which is the user's."""
    chosen = os.environ.get(VARIABLE) or CHOICES[0]
    if chosen not in CHOICES:
        raise UsageError(f"{VARIABLE} is {chosen!r:.80}: it must be {' or '.join(CHOICES)}")
    return chosen


def _host() -> str:
    return boot_id() or platform.node()  # hosts of one kernel, as containers are, share its CPUs


def _rank(text: str) -> Rank:
    found = json.loads(text)
    return Rank(**{**found, "cpus": tuple(found["cpus"])})


def _merged(comm: Comm, lines: list[str] | None) -> list[str]:
    """Return on rank 0 the lines of all hosts, each once. `lines`: a host's, None on its other ranks."""
    hosts = [text for text in map(json.loads, gather_texts(comm, json.dumps(lines))) if text is not None]
    found = Counter(line for host in hosts for line in host)
    where = {line: f"on {many} of {len(hosts)} hosts: " * (many < len(hosts)) for line, many in found.items()}
    return [] if comm.rank else [where[line] + line for line in found]


PLACED = Placed()
os.register_at_fork(after_in_child=lambda: PLACED.inherit())
