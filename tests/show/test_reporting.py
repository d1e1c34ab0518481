"""Charts and pages as files: well-formed, escaped, self-contained, told in words, true to the numbers."""

import html.parser
import itertools
import math
import re
import subprocess
import sys
import unicodedata
import xml.etree.ElementTree as xml
from pathlib import Path

import pytest
from reportpages import HOSTILE, LONG_WORD, NAN, awkward_charts, bar_charts, example, line_charts, sections

from distgpt.show import charts
from distgpt.show.charts import DARK, LIGHT, NARROW, SERIES, WIDE, Bar, BarChart, Chart, LineChart, Series
from distgpt.show.drawing import number, tick_label
from distgpt.show.page import Facts, Paragraph, Section, Table, Texts, Verdict, page
from distgpt.show.svg import standalone
from distgpt.show.svg import svg as element
from distgpt.show.tables import one_line, wrap

CHARTS = [*line_charts(), *bar_charts(), *awkward_charts()]
ALONE = ("meta", "link", "br", "hr", "img", "input")  # elements of HTML without an end
TOLD = "</title></style><script>alert('x & y')</script> \"quoted\" \\x00\\x1b[31m\\u202e \\ud800 ]]>"


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


HELPERS = Path(__file__).parents[1] / "helpers"


def on_page(*blocks):
    """Blocks in the one section of a page."""
    return Page(page("t", "", [Section("s", blocks)]))


def line_through(x, y, *log):
    """A drawn chart of one line."""
    return xml.fromstring(element(LineChart("t", "d", "", "", [Series("", x, y)], *log), "c"))


def texts(svg):
    return [element.text for element in svg.iter("text")]


def hovers(svg):
    return [title.text for title in list(svg.iter("title"))[1:]]


def lines(svg, colour="s1"):
    """The points of every line of a colour, as the file says them."""
    look = f"stroke: {LIGHT[colour]}"
    paths = [e.get("d") for e in svg.iter("path") if look in e.get("style", "") and "L" in e.get("d")]
    return [[tuple(map(float, p.split())) for p in re.findall(r"[\d.-]+ [\d.-]+", d)] for d in paths]


def bars(svg):
    """(left, width) of every bar, in the order they are drawn; samples of a legend come first."""
    found = []
    for path in svg.iter("path"):
        points = [float(x) for x, _ in re.findall(r"([\d.-]+) ([\d.-]+)", path.get("d"))]
        if "fill: " in path.get("style", "") and path.get("d").endswith("z") and len(points) == 4:
            found.append((min(points), max(points) - min(points)))
    return found


@pytest.fixture(scope="module")
def whole():
    return example()


@pytest.fixture(scope="module")
def parsed(whole):
    return Page(whole)


# Files


def test_every_chart_is_xml_that_says_in_words_what_it_shows(whole):
    """Chromium looks whether texts fit: tests/show/test_chromium.py."""
    found = [xml.fromstring(text) for text in re.findall("<svg class.*?</svg>", whole, re.S)]
    there = [block for section in sections() for block in section.blocks if isinstance(block, Chart)]
    assert len(there) == len(CHARTS)
    for (chart, width), svg in zip(itertools.product(there, (WIDE, NARROW)), found, strict=True):
        case = f"{chart.title[:40]!a}, {width} wide"
        assert svg.get("role") == "img", case
        title, desc = svg.get("aria-labelledby").split()
        assert (svg[0].tag, svg[0].get("id"), svg[0].text) == ("title", title, one_line(chart.title)), case
        assert (svg[1].tag, svg[1].get("id"), svg[1].text) == ("desc", desc, one_line(chart.description))
        x, y, w, h = map(float, svg.get("viewBox").split())
        assert (x, y, w) == (0, 0, width) and 0 < h < 2 * width + 400, case
        for points in (lines(svg, f"s{i}") for i in range(1, SERIES + 1)):
            assert all(0 <= x <= width and 0 <= y <= h for line in points for x, y in line), case
        assert all(left >= -0.1 and left + wide <= width for left, wide in bars(svg) if wide > 20), case
        places = [e.get(key, "") for e in svg.iter() for key in ("d", "x", "y", "width", "height")]
        assert not re.search(r"nan|inf|\de[+-]", " ".join(places)), case


def test_a_standalone_chart_brings_its_title_background_and_both_schemes():
    name = "{http://www.w3.org/2000/svg}"
    for chart in (line_charts()[0], bar_charts()[2], *awkward_charts()[15:17]):
        text = standalone(chart)
        svg = xml.fromstring(text.encode())
        assert svg.tag == name + "svg" and svg.find(name + "style").text == charts.chart_style()
        assert svg.find(name + "rect").get("style") == f"fill: {LIGHT['paper']}"
        titles = [t.text for t in svg.iter(name + "text") if re.search("bold|700", t.get("style"))]
        shown = "".join(titles).rstrip("…").replace(" ", "")
        assert shown and one_line(chart.title).replace(" ", "").startswith(shown)
        assert LIGHT["ink"] in text and DARK["ink"] in text and "prefers-color-scheme: dark" in text
        assert "var(" not in text and len(re.findall("https?:", text)) == 1  # the name of the format itself


def test_the_same_chart_is_the_same_file():
    again = "from reportpages import bar_charts as b; from distgpt.show.svg import svg; "
    again += "print(svg(b()[2], 'c'), end='')"
    command = [sys.executable, "-c", again]
    there = subprocess.run(command, capture_output=True, text=True, check=True, cwd=HELPERS, env={"PATH": ""})
    assert there.stdout == element(bar_charts()[2], "c") == element(bar_charts()[2], "c")


def test_every_colour_of_a_chart_has_one_for_the_dark():
    style = charts.chart_style()
    for chart in (*line_charts(), *bar_charts(), awkward_charts()[16]):
        colours = set(re.findall("#[0-9a-f]{6}\\b(?!-)", element(chart, "c")))
        assert colours <= {c for c in LIGHT.values() if f"fill: {c}" in style}, chart.title


def test_a_page_is_html_that_loads_nothing_and_runs_nothing(whole, parsed):
    assert whole.startswith("<!DOCTYPE html>") and whole.encode()
    assert not [c for c in set(whole) if c != "\n" and unicodedata.category(c).startswith("C")]
    tags = {tag for tag, _, _ in parsed.elements}
    assert not tags & {"script", "link", "img", "iframe", "object", "embed", "base", "form", "image"}
    names = [name for _, attributes, _ in parsed.elements for name in attributes]
    assert not [n for n in names if n in ("src", "srcset", "xlink:href") or n.startswith("on")]
    assert not re.search(r"https?://|url\((?!#)|@import", whole)
    policy = next(a["content"] for a, _ in parsed.all("meta") if a.get("http-equiv"))
    assert "default-src 'none'" in policy and "script" not in policy
    dark = whole.count("prefers-color-scheme: dark")
    assert dark == whole.count("@media screen and (prefers-color-scheme: dark)") == 2  # not on paper


def test_the_ids_of_a_page_differ_and_all_references_lead_somewhere(parsed):
    ids = [a["id"] for _, a, _ in parsed.elements if "id" in a]
    assert len(set(ids)) == len(ids) > 100
    for _, attributes, _ in parsed.elements:
        assert set(attributes.get("aria-labelledby", "").split()) <= set(ids)
        assert attributes.get("href", f"#{ids[0]}").removeprefix("#") in ids
        assert set(re.findall(r"url\(#(.*?)\)", " ".join(attributes.values()))) <= set(ids)


def test_headings_tables_and_charts_are_there_for_a_screen_reader(parsed):
    assert [text for _, text in parsed.all("h1")] == ["Four stages, one model"]
    assert len(parsed.all("h2")) == len(parsed.all("section")) == len(parsed.all("li")) == 7
    assert all(a["scope"] in ("col", "row") for a, _ in parsed.all("th"))
    boxes = [a for tag, a, _ in parsed.elements if tag == "div" and a.get("class") == "scroll"]
    assert len(boxes) == len(parsed.all("table")) == 4
    for a in boxes:
        assert a["tabindex"] == "0" and a["role"] == "region"
        assert a.get("aria-label") or a["aria-labelledby"]
    drawn = [a for a, _ in parsed.all("svg") if a.get("role") == "img"]
    assert len(drawn) == 2 * len(CHARTS)  # one for wide windows, one for narrow ones
    assert all(a.get("aria-hidden") == "true" for a, _ in parsed.all("svg") if a not in drawn)
    assert next(a for a, _ in parsed.all("html"))["lang"] == "en"


# Blocks of a page


def test_the_cells_of_a_table_are_its_texts():
    found = on_page(Table(["a", "b <x>"], [["1 & 2", "</td>"], ["only one"]], 'the "caption"', "the note"))
    assert [text for _, text in found.all("th", "td")] == ["a", "b <x>", "1 & 2", "</td>", "only one", ""]
    assert [a.get("scope") for a, _ in found.all("th")] == ["col", "col", "row", "row"]
    assert [t for _, t in found.all("figcaption", "p")] == ['the "caption"', "the note"]
    found = on_page(Table(["a", "b", "c"], [["x", "1", "a cell that holds a whole sentence"]]))
    kinds = [(a.get("class") or "").strip() for a, _ in found.all("th", "td")]
    assert kinds == ["", "", "prose", "", "", "prose"]


def test_texts_keep_their_lines_and_a_verdict_says_it_in_a_word():
    found = on_page(Texts([("t", "a\n\n  b\tc\r\x07\x00")]), Verdict(True, "equal"), Verdict(False, "other"))
    assert found.all("pre")[0][1] == "a\n\n  b c\\r\\x07\\x00"
    assert [text.strip() for _, text in found.all("p")] == ["Passed. equal", "Failed. other"]


def test_hostile_texts_come_out_as_text_in_every_block():
    assert one_line(HOSTILE) == TOLD
    h = HOSTILE
    blocks = [Paragraph(h), Verdict(False, h), Facts([(h, h)]), Texts([(h, h)]), Table([h], [[h]], h, h)]
    found = Page(page(h, h, [Section(h, [*blocks, BarChart(h, h, h, [Bar(h, 1, h)])])] * 3, h))
    for tag in ("title", "h1", "h2", "a", "p", "dt", "dd", "figcaption", "pre", "th", "desc", "footer"):
        assert any(text.endswith(TOLD) for _, text in found.all(tag)), tag
    assert not found.all("script")


# Lines


def test_a_line_goes_through_its_points_and_breaks_where_one_is_missing():
    svg = line_through([4, 1, 2, 3, 5], [4.0, 1.0, 2.0, NAN, 2.0])
    path = next(e.get("d") for e in svg.iter("path") if f"stroke: {LIGHT['s1']}" in e.get("style", ""))
    assert path.count("M") == 2 and path.count("L") == 2
    [(x1, y1), (x2, y2), (x4, y4), (x5, y5)] = lines(svg)[0]
    assert x4 - x2 == pytest.approx(2 * (x2 - x1), abs=0.3) and x5 - x4 == pytest.approx(x2 - x1, abs=0.3)
    assert y1 - y2 == pytest.approx((y1 - y4) / 3, abs=0.2) and y5 == y2
    assert hovers(svg) == [": 1, 1", ": 2, 2", ": 4, 4", ": 5, 2"]


def test_a_log_axis_places_by_ratio_and_leaves_out_what_is_not_positive():
    svg = line_through([-1, 0, 1, 10, 100], [1, 1, 1, 10, 100], True, True)
    [(x1, y1), (x2, y2), (x3, y3)] = lines(svg)[0]
    assert x3 - x2 == pytest.approx(x2 - x1, abs=0.2) and y2 - y3 == pytest.approx(y1 - y2, abs=0.2)
    assert {"1", "10", "100"} <= set(texts(svg))


def test_many_points_are_thinned_without_losing_the_extremes():
    values = [5.0 + (i % 2) / 10 for i in range(20_000)]
    values[7_003], values[12_346] = 9.0, 1.0
    svg = line_through(range(20_000), values)
    [line] = lines(svg)
    assert len(xml.tostring(svg)) < 120_000
    bottom, top = max((y, x) for x, y in line), min((y, x) for x, y in line)
    low = max(line[0][1], line[1][1])  # of 5.0
    assert (bottom[0] - low) / (low - top[0]) == pytest.approx(1, abs=0.02)  # 1 and 9 are as far from 5
    left, right = line[0][0], line[-1][0]
    for (_, x), step in ((top, 7_003), (bottom, 12_346)):
        assert (x - left) / (right - left) == pytest.approx(step / 19_999, abs=1e-3)


def test_dashes_markers_and_colours_tell_series_apart():
    """A line that another one hides is drawn wider."""
    names = [f"series {i}" for i in range(SERIES)]
    series = [Series(name, [1, 2], [i, i], i == 1) for i, name in enumerate(names)]
    svg = xml.fromstring(element(LineChart("t", "d", "x", "y", series), "c"))
    strokes = [e for e in svg.iter("path") if re.search("stroke-width: 2\\b", e.get("style", ""))]
    drawn, legend = strokes[:SERIES], strokes[SERIES:]
    for found in (drawn, legend):
        assert sum("stroke-dasharray" in e.get("style") for e in found) == 1 and len(found) == SERIES
        assert len({re.search("stroke: (#\\w+)", e.get("style"))[1] for e in found}) == SERIES
    assert "stroke-dasharray" in drawn[0].get("style")  # measured lines lie on predicted ones
    markers = {e.get("d") for e in svg.iter("path") if e.get("id") and "#ffffff" in e.get("style")}
    assert len(markers) == SERIES and set(names) <= set(texts(svg))
    assert ["stroke-width: 4.6" in element(chart) for chart in line_charts()[:2]] == [False, True]


# Bars


def test_bars_are_as_long_as_their_numbers_and_never_invisible():
    values = [("a", 1000.0), ("b", 500.0), ("c", 0.001), ("d", 0), ("e", NAN), ("f", -500)]
    chart = BarChart("t", "d", "s", [Bar(label, v, "half" if label == "b" else "") for label, v in values])
    svg = xml.fromstring(element(chart, "c"))
    a, b, c, f = [width for _, width in bars(svg)]
    assert b == pytest.approx(a / 2, abs=0.1) == f and a > 350 and 2 <= c < 6
    told = ["s", "a", "1,000", "b", "half", "c", "0.00100", "d", "0", "e", "–", "f", "−500"]
    assert sorted(texts(svg)) == sorted(told)
    assert hovers(svg) == ["a: 1,000", "b: half", "c: 0.00100", "f: −500"]


def test_stacked_bars_add_up():
    text = element(bar_charts()[2], "c")
    svg = xml.fromstring(text)
    assert {"103", "60.5", "59.9"} <= set(texts(svg)) and len(re.findall("<pattern", text)) == 5
    assert hovers(svg)[:4] == ["data: 0.400", "forward: 31", "backward: 64.5", "optimizer: 7.10"]
    assert len(hovers(svg)) == 4 + 6 + 6
    parts = bars(svg)[:4]
    for one, two in itertools.pairwise(parts):
        assert two[0] == pytest.approx(sum(one), abs=0.1)
    assert parts[2][1] / parts[1][1] == pytest.approx(64.5 / 31, rel=0.01)


def test_values_that_do_not_match_are_a_mistake():
    for chart in (
        LineChart("t", "d", "x", "y", [Series("", [1, 2], [1])]),
        BarChart("t", "d", "s", [Bar("x", [1])], ["a", "b"]),
    ):
        with pytest.raises(ValueError, match="zip"):
            element(chart)


# Texts


def test_long_labels_are_cut_with_the_whole_text_at_hand():
    svg = xml.fromstring(element(BarChart("t", "d", "s", [Bar(f"{LONG_WORD} {LONG_WORD}", 1.0)]), "c"))
    assert len([text for text in texts(svg) if text.endswith("…")]) == 1
    assert f"{LONG_WORD} {LONG_WORD}" in hovers(svg)
    assert wrap("aa bb cc", 35, 10) == ["aa bb", "cc"]
    assert wrap("abcdefgh", 28, 10, most=1) == ["abc…"]


def test_ticks_are_round_and_written_briefly():
    for x, log, told in (
        ([0, 10], False, "0 2 4 6 8 10"),
        ([0.13, 0.21], False, "0.14 0.16 0.18 0.20"),
        ([-3, 3], False, "−3 −2 −1 0 1 2 3"),
        ([1, 1024], True, "1 1,024"),
        ([1.31 + k / 100 for k in range(13)], True, "1.32 1.34 1.36 1.38 1.4 1.42"),
        ([1e-7 * 7**k for k in range(20)], True, "1e−07 1e−05 0.001 0.1 10 1,000 100k 10M 1G"),
    ):
        shown = texts(line_through(x, [1] * len(x), log))
        assert set(told.split()) <= set(shown) and "1e−09" not in shown, x  # nothing beyond the ends


def test_numbers_are_brief():
    ticks = {0: "0", -2: "−2", 0.0002: "0.0002", 1000: "1,000", 4096: "4,096", 10_000: "10k", 16_384: "16.4k"}
    ticks |= {2**20: "1.05M", 5e9: "5G", -3e4: "−30k", 1e-7: "1e−07", 1e300: "1e+300"}
    assert {value: tick_label(value) for value in ticks} == ticks and tick_label(2000, 1e3) == "2k"
    values = (0, 1, 2.5, 0.01234, 99.96, 123.4, 12345.6, 1e-7, 2.5e20, -3.21, NAN, math.inf)
    told = "0 1 2.50 0.0123 100 123 12,346 1e−07 2.5e+20 −3.21 – –"
    assert " ".join(map(number, values)) == told


def test_nothing_is_loaded_that_draws_before_something_is_drawn():
    script = """
import sys
import distgpt.show.charts, distgpt.show.page, distgpt.show.tables, distgpt.show.display
import distgpt.commands.train, distgpt.commands.plot
import distgpt.inference.oneprompt, distgpt.inference.manyprompts
assert not {"matplotlib", "jinja2"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", script], check=True)
