"""Charts and pages as files: well-formed, escaped, self-contained, told in words, true to the numbers."""

import html.parser
import itertools
import math
import re
import unicodedata
import xml.etree.ElementTree as xml

import pytest
from reportpages import HOSTILE, LONG_WORD, NAN, awkward_charts, bar_charts, example, line_charts, tables

from distgpt.show.charts import Bar, BarChart, LineChart, Series, StackedBars, standalone
from distgpt.show.page import Facts, Paragraph, Section, Table, Texts, Verdict, page
from distgpt.show.reporting.canvas import NARROW, SERIES, SIZE, WIDE
from distgpt.show.reporting.scales import linear_ticks, log_ticks, number, tick_labels
from distgpt.show.reporting.strokes import spread
from distgpt.show.reporting.style import DARK, LIGHT, standalone_style
from distgpt.show.reporting.words import one_line, shorten, text_width, wrap
from distgpt.show.tables import terminal_table

CHARTS = [*line_charts(), *bar_charts(), *awkward_charts()]
IDS = [f"{i}-{chart.title[:20]}".encode("ascii", "replace").decode() for i, chart in enumerate(CHARTS)]
ALONE = ("meta", "link", "br", "hr", "img", "input")  # elements of HTML without an end


class Page(html.parser.HTMLParser):
    """Reads a page as (tag, attributes, text inside, children and all), and fails where tags do not match."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements = [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        element = (tag, dict(attributes), [])
        self.elements.append(element)
        if tag not in ALONE:
            self.open.append(element)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes), []))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        for _, _, texts in self.open:
            texts.append(data)

    def all(self, *tags):
        return [(attributes, "".join(texts)) for tag, attributes, texts in self.elements if tag in tags]


def drawn(chart, width=WIDE):
    return xml.fromstring(chart.svg("c", width))


def texts(svg):
    return [element.text for element in svg.iter("text")]


def places(svg, kind="line"):
    """The points of every path of a kind, as its file says them."""
    paths = [e.get("d") for e in svg.iter("path") if kind in e.get("class").split()]
    return [[tuple(map(float, p.split())) for p in re.findall(r"[\d.-]+ [\d.-]+", d)] for d in paths]


@pytest.fixture(scope="module")
def parsed():
    return Page(example())


@pytest.mark.parametrize("width", [WIDE, NARROW])
@pytest.mark.parametrize("chart", CHARTS, ids=IDS)
def test_a_chart_is_xml_that_is_told_in_words_and_stays_on_its_sheet(chart, width):
    svg = drawn(chart, width)
    assert svg.get("role") == "img"
    title, text = svg.get("aria-labelledby").split()
    assert svg[0].tag == "title" and svg[0].get("id") == title and svg[0].text == one_line(chart.title)
    assert svg[1].tag == "desc" and svg[1].get("id") == text and svg[1].text == one_line(chart.description)
    x, y, w, h = map(float, svg.get("viewBox").split())
    assert (x, y, w) == (0, 0, width) and 0 < h < 2 * width + 400
    for element in svg.iter("text"):
        assert 0 <= float(element.get("y")) <= h
        start = float(element.get("x"))
        long = text_width(element.text, 13)
        start -= {None: 0, "middle": long / 2, "end": long}[element.get("text-anchor")]
        assert start >= -0.1 and start + long <= width + 0.2, element.text
    for element in svg.iter("rect"):
        a, b = float(element.get("x")), float(element.get("width"))
        assert a >= 0 and b > 0 and a + b <= width
    for line in places(svg):
        assert all(0 <= x <= width and 0 <= y <= h for x, y in line)
    for element in svg.iter():
        for name, value in element.attrib.items():
            assert name in ("id", "class", "aria-labelledby") or not re.search(r"nan|inf|\de[+-]", value), (
                value
            )


@pytest.mark.parametrize("chart", CHARTS, ids=IDS)
def test_a_standalone_chart_brings_its_title_background_and_both_schemes(chart):
    text = standalone(chart)
    svg = xml.fromstring(text.encode())
    name = "{http://www.w3.org/2000/svg}"
    assert svg.tag == name + "svg" and svg.find(name + "style").text == standalone_style()
    assert svg.find(name + "rect").get("class") == "paper"
    shown = "".join(t.text for t in svg.iter(name + "text") if t.get("class") == "title").rstrip("…")
    assert shown and one_line(chart.title).replace(" ", "").startswith(shown.replace(" ", ""))
    assert LIGHT["ink"] in text and DARK["ink"] in text and "prefers-color-scheme: dark" in text
    assert "var(" not in text and len(re.findall("https?:", text)) == 1  # the name of the SVG format itself


def test_a_page_is_html_that_loads_nothing_and_runs_nothing(parsed):
    text = example()
    assert text.startswith("<!DOCTYPE html>") and text.encode()
    assert not [c for c in set(text) if c != "\n" and unicodedata.category(c).startswith("C")]
    tags = {tag for tag, _, _ in parsed.elements}
    assert not tags & {"script", "link", "img", "iframe", "object", "embed", "base", "form", "image", "use"}
    names = [name for _, attributes, _ in parsed.elements for name in attributes]
    assert not [n for n in names if n in ("src", "srcset", "xlink:href") or n.startswith("on")]
    assert not re.search(r"https?://|url\((?!#)|@import", text)
    policy = next(a["content"] for a, _ in parsed.all("meta") if a.get("http-equiv"))
    assert "default-src 'none'" in policy and "script" not in policy
    dark = text.count("prefers-color-scheme: dark")
    assert dark == text.count("@media screen and (prefers-color-scheme: dark)") == 1  # not on paper


def test_the_ids_of_a_page_differ_and_all_references_lead_somewhere(parsed):
    ids = [a["id"] for _, a, _ in parsed.elements if "id" in a]
    assert len(set(ids)) == len(ids) > 100
    for _, attributes, _ in parsed.elements:
        assert set(attributes.get("aria-labelledby", "").split()) <= set(ids)
        assert attributes.get("href", f"#{ids[0]}").removeprefix("#") in ids
        assert not (found := re.match(r"url\(#(.*)\)", attributes.get("fill", ""))) or found[1] in ids


def test_headings_tables_and_charts_are_there_for_a_screen_reader(parsed):
    assert [text for _, text in parsed.all("h1")] == ["Four stages, one model"]
    assert len(parsed.all("h2")) == len(parsed.all("section")) == len(parsed.all("li")) == 7
    assert all(a["scope"] in ("col", "row") for a, _ in parsed.all("th"))
    boxes = [a for tag, a, _ in parsed.elements if tag == "div" and a.get("class") == "scroll"]
    assert len(boxes) == len(parsed.all("table")) == len(tables())
    for a in boxes:
        assert (
            a["tabindex"] == "0" and a["role"] == "region" and (a.get("aria-label") or a["aria-labelledby"])
        )
    charts = [a for a, _ in parsed.all("svg") if a.get("role") == "img"]
    assert len(charts) == 2 * len(CHARTS)  # one for wide windows, one for narrow ones
    assert all(a.get("aria-hidden") == "true" for a, _ in parsed.all("svg") if a not in charts)
    assert next(a for a, _ in parsed.all("html"))["lang"] == "en"


def test_the_cells_of_a_table_are_its_texts():
    table = Table(["a", "b <x>"], [["1 & 2", "</td>"], ["only one"]], 'the "caption"', "the note")
    found = Page(table.html("t"))
    assert [text for _, text in found.all("th", "td")] == ["a", "b <x>", "1 & 2", "</td>", "only one", ""]
    assert [a.get("scope") for a, _ in found.all("th")] == ["col", "col", "row", "row"]
    assert [t for _, t in found.all("figcaption", "p")] == ['the "caption"', "the note"]
    sentence = Page(Table(["a", "b", "c"], [["x", "1", "a cell that holds a whole sentence"]]).html("t"))
    assert [a.get("class") for a, _ in sentence.all("th", "td")] == [None, None, "prose", None, None, "prose"]


def test_hostile_texts_come_out_as_text_in_every_block():
    told = "</title></style><script>alert('x & y')</script> \"quoted\" \\x00\\x1b[31m\\u202e \\ud800 ]]>"
    assert one_line(HOSTILE) == told
    blocks = [
        Paragraph(HOSTILE),
        Verdict(False, HOSTILE),
        Facts([(HOSTILE, HOSTILE)]),
        Texts([(HOSTILE, HOSTILE)]),
        Table([HOSTILE], [[HOSTILE]], HOSTILE, HOSTILE),
        BarChart(HOSTILE, HOSTILE, HOSTILE, [Bar(HOSTILE, 1, HOSTILE)]),
    ]
    found = Page(page(HOSTILE, HOSTILE, [Section(HOSTILE, blocks)], HOSTILE))
    for tag in ("title", "h1", "h2", "p", "dt", "dd", "figcaption", "pre", "th", "desc", "footer"):
        assert any(text.endswith(told) for _, text in found.all(tag)), tag
    assert not found.all("script")


def test_generated_texts_keep_their_lines_and_spell_out_the_rest():
    found = Page(Texts([("t", "a\n\n  b\tc\r\x07\x00")]).html("n"))
    assert found.all("pre")[0][1] == "a\n\n  b c\\r\\x07\\x00"


def test_a_verdict_says_it_in_a_word():
    assert Page(Verdict(True, "all equal").html("v")).all("p")[0][1] == "Passed. all equal"
    assert Page(Verdict(False, "not equal").html("v")).all("p")[0][1] == "Failed. not equal"


def test_a_line_goes_through_its_points_and_breaks_where_one_is_missing():
    svg = drawn(LineChart("t", "d", "x", "y", [Series("", [4, 1, 2, 3, 5], [4.0, 1.0, 2.0, NAN, 2.0])]))
    path = next(e.get("d") for e in svg.iter("path") if "line" in e.get("class"))
    assert path.count("M") == 2 and path.count("L") == 2
    [(x1, y1), (x2, y2), (x4, y4), (x5, y5)] = places(svg)[0]
    assert x4 - x2 == pytest.approx(2 * (x2 - x1), abs=0.3) and x5 - x4 == pytest.approx(x2 - x1, abs=0.3)
    assert y1 - y2 == pytest.approx((y1 - y4) / 3, abs=0.2) and y5 == y2
    assert len([e for e in svg.iter("path") if "mark" in e.get("class")]) == 4


def test_a_log_axis_places_by_ratio_and_leaves_out_what_is_not_positive():
    chart = LineChart("t", "d", "x", "y", [Series("", [-1, 0, 1, 10, 100], [1, 1, 1, 10, 100])], True, True)
    [(x1, y1), (x2, y2), (x3, y3)] = places(drawn(chart))[0]
    assert x3 - x2 == pytest.approx(x2 - x1, abs=0.2) and y2 - y3 == pytest.approx(y1 - y2, abs=0.2)
    assert {"1", "10", "100"} <= set(texts(drawn(chart)))


def test_many_points_are_thinned_without_losing_the_extremes():
    values = [5.0 + (i % 2) / 10 for i in range(20_000)]
    values[7_003], values[12_346] = 9.0, 1.0
    chart = LineChart("t", "d", "x", "y", [Series("", range(20_000), values)])
    [line] = places(drawn(chart))
    assert 1000 < len(line) <= 4 * WIDE and len(chart.svg()) < 60_000
    top, *most, bottom = sorted((y, x) for x, y in line)
    low, high = line[0][1], line[1][1]
    assert {y for y, _ in most} == {low, high} and low > high
    assert (bottom[0] - low) / (low - top[0]) == pytest.approx(1, abs=0.01)  # 1 and 9 are as far from 5
    left, right = line[0][0], line[-1][0]
    assert (top[1] - left) / (right - left) == pytest.approx(7_003 / 19_999, abs=1e-3)
    assert (bottom[1] - left) / (right - left) == pytest.approx(12_346 / 19_999, abs=1e-3)


def test_a_line_that_another_one_hides_is_drawn_wider():
    charts = line_charts()
    assert 'style="stroke-width: 4.6"' in charts[1].svg() and "stroke-width" not in charts[0].svg()


def test_dashes_markers_and_colours_tell_series_apart():
    svg = drawn(LineChart("t", "d", "x", "y", [Series(str(i), [1, 2], [i, i], i == 1) for i in range(7)]))
    lines = [e.get("class") for e in svg.iter("path") if e.get("class").startswith("line s")]
    assert sum("dashed" in kind for kind in lines) == 1 and len({kind.split()[1] for kind in lines}) == 7
    assert "dashed" in lines[0]  # what was measured lies on what was predicted
    ends = [
        re.sub(r"^M[\d. -]*", "", e.get("d"))
        for e in svg.iter("path")
        if e.get("class")[:4] in ("mark", "open")
    ]
    assert len(set(ends)) == 7


def test_names_stand_beside_their_lines_or_in_a_legend():
    beside, legend = drawn(line_charts()[0]), drawn(line_charts()[0], NARROW)
    for svg, on_top in ((beside, False), (legend, True)):
        heights = [float(e.get("y")) for e in svg.iter("text") if e.text in ("serial", "cuda")]
        assert len(heights) == 2 and (max(heights) < 60) == on_top
    assert spread([10, 10, 50, 99], 17, 0, 100) == [10, 27, 50, 99]
    assert spread([95, 99, 99], 17, 0, 100) == [66, 83, 100]


def test_bars_are_as_long_as_their_numbers_and_never_invisible():
    bars = [
        Bar("a", 1000.0),
        Bar("b", 500.0, "half"),
        Bar("c", 0.001),
        Bar("d", 0),
        Bar("e", NAN),
        Bar("f", -500),
    ]
    svg = drawn(BarChart("t", "d", "s", bars))
    a, b, c, f = [float(e.get("width")) for e in svg.iter("rect")]
    assert b == pytest.approx(a / 2, abs=0.1) == f and a > 350 and 2 <= c < 6
    assert texts(svg) == ["s", "a", "1,000", "b", "half", "c", "0.00100", "d", "0", "e", "–", "f", "−500"]


def test_stacked_bars_add_up():
    svg = drawn(bar_charts()[2])
    parts = [e for e in svg.iter("rect") if e.get("height") == "18" and "part" in (e.get("class") or "")]
    assert len(parts) == 4 + 6 + 6 and {"103", "60.5", "59.9"} <= set(texts(svg))
    serial = parts[:4]
    for one, two in itertools.pairwise(serial):
        end = float(one.get("x")) + float(one.get("width"))
        assert 0 <= float(two.get("x")) - end <= 1.1
    forward, backward = (float(part.get("width")) + 1 for part in serial[1:3])
    assert backward / forward == pytest.approx(64.5 / 31, rel=0.01)
    assert serial[1].find("title").text == "forward: 31"


@pytest.mark.parametrize("width", [NARROW, WIDE])
def test_pieces_that_are_wider_than_their_share_leave_room_for_the_number(width):
    parts = [f"part {i}" for i in range(6)]
    svg = drawn(StackedBars("t", "d", "s", parts, [("a", [9.0, *[1e-6] * 4, 9.0]), ("b", [1.0] * 6)]), width)
    told = [e for e in svg.iter("text") if e.text in ("18", "18.0")]
    assert [float(e.get("x")) + text_width(e.text, SIZE) <= width for e in told] == [True]


def test_long_labels_are_cut_with_the_whole_text_at_hand():
    svg = drawn(BarChart("t", "d", "s", [Bar(f"{LONG_WORD} {LONG_WORD}", 1.0)]))
    cut = [e for e in svg.iter("text") if e.text.endswith("…")]
    assert len(cut) == 1 and cut[0].find("title").text == f"{LONG_WORD} {LONG_WORD}"
    assert wrap("aa bb cc", text_width("aa bb", 10), 10) == ["aa bb", "cc"]
    assert shorten("abcdefgh", text_width("abc…", 10), 10) == "abc…"


@pytest.mark.parametrize(
    ("low", "high", "most", "whole", "ticks"),
    [
        (0, 10, 5, False, [0, 2, 4, 6, 8, 10]),
        (0.13, 0.21, 5, False, [0.14, 0.16, 0.18, 0.20]),
        (0.97, 3.03, 9, True, [1, 2, 3]),
        (-3, 3, 6, False, [-3, -2, -1, 0, 1, 2, 3]),
    ],
)
def test_linear_ticks_are_round(low, high, most, whole, ticks):
    assert linear_ticks(low, high, most, whole) == pytest.approx(ticks)


def test_log_ticks_thin_out_by_decades():
    assert log_ticks(0.9, 1100)[0] == pytest.approx([1, 2, 5, 10, 20, 50, 100, 200, 500, 1000])
    assert [1, 10, 100, 1000] in log_ticks(0.9, 1100)
    assert log_ticks(1e-7, 1e12)[1] == pytest.approx([1e-6, 1e-4, 1e-2, 1, 1e2, 1e4, 1e6, 1e8, 1e10, 1e12])
    assert log_ticks(1.31, 1.44)[0] == pytest.approx([1.32, 1.34, 1.36, 1.38, 1.40, 1.42, 1.44])


@pytest.mark.parametrize(
    ("ticks", "log", "labels"),
    [
        ([0, 5000, 10000], False, ["0", "5k", "10k"]),
        ([0, 0.5, 1.0], False, ["0.0", "0.5", "1.0"]),
        ([-2, 0, 2], False, ["−2", "0", "2"]),
        ([0, 2e6, 4e6], False, ["0", "2M", "4M"]),
        ([1000, 2000], False, ["1,000", "2,000"]),
        ([0, 0.0002], False, ["0", "2·10⁻⁴"]),
        ([1e-4, 1, 100, 1e3, 1e4, 5e9], True, ["10⁻⁴", "1", "100", "1k", "10k", "5G"]),
        ([1, 10, 1000], True, ["1", "10", "1,000"]),
        ([16, 4096, 16384, 2**20], True, ["16", "4,096", "16,384", "1.05M"]),
        ([1.32, 1.34], True, ["1.32", "1.34"]),
        ([], True, []),
    ],
)
def test_tick_labels(ticks, log, labels):
    assert tick_labels(ticks, log) == labels


def test_numbers_have_three_digits_that_count():
    found = [
        number(v) for v in (0, 1, 2.5, 0.01234, 99.96, 123.4, 12345.6, 1e-7, 2.5e20, -3.21, NAN, math.inf)
    ]
    told = ["0", "1", "2.50", "0.0123", "100.0", "123", "12,346", "10⁻⁷", "2.5·10²⁰", "−3.21", "–", "–"]
    assert found == told


def test_a_series_with_more_x_than_y_is_a_mistake():
    with pytest.raises(ValueError, match="zip"):
        LineChart("t", "d", "x", "y", [Series("", [1, 2], [1])]).svg()
    with pytest.raises(ValueError, match="zip"):
        StackedBars("t", "d", "s", ["a", "b"], [("x", [1])]).svg()


def test_a_table_for_the_terminal_is_aligned():
    rows = [["serial", "41.2 s"], ["mpi, 2 ranks", "9.3 s"], ["名前", "\x1b[31m"], ["short"]]
    assert terminal_table(["stage", "time"], rows).splitlines() == [
        "stage             time",
        "────────────  ────────",
        "serial          41.2 s",
        "mpi, 2 ranks     9.3 s",
        "名前          \\x1b[31m",
        "short",
    ]


def test_a_table_for_the_terminal_wraps_sentences():
    why = "no NVIDIA driver was found on this machine: install one that knows the card, then CuPy for it"
    lines = terminal_table(["stage", "memory", "why it did not run"], [["cuda", "-", f"{why} {LONG_WORD}"]])
    assert max(map(len, lines.splitlines())) <= 100
    told = "".join(lines.split())
    assert "".join(why.split()) in told and LONG_WORD in told
    assert terminal_table([], []) == ""


# How people with the three kinds of colour blindness see linear RGB (Machado, Oliveira and Fernandes, 2009).
EYES = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protan": ((0.1523, 1.0526, -0.2049), (0.1145, 0.7863, 0.0992), (-0.0039, -0.0481, 1.0520)),
    "deutan": ((0.3673, 0.8606, -0.2280), (0.2801, 0.6725, 0.0474), (-0.0118, 0.0429, 0.9689)),
    "tritan": ((1.2555, -0.0767, -0.1788), (-0.0784, 0.9308, 0.1476), (0.0047, 0.6914, 0.3039)),
}


def linear(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]


def contrast(one, other):
    light = sorted(
        sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear(x), strict=True)) for x in (one, other)
    )
    return (light[1] + 0.05) / (light[0] + 0.05)


def oklab(colour, eye):
    """Where a colour lies in a space whose distances are those that are seen."""
    r, g, b = (
        min(max(sum(w * c for w, c in zip(row, linear(colour), strict=True)), 0), 1) for row in EYES[eye]
    )
    long = (0.4122 * r + 0.5363 * g + 0.0514 * b) ** (1 / 3)
    middle = (0.2119 * r + 0.6807 * g + 0.1074 * b) ** (1 / 3)
    short = (0.0883 * r + 0.2817 * g + 0.6300 * b) ** (1 / 3)
    return (
        0.2105 * long + 0.7936 * middle - 0.0041 * short,
        1.9780 * long - 2.4286 * middle + 0.4506 * short,
        0.0259 * long + 0.7828 * middle - 0.8087 * short,
    )


@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
def test_colours_can_be_read_and_told_apart_by_everyone(scheme):
    for ink in ("ink", "muted", "accent"):
        assert contrast(scheme[ink], scheme["paper"]) >= 4.5
    for verdict in ("good", "bad"):
        assert contrast(scheme["ink"], scheme[f"{verdict}-surface"]) >= 4.5
        assert contrast(scheme[verdict], scheme[f"{verdict}-surface"]) >= 4.5
    assert contrast(scheme["ink"], scheme["surface"]) >= 4.5
    series = [scheme[f"s{i}"] for i in range(1, SERIES + 1)]
    assert all(contrast(colour, scheme["paper"]) >= 3 for colour in series)
    for eye in EYES:
        seen = [oklab(colour, eye) for colour in series]
        assert min(math.dist(a, b) for a, b in itertools.combinations(seen, 2)) > 0.08, eye
