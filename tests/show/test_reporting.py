"""Charts and pages as files: well-formed, escaped, self-contained, told in words, true to the numbers."""

import html.parser
import re
import subprocess
import sys
import unicodedata
import xml.etree.ElementTree as xml

import pytest
from reportpages import HOSTILE, NAN, awkward_charts, bar_charts, example, line_charts

from distgpt.show import page
from distgpt.show.charts import DARK, LIGHT, SERIES, Bar, BarChart, LineChart, Series
from distgpt.show.drawing import svg, tick_label
from distgpt.show.page import KeyValues, Paragraph, Section, Table, Texts, Verdict
from distgpt.show.tables import one_line, wrap

CHARTS = [*line_charts(), *bar_charts(), *awkward_charts()]
ALONE = ("meta", "link", "br", "hr", "img", "input")  # elements of HTML without an end
TOLD = "</title></style><script>alert('x & y')</script> \"quoted\" \\x00\\x1b[31m\\u202e \\ud800 ]]>"
NAME = "{http://www.w3.org/2000/svg}"


class Page(html.parser.HTMLParser):
    """Reads a page as (tag, attributes, text inside, children and all), and fails where tags do not match."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements = [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.handle_startendtag(tag, attributes)
        if tag not in ALONE:
            self.open.append(self.elements[-1])

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes), []))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        for _, _, texts in self.open:
            texts.append(data)

    def all(self, *tags):
        return [(attributes, "".join(texts)) for tag, attributes, texts in self.elements if tag in tags]


@pytest.fixture(scope="module")
def whole():
    return example()


@pytest.fixture(scope="module")
def parsed(whole):
    return Page(whole)


def texts(drawn):
    return [element.text for element in xml.fromstring(drawn).iter(NAME + "text")]


def lines(drawn, colour="s1"):
    """The points of every line of a colour, as the file says them."""
    look = f"stroke: {LIGHT[colour]}"
    paths = [e for e in xml.fromstring(drawn).iter(NAME + "path") if look in e.get("style", "")]
    found = [re.findall(r"[\d.-]+ [\d.-]+", e.get("d")) for e in paths if "L" in e.get("d")]
    return [[tuple(map(float, p.split())) for p in points] for points in found]


def bars(drawn):
    """The widths of all bars, in the order they are drawn."""
    paths = (e for e in xml.fromstring(drawn).iter(NAME + "path") if e.get("d", "").rstrip().endswith("z"))
    rows = [[float(x) for x in re.findall(r"([\d.-]+) [\d.-]+", e.get("d"))] for e in paths]
    return [max(row) - min(row) for row in rows if len(row) == 4][1:]  # after the background


def test_every_chart_is_xml_that_tells_what_it_shows_and_has_colours_for_the_dark():
    for chart in CHARTS:
        for alone in (False, True):
            text = svg(chart, alone)
            root = xml.fromstring(text.encode())
            assert root.get("role") == "img"
            assert root.get("aria-label") == one_line(f"{chart.title}. {chart.description}")
            places = [e.get(key, "") for e in root.iter() for key in ("d", "x", "y", "width", "height")]
            assert not re.search(r"nan|inf|\de[+-]", " ".join(places)), chart.title
            colours = set(re.findall("#[0-9a-f]{6}\\b", text.partition("<g>")[2]))
            assert colours <= set(LIGHT.values()), chart.title
            assert (DARK["ink"] in text) is alone


def test_the_same_chart_is_the_same_file():
    assert svg(bar_charts()[2]) == svg(bar_charts()[2])


def test_a_page_is_html_that_loads_nothing_and_runs_nothing(whole, parsed):
    assert whole.startswith("<!DOCTYPE html>") and whole.encode()
    assert not [c for c in set(whole) if c != "\n" and unicodedata.category(c).startswith("C")]
    tags = {tag for tag, _, _ in parsed.elements}
    assert not tags & {"script", "link", "img", "iframe", "object", "embed", "base", "form", "image"}
    names = [name for _, attributes, _ in parsed.elements for name in attributes]
    assert not [n for n in names if n in ("src", "srcset") or n.startswith("on")]
    assert not re.search(r"url\((?!#)|@import", whole)
    policy = next(a["content"] for a, _ in parsed.all("meta") if a.get("http-equiv"))
    assert "default-src 'none'" in policy and "script" not in policy
    dark = whole.count("prefers-color-scheme: dark")
    assert dark == whole.count("@media screen and (prefers-color-scheme: dark)") == 2  # not on paper


def test_all_references_lead_somewhere_and_a_screen_reader_finds_its_way(parsed):
    ids = [a["id"] for _, a, _ in parsed.elements if "id" in a]
    for _, attributes, _ in parsed.elements:
        assert set(attributes.get("aria-labelledby", "").split()) <= set(ids)
        assert attributes.get("href", f"#{ids[0]}").removeprefix("#") in ids
        assert set(re.findall(r"url\(#(.*?)\)", " ".join(attributes.values()))) <= set(ids)
    assert [text for _, text in parsed.all("h1")] == ["Four stages, one model"]
    assert len(parsed.all("h2")) == len(parsed.all("section")) == len(parsed.all("li")) == 7
    assert all(a["scope"] in ("col", "row") for a, _ in parsed.all("th"))
    boxes = [a for tag, a, _ in parsed.elements if tag == "div" and a.get("class") == "scroll"]
    assert len(boxes) == len(parsed.all("table")) + len(CHARTS)
    assert all(a["tabindex"] == "0" and (a.get("aria-label") or a["aria-labelledby"]) for a in boxes)
    drawn = [a for a, _ in parsed.all("svg") if a.get("role") == "img"]
    assert len(drawn) == len(CHARTS)
    assert next(a for a, _ in parsed.all("html"))["lang"] == "en"


def on_page(*blocks):
    return Page(page.html("t", "", [Section("s", blocks)]))


def test_blocks_are_the_same_texts_on_a_page_and_on_a_terminal():
    table = Table(["a", "b <x>"], [["1 & 2", "</td>"], ["only one"]], 'the "caption"', "the note")
    found = on_page(table)
    assert [text for _, text in found.all("th", "td")] == ["a", "b <x>", "1 & 2", "</td>", "only one", ""]
    assert [t for _, t in found.all("figcaption", "p")] == ['the "caption"', "the note"]
    blocks = [Texts([("t", "a\n\n  b\tc\r\x07\x00")]), Verdict(True, "equal"), Verdict(False, "other")]
    found = on_page(*blocks)
    assert found.all("pre")[0][1] == "a\n\n  b c\\r\\x07\\x00"
    assert [text.strip() for _, text in found.all("p")] == ["Passed. equal", "Failed. other"]
    shown = page.terminal([table, Table(["none"], []), *blocks, KeyValues([("k", "v")]), bar_charts()[0]])
    assert shown.startswith('the "caption"\na') and "\n\nthe note\n\nt\na" in shown and "none" not in shown
    assert shown.endswith("equal\n\nother\n\nk: v") and "\x00" not in shown


def test_hostile_texts_come_out_as_text_in_every_block():
    assert one_line(HOSTILE) == TOLD
    h = HOSTILE
    blocks = [Paragraph(h), Verdict(False, h), KeyValues([(h, h)]), Texts([(h, h)]), Table([h], [[h]], h, h)]
    found = Page(page.html(h, h, [Section(h, [*blocks, BarChart(h, h, h, [Bar(h, 1, h)])])] * 3, h))
    for tag in ("title", "h1", "h2", "a", "p", "dt", "dd", "figcaption", "pre", "th", "footer"):
        assert any(text.endswith(TOLD) for _, text in found.all(tag)), tag
    assert not found.all("script")


def through(x, y, *log):
    return svg(LineChart("t", "d", "", "", [Series("", x, y)], *log))


def test_a_line_goes_through_its_points_and_a_log_axis_places_by_ratio():
    [(x1, y1), (x2, y2), (x4, y4), (x5, y5)] = lines(through([4, 1, 2, 3, 5], [4.0, 1.0, 2.0, NAN, 2.0]))[0]
    assert x4 - x2 == pytest.approx(2 * (x2 - x1), abs=0.3) and x5 - x4 == pytest.approx(x2 - x1, abs=0.3)
    assert y1 - y2 == pytest.approx((y1 - y4) / 3, abs=0.2) and y5 == y2
    drawn = through([-1, 0, 1, 10, 100], [1, 1, 1, 10, 100], True, True)
    [(x1, y1), (x2, y2), (x3, y3)] = lines(drawn)[0]
    assert x3 - x2 == pytest.approx(x2 - x1, abs=0.2) and y2 - y3 == pytest.approx(y1 - y2, abs=0.2)
    assert {"1", "10", "100"} <= set(texts(drawn))


def test_dashes_markers_and_colours_tell_series_apart_and_hidden_ones_are_wider():
    names = [f"series {i}" for i in range(SERIES)]
    drawn = svg(
        LineChart("t", "d", "x", "y", [Series(n, [1, 2], [i, i * i], i == 3) for i, n in enumerate(names)])
    )
    assert all(len(lines(drawn, f"s{i}")) == 2 for i in range(1, SERIES + 1))  # in the chart, in the legend
    assert drawn.count("stroke-dasharray") == 2 and set(names) <= set(texts(drawn))
    assert ["stroke-width: 4.6" in svg(chart) for chart in line_charts()[:2]] == [False, True]


def test_bars_are_as_long_as_their_numbers_and_parts_add_up():
    values = {"a": 1000.0, "b": 500.0, "d": 0, "e": NAN}
    drawn = svg(BarChart("t", "d", "s", [Bar(label, v, f"{v}") for label, v in values.items()]))
    assert sorted(texts(drawn)) == sorted(["s", *values, "1000.0", "500.0", "0", "nan"])
    a, b, *_ = bars(drawn)
    assert b == pytest.approx(a / 2, abs=0.1) and a > 500
    widths = bars(svg(BarChart("t", "d", "s", [Bar("x", [1, 3], "4"), Bar("y", [2, 2], "4")])))
    assert widths[0] + widths[2] == pytest.approx(widths[1] + widths[3], abs=0.1)
    assert widths[2] == pytest.approx(3 * widths[0], abs=0.1)


def test_ticks_are_round_and_written_briefly():
    for x, log, told in (
        ([0, 10], False, "0 2 4 6 8 10"),
        ([-3, 3], False, "−3 −2 −1 0 1 2 3"),
        ([1, 1024], True, "1 1,024"),
        ([1e-7 * 7**k for k in range(20)], True, "1e−07 1e−05 0.001 0.1 10 1,000 100k 10M 1G"),
    ):
        shown = texts(through(x, [1] * len(x), log))
        assert set(told.split()) <= set(shown) and "1e−09" not in shown, x  # nothing beyond the ends
    ticks = {0: "0", -2: "−2", 0.0002: "0.0002", 1000: "1,000", 10_000: "10k", 2**20: "1.05M", 1e-7: "1e−07"}
    assert {value: tick_label(value) for value in ticks} == ticks and tick_label(2000, 1e3) == "2k"
    assert wrap("aa bb cc", 35, 10) == ["aa bb", "cc"] and wrap("abcdefgh", 28, 10, most=1) == ["abc…"]


def test_nothing_is_loaded_that_draws_before_something_is_drawn():
    script = """
import sys
import distgpt.show.charts, distgpt.show.page, distgpt.show.tables, distgpt.show.display
import distgpt.commands.train, distgpt.commands.plot
import distgpt.inference.single, distgpt.inference.batch
assert not {"matplotlib", "jinja2"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", script], check=True)
