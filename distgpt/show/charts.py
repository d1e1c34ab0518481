"""Line charts, drawn with matplotlib as SVG; the colours and the style of all pictures."""

from __future__ import annotations

import math
import re
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from io import BytesIO
from typing import Any

import numpy as np

from distgpt.core.base.errors import one_line

# Series colours stay apart for the colour-blind: tests/show/test_colours.py.
COLOURS = {"paper": "#ffffff", "ink": "#1b2026", "muted": "#59626d", "rule": "#ccd3da", "grid": "#e4e8ec"}
SERIES = ("#1a4ea5", "#b9470a", "#04866c", "#e64ca8", "#aa8a1c", "#3496d2", "#4f4f56", "#7d2417")
MARKS = "os^DvPX*"
PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
LARGEST = 1e100  # what is drawn: limits need some room beyond
WIDTH = 10.5  # inches of a chart
LINE = 60  # letters of a label's line

STYLE: dict[Any, Any] = {
    "text.color": COLOURS["ink"],
    "text.parse_math": False,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": COLOURS["rule"],
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "grid.color": COLOURS["grid"],
    "path.simplify_threshold": 0.3,
    "svg.hashsalt": "distgpt",
    "svg.fonttype": "none",
}


@dataclass(frozen=True)
class Series:
    """Points in any order, joined by rising x. Dashed is for what was predicted or comes from elsewhere."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    dashed: bool = False


def line(name: str, points: Sequence[tuple[float, float]], dashed: bool = False) -> Series:
    """Return the series through (x, y)."""
    return Series(name, [x for x, _ in points], [y for _, y in points], dashed)


@dataclass(frozen=True)
class LineChart:
    """Values over values. Unknown points are left out, and on a log axis those that are not positive.

    The description tells the chart to those who cannot see it.
    """

    title: str
    description: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    log_x: bool = False
    log_y: bool = False

    def draw(self, axes: Any) -> float:
        """Draw into axes; return the height that this takes in inches."""
        for i, series in enumerate(self.series):
            known = [(drawable(x), drawable(y)) for x, y in zip(series.x, series.y, strict=True)]
            x, y = np.array(sorted(pair for pair in known if not math.isnan(pair[0]))).reshape(-1, 2).T
            step = max(1, len(x) // 8)  # of marks, which several lines have at different places
            width = 1.5 + min(3, len(self.series) - 1 - i)  # wider where later ones may cover it
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


Chart = LineChart


def series_colour(i: int) -> str:
    return SERIES[i % len(SERIES)]


@contextmanager
def style(**more: Any) -> Iterator[None]:
    """Apply the style to what is drawn and saved inside."""
    from matplotlib import rc_context

    with rc_context(STYLE | more), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)  # viewers have more fonts
        yield


def svg(chart: Chart, alone: bool = False) -> str:
    """Return the chart as an element for a page or, with its title, as a file."""
    from matplotlib.figure import Figure

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
    text = re.sub(r'<g id="[^"]*"', "<g", text[text.index("<svg ") :])  # nothing refers to groups
    label = escape(one_line(f"{chart.title}. {chart.description}"))
    return text.replace("<svg ", f'<svg class="chart" role="img" aria-label="{label}" ', 1)


def lines(text: str, letters: int = LINE) -> str:
    return textwrap.fill(one_line(text), letters)


def drawable(value: float | None) -> float:
    """Return NaN for what has no place: unknown, infinite, beyond all measure."""
    try:
        number = math.nan if value is None else float(value)
    except OverflowError:
        return math.nan
    return number if 1 / LARGEST <= abs(number) <= LARGEST else 0.0 if abs(number) < 1 else math.nan


def set_ticks(axis: Any) -> None:
    """Write numbers at ticks as 1,000 and 10k; have some on a short log axis too."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    if axis.get_scale() == "log":
        low, high = axis.get_view_interval()
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: tick_label(value)))
    axis.set_minor_formatter(NullFormatter())


def tick_label(value: float) -> str:
    """Format 10,000 as 10k."""
    factor, prefix = next((p for p in PREFIXES if max(p[0], 1e4) <= abs(value) < 1e15), (1.0, ""))
    return f"{float(f'{value / factor:.5g}'):,g}{prefix}".replace("-", "−")
