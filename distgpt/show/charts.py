"""Charts as data, and the colours and the style of all pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SERIES = 8  # colours
FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'

# For light and for dark. Series colours stay apart for the colour-blind: tests/show/test_colours.py.
COLOURS = {
    "paper": ("#ffffff", "#14181d"),
    "surface": ("#f4f6f8", "#1d2329"),
    "ink": ("#1b2026", "#e8ebef"),
    "muted": ("#59626d", "#a6b0bb"),
    "rule": ("#ccd3da", "#414b56"),
    "grid": ("#e4e8ec", "#2b333b"),
    "shade": ("#00000030", "#ffffff38"),
    "accent": ("#0b5fae", "#7bb8f5"),
    "good": ("#0b6b3a", "#74d49b"),
    "good-surface": ("#e7f5ec", "#14291d"),
    "bad": ("#a8201a", "#ff9a92"),
    "bad-surface": ("#fdecea", "#351a19"),
    "s1": ("#1a4ea5", "#6aa1fc"),
    "s2": ("#b9470a", "#ea893f"),
    "s3": ("#04866c", "#0fe1ad"),
    "s4": ("#e64ca8", "#b38aa8"),
    "s5": ("#aa8a1c", "#e3c63b"),
    "s6": ("#3496d2", "#bddeff"),
    "s7": ("#4f4f56", "#a4b8e2"),
    "s8": ("#7d2417", "#cf624f"),
}
LIGHT, DARK = ({name: pair[scheme] for name, pair in COLOURS.items()} for scheme in (0, 1))

# The style of all pictures, for matplotlib's rc_context.
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "text.color": LIGHT["ink"],
    "text.parse_math": False,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LIGHT["grid"],
    "lines.solid_capstyle": "round",
    "lines.solid_joinstyle": "round",
    "path.simplify_threshold": 0.3,
    "hatch.linewidth": 0.7,
    "svg.hashsalt": "distgpt",
    "svg.fonttype": "none",
}


def series_colour(i: int) -> str:
    return LIGHT[f"s{i % SERIES + 1}"]


@dataclass(frozen=True)
class Series:
    """Points in any order, joined by rising x. Dashed is for what was predicted or comes from elsewhere."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    dashed: bool = False


def line(name: str, points: Sequence[tuple[float, float]], dashed: bool = False) -> Series:
    """Return the series through (x, y)."""
    return Series(name, [x for x, _ in points], [y for _, y in points], dashed)


@dataclass(frozen=True)
class LineChart:
    """Values over values. Unknown points are left out, and on a log axis those that are not positive.

    The description tells the chart to those who cannot see it.
    """

    title: str
    description: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True)
class Bar:
    """A bar of one value, or of one for each part, with a text at its end."""

    label: str
    value: float | Sequence[float]
    text: str


@dataclass(frozen=True)
class BarChart:
    """Horizontal bars; if they have parts, all have the same in the same order."""

    title: str
    description: str
    unit: str
    bars: Sequence[Bar]
    parts: Sequence[str] = ()


Chart = LineChart | BarChart


def chart_style() -> str:
    """Return the CSS of charts: drawn in light colours, these are replaced on a dark screen."""
    drawn = ("paper", "ink", "muted", "grid", *(f"s{i}" for i in range(1, SERIES + 1)))
    dark_rules = "\n".join(
        f'[style*="fill: {LIGHT[name]}"], [fill="{LIGHT[name]}"] {{ fill: {DARK[name]} !important; }}\n'
        f'[style*="stroke: {LIGHT[name]}"] {{ stroke: {DARK[name]} !important; }}'
        for name in drawn
    )
    return f""".chart text {{ font-family: {FONT} !important; font-variant-numeric: tabular-nums; }}
@media screen and (prefers-color-scheme: dark) {{
{dark_rules}
}}
"""
