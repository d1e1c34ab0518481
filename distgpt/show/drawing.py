"""Charts drawn with matplotlib: lines between axes with round ticks, and horizontal bars."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from io import BytesIO
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator, ScalarFormatter

from distgpt.formatting import three_digits
from distgpt.kernels.api import Array
from distgpt.show.charts import LIGHT, SERIES, STYLE, Bar, BarChart, Chart, LineChart, Series, series_colour
from distgpt.show.tables import one_line, wrap

SIZE, LINE = 13, 17  # of text, and from one line of it to the next
THICK = 18  # of a bar
GAP = 8  # between a bar and its number
MANY = 40  # points from which not every one gets a marker
DENSE = 600  # points from which a line is drawn fine
MARKS = "os^DvPX*"
HATCHES = ("", "////", "|||", "---", "\\\\\\\\", "+++")
PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
LARGEST = 1e100  # what is drawn: limits need some room beyond

CHART: dict[Any, Any] = STYLE | {
    "font.size": SIZE,
    "axes.edgecolor": LIGHT["muted"],
    "axes.grid.axis": "y",
    "axes.labelcolor": LIGHT["muted"],
    "axes.spines.left": False,
    "axes.xmargin": 0,
    "axes.ymargin": 0,
    "lines.scale_dashes": False,
    "legend.borderaxespad": 0,
    "legend.borderpad": 0,
    "legend.columnspacing": 1.4,
    "legend.handlelength": 2.6,
    "legend.handletextpad": 0.5,
    "legend.title_fontsize": SIZE,
    "xtick.color": LIGHT["muted"],
    "ytick.color": LIGHT["muted"],
    "xtick.labelsize": SIZE,
    "ytick.labelsize": SIZE,
    "xtick.major.size": 5,
    "ytick.major.size": 0,
    "ytick.major.pad": GAP,
}


class Drawing:
    """Axes with a legend above them, so many pixels wide, and the texts that a pointer shows."""

    def __init__(self, width: int) -> None:
        layout = ConstrainedLayoutEngine(w_pad=2 / 72, h_pad=4 / 72)
        self.width, self.hovers = width, dict[str, list[str]]()
        self.figure: Any = Figure(figsize=(width / 72, 1), dpi=72, layout=layout)
        self.figure.patch.set_visible(False)
        self.axes: Any = self.figure.add_subplot()
        self.axes.patch.set_visible(False)

    def arrange(self, unit: str, samples: Sequence[Artist], names: Sequence[str], height: float) -> None:
        """The unit and the legend, in as many columns as fit, above the rest, which is so high."""
        texts = wrap_all(names, self.width - 60, most=1)
        for columns in range(len(names) or 1, 0, -1):
            legend = self.figure.legend(
                samples,
                texts,
                title="\n".join(wrap(unit, self.width)),
                loc="outside upper left",
                alignment="left",
                ncols=columns,
            )
            extent = legend.get_window_extent()
            if extent.width <= self.width - 4 or columns == 1:
                break
            legend.remove()
        legend.get_title().set_color(LIGHT["muted"])
        self.hover_cut(legend.get_texts(), names)
        self.figure.set_figheight(math.ceil(extent.height + height) / 72)

    def no_data(self, unit: str) -> None:
        self.axes.set_axis_off()
        self.axes.text(0, 0, "no data", color=LIGHT["muted"], va="bottom")
        self.arrange(unit, [], [], 2 * LINE)

    def hover(self, artist: Artist, texts: Sequence[str]) -> None:
        """Show texts at a pointer: one for the artist, or one for each of its markers."""
        gid = f"hover-{len(self.hovers)}"
        artist.set_gid(gid)
        self.hovers[gid] = [one_line(text) for text in texts]

    def hover_cut(self, shown: Sequence[Any], whole: Sequence[str]) -> None:
        """Show the whole of texts that had to be cut."""
        for artist, text in zip(shown, whole, strict=True):
            if artist.get_text().endswith("…"):
                self.hover(artist, [text])


def draw(chart: Chart, width: int) -> tuple[bytes, dict[str, list[str]]]:
    """The chart as matplotlib writes it as SVG, and the texts that pointers show by the ids of groups."""
    with rc_context(CHART), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)  # viewers have more fonts
        warnings.filterwarnings("ignore", "constrained_layout not applied", UserWarning)
        drawing = Drawing(width)
        if isinstance(chart, LineChart):
            draw_lines(drawing, chart)
        elif isinstance(chart, BarChart):
            draw_bars(drawing, chart)
        written = BytesIO()
        metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        drawing.figure.savefig(written, format="svg", metadata=metadata)
        return written.getvalue(), drawing.hovers


# Lines


def draw_lines(drawing: Drawing, chart: LineChart) -> None:
    curves = [_points(series, chart) for series in chart.series]
    xs, ys = (np.concatenate([curve[i][~np.isnan(curve[1])] for curve in curves] or [[]]) for i in (0, 1))
    if not len(xs):
        drawing.no_data(chart.y_label)
        return
    axes = drawing.axes
    axes.set_xscale("log" if chart.log_x else "linear")
    axes.set_yscale("log" if chart.log_y else "linear")
    set_ticks(axes.xaxis, xs, chart.log_x, drawing.width // 60)
    set_ticks(axes.yaxis, ys, chart.log_y, 6)
    _strokes(drawing, chart, curves)
    axes.margins(y=0.06 if chart.log_y else 0)
    if not chart.log_y:
        low = 0.0 if 0 <= ys.min() < 0.5 * ys.max() else ys.min()
        locator = axes.yaxis.get_major_locator()
        ends = locator.tick_values(*locator.nonsingular(low, ys.max()))
        axes.set_ylim(ends[0], ends[-1])
    axes.set_xlabel("\n".join(wrap(chart.x_label, 0.7 * drawing.width, most=2)))
    names = [one_line(series.name) for series in chart.series]
    looks = [_look(i, series.dashed) for i, series in enumerate(chart.series)]
    if not any(names) or names in ([chart.y_label], [chart.title]):
        names, looks = [], []
    samples = [Line2D([], [], **look) for look in looks]
    drawing.arrange(chart.y_label, samples, names, 270 if drawing.width < 600 else 330)


def drawable(value: float | None, log: bool = False) -> float:
    """NaN for what has no place: unknown, infinite, beyond all measure, not positive on a log axis."""
    try:
        number = math.nan if value is None else float(value)
    except OverflowError:
        return math.nan
    size = abs(number)
    if not size <= LARGEST or (log and number < 1 / LARGEST):
        return math.nan
    return number if size >= 1 / LARGEST else 0.0


def _points(series: Series, chart: LineChart) -> tuple[Array, Array]:
    """Its x, rising, and its y, NaN where missing; without an x a point is left out."""
    pairs = zip(series.x, series.y, strict=True)
    known = np.array([(drawable(x, chart.log_x), drawable(y, chart.log_y)) for x, y in pairs])
    x, y = known.reshape(-1, 2)[~np.isnan(known.reshape(-1, 2)[:, 0])].T
    order = np.argsort(x, kind="stable")
    return x[order], y[order]


def _look(i: int, dashed: bool, under: int = 0) -> dict[str, Any]:
    """Series differ by colour, marker and dash; wider where others lie on it."""
    return {
        "color": series_colour(i),
        "linewidth": 2 + 2.6 * under,
        "linestyle": (0, (6, 4)) if dashed else "-",
        "marker": MARKS[i % SERIES],
        "markersize": 8 + 4 * under,
        "markeredgecolor": LIGHT["paper"],
        "markeredgewidth": 1,
    }


def _strokes(drawing: Drawing, chart: LineChart, curves: Sequence[tuple[Array, Array]]) -> None:
    """Solid lines lie on dashed ones, and lines that others hide are wider."""
    order = sorted(range(len(curves)), key=lambda i: not chart.series[i].dashed)
    for place, i in enumerate(order):
        (x, y), name = curves[i], chart.series[i].name
        under = sum(_same(curves[i], curves[j]) for j in order[place + 1 :])
        look = _look(i, chart.series[i].dashed, under)
        known = np.flatnonzero(~np.isnan(y))
        texts = [f"{name}: {number(x[j])}, {number(y[j])}" for j in known]
        if len(known) > MANY:  # some markers, at other places for each series
            look["markevery"] = (0.2 * (i + 0.5) / len(curves), 0.2)
            look["marker"] = look["marker"] if len(curves) > 1 else None
            texts = [name]
        if len(x) >= DENSE:
            look["linewidth"] = 1.2
        (line,) = drawing.axes.plot(x, y, clip_on=False, zorder=3, **look)
        drawing.hover(line, texts)


def _same(one: tuple[Array, Array], other: tuple[Array, Array]) -> bool:
    """Whether one line would hide the other, as those of stages that agree."""
    return len(one[0]) == len(other[0]) > 0 and all(
        np.allclose(a, b, rtol=0, atol=0.005 * (np.nanmax(np.abs(a), initial=0)), equal_nan=True)
        for a, b in zip(one, other, strict=True)
    )


# Bars


def draw_bars(drawing: Drawing, chart: BarChart) -> None:
    """Labels to the left, bars of one or more parts, numbers to the right of them; from top to bottom."""
    if not chart.bars:
        drawing.no_data(chart.unit)
        return
    axes, parts = drawing.axes, chart.parts
    rows = [_values(bar, parts) for bar in chart.bars]
    labels = [bar.label for bar in chart.bars]
    texts = [bar.text or number(_total(row)) for bar, row in zip(chart.bars, rows, strict=True)]
    shown_labels = wrap_all(labels, 0.36 * drawing.width)
    shown_texts = wrap_all(texts, 0.3 * drawing.width)
    counts = [max(a.count("\n"), b.count("\n")) + 1 for a, b in zip(shown_labels, shown_texts, strict=True)]
    heights = np.array([max(THICK + 10, count * LINE + 8) for count in counts])
    middles = np.cumsum(heights) - heights / 2  # in pixels
    lengths = [0.0, *map(np.nansum, rows)]
    least = 6 / drawing.width * (max(lengths) - min(lengths))  # even the smallest is visible
    for i, row in enumerate(rows):
        end = 0.0
        for part, value in enumerate(row):
            if not value or math.isnan(value):
                continue
            long = math.copysign(max(abs(value), least), value)
            (bar,) = axes.barh(middles[i], long, THICK, left=end, **_look_of_part(part))
            drawing.hover(bar, [f"{parts[part]}: {number(value)}" if parts else f"{labels[i]}: {texts[i]}"])
            end += long
        place: Any = {"textcoords": "offset points", "va": "center", "annotation_clip": False}
        text = axes.annotate(shown_texts[i], (max(end, 0.0), middles[i]), (GAP, 0), **place)
        drawing.hover_cut([text], [texts[i]])
    axes.axvline(color=LIGHT["muted"], linewidth=1)
    axes.set_ylim(heights.sum(), 0)
    axes.set_yticks(middles, shown_labels, color=LIGHT["ink"])
    drawing.hover_cut(axes.get_yticklabels(), labels)
    axes.xaxis.set_visible(False)
    axes.spines[:].set_visible(False)
    axes.grid(False)
    samples = [Patch(**_look_of_part(part)) for part in range(len(parts))]
    drawing.arrange(chart.unit, samples, parts, float(heights.sum()) + 16)


def _values(bar: Bar, parts: Sequence[str]) -> list[float]:
    """What is drawn of a bar; parts below zero are not."""
    if not isinstance(bar.value, Sequence):
        return [drawable(bar.value)]
    return [max(drawable(value), 0.0) for value, _ in zip(bar.value, parts, strict=True)]


def _total(values: Sequence[float]) -> float:
    return math.nan if np.isnan(values).all() else float(np.nansum(values))


def _look_of_part(part: int) -> dict[str, Any]:
    """Parts differ by colour and texture."""
    hatch = HATCHES[part % len(HATCHES)]
    colour, edge = series_colour(part), LIGHT["paper"]
    return {"facecolor": colour, "hatch": hatch, "edgecolor": edge, "linewidth": 0.5}


# Text


def wrap_all(texts: Sequence[str], room: float, most: int = 3) -> list[str]:
    return ["\n".join(wrap(text, room, most=most)) for text in texts]


def set_ticks(axis: Any, values: Array, log: bool, most: int) -> None:
    """At most about so many round ticks: powers of two where all values are."""
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
    """10,000 becomes 10k."""
    size = abs(value)
    factor, prefix = next(((f, p) for f, p in PREFIXES if max(f, prefixed_from) <= size < 1e15), (1.0, ""))
    return minus(f"{float(f'{value / factor:.{3 if prefix else 4}g}'):,g}{prefix}")


def number(value: float) -> str:
    """A measured number with three digits that count, as 0.0123, 4.56 or 12,345."""
    if not math.isfinite(value):
        return "–"
    if value and not 1e-4 <= abs(value) < 1e15:
        return minus(f"{value:.3g}")
    return minus(f"{value:,.0f}" if value == int(value) else three_digits(value))


def minus(text: str) -> str:
    return text.replace("-", "−")
