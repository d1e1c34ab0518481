"""The ranks of a host bind themselves to cores of their own, and their threads to a core each.

A launch that has bound its ranks is obeyed. Whatever is in doubt is left to Linux.
"""

from __future__ import annotations

import errno
import os
import platform
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from distgpt.cluster.affinity.machine import SYS, Machine, is_flat, read_machine
from distgpt.cluster.affinity.plan import Place, Rank, blocks, cores_of, place_of
from distgpt.core.base.errors import UsageError
from distgpt.core.base.formatting import in_runs
from distgpt.core.base.system import boot_id
from distgpt.core.comm.agree import gather, on_every_rank
from distgpt.core.comm.api import Comm
from distgpt.core.comm.layout import Layout
from distgpt.core.comm.resources import Grants, usable_cores

VARIABLE = "DISTGPT_BIND"
CHOICES = ("auto", "off")
TAKEN = "another job of distgpt on this host runs on the same cores: threads are bound to none of them"


class Placed(Layout):
    """The layout of a node whose cores are known, on a system that can bind."""

    def __init__(self, root: Path = SYS) -> None:
        self._root = root
        self._block: tuple[int, ...] = ()  # to which `bind` is to bind
        self._bound: tuple[int, ...] = ()  # to which it has bound
        self._given: frozenset[int] = frozenset()  # where this process could run before
        self._ranks = 1  # of the job that was placed last
        self._seats: tuple[int, ...] = ()
        self._claim = ExitStack()

    def share(self, cores: float, ranks: int, grants: Grants | None = None) -> int:
        """Return one for each core of a rank's share, as far as they are granted."""
        granted = super().share(cores, ranks, grants)
        if os.environ.get(VARIABLE) == "off" or not hasattr(os, "sched_setaffinity"):
            return granted
        machine = self._machine(ranks)
        several = max(1, round(len(machine.allowed) / cores))
        if several == 1 and is_flat(machine.usable):
            return min(granted, len(machine.cores) or granted)
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
        if comm.size == 1 and is_flat(machine.usable) and not machine.doubts:
            return []  # all cores are as near to one another: Linux schedules best
        cpus = sorted(machine.allowed) if hasattr(os, "sched_setaffinity") else []
        # Hosts of one kernel, as containers are, share its CPUs.
        own = Rank(boot_id() or platform.node(), tuple(cpus), threads, bind)
        ranks = gather(comm, own)
        here = [rank for rank in ranks if rank.host == own.host]
        me = sum(rank.host == own.host for rank in ranks[: comm.rank])
        place = None
        if cpus and all(rank.bind == "auto" for rank in here):
            place = place_of(machine, here, me)
        refusals = gather(comm, self._claimed(machine, place))
        taken = [text for rank, text in zip(ranks, refusals, strict=True) if rank.host == own.host and text]
        lines = taken[:1] or doubts(machine, here)
        if taken:
            self.forget()
        elif place:
            self._block, self._seats = place.block.cpus if place.binds else (), place.seats
        # Each host is described once, by its first rank.
        described = gather(comm, [] if me else lines)
        return [] if comm.rank else list(dict.fromkeys(line for host in described for line in host))

    def _claimed(self, machine: Machine, place: Place | None) -> str:
        """Claim the cores of a place, each by an abstract socket that one process of the host can have.

        This needs no folder that all users may write to, ends with the process however that ends, and is seen
        in all containers that share the host's network. Return why it cannot be done, "" if it is.
        """
        if not (place and (place.binds or place.seats)):
            return ""
        try:
            for core in sorted({cpu.core for cpu in machine.usable if cpu.number in place.block.seats}):
                each = self._claim.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
                each.bind(claim_of(core))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return TAKEN
            return f"cores cannot be claimed ({error.strerror or error}): threads are bound to none of them"
        return ""

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
        given = self._given if ranks > 1 else frozenset[int]()
        return read_machine(self._root, given or usable_cores())

    def forget(self) -> None:
        """Give up what was claimed, and seat no thread that begins later."""
        self._block = self._seats = ()
        self._claim.close()

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


def claim_of(core: int) -> str:
    """Return the name of the socket that claims a core."""
    return f"\0distgpt-core-{core}"


def doubts(machine: Machine, here: Sequence[Rank]) -> list[str]:
    """Return why the ranks of a host are not bound, if they should be."""
    if machine.doubts:
        asked = len(here[0].cpus) > 1 and here[0].bind == "auto"
        return [f"{machine.doubts[0]}: threads run where Linux puts them"] * asked
    users = Counter(core for rank in here for core in cores_of(machine, rank))
    shared = {core for core, many in users.items() if many > 1}
    if not shared or len({rank.cpus for rank in here}) == 1:
        return []
    many = sum(bool(cores_of(machine, rank) & shared) for rank in here)
    return [
        f"{many} ranks of a host share cores ({in_runs(shared)}): bind each to cores of its own"
        " (mpirun -bind-to core, srun --cpu-bind=cores)"
    ]


PLACED = Placed()
os.register_at_fork(after_in_child=lambda: PLACED.inherit())
