"""Line charts: axes with round ticks, series told apart by colour, marker and dash, names where they fit."""

from collections.abc import Sequence
from dataclasses import dataclass

from distgpt.show.reporting.canvas import LINE, SIZE, Canvas, Chart, series_class
from distgpt.show.reporting.scales import (
    Axis,
    drawable,
    limits,
    linear_ticks,
    log_ticks,
    round_step,
    that_fits,
    tick_labels,
)
from distgpt.show.reporting.strokes import MANY, Points, Runs, curve, mark, marks, same, sample, spread
from distgpt.show.reporting.words import one_line, text_width


@dataclass(frozen=True)
class Series:
    """Points in any order, joined by rising x. Dashed is for what was predicted or comes from elsewhere."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    dashed: bool = False


@dataclass(frozen=True)
class LineChart(Chart):
    """Values over values. Points without a place (NaN, infinite, not positive on a log axis) are left out."""

    x_label: str
    y_label: str
    series: Sequence[Series]
    log_x: bool = False
    log_y: bool = False

    def draw(self, canvas: Canvas) -> None:
        values = [numbers(s, self.log_x, self.log_y) for s in self.series]
        points = [point for runs in values for run in runs for point in run]
        if not points:
            canvas.text(0, canvas.y + LINE, "no data", "muted")
            canvas.y += LINE + 6
            return
        room = self._legend(canvas, values, points)
        canvas.lines(self.y_label, "muted")
        plot = Plot(self, canvas, points, room)
        plot.axes()
        placed = [[[(plot.x.place(x), plot.y.place(y)) for x, y in run] for run in runs] for runs in values]
        self._strokes(canvas, values, placed)
        if room:
            plot.names([s.name for s in self.series], placed)
        canvas.y = plot.bottom + LINE + 6
        canvas.lines(self.x_label, "muted", middle=(plot.left + plot.right) / 2)
        canvas.y += 2

    def _legend(self, canvas: Canvas, values: Sequence[Runs], points: Points) -> float:
        """Draws one where it is needed; else the room that the names take beside the plot."""
        names = [s.name for s in self.series]
        if len(names) == 1 and names[0] in ("", self.y_label, self.title):
            return 0.0  # the name says nothing new
        room = beside(canvas, self, values, points)
        if not room and any(map(one_line, names)):
            canvas.legend(names, lambda c, x, y, i: sample(c, x, y, i, self.series[i].dashed), 34)
        return room

    def _strokes(self, canvas: Canvas, values: Sequence[Runs], placed: Sequence[Runs]) -> None:
        """What is dashed lies under what is not; lines that others hide are wider."""
        order = sorted(range(len(placed)), key=lambda i: not self.series[i].dashed)
        above = {i: order[place + 1 :] for place, i in enumerate(order)}
        under = {i: sum(same(placed[i], placed[j]) for j in above[i]) for i in order}
        for i in order:
            curve(canvas, placed[i], i, self.series[i].dashed, under[i])
        for i in order:
            marks(canvas, placed[i], i, values[i], self.series[i].name, len(placed), under[i])


def numbers(series: Series, log_x: bool, log_y: bool) -> Runs:
    """Runs of points that can be drawn, by rising x; a missing value ends a run."""
    runs: Runs = [[]]
    known = [(drawable(x, log_x), drawable(y, log_y)) for x, y in zip(series.x, series.y, strict=True)]
    for x, y in sorted(((x, y) for x, y in known if x is not None), key=lambda point: point[0]):
        if y is not None:
            runs[-1].append((x, y))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def beside(canvas: Canvas, chart: LineChart, values: Sequence[Runs], points: Points) -> float:
    """The room that names take to the right of their lines; 0 where a legend is better."""
    names = [one_line(s.name) for s in chart.series]
    widest = max(text_width(name, SIZE) for name in names)
    if canvas.narrow or len(names) > 8 or widest > 190 or not all(values) or not all(names):
        return 0.0
    axis = Axis(*limits([x for x, _ in points], chart.log_x, 0.0), 0.0, 1.0, chart.log_x)
    if any(axis.place(runs[-1][-1][0]) < 0.9 for runs in values):
        return 0.0
    return widest + 34


class Plot:
    """The rectangle between the axes."""

    def __init__(self, chart: LineChart, canvas: Canvas, points: Points, ends: float):
        self.chart, self.canvas = chart, canvas
        self.top = canvas.y + 14
        self.bottom = self.top + (220 if canvas.narrow else 280)
        xs, ys = [x for x, _ in points], [y for _, y in points]
        y_low, y_high, self.y_ticks = self._upright(ys)
        self.y_labels = tick_labels(self.y_ticks, chart.log_y)
        self.y = Axis(y_low, y_high, self.bottom, self.top, chart.log_y)
        self.left = max(text_width(label, SIZE) for label in self.y_labels) + 8
        x_low, x_high = limits(xs, chart.log_x, 0.03 if len(set(xs)) <= MANY else 0.0)
        self.right = canvas.width - (ends or 14.0)
        self.x = Axis(x_low, x_high, self.left, self.right, chart.log_x)
        self.x_ticks = self._level(xs)

    def _upright(self, ys: Sequence[float]) -> tuple[float, float, Sequence[float]]:
        """Limits and ticks of the y axis: a linear one ends at ticks."""
        if self.chart.log_y:
            low, high = limits(ys, True, 0.06)
            return low, high, that_fits(log_ticks(low, high), lambda ticks: len(ticks) <= 9)
        low, high = limits(ys, False, 0.02, from_zero=True)
        whole = all(y == int(y) for y in ys)
        step = max(round_step(high - low, 6), 1.0 if whole else 0.0)
        low, high = step * ((low + 1e-9 * step) // step), -step * ((-high + 1e-9 * step) // step)
        return low, high, linear_ticks(low, high, 7, whole)

    def _level(self, xs: Sequence[float]) -> Sequence[float]:
        """Ticks of the x axis: at the points if it is logarithmic and they are few, else at round numbers."""
        low, high = self.x.low, self.x.high
        if not self.chart.log_x:
            whole = all(x == int(x) for x in xs)
            return that_fits((linear_ticks(low, high, n, whole) for n in range(9, 0, -1)), self._fit)
        own = sorted(set(xs))
        return that_fits([*([own] if len(own) <= 9 else []), *log_ticks(low, high)], self._fit)

    def _fit(self, ticks: Sequence[float]) -> bool:
        """Whether the labels of these ticks lie apart."""
        end = -1e9
        for tick, label in zip(ticks, tick_labels(ticks, self.chart.log_x), strict=True):
            middle, half = self._under(tick, label)
            if middle - half < end + 10:
                return False
            end = middle + half
        return bool(ticks)

    def _under(self, tick: float, label: str) -> tuple[float, float]:
        """The middle of a label of the x axis, moved so that it stays on the sheet, and half its width."""
        half = text_width(label, SIZE) / 2
        return min(max(self.x.place(tick), half), self.canvas.width - half), half

    def axes(self) -> None:
        canvas = self.canvas
        for tick, label in zip(self.y_ticks, self.y_labels, strict=True):
            y = self.y.place(tick)
            canvas.add("path", class_="grid", d=f"M{self.left:.1f} {y:.1f}H{self.right:.1f}")
            canvas.text(self.left - 8, y + 4.5, label, "muted", "end")
        ticks = tick_labels(self.x_ticks, self.chart.log_x)
        for tick, label in zip(self.x_ticks, ticks, strict=True):
            x = self.x.place(tick)
            canvas.add("path", class_="axis", d=f"M{x:.1f} {self.bottom:.1f}v5")
            canvas.text(self._under(tick, label)[0], self.bottom + LINE + 2, label, "muted", "middle")
        canvas.add("path", class_="axis", d=f"M{self.left:.1f} {self.bottom:.1f}H{self.right:.1f}")

    def names(self, names: Sequence[str], placed: Sequence[Runs]) -> None:
        """Each name at the end of its line, moved up or down where two would touch."""
        ends = [runs[-1][-1] for runs in placed]
        order = sorted(range(len(names)), key=lambda i: ends[i][1])
        heights = spread([ends[i][1] for i in order], LINE, self.top, self.bottom)
        for i, y in zip(order, heights, strict=True):
            x = self.right + 24
            start = f"M{ends[i][0] + 6:.1f} {ends[i][1]:.1f}L{x - 10:.1f} {y:.1f}"
            self.canvas.add("path", class_=f"line thin {series_class(i)}", d=start)
            mark(self.canvas, x - 5, y, i)
            self.canvas.text(x + 5, y + 4.5, names[i])
