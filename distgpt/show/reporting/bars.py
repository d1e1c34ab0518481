"""Horizontal bars, plain or stacked: labels to the left, numbers to the right."""

from collections.abc import Sequence
from dataclasses import dataclass

from distgpt.show.reporting.canvas import LINE, SIZE, Canvas, Chart, element, hover, series_class
from distgpt.show.reporting.scales import drawable, number
from distgpt.show.reporting.words import one_line, text_width, wrap

THICK = 18  # of a bar
VISIBLE = 3.0  # how wide even the smallest bar is
GAP = 8  # between label, bar and number


@dataclass(frozen=True)
class Bar:
    """`text` is printed beside the bar; the number, if it is empty."""

    label: str
    value: float
    text: str = ""


@dataclass(frozen=True)
class Row:
    """A bar that is ready to be placed: its pieces as (part, value)."""

    label: str
    pieces: list[tuple[int, float]]
    text: str

    @property
    def ends(self) -> tuple[float, float]:
        total = sum(value for _, value in self.pieces)
        return min(total, 0.0), max(total, 0.0)


@dataclass(frozen=True)
class BarChart(Chart):
    """One bar per number."""

    unit: str
    bars: Sequence[Bar]

    def draw(self, canvas: Canvas) -> None:
        rows = []
        for bar in self.bars:
            value = drawable(bar.value)
            text = bar.text or ("–" if value is None else number(value))
            rows.append(Row(bar.label, [(0, value)] if value else [], text))
        draw_rows(canvas, self.unit, rows, [])


@dataclass(frozen=True)
class StackedBars(Chart):
    """Bars made of parts: the same parts in the same order in each."""

    unit: str
    parts: Sequence[str]
    bars: Sequence[tuple[str, Sequence[float]]]

    def draw(self, canvas: Canvas) -> None:
        rows = []
        for label, values in self.bars:
            known = [(i, drawable(v)) for i, v in zip(range(len(self.parts)), values, strict=True)]
            pieces = [(i, v) for i, v in known if v is not None and v > 0]
            rows.append(Row(label, pieces, number(sum(v for _, v in pieces)) if pieces else "–"))
        if self.parts:
            textures(canvas, len(self.parts))
            canvas.legend(self.parts, lambda c, x, y, i: piece(c, x, y - 6, 12, 12, i, ""), 12)
        draw_rows(canvas, self.unit, rows, self.parts)


def draw_rows(canvas: Canvas, unit: str, rows: Sequence[Row], parts: Sequence[str]) -> None:
    if unit:
        canvas.lines(unit, "muted")
        canvas.y += 6
    if not rows:
        canvas.text(0, canvas.y + LINE, "no data", "muted")
        canvas.y += LINE + 6
        return
    labels, texts = columns(canvas, rows)
    left = max(text_width(line, SIZE) for label in labels for line in label) + GAP
    right = canvas.width - max(text_width(line, SIZE) for text in texts for line in text) - GAP
    low = min(row.ends[0] for row in rows)
    high = max(row.ends[1] for row in rows)
    spare = VISIBLE * max(1, *(len(row.pieces) for row in rows))  # what pieces may get beyond their share
    scale = (right - left - spare) / (high - low) if high - low > 0 else 0.0
    zero = left - low * scale + (VISIBLE if low < 0 else 0.0)
    axis = len(canvas.parts)
    top = canvas.y
    for row, label, text in zip(rows, labels, texts, strict=True):
        draw_row(canvas, row, label, text, zero, scale, parts)
    line = element("path", class_="axis", d=f"M{zero - 0.5:.1f} {top:.1f}V{canvas.y:.1f}")
    canvas.parts.insert(axis, line)  # under the bars


def columns(canvas: Canvas, rows: Sequence[Row]) -> tuple[list[list[str]], list[list[str]]]:
    """Labels and numbers, wrapped so that a good part of the width is left for the bars."""
    labels = [wrap(one_line(row.label), canvas.width * 0.36, SIZE) for row in rows]
    texts = [wrap(one_line(row.text), canvas.width * 0.3, SIZE) for row in rows]
    return labels, texts


def draw_row(
    canvas: Canvas,
    row: Row,
    label: list[str],
    text: list[str],
    zero: float,
    scale: float,
    parts: Sequence[str],
) -> None:
    height = max(THICK + 10, max(len(label), len(text)) * LINE + 8)
    middle = canvas.y + height / 2
    cut = row.label if label[-1].endswith("…") else None
    block(canvas, 0.0, middle, label, cut)
    x = zero
    for part, value in row.pieces:
        width = max(abs(value) * scale, VISIBLE)
        name = parts[part] if parts else row.label
        told = f"{one_line(name)}: {number(value) if parts else row.text}"
        shown = width - 1 if parts and width > VISIBLE else width  # a gap between the parts
        piece(canvas, x if value >= 0 else x - width, middle - THICK / 2, shown, THICK, part, told)
        x += width if value >= 0 else 0.0
    block(canvas, x + GAP, middle, text, row.text if text[-1].endswith("…") else None)
    canvas.y += height


def block(canvas: Canvas, x: float, middle: float, lines: list[str], whole: str | None) -> None:
    """Lines of text around a height."""
    first = middle + 4.5 - (len(lines) - 1) * LINE / 2
    for i, line in enumerate(lines):
        canvas.text(x, first + i * LINE, line, whole=whole)


def textures(canvas: Canvas, count: int) -> None:
    """Lines over a part's colour, so that parts differ without it: none, then slanted, upright, level, …"""
    ways = ["M-2 2l4 -4M0 8l8 -8M6 10l4 -4", "M3 0v8", "M0 3h8", "M-2 6l4 4M0 0l8 8M6 -2l4 4", "M3 0v8M0 3h8"]
    patterns = [
        f'<pattern id="{canvas.name}-t{i}" width="8" height="8" patternUnits="userSpaceOnUse">'
        f'<path class="texture" d="{way}"/></pattern>'
        for i, way in enumerate(ways[: max(count - 1, 0)], start=1)
    ]
    if patterns:
        canvas.add("defs", "".join(patterns))


def piece(canvas: Canvas, x: float, y: float, width: float, height: float, part: int, told: str) -> None:
    title = hover(told) if told else ""
    canvas.add("rect", title, class_=f"part {series_class(part)}", x=x, y=y, width=width, height=height)
    way = part % 6
    if way:
        canvas.add("rect", title, fill=f"url(#{canvas.name}-t{way})", x=x, y=y, width=width, height=height)
