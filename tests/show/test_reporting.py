"""Charts and pages as files: well-formed, escaped, self-contained, true to the numbers."""

import html.parser
import math
import re
import subprocess
import sys
import xml.etree.ElementTree as xml

import numpy as np
import pytest
from matplotlib.figure import Figure

from distgpt.show import charts, page
from distgpt.show.charts import Bar, BarChart, LineChart, Series, svg, tick_label
from distgpt.show.page import KeyValues, Paragraph, Section, Table, Texts, Verdict

HOSTILE = "</title></style><script>alert('x & y')</script> \"quoted\" \x00\x1b[31m\u202e \ud800 ]]>"
TOLD = "</title></style><script>alert('x & y')</script> \"quoted\" \\x00\\x1b[31m\\u202e \\ud800 ]]>"
LONG_WORD = "Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft" * 2
NAN, INF = math.nan, math.inf
ODD = Series("s", [1, 2, 3, 4, 5], [1, NAN, 10**400, 5e-324, -INF])
H, W = HOSTILE, LONG_WORD
CHARTS = [
    LineChart(
        "Plain", "As it says.", "x", "y", [Series("a", [1, 2], [1, 2]), Series("b", [2, 1], [3, 4], True)]
    ),
    LineChart("No series", "Nothing.", "x", "y", []),
    LineChart("Holes", "As it says.", "x", "y", [ODD, Series("t", [], [])]),
    LineChart("Log", "As it says.", "x", "y", [Series("s", [-1, 0, 3], [1, 1, 4]), ODD], True, True),
    LineChart(H, H, H, H, [Series(H, [1, 2], [1, 2])]),
    LineChart(W, W, W, W, [Series(f"{i} {W}", [1, 2], [i, i * i]) for i in range(10)]),
    BarChart("No bars", "As it says.", "s", []),
    BarChart(H, H, H, [Bar(H, 1.0, H), Bar(W, INF, W), Bar("none", NAN, "")]),
    BarChart(H, H, H, [Bar(H, [1.0, NAN, 1.0], "a"), Bar(W, [0.0, INF, 2.0], "b")], [H, W, "c"]),
]


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
        if tag != "meta":
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


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("chart", CHARTS, ids=range(len(CHARTS)))
def test_every_chart_is_xml_that_tells_what_it_shows_and_always_the_same(chart):
    for alone in (False, True):
        text = svg(chart, alone)
        assert text == svg(chart, alone)
        root = xml.fromstring(text.encode())
        expected = f"{chart.title}. {chart.description}".replace(HOSTILE, TOLD)
        assert root.get("role") == "img" and root.get("aria-label") == expected
        places = [element.get(key, "") for element in root.iter() for key in ("d", "x", "y")]
        assert not re.search(r"nan|inf", " ".join(places))


def drawn(draw, chart):
    axes = Figure().add_subplot()
    draw(axes, chart)
    return axes


def test_lines_go_through_their_points_and_bars_are_as_long_as_their_numbers():
    series = [Series("a", [4, 1, 2, 3], [4.0, 1.0, 2.0, NAN]), Series("b", [1, 2], [1, 2], dashed=True)]
    one, other = drawn(charts._draw_lines, LineChart("t", "d", "", "", series, log_x=True)).lines
    np.testing.assert_array_equal(one.get_xydata(), [(1, 1), (2, 2), (3, NAN), (4, 4)])
    assert (one.get_linestyle(), other.get_linestyle()) == ("-", "--") and one.axes.get_xscale() == "log"
    bars = [Bar("x", [1, 3], "4"), Bar("y", [2, NAN], "2")]
    patches = drawn(charts._draw_bars, BarChart("t", "d", "s", bars, ["p", "q"])).patches
    assert [(bar.get_x(), bar.get_width()) for bar in patches] == [(0, 1), (0, 2), (1, 3), (2, 0)]


def test_ticks_are_written_briefly():
    ticks = {
        0: "0",
        -2: "−2",
        0.0002: "0.0002",
        1000: "1,000",
        10_000: "10k",
        2**20: "1.0486M",
        1e-7: "1e−07",
    }
    assert {value: tick_label(value) for value in ticks} == ticks


def test_a_page_is_html_that_loads_nothing_and_whose_references_lead_somewhere():
    table = Table(["stage", "why"], [["cuda", "no driver"]], "Not run")
    blocks = [Verdict(True, "yes"), table, *CHARTS]
    parsed = Page(page.html("Title", "lead", [Section(f"part {i}", blocks) for i in range(3)], "end"))
    tags = {tag for tag, _, _ in parsed.elements}
    assert not tags & {"script", "link", "img", "iframe", "object", "embed", "base", "form", "image"}
    names = [name for _, attributes, _ in parsed.elements for name in attributes]
    assert not [name for name in names if name in ("src", "srcset") or name.startswith("on")]
    policy = next(a["content"] for a, _ in parsed.all("meta") if a.get("http-equiv"))
    assert "default-src 'none'" in policy and "script" not in policy
    ids = [attributes["id"] for _, attributes, _ in parsed.elements if "id" in attributes]
    for _, attributes, _ in parsed.elements:
        assert set(attributes.get("aria-labelledby", "").split()) <= set(ids)
        assert attributes.get("href", f"#{ids[0]}").removeprefix("#") in ids
    assert len(parsed.all("h2")) == len(parsed.all("section")) == len(parsed.all("li")) == 3


def on_page(*blocks):
    return Page(page.html("t", "", [Section("s", blocks)]))


def test_blocks_are_the_same_texts_on_a_page_and_on_a_terminal():
    table = Table(["a", "b <x>"], [["1 & 2", "</td>"]], 'the "caption"', "the note")
    found = on_page(table)
    assert [text for _, text in found.all("th", "td")] == ["a", "b <x>", "1 & 2", "</td>"]
    assert [t for _, t in found.all("figcaption", "p")] == ['the "caption"', "the note"]
    blocks = [Texts([("t", "a\n\n  b\tc\r\x07\x00")]), Verdict(True, "equal"), Verdict(False, "other")]
    found = on_page(*blocks)
    assert found.all("pre")[0][1] == "a\n\n  b c\\r\\x07\\x00"
    assert [text for _, text in found.all("p")] == ["✓ Passed. equal", "✗ Failed. other"]
    shown = page.terminal([table, Table(["none"], []), *blocks, KeyValues([("k", "v")]), CHARTS[0]])
    assert shown.startswith('the "caption"\na') and "\n\nthe note\n\nt\na" in shown and "none" not in shown
    assert shown.endswith("equal\n\nother\n\nk: v") and "\x00" not in shown


def test_hostile_texts_come_out_as_text_in_every_block():
    h = HOSTILE
    blocks = [Paragraph(h), Verdict(False, h), KeyValues([(h, h)]), Texts([(h, h)]), Table([h], [[h]], h, h)]
    found = Page(page.html(h, h, [Section(h, blocks)] * 3, h))
    for tag in ("title", "h1", "h2", "a", "p", "dt", "dd", "figcaption", "pre", "th", "footer"):
        assert any(text.endswith(TOLD) for _, text in found.all(tag)), tag
    assert not found.all("script")


def test_nothing_is_loaded_that_draws_before_something_is_drawn():
    script = """
import sys
import distgpt.show.page, distgpt.show.display, distgpt.commands.train, distgpt.commands.runs
import distgpt.core.generate.single, distgpt.inference.generation.batch
assert not {"matplotlib", "jinja2"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", script], check=True)
