"""Charts as data, and as SVG: an element for a page, which draws it in two widths, or a file of its own."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as xml
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from distgpt.show.tables import one_line, wrap

WIDE, NARROW = 800, 328  # drawn for a screen or paper, and for a phone: text keeps its size on both
SERIES = 8
TITLE = 16  # the size of its text in pixels
FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'

# For light and for dark. Series colours stay apart for the colour-blind: tests/test_colours.py.
COLOURS = {
    "paper": ("#ffffff", "#14181d"),
    "surface": ("#f4f6f8", "#1d2329"),
    "ink": ("#1b2026", "#e8ebef"),
    "muted": ("#59626d", "#a6b0bb"),
    "rule": ("#ccd3da", "#414b56"),
    "grid": ("#e4e8ec", "#2b333b"),
    "shade": ("#00000030", "#ffffff38"),
    "accent": ("#0b5fae", "#7bb8f5"),
    "good": ("#0b6b3a", "#74d49b"),
    "good-surface": ("#e7f5ec", "#14291d"),
    "bad": ("#a8201a", "#ff9a92"),
    "bad-surface": ("#fdecea", "#351a19"),
    "s1": ("#1a4ea5", "#6aa1fc"),
    "s2": ("#b9470a", "#ea893f"),
    "s3": ("#04866c", "#0fe1ad"),
    "s4": ("#e64ca8", "#b38aa8"),
    "s5": ("#aa8a1c", "#e3c63b"),
    "s6": ("#3496d2", "#bddeff"),
    "s7": ("#4f4f56", "#a4b8e2"),
    "s8": ("#7d2417", "#cf624f"),
}
LIGHT, DARK = ({name: pair[scheme] for name, pair in COLOURS.items()} for scheme in (0, 1))

# What all pictures have in common, for matplotlib's rc_context.
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "text.color": LIGHT["ink"],
    "text.parse_math": False,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LIGHT["grid"],
    "lines.solid_capstyle": "round",
    "lines.solid_joinstyle": "round",
    "path.simplify_threshold": 0.3,
    "hatch.linewidth": 0.7,
    "svg.hashsalt": "distgpt",
    "svg.fonttype": "none",
}
DRAWN = ("paper", "ink", "muted", "grid", *(f"s{i}" for i in range(1, SERIES + 1)))  # what charts use


def series_colour(i: int) -> str:
    return LIGHT[f"s{i % SERIES + 1}"]


@dataclass(frozen=True)
class Chart:
    """What every chart has: a title, and a description for those who cannot see it."""

    title: str
    description: str

    def svg(self, name: str = "", width: int = WIDE) -> str:
        """An element for a page; its ids begin with `name`."""
        return _element(self, name or "chart", width)


@dataclass(frozen=True)
class Series:
    """Points in any order, joined by rising x. Dashed is for what was predicted or comes from elsewhere."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    dashed: bool = False


def line(name: str, points: Sequence[tuple[float, float]], dashed: bool = False) -> Series:
    """The series through (x, y)."""
    return Series(name, [x for x, _ in points], [y for _, y in points], dashed)


@dataclass(frozen=True)
class LineChart(Chart):
    """Values over values. Points without a place (NaN, infinite, not positive on a log axis) are left out."""

    x_label: str
    y_label: str
    series: Sequence[Series]
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True)
class Bar:
    """Of one number, or of one for each part. `text` is printed beside the bar; the sum, if it is empty."""

    label: str
    value: float | Sequence[float]
    text: str = ""


@dataclass(frozen=True)
class BarChart(Chart):
    """Horizontal bars; if they have parts, all have the same in the same order."""

    unit: str
    bars: Sequence[Bar]
    parts: Sequence[str] = ()


def standalone(chart: Chart) -> str:
    """An .svg file of its own, with its title, and with a background and colours for light and for dark."""
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{_element(chart, "chart", WIDE, chart_style())}\n'


def chart_style() -> str:
    """The style of charts. Drawn in light colours, these are replaced on a dark screen."""
    dark_rules = "\n".join(
        f'[style*="fill: {LIGHT[name]}"], [fill="{LIGHT[name]}"] {{ fill: {DARK[name]} !important; }}\n'
        f'[style*="stroke: {LIGHT[name]}"] {{ stroke: {DARK[name]} !important; }}'
        for name in DRAWN
    )
    return f""".chart text {{ font-family: {FONT} !important; font-variant-numeric: tabular-nums; }}
.chart path {{ stroke-linejoin: round; }}
@media screen and (prefers-color-scheme: dark) {{
{dark_rules}
}}
"""


def _element(chart: Chart, name: str, width: int, style: str = "") -> str:
    """What matplotlib draws, without its style, and with what pointers, readers and a page need."""
    from distgpt.show.drawing import draw  # loads matplotlib

    written, hovers = draw(chart, width)
    drawn = xml.fromstring(written)
    for element in list(drawn.iter()):
        element.tag = element.tag.partition("}")[2]
        gid = element.attrib.pop("id", "") if element.tag == "g" else ""  # nothing refers to groups
        element.attrib = {key.partition("}")[2] or key: _value(key, v, name) for key, v in element.items()}
        element.text, element.tail = ((text or "").strip("\n ") for text in (element.text, element.tail))
        if texts := hovers.get(gid):
            markers = [e for e in element.iter() if e.tag.endswith("}use")]
            for shown, text in zip(markers if len(markers) == len(texts) else [element], texts, strict=False):
                xml.SubElement(shown, "title").text = text
    body = [child for child in drawn if child.find("style") is None]
    height = math.ceil(float(drawn.get("height", "").removesuffix("pt")))
    return xml.tostring(_framed(body, chart, name, width, height, style), encoding="unicode")


def _value(key: str, value: str, name: str) -> str:
    """An attribute with ids that differ within a page, and no more decimals than can be seen."""
    if key == "id":
        return f"{name}-{value}"
    if key == "d":
        return re.sub(r"(\.\d\d)\d+| +(?=[A-Za-z ]|$)", r"\1", value)
    return re.sub(r"^#|(?<=url\()#", f"#{name}-", value) if key.endswith("href") or "url(" in value else value


def _framed(
    body: list[xml.Element], chart: Chart, name: str, width: int, height: int, style: str
) -> xml.Element:
    """An image of its own has its title above, a margin, a background and its style inside."""
    title = wrap(chart.title, width / 1.12, TITLE) if style else []
    margin, above = (16, len(title) * (TITLE + 4) + 8) if style else (0, 0)
    box = (-margin, -margin - above, width + 2 * margin, height + above + 2 * margin)
    attributes = {"class": "chart", "viewBox": "{} {} {} {}".format(*box)}
    attributes |= {"width": f"{box[2]}", "height": f"{box[3]}", "role": "img"}
    svg = xml.Element("svg", attributes | {"aria-labelledby": f"{name}-title {name}-text"})
    xml.SubElement(svg, "title", id=f"{name}-title").text = one_line(chart.title) or "Chart"
    xml.SubElement(svg, "desc", id=f"{name}-text").text = one_line(chart.description) or "No description."
    if style:
        svg.set("xmlns", "http://www.w3.org/2000/svg")
        xml.SubElement(svg, "style").text = style
        corner = {"x": f"{box[0]}", "y": f"{box[1]}", "style": f"fill: {LIGHT['paper']}"}
        xml.SubElement(svg, "rect", corner, width="100%", height="100%")
    for i, line in enumerate(title):
        look = f"font-size: {TITLE}px; font-weight: bold; fill: {LIGHT['ink']}"
        xml.SubElement(svg, "text", x="0", y=f"{i * (TITLE + 4) - above + TITLE}", style=look).text = line
    svg.extend(body)
    return svg
