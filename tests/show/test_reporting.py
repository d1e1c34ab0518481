"""Charts: well-formed, escaped, true to the numbers; and blocks of text."""

import math
import re
import subprocess
import sys
import xml.etree.ElementTree as xml

import numpy as np
import pytest
from charts import Bar, BarChart, LineChart, Series, svg
from matplotlib.figure import Figure

from distgpt.show import page

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
]


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


def drawn(chart):
    axes = Figure().add_subplot()
    chart.draw(axes)
    return axes


def test_lines_go_through_their_points_and_bars_are_as_long_as_their_numbers():
    series = [Series("a", [4, 1, 2, 3], [4.0, 1.0, 2.0, NAN]), Series("b", [1, 2], [1, 2], dashed=True)]
    one, other = drawn(LineChart("t", "d", "", "", series, log_x=True)).lines
    np.testing.assert_array_equal(one.get_xydata(), [(1, 1), (2, 2), (3, NAN), (4, 4)])
    assert (one.get_linestyle(), other.get_linestyle()) == ("-", "--") and one.axes.get_xscale() == "log"
    bars = drawn(BarChart("t", "d", "s", [Bar("x", 4, "4"), Bar("y", NAN, "2")])).patches
    assert [(bar.get_x(), bar.get_width()) for bar in bars] == [(0, 4), (0, 0)]


def test_blocks_on_a_terminal():
    table = page.Table(["a", "b <x>"], [["1 & 2", "</td>"]], 'the "caption"', "the note")
    blocks = [page.Texts([("t", "a\n\n  b\tc\r\x07\x00")]), page.Paragraph("equal"), CHARTS[0]]
    shown = page.terminal([table, page.Table(["none"], []), *blocks])
    assert shown.startswith('the "caption"\na') and "\n\nthe note\n\nt\na" in shown and "none" not in shown
    assert shown.endswith("\n\nequal") and "\x00" not in shown


def test_nothing_is_loaded_that_draws_before_something_is_drawn():
    script = """
import sys
import distgpt.show.page, distgpt.show.display, distgpt.commands.train, distgpt.commands.runs
import distgpt.core.generate.single, distgpt.inference.generation.batch
assert not {"matplotlib", "jinja2"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", script], check=True)
