"""Binds the ranks of a host to separate cores, and their threads to a core each.

If the launcher has bound the ranks, its binding stays. In case of doubt, nothing is bound.
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
from distgpt.core.comm.affinity import Affinity
from distgpt.core.comm.agree import gather, on_every_rank
from distgpt.core.comm.api import Comm
from distgpt.core.comm.resources import Grants, usable_cores

VARIABLE = "DISTGPT_BIND"
CHOICES = ("auto", "off")
TAKEN = "another distgpt job on this host uses the same cores: threads are not bound to cores"


class Placed(Affinity):
    """Affinity of a node whose cores are known, on a system that can bind."""

    def __init__(self, root: Path = SYS) -> None:
        self._root = root
        self._block: tuple[int, ...] = ()  # CPUs that `bind` will bind to
        self._bound: tuple[int, ...] = ()  # CPUs that it has bound to
        self._given: frozenset[int] = frozenset()  # CPUs of this process before binding
        self._ranks = 1  # size of the last placed job
        self._seats: tuple[int, ...] = ()
        self._claim = ExitStack()

    def share(self, cores: float, ranks: int, grants: Grants | None = None) -> int:
        """Return one thread per core of a rank's share, limited to the granted cores."""
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
        if comm.size == 1 < self._ranks:  # a single-rank stage within a job keeps the job's binding
            return []
        self.forget()
        self._ranks = comm.size
        if comm.size == threads == 1:
            return []  # one thread takes no other rank's core, and shares its memory with none
        machine = self._machine(comm.size)
        if comm.size == 1 and is_flat(machine.usable) and not machine.doubts:
            return []  # all cores are equally near, so Linux schedules best
        cpus = sorted(machine.allowed) if hasattr(os, "sched_setaffinity") else []
        # Hosts with the same kernel, such as containers, share its CPUs.
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
        """Claim the cores of a place. Return the reason if that fails, otherwise "".

        Each claim is an abstract socket that only one process of a host can bind. Such a socket needs no
        directory that all users can write to, ends with the process in any case, and is visible in all
        containers that share the host's network.
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
            return f"cannot claim cores ({error.strerror or error}): threads are not bound to cores"
        return ""

    def bind(self) -> None:
        block, self._block = self._block, ()
        if not block or block == self._bound:  # otherwise helpers of a pool would lose their cores
            return
        self._given = self._given or frozenset(usable_cores())
        for thread in Path("/proc/self/task").iterdir():  # MPI has started threads
            with suppress(OSError):  # the thread has ended
                os.sched_setaffinity(int(thread.name), block)
        self._bound = block

    @contextmanager
    def unbound(self) -> Iterator[None]:
        if not self._given:
            yield
            return
        before = usable_cores()
        with suppress(OSError):  # CPUs may have been taken offline
            os.sched_setaffinity(0, self._given)
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)

    def pin_thread(self, thread: int, threads: int) -> None:
        """Bind a helper thread to its core. The caller, worker 0, is moved to its core but not bound.

        Otherwise threads and processes that it starts later would inherit the binding.
        """
        if threads != len(self._seats):
            return
        with suppress(OSError):  # the CPU may be offline
            before = os.sched_getaffinity(0)
            os.sched_setaffinity(0, {self._seats[thread]})
            if thread == 0:
                os.sched_setaffinity(0, before)

    def _machine(self, ranks: int) -> Machine:
        """Return the CPUs given by the launch, even after this process has bound itself to some."""
        given = self._given if ranks > 1 else frozenset[int]()
        return read_machine(self._root, given or usable_cores())

    def forget(self) -> None:
        """Release all claims, and bind no more threads."""
        self._block = self._seats = ()
        self._claim.close()

    def inherit(self) -> None:
        """Reset in a forked child, which inherited the parent's binding. The parent keeps the cores."""
        self.forget()
        self._bound, self._given, self._ranks = (), frozenset(), 1


def wanted() -> str:
    """Return the user's value of DISTGPT_BIND."""
    chosen = os.environ.get(VARIABLE) or CHOICES[0]
    if chosen not in CHOICES:
        raise UsageError(f"{VARIABLE} must be {' or '.join(CHOICES)}, not {chosen!r:.80}")
    return chosen


def claim_of(core: int) -> str:
    return f"\0distgpt-core-{core}"


def doubts(machine: Machine, here: Sequence[Rank]) -> list[str]:
    """Return why the ranks of a host are not bound, if they should be."""
    if machine.doubts:
        asked = len(here[0].cpus) > 1 and here[0].bind == "auto"
        return [f"{machine.doubts[0]}: threads are not bound to cores"] * asked
    users = Counter(core for rank in here for core in cores_of(machine, rank))
    shared = {core for core, many in users.items() if many > 1}
    if not shared or len({rank.cpus for rank in here}) == 1:
        return []
    many = sum(bool(cores_of(machine, rank) & shared) for rank in here)
    return [
        f"{many} ranks of a host share cores ({in_runs(shared)}); bind each rank to its own cores"
        " (mpirun -bind-to core, srun --cpu-bind=cores)"
    ]


PLACED = Placed()
os.register_at_fork(after_in_child=lambda: PLACED.inherit())
