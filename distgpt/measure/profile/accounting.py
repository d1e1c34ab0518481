"""Adds up the operations of a step by kind: each second of each worker counts once.

An operation that the leading worker calls while the others have none of their own occupies all workers.
During a call that starts the workers side by side (`each`, `run_together`), each has its own operations; it
waits after its last one, and a worker that had to be woken also before its first one. The time of an
operation that another calls counts for the inner one alone. The rest of a step lies between the operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from distgpt.kernels.api import Array
from distgpt.measure.profile.operations import ORDER, WORKERS, Cost, cost_of, line_of
from distgpt.measure.profile.recorder import SIDE_BY_SIDE, TOGETHER, Clock, Event, Taken

NOBODY = -1
_SIDEWAYS = (SIDE_BY_SIDE, TOGETHER)


def no_times() -> Array:
    """Make zeros for worker-seconds, calls, FLOPs of matmuls and bytes, each per row of ORDER."""
    return np.zeros((4, len(ORDER)))


@dataclass(frozen=True, slots=True)
class _Structure:
    """The facts about one worker's sequence of operations that are the same in every step."""

    names: tuple[str, ...]
    parents: Array
    rows: Array  # indices into ORDER, NOBODY for calls that are no operation
    costs: Array  # FLOPs and bytes
    aside: Array  # events that start the workers
    shares: Array  # whether in each of these they share all operations


@dataclass(frozen=True, slots=True)
class Lane:
    """One worker's part of a step, in seconds from its beginning."""

    known: _Structure
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


@dataclass(slots=True)
class Accountant:
    """Accounts for steps. Counts the cost of a sequence of operations once: all steps of a run are alike."""

    clock: Clock
    workers: int
    _known: dict[tuple[int, tuple[str, ...]], _Structure] = field(default_factory=dict)

    def account(self, taken: Taken) -> Account:
        """Account for a step. Waits for it."""
        seconds = self.clock.since(taken.end, taken.begin)
        idle: list[list[Event]] = [[] for _ in range(self.workers - len(taken.lanes))]
        lanes = [self._lane(i, events, taken.begin) for i, events in enumerate([*taken.lanes, *idle])]
        lead, times = lanes[0], no_times()
        regions = _Regions(lead.begins[lead.known.aside], lead.ends[lead.known.aside], lead.known.shares)
        for number, lane in enumerate(lanes):
            self._add(lane, regions, times)
            if number < self.workers:
                times[0, ORDER.index(WORKERS)] += _waiting(lane, regions, helper=number > 0)
        return Account(seconds, times, lanes)

    def _lane(self, number: int, events: Sequence[Event], origin: Any) -> Lane:
        names, before, begins, ends, args, named = zip(*events, strict=True) if events else ((),) * 6
        known = self._known.get((number, names))
        if known is None:
            known = self._known[number, names] = _structure(names, before, args, named)
        return Lane(known, *(self.clock.seconds(stamps, origin) for stamps in (begins, ends)))

    def _add(self, lane: Lane, regions: _Regions, times: Array) -> None:
        """Add one worker's operations to the times."""
        known, taken = lane.known, lane.ends - lane.begins
        called = known.parents != NOBODY
        own = taken - np.bincount(known.parents[called], taken[called], len(taken))
        inside = regions.of(lane.begins)
        aside = inside != NOBODY
        workers = np.where(aside, 1, self.workers)
        part = np.ones(len(own))
        if len(regions.shares):
            part[aside & regions.shares[inside]] = 1 / self.workers
        counted = known.rows != NOBODY
        for total, each in zip(times, (own * workers, part, *(known.costs * part)), strict=True):
            total += np.bincount(known.rows[counted], each[counted], len(ORDER))


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
    within = (inside != NOBODY) & (lane.known.rows != NOBODY)
    np.minimum.at(first, inside[within], lane.begins[within])
    np.maximum.at(last, inside[within], lane.ends[within])
    spans = [(last, regions.ends)]
    if helper:
        spans.append((regions.begins, np.where(last > regions.begins, first, regions.begins)))
    for begins, ends in spans:
        lane.waits.extend(zip(begins.tolist(), ends.tolist(), strict=True))
    return sum(end - begin for begin, end in lane.waits)


def _structure(
    names: tuple[str, ...], before: Sequence[int], args: Sequence[Any], named: Sequence[dict[str, Any]]
) -> _Structure:
    """Return the structure of events, ordered by their ends: event `at` encloses those from before[at] on."""
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
    return _Structure(
        names,
        np.array(operations, np.int64),
        np.array(rows, np.int64),
        np.array(costs).reshape(-1, 2).T,
        np.array(aside, np.int64),
        np.array([names[at] == TOGETHER for at in aside], bool),
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
