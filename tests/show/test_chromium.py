"""The example report in a real browser: nothing sticks out or overlaps, all can be read, on paper too."""

import shutil
import subprocess

import pytest
from browser import BROWSER
from pagechecks import SCHEMES, check_readable, chromium, measured
from reportpages import example, line_charts

from distgpt.show.charts import DARK, LIGHT
from distgpt.show.svg import standalone

pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium or Chrome")


@pytest.fixture(scope="module")
def text():
    return example()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_page_fits_every_window_and_can_be_read(text, tmp_path, scheme):
    check_readable(tmp_path, scheme, text, charts=34, texts=250)


def test_a_page_lets_no_script_run(text, tmp_path):
    assert measured(tmp_path, "light", text, allowed=False) == {}


def test_on_paper_a_page_is_light_and_complete(text, tmp_path):
    """In a dark scheme, too: sheets of paper are white."""
    page, target = tmp_path / "page.html", tmp_path / "page.pdf"
    page.write_text(text)
    chromium(tmp_path, "--blink-settings=preferredColorScheme=0", f"--print-to-pdf={target}", page)
    assert target.read_bytes().startswith(b"%PDF-") and target.stat().st_size > 50_000
    if shutil.which("pdftotext"):
        printed = subprocess.run(
            ["pdftotext", target, "-"], capture_output=True, text=True, check=True
        ).stdout
        for told in ("Four stages, one model", "Loss by step", "mpi-cuda, 2 ranks", "3.1e-07", "Zen 5"):
            assert told in printed
    if shutil.which("pdftoppm"):
        first = ["pdftoppm", "-r", "20", "-f", "1", "-l", "1", target]
        pixels = subprocess.run(first, capture_output=True, check=True).stdout.split(b"255\n", 1)[1]
        assert sum(pixels) / len(pixels) > 220


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_standalone_chart_has_the_colours_of_the_scheme(tmp_path, scheme):
    (tmp_path / "chart.svg").write_text(standalone(line_charts()[0]))
    shot = tmp_path / "shot.png"
    settings = f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}"
    chromium(tmp_path, settings, "--window-size=900,500", f"--screenshot={shot}", tmp_path / "chart.svg")
    image = pytest.importorskip("PIL.Image").open(shot).convert("RGB")
    colours = LIGHT if scheme == "light" else DARK
    assert image.getpixel((3, 3)) == tuple(bytes.fromhex(colours["paper"][1:]))
    assert image.tobytes().count(bytes.fromhex(colours["s1"][1:])) > 100
