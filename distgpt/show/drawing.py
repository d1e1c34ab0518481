"""Charts drawn with matplotlib, as SVG: lines between axes with round ticks, and horizontal bars."""

from __future__ import annotations

import math
import re
import warnings
from html import escape
from io import BytesIO
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator, ScalarFormatter

from distgpt.kernels.api import Array
from distgpt.show.charts import (
    LIGHT,
    SERIES,
    STYLE,
    BarChart,
    Chart,
    LineChart,
    Series,
    chart_style,
    series_colour,
)
from distgpt.show.tables import one_line, wrap

WIDTH, HEIGHT = 760, 330  # of a chart, and of its lines without a legend, in pixels
SIZE, LINE = 13, 18  # of text, and from one line of it to the next
MANY = 24  # points from which not every one gets a marker
MARKS = "os^DvPX*"
HATCHES = ("", "////", "|||", "---", "\\\\\\\\", "+++")
PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
LARGEST = 1e100  # what is drawn: limits need some room beyond

CHART: dict[Any, Any] = STYLE | {
    "font.size": SIZE,
    "figure.facecolor": LIGHT["paper"],
    "axes.facecolor": "none",
    "axes.edgecolor": LIGHT["muted"],
    "axes.grid.axis": "y",
    "axes.labelcolor": LIGHT["muted"],
    "axes.spines.left": False,
    "axes.titlecolor": LIGHT["muted"],
    "axes.titlelocation": "left",
    "axes.titlesize": SIZE,
    "axes.xmargin": 0,
    "axes.ymargin": 0,
    "lines.scale_dashes": False,
    "legend.borderaxespad": 0.3,
    "legend.borderpad": 0,
    "legend.columnspacing": 1.4,
    "legend.handlelength": 2.6,
    "legend.handletextpad": 0.5,
    "xtick.color": LIGHT["muted"],
    "ytick.color": LIGHT["muted"],
    "xtick.major.size": 5,
    "ytick.major.size": 0,
    "ytick.major.pad": 8,
}


def svg(chart: Chart, alone: bool = False) -> str:
    """Return the chart as an element for a page or, with its title and the page's colours, as a file."""
    with rc_context(CHART | {"svg.hashsalt": one_line(chart.title)}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)  # viewers have more fonts
        figure = Figure(dpi=72, layout="constrained")
        axes = figure.add_subplot()
        height = draw_lines(axes, chart) if isinstance(chart, LineChart) else draw_bars(axes, chart)
        height += _add_legend(figure, axes, chart.title if alone else "")
        figure.set_size_inches(WIDTH / 72, height / 72)
        written = BytesIO()
        figure.savefig(written, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = written.getvalue().decode()
    text = re.sub(r'<g id="[^"]*"', "<g", text[text.index("<svg ") :])  # nothing refers to groups
    text = re.sub(r'="([\d.]+)pt"', r'="\1"', text)  # of its size
    label = escape(one_line(f"{chart.title}. {chart.description}"))
    style = f"<style>{chart_style()}</style>" if alone else ""
    return text.replace("<svg ", f'<svg class="chart" role="img" aria-label="{label}" ', 1).replace(
        ">\n", f">{style}\n", 1
    )


# Lines


def draw_lines(axes: Any, chart: LineChart) -> float:
    """Draw lines, and return the height that they take."""
    curves = [_points(series, chart) for series in chart.series]
    xs, ys = (np.concatenate([curve[i][~np.isnan(curve[1])] for curve in curves] or [[]]) for i in (0, 1))
    axes.set_title(_short(chart.y_label))
    if not len(xs):
        return _no_data(axes)
    axes.set_xscale("log" if chart.log_x else "linear")
    axes.set_yscale("log" if chart.log_y else "linear")
    set_ticks(axes.xaxis, xs, chart.log_x, WIDTH // 60)
    set_ticks(axes.yaxis, ys, chart.log_y, 6)
    for i, series in enumerate(chart.series):
        x, y = curves[i]
        axes.plot(
            *(x, y),
            color=series_colour(i),
            linewidth=2 + 2.6 * sum(_same(curves[i], later) for later in curves[i + 1 :]),
            linestyle=(0, (6, 4)) if series.dashed else "-",
            marker=MARKS[i % SERIES] if len(curves) > 1 or len(x) <= MANY else None,
            markevery=(0.2 * (i + 0.5) / len(curves), 0.2) if len(x) > MANY else None,
            markersize=8,
            markeredgecolor=LIGHT["paper"],
            clip_on=False,
            zorder=2.5 if series.dashed else 3,
            label=_short(series.name),
        )
    axes.margins(y=0.06)
    if not chart.log_y and 0 <= ys.min() < 0.5 * ys.max():
        axes.set_ylim(bottom=0)
    axes.set_xlabel(_short(chart.x_label))
    return HEIGHT


def drawable(value: float | None, log: bool = False) -> float:
    """Return NaN for what has no place: unknown, infinite, beyond all measure, not positive on a log axis."""
    try:
        number = math.nan if value is None else float(value)
    except OverflowError:
        return math.nan
    size = abs(number)
    if not size <= LARGEST or (log and number < 1 / LARGEST):
        return math.nan
    return number if size >= 1 / LARGEST else 0.0


def _points(series: Series, chart: LineChart) -> tuple[Array, Array]:
    """Return a series' x, rising, and its y, NaN where unknown; points without an x are left out."""
    pairs = zip(series.x, series.y, strict=True)
    known = [(drawable(x, chart.log_x), drawable(y, chart.log_y)) for x, y in pairs]
    x, y = np.array(sorted(pair for pair in known if not math.isnan(pair[0]))).reshape(-1, 2).T
    return x, y


def _same(one: tuple[Array, Array], other: tuple[Array, Array]) -> bool:
    """Return whether one line would hide the other, as those of stages that agree."""
    return len(one[0]) == len(other[0]) > 0 and all(
        np.allclose(a, b, rtol=0, atol=0.005 * np.nanmax(np.abs(a), initial=0), equal_nan=True)
        for a, b in zip(one, other, strict=True)
    )


# Bars


def draw_bars(axes: Any, chart: BarChart) -> float:
    """Draw bars from top to bottom with labels on their left and texts on their right; return the height."""
    axes.set_title(_short(chart.unit, 0.6 * WIDTH))
    if not chart.bars:
        return _no_data(axes)
    values = np.array([np.atleast_1d(bar.value) for bar in chart.bars], float)
    values[~np.isfinite(values)] = 0
    ends, places = np.zeros(len(values)), np.arange(len(values))
    for part, of_part in enumerate(values.T):
        how = {"facecolor": series_colour(part), "hatch": HATCHES[part % len(HATCHES)]}
        name = _short(chart.parts[part]) if chart.parts else None
        drawn = axes.barh(
            places, of_part, 0.62, left=ends, edgecolor=LIGHT["paper"], linewidth=0.5, label=name, **how
        )
        ends = ends + of_part
    axes.bar_label(drawn, ["\n".join(wrap(bar.text, 0.3 * WIDTH)) for bar in chart.bars], padding=8)
    labels = ["\n".join(wrap(bar.label, 0.36 * WIDTH)) for bar in chart.bars]
    axes.set_yticks(places, labels, color=LIGHT["ink"])
    axes.invert_yaxis()
    axes.margins(y=0.02)
    axes.xaxis.set_visible(False)
    axes.spines["bottom"].set_visible(False)
    axes.spines["left"].set_visible(True)
    axes.grid(False)
    return len(places) * max(30, LINE * max(label.count("\n") + 1 for label in labels)) + 40


# Both


def _short(text: str, room: float = WIDTH - 60) -> str:
    """Return what fits into one line."""
    return "".join(wrap(text, room, SIZE, most=1))


def _add_legend(figure: Figure, axes: Any, title: str) -> float:
    """Add a legend above, if anything has a name, in as many columns as fit; return its height."""
    handles, names = axes.get_legend_handles_labels()
    if not any(names) and not title:
        return 0
    columns = max(1, min(len(names), WIDTH // (8 * max(map(len, names), default=0) + 60)))
    lines = wrap(title, WIDTH, 16)
    legend = figure.legend(
        *(handles, names),
        title="\n".join(lines),
        title_fontproperties={"weight": "bold", "size": 16},
        loc="outside upper left",
        alignment="left",
        ncols=columns,
    )
    legend.get_title().set_multialignment("left")
    return LINE * math.ceil(len(names) / columns) + 22 * len(lines) + 8


def _no_data(axes: Any) -> float:
    axes.set_axis_off()
    axes.text(0, 0.5, "no data", color=LIGHT["muted"])
    return 3 * LINE


def set_ticks(axis: Any, values: Array, log: bool, most: int) -> None:
    """Set about `most` round ticks or fewer: powers of two where all values are."""
    low, high = float(values.min()), float(values.max())
    if not log:
        whole = bool(np.all(values == np.round(values)) and max(-low, high) < 1e15)
        axis.set_major_locator(MaxNLocator(most, steps=[1, 2, 5, 10], integer=whole, min_n_ticks=1))
    elif low >= 1 and np.all(np.log2(values) % 1 == 0):
        axis.set_major_locator(LogLocator(base=2, numticks=most))
    else:
        dense = high < 10 * low and axis.axis_name == "y"
        subs = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8) if dense else (1, 2, 5) if high < 1000 * low else (1,)
        axis.set_major_locator(LogLocator(subs=subs, numticks=most))
    axis.set_minor_locator(NullLocator())
    size = max(abs(low), abs(high))
    if log or (size >= 1e4 and high - low > 0.1 * size):
        prefixed_from = 1e4 if log else 1e3
        axis.set_major_formatter(FuncFormatter(lambda x, _: tick_label(x, prefixed_from)))
    else:  # the same number of decimals at all
        axis.set_major_formatter(ScalarFormatter())


def tick_label(value: float, prefixed_from: float = 1e4) -> str:
    """Format 10,000 as 10k."""
    size = abs(value)
    factor, prefix = next(((f, p) for f, p in PREFIXES if max(f, prefixed_from) <= size < 1e15), (1.0, ""))
    return f"{float(f'{value / factor:.{3 if prefix else 4}g}'):,g}{prefix}".replace("-", "−")
