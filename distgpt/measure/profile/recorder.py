"""Records every operation of a step, and adds up its time by kind: each second of each worker counts once.

For the length of a step, measuring calls stand in front of the operations of one backend, one communicator
and one source of batches; without a profile there are none, and nothing that could be slow.

An operation that the leading worker calls while the others have none of their own occupies all workers.
During a call that starts the workers side by side (`each`, `run_together`), each has its own operations; it
waits after its last one, and a worker that had to be woken also before its first one. The time of an
operation that another calls counts for the inner one alone. The rest of a step lies between the operations.
"""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from distgpt.core.comm.api import Comm
from distgpt.core.data.batches import Batches
from distgpt.core.ops.api import Array
from distgpt.core.ops.kernels import Kernels
from distgpt.measure.profile.operations import OPERATIONS, ORDER, WORKERS, Cost, cost_of, line_of

if TYPE_CHECKING:  # a profile of a CPU stage needs nothing of gpu/
    from distgpt.gpu.device import CupyDevice

SIDE_BY_SIDE, TOGETHER = "each", "run_together"  # calls during which each worker has operations of its own

_SIDEWAYS = (SIDE_BY_SIDE, TOGETHER)
NOBODY = -1

# An event: operation, events of this worker before it began, begin, end, arguments.
Event = tuple[str, int, Any, Any, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Clock:
    """The processor's clock, for backends whose calls return when their work is done."""

    now: Callable[[], Any] = time.perf_counter  # makes a stamp
    since: Callable[[Any, Any], float] = operator.sub  # seconds to a stamp from an earlier one; waits
    settle: Callable[[], None] = lambda: None  # waits until all work so far is done

    @classmethod
    def of(cls, device: CupyDevice) -> Clock:
        """Return a clock of events in the stream of a GPU, for work that calls only queue."""
        return cls(device.mark, lambda stamp, origin: float(stamp.seconds_since(origin)), device.synchronize)

    def seconds(self, stamps: Sequence[Any], origin: Any) -> Array:
        """Return the seconds from the origin to each stamp."""
        return np.array([self.since(stamp, origin) for stamp in stamps], np.float64)


@dataclass(slots=True)
class Taken:
    """A step as it was recorded. The first of `lanes` is the worker that led it.

    It ends with its launch, or where the next one begins if that was launched before this was waited for.
    """

    begin: Any
    end: Any = None
    lanes: list[list[Event]] = field(default_factory=list)


class _Place(threading.local):
    """The calling thread's own list of events."""

    def __init__(self, lanes: list[list[Event]]) -> None:
        self.events: list[Event] = []
        lanes.append(self.events)


class Recorder:
    """`with recorder.step() as taken: …` measures the operations of the calling thread and of the workers."""

    def __init__(
        self,
        clock: Clock,
        kernels: Kernels,
        comm: Comm,
        batches: Batches,
        exchanges: Sequence[tuple[Any, str, Array]],
    ) -> None:
        """`exchanges`: methods that wait for other ranks, by object and name, and what they are about."""
        self._clock, self._comm = clock, comm
        self._lanes: list[list[Event]] = []
        self._place = _Place(self._lanes)
        parts: list[tuple[Any, tuple[str, ...]]] = [(kernels, tuple(OPERATIONS)), (batches, ("fill",))]
        if kernels.threads > 1:
            parts.append((kernels, (SIDE_BY_SIDE, TOGETHER)))
        timed = [
            (part, name, self._timed(name, getattr(part, name))) for part, names in parts for name in names
        ]
        if comm.size > 1:
            timed += [(of, name, self._exchange(getattr(of, name), array)) for of, name, array in exchanges]
        self._timed_calls = timed

    @contextmanager
    def step(self) -> Iterator[Taken]:
        """Record a step; what is recorded is complete at the end."""
        with ExitStack() as attached:
            for part, name, call in self._timed_calls:
                attached.enter_context(_instead(part, name, call))
            for lane in self._lanes:  # of a step that failed
                lane.clear()
            taken = Taken(self._clock.now())
            yield taken
            taken.end = self._clock.now()
        for lane in self._lanes:
            taken.lanes.append(list(lane))
            lane.clear()

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        now, place = self._clock.now, self._place

        def measured(*args: Any, **named: Any) -> Any:
            events = place.events
            before = len(events)
            begin = now()
            found = call(*args, **named)
            events.append((name, before, begin, now(), args, named))
            return found

        return measured

    def _exchange(self, call: Callable[..., Any], array: Array) -> Callable[..., Any]:
        """Measure the waiting for all ranks, and then what of the exchange was not hidden before."""
        now, settle, place, comm = self._clock.now, self._clock.settle, self._place, self._comm

        def measured(*args: Any) -> None:
            events = place.events
            begin = now()
            settle()
            comm.barrier()
            together = now()
            events.append(("wait", len(events), begin, together, (array,), {}))
            before = len(events)
            call(*args)
            events.append(("transfer", before, together, now(), (array,), {}))

        return measured


@contextmanager
def _instead(of: Any, name: str, call: Callable[..., Any]) -> Iterator[None]:
    """Replace a method of an object for a while."""
    own = vars(of).get(name)
    setattr(of, name, call)
    try:
        yield
    finally:
        if own is None:
            delattr(of, name)
        else:
            setattr(of, name, own)


# Accounting


def no_times() -> Array:
    """Make zeros for worker-seconds, calls, FLOPs of matmuls and bytes, each per row of ORDER."""
    return np.zeros((4, len(ORDER)))


@dataclass(frozen=True, slots=True)
class Lane:
    """One worker's part of a step, its events in seconds from the step's beginning."""

    names: tuple[str, ...]
    parents: Array
    rows: Array  # indices into ORDER, NOBODY for calls that are no operation
    costs: Array  # FLOPs and bytes
    aside: Array  # events that start the workers
    shares: Array  # whether in each of these they share all operations
    begins: Array
    ends: Array
    waits: list[tuple[float, float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Account:
    """A step's times, and what each worker did. `begin` in seconds from when all ranks met."""

    seconds: float
    times: Array
    lanes: list[Lane]
    number: int = 0
    begin: float = 0.0


def account(clock: Clock, workers: int, taken: Taken) -> Account:
    """Account for a step. Waits for it."""
    seconds = clock.since(taken.end, taken.begin)
    idle: list[list[Event]] = [[] for _ in range(workers - len(taken.lanes))]
    lanes = [_lane(clock, events, taken.begin) for events in (*taken.lanes, *idle)]
    lead, times = lanes[0], no_times()
    regions = _Regions(lead.begins[lead.aside], lead.ends[lead.aside], lead.shares)
    for number, lane in enumerate(lanes):
        _add(lane, workers, regions, times)
        if number < workers:
            times[0, ORDER.index(WORKERS)] += _waiting(lane, regions, helper=number > 0)
    return Account(seconds, times, lanes)


def _lane(clock: Clock, events: Sequence[Event], origin: Any) -> Lane:
    """Return a lane of events, ordered by their ends: each encloses those from its `before` on."""
    names, before, begins, ends, args, named = zip(*events, strict=True) if events else ((),) * 6
    parents = [NOBODY] * len(names)
    open_: list[int] = []  # ended, and perhaps inside of another
    for at, first in enumerate(before):
        while open_ and open_[-1] >= first:
            parents[open_.pop()] = at
        open_.append(at)
    operations = [_nearest_operation(parents, names, at) for at in range(len(names))]
    apart = set(operations)
    rows, costs, aside = [], [], []
    for at, name in enumerate(names):
        inside = operations[at]
        if name in _SIDEWAYS:
            rows.append(NOBODY)
            costs.append(Cost())
        else:
            rows.append(ORDER.index(line_of(name, None if inside == NOBODY else names[inside], at in apart)))
            costs.append(cost_of(name, at in apart, args[at], named[at]))
        if parents[at] == NOBODY and _is_wide(name, args[at], named[at]):
            aside.append(at)
    return Lane(
        names,
        np.array(operations, np.int64),
        np.array(rows, np.int64),
        np.array(costs).reshape(-1, 2).T,
        np.array(aside, np.int64),
        np.array([names[at] == TOGETHER for at in aside], bool),
        clock.seconds(begins, origin),
        clock.seconds(ends, origin),
    )


def _nearest_operation(parents: list[int], names: Sequence[str], at: int) -> int:
    """Return the operation that called event `at`; a call that only starts the workers is none."""
    parent = parents[at]
    while parent != NOBODY and names[parent] in _SIDEWAYS:
        parent = parents[parent]
    return parent


def _is_wide(name: str, args: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Return whether several workers had something to do."""
    if name == SIDE_BY_SIDE:
        return int(named.get("count", args[-1])) > 1
    return name == TOGETHER


def _add(lane: Lane, workers: int, regions: _Regions, times: Array) -> None:
    """Add one worker's operations to the times."""
    taken = lane.ends - lane.begins
    called = lane.parents != NOBODY
    own = taken - np.bincount(lane.parents[called], taken[called], len(taken))
    inside = regions.of(lane.begins)
    aside = inside != NOBODY
    part = np.ones(len(own))
    if len(regions.shares):
        part[aside & regions.shares[inside]] = 1 / workers
    counted = lane.rows != NOBODY
    each = (own * np.where(aside, 1, workers), part, *(lane.costs * part))
    for total, values in zip(times, each, strict=True):
        total += np.bincount(lane.rows[counted], values[counted], len(ORDER))


@dataclass(frozen=True, slots=True)
class _Regions:
    """The times when workers had operations of their own, and whether these were parts of the same ones."""

    begins: Array
    ends: Array
    shares: Array

    def of(self, moments: Array) -> Array:
        """Return the index of the region that each moment lies in, or NOBODY."""
        if not len(self.begins):
            return np.full(len(moments), NOBODY)
        found = np.searchsorted(self.begins, moments, "right") - 1
        return np.where((found >= 0) & (moments < self.ends[found]), found, NOBODY)


def _waiting(lane: Lane, regions: _Regions, helper: bool) -> float:
    """Note when a worker waits: in each region after its last operation, a helper also before its first."""
    first, last = regions.ends.copy(), regions.begins.copy()
    inside = regions.of(lane.begins)
    within = (inside != NOBODY) & (lane.rows != NOBODY)
    np.minimum.at(first, inside[within], lane.begins[within])
    np.maximum.at(last, inside[within], lane.ends[within])
    spans = [(last, regions.ends)]
    if helper:
        spans.append((regions.begins, np.where(last > regions.begins, first, regions.begins)))
    for begins, ends in spans:
        lane.waits.extend(zip(begins.tolist(), ends.tolist(), strict=True))
    return sum(end - begin for begin, end in lane.waits)
