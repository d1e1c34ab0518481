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
from distgpt.measure.sweep.grid import BITS, VARYING, Values
from distgpt.measure.sweep.ledger import Ledger
from distgpt.measure.sweep.ranking import Compared, Row, shortly
from distgpt.show.charts import COLOURS, MARKS, series_colour, set_ticks, style
from distgpt.show.plot import DPI, FONTS, SMOOTHED, WIDTH, read_runs

ACROSS, MOST_PANELS = 3, 9
NAMED = 3  # points with a colour and a name among the curves
MOST_LINES = 8  # in a panel of results; more points are not joined
SPREAD = 8.0  # times the median's distance from the best: what is further off is drawn at the edge
UNLIKE = "all"  # the name of points that no line joins
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
            _Panel(figure.add_subplot(place), ledger, rows, name).draw()
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


class _Panel:
    """The results by one setting. Points that differ in it alone are joined, if that makes few lines.

    With several rungs it has how far each point was behind the best one at the last step to which it came.
    """

    def __init__(self, axes: Any, ledger: Ledger, rows: Sequence[Row], name: str) -> None:
        self._axes, self._name, self._metric = axes, name, ledger.grid.metric
        self._rungs, self._order = ledger.grid.rungs, list(ledger.grid.points)
        self._rows = [row for row in rows if row.last and not row.error]
        self._places = self._x_axis([row.values[name] for row in rows])
        self._bests = [
            min(row.rungs[rung].mean for row in self._rows if len(row.rungs) > rung)
            for rung in range(self._reached())
        ]
        self._failed = [row for row in rows if row.error]
        heights = sorted(self._height(row) for row in self._rows)
        usual = heights[0] + SPREAD * (heights[len(heights) // 2] - heights[0])
        is_far = heights[-1] - heights[0] > 1.5 * (usual - heights[0]) > 0
        self._top = usual if is_far else heights[-1]

    def _reached(self) -> int:
        return max(len(row.rungs) for row in self._rows)

    def _x_axis(self, values: list[Any]) -> dict[str, float]:
        """Set up the axis; return the place of each value."""
        different = list(dict.fromkeys(values))
        if VARYING[self._name].kind not in (int, float):
            self._axes.set_xticks(range(len(different)), [shortly(value) for value in different])
            return {str(value): float(place) for place, value in enumerate(different)}
        different.sort()
        if different[0] > 0 and different[-1] >= LOG_FROM * different[0]:
            self._axes.set_xscale("log")
        if len(different) <= MOST_LINES:
            self._axes.set_xticks(different, [shortly(value) for value in different])
            self._axes.minorticks_off()
        else:
            set_ticks(self._axes.xaxis)
            if different[-1] > MOST_SUBDIVIDED * different[0] > 0:
                self._axes.xaxis.set_major_locator(LogLocator(subs=(1,)))
        return {str(value): float(value) for value in different}

    def _height(self, row: Row) -> float:
        last = _last(row)
        return last.mean - (self._bests[len(row.rungs) - 1] if self._rungs > 1 else 0.0)

    def _groups(self) -> dict[str, list[Row]]:
        """Return the points by what their line is called."""
        groups: dict[str, list[Row]] = {}
        for row in sorted(self._rows, key=lambda row: (len(row.rungs), self._order.index(row.point))):
            others = {key: value for key, value in row.values.items() if key != self._name}
            name = f"to step {_last(row).step:,}" if self._rungs > 1 else _spelled(others)
            groups.setdefault(name, []).append(row)
        for group in groups.values():
            group.sort(key=lambda row: self._places[str(row.values[self._name])])
        are_lines = len(groups) <= MOST_LINES and max(map(len, groups.values())) > 1
        return groups if are_lines or self._rungs > 1 else {UNLIKE: self._rows}

    def draw(self) -> None:
        groups = self._groups()
        for number, (name, group) in enumerate(groups.items()):
            look = {"color": series_colour(number), "marker": MARKS[number % len(MARKS)], "markersize": 5}
            is_joined = self._rungs == 1 and name != UNLIKE
            self._points(group, look | {"linestyle": "-" if is_joined else "none"}, name)
        if self._failed:
            x = [self._places[str(row.values[self._name])] for row in self._failed]
            self._axes.plot(x, [self._top] * len(x), "x", color=COLOURS["bad"], label="failed")
        best = self._rows[0]
        at = (self._places[str(best.values[self._name])], self._height(best))
        self._axes.plot(*at, "o", markersize=11, markerfacecolor="none", color=COLOURS["bad"])
        behind = f"{self._metric} behind the best at that step" if self._rungs > 1 else self._metric
        self._axes.set_title(f"{behind}, by {self._name}", fontsize=8.5)
        ends = [(self._height(row), _last(row).spread or 0.0) for row in self._rows]
        low = min(height - spread for height, spread in ends)
        top = max(height + spread for height, spread in ends if height <= self._top)
        room = 0.08 * (max(top, self._top) - low or abs(low) or 1.0)
        self._axes.set_ylim(low - room, max(top, self._top) + room)
        set_ticks(self._axes.yaxis)
        if len(groups) > 1 or self._failed:
            handles, labels = self._axes.get_legend_handles_labels()
            named = [pair for pair in zip(handles, labels, strict=True) if pair[1] != UNLIKE]
            self._axes.legend(*zip(*named, strict=True), fontsize=7, frameon=True, framealpha=0.8)

    def _points(self, rows: Sequence[Row], look: dict[str, Any], label: str) -> None:
        """Draw points with the spread of their seeds; those far off are arrows at the edge."""
        x = [self._places[str(row.values[self._name])] for row in rows]
        y = [min(self._top, self._height(row)) for row in rows]
        self._axes.plot(x, y, **look | {"marker": "none", "linewidth": 1})
        self._axes.plot([], [], **look, label=label)
        for place, height, row in zip(x, y, rows, strict=True):
            far = {"marker": "^"} if self._height(row) > self._top else {}
            self._axes.errorbar(place, height, yerr=_last(row).spread, capsize=2, **look | far)


def _last(row: Row) -> Compared:
    assert row.last
    return row.last


def _spelled(values: Values) -> str:
    return ", ".join(f"{name} {shortly(value)}" for name, value in values.items())
