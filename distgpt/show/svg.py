"""Charts as SVG: elements of a page, or files of their own. Loads matplotlib."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as xml

from distgpt.show.charts import LIGHT, WIDE, Chart, chart_style
from distgpt.show.drawing import draw
from distgpt.show.tables import one_line, wrap

TITLE = 16  # the size of a title's text in pixels


def svg(chart: Chart, name: str = "chart", width: int = WIDE) -> str:
    """An element for a page; its ids begin with `name`."""
    return _element(chart, name, width)


def standalone(chart: Chart) -> str:
    """An .svg file of its own, with its title, and with a background and colours for light and for dark."""
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{_element(chart, "chart", WIDE, chart_style())}\n'


def _element(chart: Chart, name: str, width: int, style: str = "") -> str:
    """What matplotlib draws, without its style, and with what pointers, readers and a page need."""
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
