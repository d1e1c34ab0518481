"""A sheet that charts are drawn on from top to bottom, and the SVG that comes out, for a page or alone."""

from __future__ import annotations

import math
import re
import textwrap
import xml.etree.ElementTree as xml
from collections.abc import Callable, Sequence
from functools import lru_cache
from io import BytesIO
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextToPath
from matplotlib.transforms import Affine2D

from distgpt.show.charts import LIGHT, Chart
from distgpt.show.tables import one_line

SIZE = 13  # of text
LINE = 17  # from one line of text to the next
NO_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))


class Sheet:
    """A figure that is filled from top to bottom; places are pixels from its upper left corner."""

    def __init__(self, width: int) -> None:
        self.width, self.y = width, 0.0
        self.figure = Figure(figsize=(width / 72, 1), dpi=72)
        self.figure.patch.set_visible(False)
        self.hovers: dict[str, list[str]] = {}
        self._down = Affine2D()
        self._axes: list[tuple[Axes, float, float, float, float]] = []

    @property
    def narrow(self) -> bool:
        return self.width < 600

    def place(self, axes: Axes, left: float, top: float, right: float, bottom: float) -> None:
        self._axes.append((axes, left, top, right, bottom))

    def add(self, artist: Artist) -> None:
        artist.set_transform(self._down)
        self.figure.add_artist(artist)

    def text(self, x: float, y: float, text: str, colour: str = "ink", whole: str = "", **how: Any) -> None:
        """`y` is the baseline; `whole` is what the text says where it had to be cut."""
        if text := one_line(text):
            look: dict[str, Any] = {"fontsize": SIZE, "color": LIGHT[colour], "transform": self._down} | how
            artist = self.figure.text(x, y, text, **look)
            if text.endswith("…") and whole:
                self.hover(artist, [whole])

    def lines(
        self, text: str, colour: str = "muted", size: int = SIZE, most: int = 2, middle: float | None = None
    ) -> None:
        """A text over the whole width, wrapped; around a middle, if that fits."""
        weight = "bold" if size > SIZE else "normal"
        for line in wrap(text, self.width / (1.12 if size > SIZE else 1), size, most):
            self.y += size + 4
            wide = text_width(line, size)
            x = 0.0 if middle is None else min(max(middle - wide / 2, 0.0), max(self.width - wide, 0.0))
            self.text(x, self.y - 4, line, colour, text, fontsize=size, fontweight=weight)

    def legend(
        self, names: Sequence[str], wide: float, sample: Callable[[int, float, float], Artist]
    ) -> None:
        """Names with samples of this width, as many in a row as fit."""
        x, y = 0.0, self.y + LINE - 4
        for i, name in enumerate(names):
            text = wrap(name, self.width - wide - 8, most=1)[0]
            needed = wide + 7 + text_width(text)
            if x and x + needed > self.width:
                x, y = 0.0, y + LINE + 3
            self.add(sample(i, x, y - 4.5))
            self.text(x + wide + 7, y, text, whole=name)
            x += needed + 18
        self.y = y + 10

    def hover(self, artist: Artist, texts: Sequence[str]) -> None:
        """Show texts at a pointer: one for the artist, or one for each of its markers."""
        gid = f"hover-{len(self.hovers)}"
        artist.set_gid(gid)
        self.hovers[gid] = [one_line(text) for text in texts]

    def no_data(self) -> None:
        self.text(0, self.y + LINE, "no data", "muted")
        self.y += LINE + 6

    def finish(self) -> xml.Element:
        """Everything into its place, as matplotlib writes it."""
        height = math.ceil(self.y)
        self.figure.set_size_inches(self.width / 72, height / 72)
        self._down.scale(1, -1).translate(0, height)
        for axes, left, top, right, bottom in self._axes:
            place = (
                left / self.width,
                1 - bottom / height,
                (right - left) / self.width,
                (bottom - top) / height,
            )
            axes.set_position(place)
        drawn = BytesIO()
        self.figure.savefig(drawn, format="svg", metadata=NO_METADATA)
        return xml.fromstring(drawn.getvalue())


def finished(sheet: Sheet, chart: Chart, name: str, style: str) -> str:
    """Without what a page must not hold twice or at all; with title, description and what pointers show."""
    drawn = sheet.finish()
    for element in drawn.iter():
        element.tag = element.tag.partition("}")[2]
        element.attrib = {
            key.rpartition("}")[2]: _value(key, value, name)
            for key, value in element.items()
            if not value.startswith("rotate(-0 ")
        }
        element.text, element.tail = ((text or "").strip("\n ") for text in (element.text, element.tail))
    for parent in list(drawn.iter()):
        for child in list(parent):
            if child.tag == "style" or (child.tag in ("g", "defs") and not len(child)):
                parent.remove(child)
    for gid, texts in sheet.hovers.items():
        group = next(element for element in drawn.iter() if element.get("id") == f"{name}-{gid}")
        for shown, text in zip(list(group.iter("use")) or [group], texts, strict=False):
            xml.SubElement(shown, "title").text = text
    used = set(re.findall(r"#([\w-]+)", " ".join(v for e in drawn.iter() for v in e.attrib.values())))
    for element in drawn.iter():
        if element.get("id", "") not in used:
            element.attrib.pop("id", None)
    return xml.tostring(_framed(list(drawn), sheet, chart, name, style), encoding="unicode")


def _value(key: str, value: str, name: str) -> str:
    """An attribute with ids that differ within a page, and no more decimals than can be seen."""
    if key == "id":
        return f"{name}-{value}"
    if key in ("d", "x", "y"):
        value = re.sub(r"\d+\.\d+", lambda found: f"{float(found[0]):.2f}".rstrip("0").rstrip("."), value)
        return re.sub(" ?([MLCz]) *", r"\1", value).strip()
    if key == "style":  # chart_style has the font
        value = re.sub(f"font(: {SIZE}px|-size: {SIZE}px|-family:)[^;]*; ", "", value)
    return re.sub(r"^#|(?<=url\()#", f"#{name}-", value) if key.endswith("href") or "url(" in value else value


def _framed(drawn: list[xml.Element], sheet: Sheet, chart: Chart, name: str, style: str) -> xml.Element:
    margin = 16 if style else 0
    width, height = sheet.width + 2 * margin, math.ceil(sheet.y) + 2 * margin
    attributes = {"class": "chart", "viewBox": f"{-margin} {-margin} {width} {height}"}
    attributes |= {"width": f"{width}", "height": f"{height}", "role": "img"}
    attributes["aria-labelledby"] = f"{name}-title {name}-text"
    svg = xml.Element("svg", attributes)
    xml.SubElement(svg, "title", id=f"{name}-title").text = one_line(chart.title) or "Chart"
    xml.SubElement(svg, "desc", id=f"{name}-text").text = one_line(chart.description) or "No description."
    if style:
        svg.set("xmlns", "http://www.w3.org/2000/svg")
        xml.SubElement(svg, "style").text = style
        corner = {"x": f"{-margin}", "y": f"{-margin}", "style": f"fill: {LIGHT['paper']}"}
        xml.SubElement(svg, "rect", corner, width="100%", height="100%")
    svg.extend(drawn)
    return svg


@lru_cache(maxsize=4096)
def text_width(text: str, size: float = SIZE) -> float:
    """In DejaVu Sans, the widest sans-serif font in common use: what is measured so fits in others, too."""
    font = FontProperties(family="DejaVu Sans", size=size)
    foreign = sum(c > "\u2e7f" for c in text)  # drawn twice as wide by the fonts that have them
    wide = float(TextToPath().get_text_width_height_descent(text, font, False)[0])
    return 1.04 * wide + 0.45 * size * foreign  # browsers round the widths of letters


def wrap(text: str, room: float, size: float = SIZE, most: int = 3) -> list[str]:
    """At most so many lines that fit; words longer than a line are cut in pieces."""
    text, lines = one_line(text), []
    for letters in range(min(len(text), int(3 * room / size)), 0, -1):
        lines = textwrap.wrap(text, letters)
        if all(text_width(line, size) <= room for line in lines):
            break
    if len(lines) > most:
        last = lines[most - 1]
        while last and text_width(f"{last}…", size) > room:
            last = last[:-1]
        lines[most - 1 :] = [f"{last.rstrip()}…"]
    return lines
