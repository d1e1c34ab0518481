"""The picture of a sweep: the curves of its runs, and the result by each setting that varies."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from distgpt.core.base.files import atomic_file
from distgpt.show.charts import COLOURS, MARKS, series_colour, set_ticks, style
from distgpt.show.plot import DPI, FONTS, SMOOTHED, WIDTH, read_runs
from distgpt.sweep.grid import BITS, VARYING, Grid
from distgpt.sweep.ledger import Ledger
from distgpt.sweep.standings import Compared, Row, shortly

ACROSS, MOST_PANELS = 3, 9
NAMED = 3  # points with a colour and a name among the curves
MOST_LINES = 8  # in a panel of results; more points are not joined
SPREAD = 8.0  # times the median's distance from the best: what is further off lies outside
MOST_SUBDIVIDED = 30.0  # of a logarithmic axis, how far it reaches with ticks between powers of ten
LOG_FROM = 5.0  # the largest value of a setting by its smallest


def draw(ledger: Ledger, rows: Sequence[Row]) -> Path:
    """Draw sweep.png; return its path."""
    names = [name for name in rows[0].values if len({str(row.values[name]) for row in rows}) > 1][
        :MOST_PANELS
    ]
    lines = -(-len(names) // ACROSS)
    picture = BytesIO()
    with style(**FONTS):
        figure: Any = Figure(figsize=(WIDTH, 3.2 + 2.6 * lines), dpi=DPI, layout="constrained")
        grid = figure.add_gridspec(1 + lines, ACROSS * 2, height_ratios=[1.25, *[1] * lines])
        _curves(figure.add_subplot(grid[0, :]), ledger, rows)
        for number, name in enumerate(names):
            row, column = divmod(number, ACROSS)
            width = ACROSS * 2 // min(ACROSS, len(names) - row * ACROSS)
            place = grid[1 + row, column * width : (column + 1) * width]
            _panel(figure.add_subplot(place), ledger.grid, rows, name)
        figure.savefig(picture, format="png")
    path = ledger.path / "sweep.png"
    with atomic_file(path) as file:
        file.write(picture.getvalue())
    return path


def _curves(axes: Any, ledger: Ledger, rows: Sequence[Row]) -> None:
    """Draw the training losses of all runs, those of the best points last and in colour."""
    in_bits = ledger.grid.metric == BITS  # as it must be where tokenizers differ
    seen, rank = [], {row.point: place for place, row in enumerate(rows)}
    for run in sorted(ledger.runs, key=lambda run: -rank[run.point]):
        if ledger.directory(run).metrics.is_file() and ledger.directory(run).metrics.stat().st_size:
            recorded = read_runs([ledger.directory(run).path])[0]
            place, curve = rank[run.point], recorded.losses("loss", in_bits)
            count = max(1, round(len(curve.steps) * SMOOTHED))
            seen.append(smooth := curve.smoothed(count))
            best = place < NAMED and not rows[place].error
            look: dict[str, Any] = {"color": COLOURS["rule"], "linewidth": 0.8}
            if best:
                look = {"color": series_colour(place), "linewidth": 1.5}
            axes.plot(curve.steps, smooth, **look)
    for row in rows[:NAMED][::-1]:
        if not row.error:
            axes.plot([], [], color=series_colour(rank[row.point]), label=f"{row.point}: {row.last}")
    for compared in rows[0].rungs[:-1]:
        axes.axvline(compared.step, color=COLOURS["muted"], linestyle=":", linewidth=1)
    known = np.concatenate(seen) if seen else np.array([])
    if len(known := known[np.isfinite(known)]):
        low, usual = known.min(), np.percentile(known, 98)
        axes.set_ylim(low - 0.03 * (usual - low), usual + 0.05 * (usual - low))
    unit = "bits per byte" if in_bits else "nats per token"
    and_lines = "; runs are compared at the dotted lines" * (ledger.grid.rungs > 1)
    axes.set_title(f"Training loss ({unit}) by step{and_lines}")
    for axis in (axes.xaxis, axes.yaxis):
        set_ticks(axis)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="upper right", title=ledger.grid.metric)


def _panel(axes: Any, grid: Grid, rows: Sequence[Row], name: str) -> None:
    """Draw the results by one setting. Points that differ in it alone are joined, if that makes few lines.

    With several rungs: how far each point was behind the best one at the last step to which it came.
    """
    finished = [row for row in rows if row.last and not row.error]
    places = _x_axis(axes, name, [row.values[name] for row in rows])

    def height(row: Row) -> float:
        rung = len(row.rungs) - 1
        best = min(other.rungs[rung].mean for other in finished if len(other.rungs) > rung)
        return _last(row).mean - (best if grid.rungs > 1 else 0.0)

    groups: dict[str, list[Row]] = {}
    for row in sorted(finished, key=lambda row: (len(row.rungs), places[str(row.values[name])])):
        others = (f"{key} {shortly(value)}" for key, value in row.values.items() if key != name)
        groups.setdefault(f"to step {_last(row).step:,}" if grid.rungs > 1 else ", ".join(others), []).append(
            row
        )
    if grid.rungs == 1 and (len(groups) > MOST_LINES or max(map(len, groups.values())) == 1):
        groups = {"": finished}
    for number, (label, group) in enumerate(groups.items()):
        x, y = [places[str(row.values[name])] for row in group], [height(row) for row in group]
        style = "-" if grid.rungs == 1 and label else "none"
        look = {"color": series_colour(number), "marker": MARKS[number % len(MARKS)], "markersize": 5}
        spread = [_last(row).spread or 0.0 for row in group]
        axes.errorbar(x, y, yerr=spread, capsize=2, linestyle=style, linewidth=1, label=label, **look)
    heights = sorted(map(height, finished))
    usual = heights[0] + SPREAD * (heights[len(heights) // 2] - heights[0])
    if heights[-1] - heights[0] > 1.5 * (usual - heights[0]) > 0:  # a few lie far off: above the edge
        axes.set_ylim(heights[0] - 0.08 * (usual - heights[0]), usual)
    if failed := [places[str(row.values[name])] for row in rows if row.error]:
        bottom, top = axes.get_ylim()
        axes.plot(
            failed, [top - 0.05 * (top - bottom)] * len(failed), "x", color=COLOURS["bad"], label="failed"
        )
    best = finished[0]
    at = places[str(best.values[name])], height(best)
    axes.plot(*at, "o", markersize=11, markerfacecolor="none", color=COLOURS["ink"])
    axes.set_title(f"{'behind the best' if grid.rungs > 1 else grid.metric}, by {name}", fontsize=8.5)
    set_ticks(axes.yaxis)
    if len(groups) > 1 or failed:
        axes.legend(fontsize=7, frameon=True, framealpha=0.8)


def _x_axis(axes: Any, name: str, values: list[Any]) -> dict[str, float]:
    """Set up the axis; return the place of each value."""
    different = list(dict.fromkeys(values))
    if VARYING[name].kind not in (int, float):
        axes.set_xticks(range(len(different)), [shortly(value) for value in different])
        return {str(value): float(place) for place, value in enumerate(different)}
    different.sort()
    if different[0] > 0 and different[-1] >= LOG_FROM * different[0]:
        axes.set_xscale("log")
    if len(different) <= MOST_LINES:
        axes.set_xticks(different, [shortly(value) for value in different])
        axes.minorticks_off()
    else:
        set_ticks(axes.xaxis)
        if different[-1] > MOST_SUBDIVIDED * different[0] > 0:
            axes.xaxis.set_major_locator(LogLocator(subs=(1,)))
    return {str(value): float(value) for value in different}


def _last(row: Row) -> Compared:
    assert row.last
    return row.last
