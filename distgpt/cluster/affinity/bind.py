"""The ranks of a host bind themselves to cores of their own, and their threads to a core each.

A launch that has bound its ranks is obeyed. Whatever is in doubt is left to Linux.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from distgpt.cluster.affinity.machine import SYS, Machine, is_flat, read_machine
from distgpt.core.base.errors import UsageError
from distgpt.core.comm.agree import on_every_rank
from distgpt.core.comm.api import Comm
from distgpt.core.comm.layout import Layout
from distgpt.core.comm.resources import Grants, usable_cores

if TYPE_CHECKING:
    from distgpt.cluster.affinity.places import Claim

VARIABLE = "DISTGPT_BIND"
CHOICES = ("auto", "off")


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
        several = max(1, round(len(machine.allowed) / cores))
        if several == 1 and is_flat(machine.usable):
            return min(granted, len(machine.cores) or granted)
        from distgpt.cluster.affinity.plan import blocks

        cut = blocks(machine, several)
        return min(granted, len(cut[0].seats)) if cut else granted

    def place(self, comm: Comm, threads: int, threads_given: bool) -> list[str]:
        bind = on_every_rank(comm, wanted)
        if comm.size == 1 < self._ranks:  # a stage of its own beside a job's keeps what the job has
            return []
        self.forget()
        self._ranks = comm.size
        if comm.size == threads == 1:
            return []  # wherever it runs it takes nobody's core, and shares its memory with no other thread
        machine = self._machine(comm.size)
        cpus = sorted(machine.allowed) if hasattr(os, "sched_setaffinity") else ()
        too_many = threads_given and threads > len(machine.cores)
        if comm.size == 1 and is_flat(machine.usable) and not (machine.doubts or too_many):
            return []  # all cores are as near to one another: Linux evades other programs best
        from distgpt.cluster.affinity.places import placed

        place, self._claim, lines = placed(comm, machine, cpus, threads, threads_given, bind)
        if place:
            self._block, self._seats = place.block.cpus if place.binds else (), place.seats
        return lines

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


PLACED = Placed()
os.register_at_fork(after_in_child=lambda: PLACED.inherit())
