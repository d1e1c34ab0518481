"""Charts drawn with matplotlib: lines between axes with round ticks, and horizontal bars."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, Locator, LogLocator, MaxNLocator

from distgpt.kernels.api import Array
from distgpt.show.charts import LIGHT, SERIES, STYLE, BarChart, Chart, LineChart, Series, StackedBars
from distgpt.show.sheet import LINE, SIZE, Sheet, finished, text_width, wrap
from distgpt.show.tables import one_line
from distgpt.units import three_digits

TITLE = 16  # the size of a title's text
THICK = 18  # of a bar
VISIBLE = 3.0  # how wide even the smallest bar is
GAP = 8  # between label, bar and number
MANY = 40  # points from which not every one gets a marker
DENSE = 600  # points from which a line is drawn fine
MARKS = "os^DvPX*"
HATCHES = ("", "////", "|||", "---", "\\\\\\\\", "+++")
PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
LARGEST = 1e100  # what is drawn: limits need some room beyond


def draw(chart: Chart, name: str, width: int, style: str = "") -> str:
    """The chart as an SVG element whose ids begin with `name`; with a style it can stand alone."""
    with rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)  # viewers have more fonts
        sheet = Sheet(width)
        if style:
            sheet.lines(chart.title, "ink", size=TITLE, most=3)
            sheet.y += 8
        if isinstance(chart, LineChart):
            _draw_lines(sheet, chart)
        elif isinstance(chart, BarChart):
            _draw_bars(sheet, chart)
        elif isinstance(chart, StackedBars):
            _draw_stacked(sheet, chart)
        return finished(sheet, chart, name or "chart", style)


# Lines


def _draw_lines(sheet: Sheet, chart: LineChart) -> None:
    curves = [_points(series, chart) for series in chart.series]
    xs, ys = (np.concatenate([curve[i][~np.isnan(curve[1])] for curve in curves] or [[]]) for i in (0, 1))
    if not len(xs):
        sheet.no_data()
        return
    names = [one_line(series.name) for series in chart.series]
    if any(names) and names not in ([chart.y_label], [chart.title]):
        looks = [_look(i, series.dashed) for i, series in enumerate(chart.series)]
        sheet.legend(
            names, 34, lambda i, x, y: Line2D([x, x + 17, x + 34], [y, y, y], markevery=[1], **looks[i])
        )
    sheet.lines(chart.y_label)
    axes = _empty_axes(sheet, chart, 0.03 if len(set(xs)) <= MANY else 0.0)
    _strokes(sheet, axes, chart, curves)
    labels = _label_heights(axes, ys)
    left, right = max(map(text_width, labels)) + GAP, sheet.width - 14.0
    _label_level(sheet, axes, xs, left, right)
    top = sheet.y + 18
    sheet.y = top + (220 if sheet.narrow else 280)
    sheet.place(axes, left, top, right, sheet.y)
    sheet.y += LINE + 6
    sheet.lines(chart.x_label, middle=(left + right) / 2)
    sheet.y += 4


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


def _empty_axes(sheet: Sheet, chart: LineChart, margin: float) -> Any:
    axes: Any = sheet.figure.add_axes((0, 0, 1, 1))
    axes.patch.set_visible(False)
    axes.set_xscale("log" if chart.log_x else "linear")
    axes.set_yscale("log" if chart.log_y else "linear")
    axes.margins(x=margin, y=0.06 if chart.log_y else 0.0)
    axes.grid(False, axis="x")
    axes.spines["bottom"].set_color(LIGHT["muted"])
    axes.tick_params(labelsize=SIZE, labelcolor=LIGHT["muted"], color=LIGHT["muted"])
    axes.tick_params(axis="x", length=5, pad=4)
    axes.tick_params(axis="y", length=0, pad=GAP)
    return axes


def _label_heights(axes: Any, ys: Array) -> list[str]:
    """Ticks of the y axis, which ends at ticks if it is linear; it begins at 0 if that is not far."""
    if axes.get_yscale() == "log":
        found = [_ticks(locator, axes.yaxis) for locator in log_locators(*axes.get_ylim())]
        ticks = next(some for some in found if 2 <= len(some) <= 9)
    else:
        low, high = axes.get_ylim()
        low = 0.0 if 0 <= ys.min() < 0.5 * ys.max() else low
        ticks = [float(tick) for tick in _round_numbers(6, ys).tick_values(low, high)]
        axes.set_ylim(ticks[0], ticks[-1])
    labels = tick_labels(ticks, axes.get_yscale() == "log")
    axes.set_yticks(ticks, labels)
    axes.minorticks_off()
    return labels


def _label_level(sheet: Sheet, axes: Any, xs: Array, left: float, right: float) -> None:
    """Ticks of the x axis whose labels fit: at the points if it is logarithmic and they are few."""
    log = axes.get_xscale() == "log"
    own = [FixedLocator(sorted(set(xs)))] if len(set(xs)) <= 9 else []
    linear = [_round_numbers(most, xs) for most in range(9, 0, -1)]
    to_place = axes.transScale + axes.transLimits
    for locator in [*own, *log_locators(*axes.get_xlim())] if log else linear:
        ticks = _ticks(locator, axes.xaxis)
        labels = tick_labels(ticks, log)
        places = [left + float(to_place.transform((tick, 1))[0]) * (right - left) for tick in ticks]
        halves = [text_width(label) / 2 for label in labels]
        sides = [(p < h) - (p + h > sheet.width) for p, h in zip(places, halves, strict=True)]
        shown = [p + side * h for p, h, side in zip(places, halves, sides, strict=True)]
        ends = [-99.0, *(place + half for place, half in zip(shown, halves, strict=True))]
        if ticks and all(p - h >= e + 10 for p, h, e in zip(shown, halves, ends, strict=False)):
            break
    axes.set_xticks(ticks, labels)
    axes.minorticks_off()
    for text, side in zip(axes.get_xticklabels(), sides, strict=True):
        text.set_ha({-1: "right", 0: "center", 1: "left"}[side])


def _ticks(locator: Locator, axis: Any) -> list[float]:
    low, high = (float(end) for end in axis.get_view_interval())
    # Rounding may move a tick a little beyond an end.
    below, above = (low, high) if axis.get_scale() == "log" else (high - low, high - low)
    first, last = low - 1e-9 * below, high + 1e-9 * above
    return [float(tick) for tick in locator.tick_values(low, high) if first <= tick <= last]


def _round_numbers(most: int, values: Array) -> MaxNLocator:
    whole = bool(np.all(values == np.round(values)) and np.abs(values).max() < 1e15)
    return MaxNLocator(most, steps=[1, 2, 5, 10], integer=whole, min_n_ticks=1)


def log_locators(low: float, high: float) -> list[Locator]:
    """Ticks of a logarithmic axis, the densest first."""
    decades = math.log10(high / low)
    if decades < 0.7:
        return [MaxNLocator(most, steps=[1, 2, 5, 10]) for most in (7, 4, 2, 1)]
    several = [subs for subs, most in (((1, 2, 3, 5), 1.5), ((1, 2, 5), 3.5)) if decades < most]
    return [
        *(LogLocator(subs=subs, numticks=99) for subs in several),
        *(LogLocator(numticks=most) for most in (9, 7, 5, 4, 3, 2)),
    ]


def _look(i: int, dashed: bool, under: int = 0) -> dict[str, Any]:
    """Series told apart by colour, marker and dash; wider where others lie on it."""
    return {
        "color": LIGHT[f"s{i % SERIES + 1}"],
        "linewidth": 2 + 2.6 * under,
        "linestyle": (0, (6, 4)) if dashed else "-",
        "marker": MARKS[i % SERIES],
        "markersize": 8 + 4 * under,
        "markeredgecolor": LIGHT["paper"],
        "markeredgewidth": 1,
    }


def _strokes(sheet: Sheet, axes: Any, chart: LineChart, curves: Sequence[tuple[Array, Array]]) -> None:
    """What is dashed lies under what is not; lines that others hide are wider."""
    order = sorted(range(len(curves)), key=lambda i: not chart.series[i].dashed)
    for place, i in enumerate(order):
        x, y = curves[i]
        under = sum(_same(curves[i], curves[j]) for j in order[place + 1 :])
        marked = _marked(x, y, i, len(curves))
        look = _look(i, chart.series[i].dashed, under)
        if len(x) >= DENSE:
            look["linewidth"] = 1.2
        (line,) = axes.plot(x, y, markevery=marked, clip_on=False, zorder=3, **look)
        if marked:
            name = chart.series[i].name
            sheet.hover(line, [f"{name}: {number(x[j])}, {number(y[j])}" for j in marked])


def _same(one: tuple[Array, Array], other: tuple[Array, Array]) -> bool:
    """Whether one line would hide the other, as those of stages that agree."""
    return len(one[0]) == len(other[0]) > 0 and all(
        np.allclose(a, b, rtol=0, atol=0.005 * (np.nanmax(np.abs(a), initial=0)), equal_nan=True)
        for a, b in zip(one, other, strict=True)
    )


def _marked(x: Array, y: Array, i: int, series: int) -> list[int]:
    """The points that get a marker: all if they are few, else some, in other places for each series."""
    known = np.flatnonzero(~np.isnan(y))
    if len(known) <= MANY:
        return [int(j) for j in known]
    if series == 1:
        return []
    wanted = [x[known[0]] + (x[known[-1]] - x[known[0]]) * (k + (i + 0.5) / series) / 5 for k in range(5)]
    return sorted({int(known[np.argmin(np.abs(x[known] - place))]) for place in wanted})


# Bars


def _draw_bars(sheet: Sheet, chart: BarChart) -> None:
    rows = []
    for bar in chart.bars:
        value = drawable(bar.value)
        pieces = [(0, value)] if value and not math.isnan(value) else []
        rows.append((bar.label, pieces, bar.text or number(value)))
    _draw_rows(sheet, chart.unit, rows, [])


def _draw_stacked(sheet: Sheet, chart: StackedBars) -> None:
    rows = []
    for label, values in chart.bars:
        known = [(i, drawable(v)) for i, v in zip(range(len(chart.parts)), values, strict=True)]
        pieces = [(i, v) for i, v in known if v > 0]
        rows.append((label, pieces, number(sum(v for _, v in pieces) if pieces else math.nan)))
    if chart.parts:
        sheet.legend(chart.parts, 12, lambda i, x, y: _piece(x, y - 6, 12, 12, i))
    _draw_rows(sheet, chart.unit, rows, chart.parts)


def _draw_rows(
    sheet: Sheet, unit: str, rows: list[tuple[str, list[tuple[int, float]], str]], parts: Sequence[str]
) -> None:
    """Labels to the left, numbers to the right of the bars."""
    sheet.lines(unit)
    sheet.y += 6
    if not rows:
        sheet.no_data()
        return
    labels = [wrap(label, sheet.width * 0.36) for label, _, _ in rows]
    texts = [wrap(text, sheet.width * 0.3) for _, _, text in rows]
    left = max(text_width(line) for label in labels for line in label) + GAP
    right = sheet.width - max(text_width(line) for text in texts for line in text) - GAP
    sums = [sum(value for _, value in pieces) for _, pieces, _ in rows]
    low, high = min(0.0, *sums), max(0.0, *sums)
    spare = VISIBLE * max(1, *(len(pieces) for _, pieces, _ in rows))  # beyond their share
    scale = (right - left - spare) / (high - low) if high > low else 0.0
    zero = left - low * scale + (VISIBLE if low < 0 else 0.0)
    top = sheet.y
    for (label, pieces, text), label_lines, text_lines in zip(rows, labels, texts, strict=True):
        height = max(THICK + 10, max(len(label_lines), len(text_lines)) * LINE + 8)
        middle = sheet.y + height / 2
        x = zero
        for part, value in pieces:
            width = max(abs(value) * scale, VISIBLE)
            shown = width - 1 if parts and width > VISIBLE else width  # a gap between the parts
            piece = _piece(x if value >= 0 else x - width, middle - THICK / 2, shown, THICK, part)
            sheet.hover(piece, [f"{parts[part]}: {number(value)}" if parts else f"{label}: {text}"])
            sheet.add(piece)
            x += width if value >= 0 else 0.0
        _block(sheet, 0.0, middle, label_lines, label)
        _block(sheet, x + GAP, middle, text_lines, text)
        sheet.y += height
    sheet.add(Line2D([zero, zero], [top, sheet.y], color=LIGHT["muted"], linewidth=1))


def _piece(x: float, y: float, width: float, height: float, part: int) -> Rectangle:
    """Parts differ by colour and texture."""
    colour, hatch = LIGHT[f"s{part % SERIES + 1}"], HATCHES[part % len(HATCHES)]
    paper = LIGHT["paper"]
    return Rectangle((x, y), width, height, facecolor=colour, hatch=hatch, edgecolor=paper, linewidth=0)


def _block(sheet: Sheet, x: float, middle: float, lines: list[str], whole: str) -> None:
    """Lines of text around a height."""
    first = middle + 4.5 - (len(lines) - 1) * LINE / 2
    for i, line in enumerate(lines):
        sheet.text(x, first + i * LINE, line, whole=whole)


# Numbers


def tick_labels(ticks: Sequence[float], log: bool) -> list[str]:
    """10,000 becomes 10k; on a linear axis all labels get the same prefix and number of decimals."""
    largest = max(map(abs, ticks), default=0.0)
    if len(ticks) < 2 or (log and largest >= 10 * min(ticks)):
        return [_tick_label(tick, abs(tick)) for tick in ticks]
    return [_tick_label(tick, largest, float(np.diff(ticks).min())) for tick in ticks]


def _tick_label(value: float, largest: float, step: float = 0.0) -> str:
    if not 1e-3 * (1 - 1e-9) <= largest < 1e15:
        return minus(f"{value:.3g}")
    factor, prefix = next(((f, p) for f, p in PREFIXES if largest >= max(f, 1e4)), (1.0, ""))
    if not step:
        return f"{float(f'{value / factor:.{3 if prefix else 4}g}'):,g}{prefix}"
    if _decimals(step / factor) > 2:
        factor, prefix = 1.0, ""
    return minus(f"{value / factor + 0.0:,.{_decimals(step / factor)}f}{prefix if value else ''}")


def _decimals(step: float) -> int:
    """How many decimals it takes to write multiples of a step."""
    return next((n for n in range(15) if abs(round(step, n) - step) <= 1e-6 * step), 15)


def number(value: float) -> str:
    """A measured number with three digits that count, as 0.0123, 4.56 or 12,345."""
    if not math.isfinite(value):
        return "–"
    if value and not 1e-4 <= abs(value) < 1e15:
        return minus(f"{value:.3g}")
    return minus(f"{value:,.0f}" if value == int(value) else three_digits(value))


def minus(text: str) -> str:
    return text.replace("-", "−")
