"""The end of a sweep: its points in order as a table, a picture, the best settings as TOML, all as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from distgpt.core.base.errors import DistgptError, NonFiniteError, command_line, escape
from distgpt.core.base.files import atomic_file
from distgpt.core.base.formatting import count
from distgpt.core.config.run_config import as_toml
from distgpt.core.saved.metrics import IN_BITS
from distgpt.measure.sweep.grid import Grid, Values
from distgpt.measure.sweep.ledger import DIVERGED, Ledger, Result, Rung, measured, on_rung
from distgpt.show.page import terminal_table
from distgpt.show.plot import Look, plot

BEST = "best"
MOST_DRAWN = 8  # runs: as many as there are colours


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


def finish(ledger: Ledger) -> str:
    """Write all results; return the table, notes, and where the files are. Raises if no run has finished."""
    grid, rows = ledger.grid, rows_of(ledger)
    if all(row.error for row in rows):
        kind = NonFiniteError if all(row.state in DIVERGED for row in rows) else DistgptError
        raise kind(f"no run of {ledger.path} has finished; {rows[0].point}: {rows[0].error}")
    best, all_of_it, toml = rows[0], ledger.path / "sweep.json", ledger.path / "best.toml"
    assert best.last
    results = {run.name: asdict(ledger.result(run)) for run in ledger.runs}
    found = {"grid": asdict(grid), "points": [asdict(row) for row in rows], "runs": results}
    with atomic_file(all_of_it) as file:
        file.write(json.dumps(found, indent=1).encode() + b"\n")
    about = f"{grid.metric} {best.last} at step {best.last.step:,}, the best of {count(len(rows), 'point')}"
    with atomic_file(toml) as file:
        file.write(f"# {about}\n{as_toml({**grid.fixed, **best.values})}".encode())
    lines = {
        "best": f"{toml} ({grid.metric} {best.last})",
        "picture": str(draw(ledger, rows)),
        "results": str(all_of_it),
        "next": command_line("train", "--config", toml),
    }
    notes = [f"note: {line}" for line in notes_on(grid, rows)]
    return "\n".join(
        [table(grid, rows), *notes, "", *(f"{name:<10}{escape(text)}" for name, text in lines.items())]
    )


def draw(ledger: Ledger, rows: Sequence[Row]) -> Path:
    """Draw the curves of the best points' runs; `distgpt plot FOLDER` draws those of all."""
    best = [row.point for row in rows if not row.error]
    runs = sorted((run for run in ledger.runs if run.point in best), key=lambda run: best.index(run.point))
    paths = [ledger.directory(run).path for run in runs[:MOST_DRAWN]]
    return plot(paths, ledger.path / "sweep.png", Look())


def table(grid: Grid, rows: Sequence[Row]) -> str:
    """Format the points as a table; below it what has stopped some."""
    names = list(rows[0].values)
    has_bits = any(row.bits_per_byte is not None for row in rows)
    columns = [*names, "steps", grid.metric, *["bits/byte"] * has_bits, "tokens/s", ""]
    shown = [
        [
            *(shortly(row.values[name]) for name in names),
            f"{row.last.step:,}" if row.last else "",
            str(row.last or ""),
            *["" if row.bits_per_byte is None else f"{row.bits_per_byte:.4f}"] * has_bits,
            "" if row.tokens_per_s is None else f"{row.tokens_per_s:,.0f}",
            row.state,
        ]
        for row in rows
    ]
    failed = [escape(f"{row.point}: {row.error}") for row in rows if row.error]
    return "\n".join([terminal_table(columns, shown), *failed])


def notes_on(grid: Grid, rows: Sequence[Row]) -> list[str]:
    """Return what to know before the best point is believed."""
    best, found = rows[0], []
    if len(best.rungs) < grid.rungs:
        found.append("all promoted points have failed: the best of the others was not trained to the end")
    for name, chosen in best.values.items():
        tried = sorted({row.values[name] for row in rows}) if type(chosen) in (int, float) else []
        if len(tried) > 2 and chosen in (tried[0], tried[-1]):
            side = "smallest" if chosen == tried[0] else "largest"
            found.append(f"{name} {shortly(chosen)} is the {side} that was tried: the best may lie beyond")
    if near := sum(is_as_good(best, row, len(grid.seeds)) for row in rows[1:]):
        found.append(f"{count(near, 'other point')} within two standard errors of the best: try more seeds")
    return found
