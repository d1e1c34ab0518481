"""The points of a sweep in order: how each did at the steps at which it was compared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Any

from distgpt.core.saved.metrics import IN_BITS
from distgpt.measure.sweep.grid import Grid, Values
from distgpt.measure.sweep.ledger import DIVERGED, Ledger, Result, Rung, measured, on_rung

BEST = "best"


@dataclass(frozen=True, slots=True)
class Compared:
    """The mean of a point's seeds at a step, and their standard deviation if they are two or more."""

    step: int
    mean: float
    spread: float | None

    def __str__(self) -> str:
        return f"{self.mean:.4f}" + ("" if self.spread is None else f" ± {self.spread:.4f}")


@dataclass(slots=True)
class Row:
    """A point: what it was compared by on each rung to which all of its runs came."""

    point: str
    values: Values
    state: str  # best, finished, ended early, or what has stopped it
    rungs: list[Compared]
    tokens_per_s: float | None = None
    error: str = ""
    bits_per_byte: float | None = None  # of the same loss, where it is one per token

    @property
    def last(self) -> Compared | None:
        return self.rungs[-1] if self.rungs else None


def rows_of(ledger: Ledger) -> list[Row]:
    """Return all points: those that came furthest first, the lowest loss first among them."""
    results = ledger.results()
    last = on_rung(ledger.grid, results, ledger.grid.rungs - 1)
    rows = []
    for point, values in ledger.grid.points.items():
        own = [results[run.name] for run in ledger.runs if run.point == point]
        rows.append(_row(ledger.grid, point, values, own, point in last))
    rows.sort(key=_order)
    if rows and not rows[0].error:
        rows[0].state = BEST
    return rows


def _order(row: Row) -> tuple[bool, int, float]:
    return bool(row.error), -len(row.rungs), row.last.mean if row.last else math.inf


def _row(grid: Grid, point: str, values: Values, results: Sequence[Result], is_last: bool) -> Row:
    rates = [result.tokens_per_s for result in results if result.tokens_per_s]
    row = Row(point, values, "finished" if is_last else "ended early", [], median(rates) if rates else None)
    if failed := [result for result in results if result.stop]:
        row.state = next((result.stop for result in failed if result.stop in DIVERGED), failed[0].stop)
        row.error = failed[0].why
    for rung in range(min(len(result.rungs) for result in results)):
        found = [value for result in results if (value := measured(grid, result, rung)) is not None]
        if len(found) == len(results):
            spread = stdev(found) if len(found) > 1 else None
            row.rungs.append(Compared(results[0].rungs[rung].step, fmean(found), spread))
            row.bits_per_byte = _bits_per_byte(grid, [result.rungs[rung] for result in results])
    return row


def _bits_per_byte(grid: Grid, rungs: Sequence[Rung]) -> float | None:
    """Return the mean of what is compared in bits per byte; None where it is that already, or not known."""
    name = IN_BITS.get(grid.metric)
    known = [bits for rung in rungs if name and (bits := getattr(rung, name)) is not None]
    return fmean(known) if rungs and len(known) == len(rungs) else None


def is_as_good(best: Row, other: Row, seeds: int) -> bool:
    """Return whether seeds leave open which one is better: within two standard errors of the difference."""
    one, two = best.last, other.last
    if other.error or len(other.rungs) < len(best.rungs) or not one or not two:
        return False
    return two.mean - one.mean < 2 * math.hypot(one.spread or 0.0, two.spread or 0.0) / math.sqrt(
        max(1, seeds)
    )


def shortly(value: Any) -> str:
    """Format the value of a setting."""
    return f"{value:g}" if type(value) is float else str(value)
