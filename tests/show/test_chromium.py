"""The example report in a real browser: nothing sticks out, all can be read, in every scheme and on paper."""

import pytest
from browser import BROWSER
from pagechecks import SCHEMES, check_readable, chromium, measured
from reportpages import example

pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium or Chrome")


@pytest.fixture(scope="module")
def text():
    return example()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_page_fits_every_window_and_can_be_read(text, tmp_path, scheme):
    check_readable(tmp_path, scheme, text, charts=15, texts=150)


def test_a_page_lets_no_script_run_and_prints(text, tmp_path):
    assert measured(tmp_path, "light", text, allowed=False) == {}
    page, target = tmp_path / "page.html", tmp_path / "page.pdf"
    page.write_text(text)
    chromium(tmp_path, "--blink-settings=preferredColorScheme=0", f"--print-to-pdf={target}", page)
    assert target.read_bytes().startswith(b"%PDF-") and target.stat().st_size > 50_000
