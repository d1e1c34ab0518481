"""The end of a sweep: a table, the best settings as TOML, and all of it as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from distgpt.core.base.errors import DistgptError, NonFiniteError, command_line, escape
from distgpt.core.base.files import atomic_file
from distgpt.core.base.formatting import count
from distgpt.core.config.run_config import as_toml
from distgpt.measure.sweep.grid import Grid
from distgpt.measure.sweep.ledger import DIVERGED, Ledger
from distgpt.measure.sweep.picture import draw
from distgpt.measure.sweep.ranking import Row, is_as_good, rows_of, shortly
from distgpt.show.page import terminal_table


def finish(ledger: Ledger) -> str:
    """Write all results; return the table, and where they are."""
    rows = rows_of(ledger)
    refuse_without_best(ledger, rows)
    write(ledger, rows)
    return ending(ledger, rows, draw(ledger, rows))


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


def notes(grid: Grid, rows: Sequence[Row]) -> list[str]:
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


def write(ledger: Ledger, rows: Sequence[Row]) -> None:
    """Write sweep.json and best.toml."""
    grid, best = ledger.grid, rows[0]
    results = {run.name: asdict(ledger.result(run)) for run in ledger.runs}
    found = {"grid": asdict(grid), "points": [asdict(row) for row in rows], "runs": results}
    with atomic_file(ledger.path / "sweep.json") as file:
        file.write(json.dumps(found, indent=1).encode() + b"\n")
    assert best.last
    about = (
        f"# {grid.metric} {best.last} at step {best.last.step:,}, the best of {count(len(rows), 'point')}\n"
    )
    with atomic_file(best_file(ledger)) as file:
        file.write((about + as_toml({**grid.fixed, **best.values})).encode())


def best_file(ledger: Ledger) -> Path:
    return ledger.path / "best.toml"


def ending(ledger: Ledger, rows: Sequence[Row], picture: Path) -> str:
    """Return the table, and where the results are."""
    files = {"picture": picture, "results": ledger.path / "sweep.json"}
    lines = [f"{name:<10}{escape(str(path))}" for name, path in files.items()]
    best, file = rows[0], best_file(ledger)
    lines.insert(0, f"{'best':<10}{escape(str(file))} ({ledger.grid.metric} {best.last})")
    next_one = f"{'next':<10}{escape(command_line('train', '--config', file))}"
    hints = [f"note: {line}" for line in notes(ledger.grid, rows)]
    return "\n".join([table(ledger.grid, rows), *hints, "", *lines, next_one])


def refuse_without_best(ledger: Ledger, rows: Sequence[Row]) -> None:
    """Raise an error if no run has come to its end."""
    if all(row.error for row in rows):
        kind = NonFiniteError if all(row.state in DIVERGED for row in rows) else DistgptError
        raise kind(f"no run of {ledger.path} has finished; {rows[0].point}: {rows[0].error}")
