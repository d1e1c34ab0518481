"""Records every operation of a step, and adds up its time by kind. Each second of each worker counts once.

While steps are measured, wrappers replace the operations of one backend, one communicator and one source of
batches. Without a profile there are no wrappers, so nothing is slower.

An operation that the leading worker calls outside a parallel region occupies all workers. In a call that
starts the workers in parallel (`each`, `run_together`), each has its own operations. It waits after its last
one and, if it had to be woken, before its first one. If operations are nested, time counts only for the
inner one. The rest of a step is between the operations.
"""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from distgpt.core.comm.api import Comm
from distgpt.core.data.batches import Batches
from distgpt.core.ops.api import Array
from distgpt.core.ops.kernels import Kernels
from distgpt.measure.profile.operations import OPERATIONS, ORDER, WORKERS, flops_of, row_of

if TYPE_CHECKING:  # a profile of a CPU stage must not import gpu/
    from distgpt.gpu.device import CupyDevice


@dataclass(frozen=True, slots=True)
class Timer:
    """The processor's clock, for backends whose calls return when their work is done."""

    now: Callable[[], Any] = time.perf_counter  # makes a time stamp
    since: Callable[[Any, Any], float] = operator.sub  # seconds between stamps, later one first; waits
    settle: Callable[[], None] = lambda: None  # waits until all queued work is done

    @classmethod
    def of(cls, device: CupyDevice) -> Timer:
        """Return a clock of events in a GPU's stream, for work that calls only queue."""
        return cls(device.mark, lambda stamp, origin: float(stamp.seconds_since(origin)), device.synchronize)


@dataclass(slots=True, eq=False)
class Region:
    """A call in which workers have their own operations or (`is_shared`) parts of the same ones."""

    is_shared: bool
    begin: Any
    end: Any = None


@dataclass(slots=True, eq=False)
class Event:
    """A call of an operation, and the operation that called it."""

    name: str
    worker: int
    parent: Event | None
    region: Region | None
    args: tuple[Any, ...]
    named: dict[str, Any]
    begin: Any = None
    end: Any = None


@dataclass(slots=True)
class Taken:
    """A recorded step. It ends with its launch or at the start of the next step."""

    begin: Any
    end: Any = None
    events: list[Event] = field(default_factory=list)
    regions: list[Region] = field(default_factory=list)


class _Place(threading.local):
    def __init__(self, numbers: Iterator[int]) -> None:
        self.worker = next(numbers)
        self.event: Event | None = None


class Recorder:
    """Measures the operations of the calling thread and the workers in `with recorder.attached(): …`."""

    def __init__(
        self,
        clock: Timer,
        kernels: Kernels,
        comm: Comm,
        batches: Batches,
        exchanges: Sequence[tuple[Any, str]],
    ) -> None:
        """`exchanges`: methods that wait for other ranks, as object and name."""
        self._clock, self._comm = clock, comm
        self._taken = Taken(clock.now())
        self._place = _Place(count())
        self._region: Region | None = None
        parts: list[tuple[Any, str]] = [*((kernels, name) for name in OPERATIONS), (batches, "fill")]
        self._calls = [(part, name, self._timed(name, getattr(part, name))) for part, name in parts]
        if kernels.threads > 1:
            for name in ("each", "run_together"):
                self._calls.append((kernels, name, self._side_by_side(name, getattr(kernels, name))))
        for of, name in exchanges if comm.size > 1 else ():
            self._calls.append((of, name, self._exchange(getattr(of, name))))

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Replace the operations with measuring wrappers inside the `with` block."""
        before = [vars(part).get(name) for part, name, _ in self._calls]
        try:
            for part, name, call in self._calls:
                setattr(part, name, call)
            yield
        finally:
            for (part, name, _), own in zip(self._calls, before, strict=True):
                if own is not None:
                    setattr(part, name, own)
                elif name in vars(part):
                    delattr(part, name)

    @contextmanager
    def step(self) -> Iterator[Taken]:
        """Record a step. The record is complete at the end."""
        self._taken = taken = Taken(self._clock.now())
        yield taken
        taken.end = self._clock.now()

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        now, place = self._clock.now, self._place

        def measured(*args: Any, **named: Any) -> Any:
            event = Event(name, place.worker, place.event, self._region, args, named)
            self._taken.events.append(event)
            place.event = event
            event.begin = now()
            try:
                return call(*args, **named)
            finally:
                event.end = now()
                place.event = event.parent

        return measured

    def _side_by_side(self, name: str, call: Callable[..., None]) -> Callable[..., None]:
        def measured(work: Callable[..., None], count: int = 2) -> None:
            args = (work, count) if name == "each" else (work,)
            if self._region or self._place.event or count == 1:
                call(*args)
                return
            self._region = region = Region(name == "run_together", self._clock.now())
            try:
                call(*args)
            finally:
                self._region, region.end = None, self._clock.now()
            self._taken.regions.append(region)

        return measured

    def _exchange(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Measure the wait for all ranks, then the part of the exchange that no computation hides."""

        def meet() -> None:
            self._clock.settle()
            self._comm.barrier()

        wait, transfer = self._timed("wait", meet), self._timed("transfer", call)

        def measured(*args: Any) -> None:
            wait()
            transfer(*args)

        return measured


def no_times() -> Array:
    """Return zeros for worker-seconds, calls and matmul FLOPs, each per row of ORDER."""
    return np.zeros((3, len(ORDER)))


def account(clock: Timer, workers: int, taken: Taken) -> tuple[float, Array]:
    """Return a step's seconds, and its times in the format of `no_times`. Waits for the step."""

    def seconds(stamp: Any) -> float:
        return clock.since(stamp, taken.begin)

    times = no_times()
    ends = [(seconds(event.begin), seconds(event.end)) for event in taken.events]
    inner: dict[Event | None, float] = {}  # seconds in operations that this one called
    for event, (begin, end) in zip(taken.events, ends, strict=True):
        inner[event.parent] = inner.get(event.parent, 0.0) + end - begin
    busy: dict[tuple[Region | None, int], list[float]] = {}
    for event, (begin, end) in zip(taken.events, ends, strict=True):
        apart = event in inner
        flops = flops_of(event.name, apart, event.args, event.named)
        own = end - begin - inner.get(event, 0.0)
        part = 1 / workers if event.region and event.region.is_shared else 1.0
        occupied = own if event.region else own * workers
        times[:, ORDER.index(row_of(event.name, apart))] += occupied, part, part * flops
        busy.setdefault((event.region, event.worker), []).extend((begin, end))
    for region in taken.regions:
        begin, end = seconds(region.begin), seconds(region.end)
        for worker in range(workers):
            own_times = busy.get((region, worker), [begin])
            woken = min(own_times) - begin if worker else 0.0
            times[0, ORDER.index(WORKERS)] += end - max(own_times) + woken
    return seconds(taken.end), times
