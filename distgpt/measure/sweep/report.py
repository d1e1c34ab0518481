"""The report of a sweep: a table of its ranked points, the best settings as TOML, everything as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median, stdev

from distgpt.core.base.errors import DistgptError, NonFiniteError, command_line, escape
from distgpt.core.base.files import atomic_file, write_json
from distgpt.core.config.run_config import as_toml
from distgpt.measure.sweep.grid import DIVERGED, Grid, Ledger, Result, Values, measured, on_rung, shortly
from distgpt.show.page import terminal_table


@dataclass(frozen=True, slots=True)
class Compared:
    """Mean over a point's seeds at a step, and the standard deviation if there is more than one seed."""

    step: int
    mean: float
    spread: float | None

    def __str__(self) -> str:
        return f"{self.mean:.4f}" + ("" if self.spread is None else f" ± {self.spread:.4f}")


@dataclass(slots=True)
class Row:
    """A point and its metric on each rung that all its runs reached."""

    point: str
    values: Values
    state: str  # best, finished, ended early, or the reason of a stop
    rungs: list[Compared]
    tokens_per_s: float | None
    error: str = ""


def rows_of(ledger: Ledger) -> list[Row]:
    """Return all points: first the ones with the most rungs, then the lowest loss."""
    results = ledger.results()
    last = on_rung(ledger.grid, results, ledger.grid.rungs - 1)
    rows = []
    for point, values in ledger.grid.points.items():
        own = [results[run.name] for run in ledger.runs if run.point == point]
        rows.append(_row(ledger.grid, point, values, own, "finished" if point in last else "ended early"))
    rows.sort(key=lambda row: (bool(row.error), -len(row.rungs), row.rungs[-1].mean if row.rungs else 0.0))
    if not rows[0].error:
        rows[0].state = "best"
    return rows


def _row(grid: Grid, point: str, values: Values, results: Sequence[Result], state: str) -> Row:
    rates = [result.tokens_per_s for result in results if result.tokens_per_s]
    row = Row(point, values, state, [], median(rates) if rates else None)
    if failed := sorted((result for result in results if result.stop), key=lambda r: r.stop not in DIVERGED):
        row.state, row.error = failed[0].stop, failed[0].error.partition("; ")[0]
    for rung in range(min(len(result.rungs) for result in results)):
        found = [value for result in results if (value := measured(grid, result, rung)) is not None]
        if len(found) == len(results):
            spread = stdev(found) if len(found) > 1 else None
            row.rungs.append(Compared(results[0].rungs[rung].step, fmean(found), spread))
    return row


def finish(ledger: Ledger) -> str:
    """Write all results. Return the table and the paths of the files. Raise an error if no run finished."""
    grid, rows = ledger.grid, rows_of(ledger)
    if all(row.error for row in rows):
        kind = NonFiniteError if all(row.state in DIVERGED for row in rows) else DistgptError
        raise kind(f"no run of {ledger.path} has finished; {rows[0].point}: {rows[0].error}")
    best, all_of_it, toml = rows[0], ledger.path / "sweep.json", ledger.path / "best.toml"
    results = {run.name: asdict(ledger.result(run)) for run in ledger.runs}
    result = {"grid": asdict(grid), "points": [asdict(row) for row in rows], "runs": results}
    write_json(all_of_it, result)
    about = f"{grid.metric} {best.rungs[-1]}"
    with atomic_file(toml) as file:
        text = f"# {about} at step {best.rungs[-1].step:,}\n{as_toml({**grid.fixed, **best.values})}"
        file.write(text.encode())
    lines = {
        "best": f"{toml} ({about})",
        "results": str(all_of_it),
        "next": command_line("train", "--config", toml),
        "curves": command_line("plot", ledger.path),
    }
    if len(best.rungs) < grid.rungs:
        lines["note"] = "all promoted points failed; the best of the others was not trained to the end"
    return "\n".join([table(grid, rows), "", *(f"{name:<10}{escape(text)}" for name, text in lines.items())])


def table(grid: Grid, rows: Sequence[Row]) -> str:
    shown = [
        [
            *map(shortly, row.values.values()),
            f"{row.rungs[-1].step:,}" if row.rungs else "",
            str(row.rungs[-1]) if row.rungs else "",
            "" if row.tokens_per_s is None else f"{row.tokens_per_s:,.0f}",
            row.state,
        ]
        for row in rows
    ]
    failed = [escape(f"{row.point}: {row.error}") for row in rows if row.error]
    columns = [*rows[0].values, "steps", grid.metric, "tokens/s", ""]
    return "\n".join([terminal_table(columns, shown), *failed])
