"""Records every operation of a step: which, from when to when, on which worker, called from where.

For the length of a step, measuring calls stand in front of the operations of one backend, one communicator
and one source of batches; without a profile there are none, and nothing that could be slow.
"""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from distgpt.comm.api import Comm
from distgpt.data.batches import Batches
from distgpt.gpu.device import CupyDevice
from distgpt.kernels.api import Array, Kernels
from distgpt.measure.profile.operations import OPERATIONS

SIDE_BY_SIDE, TOGETHER = "each", "run_together"  # calls during which each worker has operations of its own

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

        def measured(*args: Any, **named: Any) -> None:
            events = place.events
            before = len(events)
            begin = now()
            call(*args, **named)
            events.append((name, before, begin, now(), args, named))

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
