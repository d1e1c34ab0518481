"""The example report in a real browser: nothing sticks out or overlaps, all can be read, on paper too."""

import json
import re
import shutil
import subprocess
from html import unescape

import pytest
from reportpages import example, line_charts

from distgpt.show.charts import DARK, LIGHT
from distgpt.show.svg import standalone

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium or Chrome")

WIDTHS = (360, 700, 1280)
SCHEMES = {"light": 1, "dark": 0}  # Chromium's numbers for what a user prefers

# How much two colours differ, and which colour lies behind a node.
CONTRAST = """
const root = document.documentElement;
const colour = text => (text.match(/[\\d.]+/g) || [0, 0, 0]).map(Number);
const linear = v => (v /= 255) <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
const light = c => { const [r, g, b] = c.map(linear);
  return .2126 * r + .7152 * g + .0722 * b; };
const contrast = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p);
  return (x + .05) / (y + .05); };
const behind = node => { for (; node; node = node.parentElement) {
  const c = colour(getComputedStyle(node).backgroundColor);
  if (c.length < 4 || c[3] > 0) return c.slice(0, 3); }
  return [255, 255, 255]; };
"""

# Runs inside the page, and tells the page around it what it measured.
MEASURE = (
    CONTRAST
    + """
const found = {overlaps: [], outside: [], contrasts: [], charts: 0, texts: 0, sideways: [], tables: []};
found.dark = matchMedia('(prefers-color-scheme: dark)').matches;
found.window = innerWidth;
found.page = root.scrollWidth;
found.paper = getComputedStyle(document.body).backgroundColor;
const visible = node => node.getClientRects().length > 0;
for (const svg of document.querySelectorAll('svg.chart')) {
  if (!visible(svg)) continue;
  found.charts++;
  const frame = svg.getBoundingClientRect(), boxes = [];
  if (frame.right > innerWidth) found.sideways.push('chart');
  for (const text of svg.querySelectorAll('text')) {
    const box = text.getBoundingClientRect(), told = text.firstChild.data;
    found.texts++;
    found.contrasts.push([contrast(colour(getComputedStyle(text).fill), behind(svg)), told]);
    if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 3 ||
        box.bottom > frame.bottom + 3) found.outside.push(told);
    for (const [other, name] of boxes)
      if (Math.min(box.right, other.right) - Math.max(box.left, other.left) > 0.5 &&
          Math.min(box.bottom, other.bottom) - Math.max(box.top, other.top) > 3)
        found.overlaps.push([told, name]);
    boxes.push([box, told]);
  }
  found.smallest = Math.min(found.smallest ?? 99, frame.width / svg.viewBox.baseVal.width * 13);
}
for (const node of document.querySelectorAll('h1, h2, p, a, th, td, dt, dd, figcaption, pre, footer, span')) {
  if (!visible(node) || !node.innerText.trim()) continue;
  found.contrasts.push([contrast(colour(getComputedStyle(node).color), behind(node)), node.innerText]);
  if (!node.closest('.scroll') && node.getBoundingClientRect().right > innerWidth + 0.5)
    found.sideways.push(node.innerText.slice(0, 40));
}
for (const box of document.querySelectorAll('.scroll')) {
  box.focus();
  found.tables.push([box.scrollWidth, box.clientWidth, document.activeElement === box]);
}
parent.postMessage(JSON.stringify(found), '*');
"""
)

# Frames may be narrower than the narrowest window that a browser opens, and one start serves them all.
AROUND = """<!DOCTYPE html><body>
<script>onmessage = message => { const out = document.createElement('pre'); out.className = 'measured';
  out.textContent = message.data; document.body.append(out); }</script>
"""


def chromium(folder, *words):
    """One run of the browser with a profile of its own."""
    fixed = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
    command = [BROWSER, *fixed, f"--user-data-dir={folder / 'profile'}", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def measured(folder, scheme, text, allowed=True):
    """What the page measured about itself, by the width of its window."""
    if allowed:
        text = text.replace("default-src 'none'", "default-src 'none'; script-src 'unsafe-inline'")
    (folder / "page.html").write_text(text.replace("</body>", f"<script>{MEASURE}</script></body>"))
    style = "border: 0; height: 900px; width:"
    frames = "\n".join(f'<iframe src="page.html" style="{style} {w}px"></iframe>' for w in WIDTHS)
    (folder / "frames.html").write_text(f"{AROUND}{frames}</body>")
    options = ["--virtual-time-budget=3000", f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}"]
    dom = chromium(folder, *options, "--dump-dom", folder / "frames.html")
    texts = re.findall(r'<pre class="measured">(.*?)</pre>', dom, re.S)
    return {found["window"]: found for found in map(json.loads, map(unescape, texts))}


def check_readable(folder, scheme, text, charts, texts):
    """The page fits every window, with at least so many charts and texts in them."""
    all_widths = measured(folder, scheme, text)
    assert set(all_widths) == set(WIDTHS)
    paper = (LIGHT if scheme == "light" else DARK)["paper"]
    for width, found in all_widths.items():
        case = f"{width} wide"
        assert found["dark"] == (scheme == "dark"), case
        assert found["paper"] == "rgb({}, {}, {})".format(*bytes.fromhex(paper[1:])), case
        assert found["charts"] >= charts and found["texts"] >= texts, case
        assert len(found["contrasts"]) > texts, case
        assert found["page"] <= width and not found["sideways"], case
        assert not found["outside"] and not found["overlaps"], case
        assert found["smallest"] >= 10, case  # the size of a chart's text, in pixels
        worst, told = min(found["contrasts"])
        assert worst >= 4.5, (case, told)
        assert all(focused for _, _, focused in found["tables"]), case
    # A wide table scrolls by itself.
    assert any(inside > outside for inside, outside, _ in all_widths[360]["tables"])


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
