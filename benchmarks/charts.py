"""Line and bar charts as data, drawn with matplotlib as SVG."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from io import BytesIO
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from distgpt.core.base.errors import one_line
from distgpt.show.plot import drawable, series_colour, set_ticks, style

MARKS = "os^DvPX*"
WIDTH = 10.5  # inches
LINE = 60  # characters of a label's line


@dataclass(frozen=True)
class Series:
    """Points (x, y), joined in order of x. Dashed lines are predictions or external results."""

    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False


@dataclass(frozen=True)
class LineChart:
    """Values over values. Skips unknown points and, on a log axis, points that are not positive.

    The description is the text for screen readers.
    """

    title: str
    description: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    log_x: bool = False
    log_y: bool = False

    def draw(self, axes: Any) -> float:
        for i, series in enumerate(self.series):
            known = [(drawable(x), drawable(y)) for x, y in series.points]
            x, y = np.array(sorted(pair for pair in known if not math.isnan(pair[0]))).reshape(-1, 2).T
            step = max(1, len(x) // 8)  # between markers, offset so that lines do not share them
            width = 1.5 + min(3, len(self.series) - 1 - i)  # wider for lines that later ones may cover
            look = {"color": series_colour(i), "linestyle": "--" if series.dashed else "-"}
            marks = {"marker": MARKS[i % len(MARKS)], "markevery": (i % step, step), "linewidth": width}
            axes.plot(x, y, **look, **marks, label=lines(series.name))
        for axis, log in (("x", self.log_x), ("y", self.log_y)):
            axes.set(**{f"{axis}scale": "log" if log else "linear"})
        set_ticks(axes.xaxis)
        set_ticks(axes.yaxis)
        axes.set_title(lines(self.y_label))
        axes.set_xlabel(lines(self.x_label))
        return 4.6


@dataclass(frozen=True)
class Bar:
    label: str
    value: float
    text: str


@dataclass(frozen=True)
class BarChart:
    title: str
    description: str
    unit: str
    bars: Sequence[Bar]

    def draw(self, axes: Any) -> float:
        values = np.array([bar.value for bar in self.bars], float)
        values[~np.isfinite(values)] = 0
        places = np.arange(len(values))
        drawn = axes.barh(places, values, 0.62, color=series_colour(0))
        labels = [lines(bar.label, LINE // 2) for bar in self.bars]
        if self.bars:
            axes.bar_label(drawn, [lines(bar.text, LINE // 2) for bar in self.bars], padding=8)
        axes.set_yticks(places, labels)
        axes.invert_yaxis()
        axes.xaxis.set_visible(False)
        axes.grid(False)
        axes.set_title(lines(self.unit))
        return 0.9 + 0.25 * len(places) + 0.2 * sum(label.count("\n") + 1 for label in labels)


Chart = LineChart | BarChart


def svg(chart: Chart, alone: bool = False) -> str:
    """Return the chart as an SVG element or, with its title, as a file."""
    written = BytesIO()
    with style(**{"svg.hashsalt": one_line(chart.title)}):
        figure: Any = Figure(layout="constrained")
        axes = figure.add_subplot()
        figure.set_size_inches(WIDTH, chart.draw(axes))
        if any(axes.get_legend_handles_labels()[1]):
            figure.legend(loc="outside upper left", ncols=3)
        if alone:
            axes.set_title(f"{lines(chart.title)}\n{axes.get_title('left')}")
        figure.savefig(written, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = written.getvalue().decode()
    text = re.sub(r'<g id="[^"]*"', "<g", text[text.index("<svg ") :])  # groups are not referenced
    label = escape(one_line(f"{chart.title}. {chart.description}"))
    return text.replace("<svg ", f'<svg class="chart" role="img" aria-label="{label}" ', 1)


def lines(text: str, letters: int = LINE) -> str:
    return textwrap.fill(one_line(text), letters)
