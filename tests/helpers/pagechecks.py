"""Pages measured in a real browser: what sticks out, what overlaps, what cannot be read."""

import json
import re
import subprocess
from html import unescape

from browser import BROWSER

from distgpt.show.charts import DARK, LIGHT

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
