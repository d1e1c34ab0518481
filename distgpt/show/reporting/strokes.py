"""What is drawn between the axes: lines, thinned where points are many, and the markers on them."""

from collections.abc import Sequence

from distgpt.show.reporting.canvas import Canvas, hover, series_class
from distgpt.show.reporting.scales import number
from distgpt.show.reporting.words import one_line

MANY = 40  # points from which not every one gets a marker
MARKS = (  # around 0, 0; the last two are open
    "m-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z",
    "m-3.6 -3.6h7.2v7.2h-7.2z",
    "m0 -4.8l4.6 8.2h-9.2z",
    "m0 -5l5 5l-5 5l-5 -5z",
    "m0 4.8l4.6 -8.2h-9.2z",
    "m-5 0h10m-5 -5v10",
    "m-3.8 -3.8l7.6 7.6m0 -7.6l-7.6 7.6",
)
DENSE = 600  # points from which a line is thinned and drawn fine
OPEN = 5  # markers from which on they are drawn, not filled

Points = list[tuple[float, float]]  # numbers, or places on the sheet
Runs = list[Points]  # a line is broken where a value is missing


def spread(wanted: Sequence[float], gap: float, top: float, bottom: float) -> list[float]:
    """Rising heights at least a gap apart, near the wanted ones, inside the limits if there is room."""
    heights: list[float] = []
    for height in wanted:
        heights.append(max(height, heights[-1] + gap if heights else top))
    limit = bottom
    for i in range(len(heights) - 1, -1, -1):
        heights[i] = min(heights[i], limit)
        limit = heights[i] - gap
    return heights


def thinned(run: Points) -> Points:
    """At most four points for each unit of width: the first, the lowest, the highest, the last."""
    if len(run) < DENSE:
        return run
    kept: Points = []
    group: Points = []
    for point in run:
        if group and int(point[0]) != int(group[0][0]):
            kept += extremes(group)
            group = []
        group.append(point)
    return kept + extremes(group)


def extremes(group: Points) -> Points:
    chosen = {0, len(group) - 1}
    chosen.add(min(range(len(group)), key=lambda i: group[i][1]))
    chosen.add(max(range(len(group)), key=lambda i: group[i][1]))
    return [group[i] for i in sorted(chosen)]


def same(first: Runs, second: Runs) -> bool:
    """Whether one line would hide the other, as those of stages that agree."""
    a, b = ([point for run in runs for point in run] for runs in (first, second))
    near = (abs(x - u) < 1 and abs(y - v) < 2 for (x, y), (u, v) in zip(a, b, strict=False))
    return len(a) == len(b) > 0 and all(near)


def curve(canvas: Canvas, runs: Runs, i: int, dashed: bool, under: int) -> None:
    """One path, wider where others lie on it; a run of a single point becomes a dot."""
    moves = []
    kind = f"line {series_class(i)}" + " dashed" * dashed + " dense" * any(len(r) >= DENSE for r in runs)
    for run in map(thinned, runs):
        places = [f"{x:.1f} {y:.1f}" for x, y in run]
        moves.append("M" + "L".join(places) + ("h0" if len(places) == 1 else ""))
    if moves:
        wider = {"style": f"stroke-width: {2 + 2.6 * under:.1f}"} if under else {}
        canvas.add("path", class_=kind, d="".join(moves), **wider)


def marks(canvas: Canvas, runs: Runs, i: int, values: Runs, name: str, series: int, under: int) -> None:
    """A marker on every point if there are few, else on some, in other places for each series."""
    places = [point for run in runs for point in run]
    points = [point for run in values for point in run]
    chosen: Sequence[int] = range(len(places))
    if len(places) > MANY:
        if series == 1:
            return
        left, right = places[0][0], places[-1][0]
        wanted = [left + (right - left) * (k + (i + 0.5) / series) / 5 for k in range(5)]
        chosen = sorted({nearest(places, x) for x in wanted})
        under = 0
    for j in chosen:
        x, y = points[j]
        mark(canvas, *places[j], i, f"{one_line(name)}: {number(x)}, {number(y)}", 1 + 0.5 * under)


def nearest(places: Points, x: float) -> int:
    return min(range(len(places)), key=lambda j: abs(places[j][0] - x))


def mark(canvas: Canvas, x: float, y: float, i: int, told: str = "", scale: float = 1.0) -> None:
    shape = i % len(MARKS)
    kind = "open" if shape >= OPEN else "mark"
    title = hover(told) if told else ""
    if scale == 1.0:
        canvas.add("path", title, class_=f"{kind} {series_class(i)}", d=f"M{x:.1f} {y:.1f}{MARKS[shape]}")
    else:
        place = f"translate({x:.1f} {y:.1f}) scale({scale:.2g})"
        canvas.add(
            "path", title, class_=f"{kind} {series_class(i)}", d=f"M0 0{MARKS[shape]}", transform=place
        )


def sample(canvas: Canvas, x: float, y: float, i: int, dashed: bool) -> None:
    canvas.add("path", class_=f"line {series_class(i)}" + " dashed" * dashed, d=f"M{x:.1f} {y:.1f}h34")
    mark(canvas, x + 17, y, i)
