"""From the operations of a step to the time that each kind of them took: each second of each worker, once.

An operation that the leading worker calls while the others have none of their own occupies all workers.
During a call that starts the workers side by side (`each`, `share`), each has its own operations; it waits
after its last one, and a worker that had to be woken also before its first one. The time of an operation that
another calls counts for the inner one alone. The rest of a step lies between the operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from distgpt.kernels.api import Array
from distgpt.measure.profile.operations import ORDER, WORKERS, Cost, cost_of, line_of
from distgpt.measure.profile.recorder import SHARED, SIDE_BY_SIDE, Clock, Taken

NOBODY = -1
_SIDEWAYS = (SIDE_BY_SIDE, SHARED)


@dataclass(frozen=True, slots=True)
class Times:
    """Per row of ORDER: worker-seconds, calls, FLOPs of matmuls, bytes."""

    seconds: Array
    calls: Array
    flops: Array
    bytes: Array

    @staticmethod
    def none() -> Times:
        return Times(*(np.zeros(len(ORDER)) for _ in range(4)))

    def add(self, other: Times) -> None:
        for own, more in zip(self.parts(), other.parts(), strict=True):
            own += more

    def parts(self) -> tuple[Array, Array, Array, Array]:
        return self.seconds, self.calls, self.flops, self.bytes


@dataclass(frozen=True, slots=True)
class Lane:
    """One worker's part of a step. `rows` are indices into ORDER, NOBODY for calls that are no operation."""

    names: tuple[str, ...]
    rows: Array
    begins: Array
    ends: Array
    waits: list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Account:
    """The times of a step, and what each worker did, in seconds from its beginning."""

    seconds: float
    times: Times
    lanes: list[Lane]


@dataclass(frozen=True, slots=True)
class Traced:
    """A step with all its operations. `begin` in seconds from the moment at which all ranks met."""

    number: int
    begin: float
    account: Account


@dataclass(frozen=True, slots=True)
class _Structure:
    """A sequence of operations of one worker: what is the same in every step."""

    parents: Array
    rows: Array
    flops: Array
    bytes: Array
    aside: list[tuple[int, bool]]  # events that start the workers, and whether they share all operations


@dataclass(slots=True)
class Accountant:
    """Accounts for steps. Counts the cost of a sequence of operations once: all steps of a run are alike."""

    clock: Clock
    workers: int
    _known: dict[tuple[int, tuple[str, ...]], _Structure] = field(default_factory=dict)

    def account(self, taken: Taken) -> Account:
        """Account for a step. Waits for it."""
        seconds = float(self.clock.seconds([taken.end], taken.begin)[0])
        times, lanes = Times.none(), []
        regions = _no_regions()
        for number, events in enumerate(taken.lanes):
            if not events:
                lanes.append(_idle())
                continue
            names, before, begins, ends, args, named = zip(*events, strict=True)
            known = self._known.get((number, names))
            if known is None:
                known = self._known[number, names] = _structure(names, before, args, named)
            begins, ends = (self.clock.seconds(stamps, taken.begin) for stamps in (begins, ends))
            if number == 0:
                regions = _Regions(
                    begins[[at for at, _ in known.aside]],
                    ends[[at for at, _ in known.aside]],
                    np.array([shares for _, shares in known.aside], bool),
                )
            lanes.append(self._lane(names, known, begins, ends, regions, times))
        lanes += [_idle() for _ in range(self.workers - len(lanes))]
        self._waiting(lanes, regions, times)
        return Account(seconds, times, lanes)

    def _lane(
        self,
        names: tuple[str, ...],
        known: _Structure,
        begins: Array,
        ends: Array,
        regions: _Regions,
        times: Times,
    ) -> Lane:
        """Add one worker's operations to the times."""
        taken = ends - begins
        called = known.parents != NOBODY
        own = taken - np.bincount(known.parents[called], taken[called], len(taken))
        inside = regions.of(begins)
        aside = inside != NOBODY
        workers = np.where(aside, 1, self.workers)
        part = np.where(aside & regions.shares[inside], 1 / self.workers, 1.0) if len(regions.shares) else 1.0
        counted = known.rows != NOBODY
        of = known.rows[counted]
        found = (own * workers, part * np.ones(len(own)), known.flops * part, known.bytes * part)
        times.add(Times(*(np.bincount(of, each[counted], len(ORDER)) for each in found)))
        return Lane(names, known.rows, begins, ends, [])

    def _waiting(self, lanes: list[Lane], regions: _Regions, times: Times) -> None:
        """Add the waiting before the first and after the last operation of each worker in a region."""
        at = ORDER.index(WORKERS)
        for number, lane in enumerate(lanes[: self.workers]):
            first, last = regions.ends.copy(), regions.begins.copy()
            inside = regions.of(lane.begins)
            within = (inside != NOBODY) & (lane.rows != NOBODY)
            np.minimum.at(first, inside[within], lane.begins[within])
            np.maximum.at(last, inside[within], lane.ends[within])
            spans = [(np.maximum(last, regions.begins), regions.ends)]
            if number:
                spans.append((regions.begins, np.where(last > regions.begins, first, regions.begins)))
            for begins, ends in spans:
                times.seconds[at] += float((ends - begins).sum())
                lane.waits.extend(zip(begins.tolist(), ends.tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class _Regions:
    """When workers had operations of their own, and whether these were parts of the same ones."""

    begins: Array
    ends: Array
    shares: Array

    def of(self, moments: Array) -> Array:
        """The index of the region that each moment lies in, or NOBODY."""
        if not len(self.begins):
            return np.full(len(moments), NOBODY)
        found = np.searchsorted(self.begins, moments, "right") - 1
        return np.where((found >= 0) & (moments < self.ends[found]), found, NOBODY)


def _idle() -> Lane:
    return Lane((), np.zeros(0, np.int64), np.zeros(0), np.zeros(0), [])


def _no_regions() -> _Regions:
    return _Regions(np.zeros(0), np.zeros(0), np.zeros(0, bool))


def _structure(
    names: Sequence[str], before: Sequence[int], args: Sequence[Any], named: Sequence[dict[str, Any]]
) -> _Structure:
    """Events come in the order of their ends: event number `at` encloses those from number before[at] on."""
    parents = [NOBODY] * len(names)
    open_: list[int] = []  # ended, and perhaps inside of another
    for at, first in enumerate(before):
        while open_ and open_[-1] >= first:
            parents[open_.pop()] = at
        open_.append(at)
    operations = [_nearest_operation(parents, names, at) for at in range(len(names))]
    apart = set(operations)
    rows, costs = [], []
    for at, name in enumerate(names):
        inside = operations[at]
        if name in _SIDEWAYS:
            rows.append(NOBODY)
            costs.append(Cost())
            continue
        rows.append(ORDER.index(line_of(name, None if inside == NOBODY else names[inside], at in apart)))
        costs.append(cost_of(name, at in apart, args[at], named[at]))
    aside = [
        (at, names[at] == SHARED)
        for at in range(len(names))
        if parents[at] == NOBODY and _is_wide(names[at], args[at], named[at])
    ]
    return _Structure(
        np.array(operations),
        np.array(rows),
        np.array([cost.flops for cost in costs]),
        np.array([cost.bytes for cost in costs]),
        aside,
    )


def _nearest_operation(parents: list[int], names: Sequence[str], at: int) -> int:
    """The operation that called it; a call that only starts the workers is none."""
    parent = parents[at]
    while parent != NOBODY and names[parent] in _SIDEWAYS:
        parent = parents[parent]
    return parent


def _is_wide(name: str, args: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Whether several workers had something to do."""
    if name == SIDE_BY_SIDE:
        return int(named.get("count", args[-1])) > 1
    return name == SHARED
