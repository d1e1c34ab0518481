"""Colours for light and dark, and the style sheets of charts and pages that are made of them."""

from collections.abc import Callable

# Series colours stay apart for the colour-blind (tests/test_reporting.py simulates them), in this order.
LIGHT = {
    "paper": "#ffffff",
    "surface": "#f4f6f8",
    "ink": "#1b2026",
    "muted": "#59626d",
    "rule": "#ccd3da",
    "grid": "#e4e8ec",
    "shade": "#00000030",
    "accent": "#0b5fae",
    "good": "#0b6b3a",
    "good-surface": "#e7f5ec",
    "bad": "#a8201a",
    "bad-surface": "#fdecea",
    "s1": "#1a4ea5",
    "s2": "#b9470a",
    "s3": "#04866c",
    "s4": "#e64ca8",
    "s5": "#aa8a1c",
    "s6": "#3496d2",
    "s7": "#4f4f56",
    "s8": "#7d2417",
}
DARK = {
    "paper": "#14181d",
    "surface": "#1d2329",
    "ink": "#e8ebef",
    "muted": "#a6b0bb",
    "rule": "#414b56",
    "grid": "#2b333b",
    "shade": "#ffffff38",
    "accent": "#7bb8f5",
    "good": "#74d49b",
    "good-surface": "#14291d",
    "bad": "#ff9a92",
    "bad-surface": "#351a19",
    "s1": "#6aa1fc",
    "s2": "#ea893f",
    "s3": "#0fe1ad",
    "s4": "#b38aa8",
    "s5": "#e3c63b",
    "s6": "#bddeff",
    "s7": "#a4b8e2",
    "s8": "#cf624f",
}
SERIES = 8
FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'


def chart_rules(colour: Callable[[str], str]) -> str:
    """The style of everything inside a chart."""
    rules = [
        f".chart text {{ fill: {colour('ink')}; }}",
        f".chart text.muted {{ fill: {colour('muted')}; }}",
        f".chart .paper {{ fill: {colour('paper')}; }}",
        f".chart .grid {{ stroke: {colour('grid')}; }}",
        f".chart .axis {{ stroke: {colour('muted')}; }}",
        f".chart .mark {{ stroke: {colour('paper')}; }}",
        f".chart .texture {{ stroke: {colour('paper')}; }}",
    ]
    for i in range(1, SERIES + 1):
        s = colour(f"s{i}")
        rules.append(f".chart .s{i} {{ fill: {s}; }}")
        rules.append(f".chart .line.s{i}, .chart .open.s{i} {{ stroke: {s}; }}")
    return "\n".join(rules)


CHART_SHAPES = f"""
.chart text {{ font: 13px {FONT}; font-variant-numeric: tabular-nums; }}
.chart text.title {{ font-size: 16px; font-weight: 600; }}
.chart .line, .chart .open, .chart .grid, .chart .axis {{ fill: none; }}
.chart .line {{ stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }}
.chart .thin {{ stroke-width: 1; }}
.chart .dense {{ stroke-width: 1.2; }}
.chart .dashed {{ stroke-dasharray: 6 4; stroke-linecap: butt; }}
.chart .open {{ stroke-width: 2.2; }}
.chart .mark {{ stroke-width: 1; }}
.chart .texture {{ stroke-width: 1.3; opacity: 0.45; fill: none; }}
"""


def variables(colours: dict[str, str]) -> str:
    return " ".join(f"--{name}: {value};" for name, value in colours.items())


def standalone_style() -> str:
    """For a file of its own: plain colours instead of variables, since not every viewer knows those."""
    light, dark = (chart_rules(colours.__getitem__) for colours in (LIGHT, DARK))
    return f"{light}\n@media screen and (prefers-color-scheme: dark) {{\n{dark}\n}}{CHART_SHAPES}"


def page_style() -> str:
    """For a page: both schemes as variables; on paper always the light one."""
    return (
        f":root {{ color-scheme: light dark; {variables(LIGHT)} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {variables(DARK)} }} }}\n"
        + PAGE
        + chart_rules(lambda name: f"var(--{name})")
        + CHART_SHAPES
        + PRINT
    )


PAGE = f"""
* {{ box-sizing: border-box; }}
html {{ -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }}
body {{ margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 {FONT};
  overflow-wrap: anywhere; }}
main, header, footer, nav {{ max-width: 52rem; margin: 0 auto; padding: 0 1rem; }}
header {{ padding-top: 2.5rem; }}
h1 {{ font-size: 1.9rem; line-height: 1.2; letter-spacing: -0.01em; margin: 0 0 0.6rem; text-wrap: balance; }}
h2 {{ font-size: 1.3rem; line-height: 1.3; margin: 0 0 0.8rem; padding-top: 1.1rem;
  border-top: 1px solid var(--rule); }}
section {{ margin: 2.6rem 0 0; }}
p {{ margin: 0 0 1rem; max-width: 42rem; }}
.lead {{ font-size: 1.1rem; color: var(--muted); }}
nav ul {{ list-style: none; margin: 1.2rem 0 0; padding: 0; display: flex; flex-wrap: wrap;
  gap: 0.2rem 1.2rem; }}
nav a {{ display: inline-block; padding: 0.2rem 0; }}
a {{ color: var(--accent); }}
:focus-visible {{ outline: 2px solid var(--accent); outline-offset: 2px; }}
figure {{ margin: 1.4rem 0 1.8rem; }}
figcaption {{ font-weight: 600; text-align: left; margin: 0 0 0.6rem; }}
.chart {{ display: block; width: 100%; height: auto; overflow: visible; }}
.for-narrow {{ display: none; max-width: 440px; }}
.scroll {{ overflow-x: auto; background:
  linear-gradient(to right, var(--paper) 30%, transparent) left / 2.5rem 100%,
  linear-gradient(to left, var(--paper) 30%, transparent) right / 2.5rem 100%,
  linear-gradient(to right, var(--shade), transparent) left / 0.8rem 100%,
  linear-gradient(to left, var(--shade), transparent) right / 0.8rem 100%;
  background-repeat: no-repeat; background-attachment: local, local, scroll, scroll; }}
table {{ border-collapse: collapse; font-size: 0.9rem; line-height: 1.4;
  font-variant-numeric: tabular-nums; overflow-wrap: normal; }}
th, td {{ padding: 0.42rem 0 0.42rem 1.2rem; text-align: right; vertical-align: top; white-space: nowrap; }}
th:first-child {{ padding-left: 0; text-align: left; }}
thead th {{ vertical-align: bottom; color: var(--muted); font-weight: 600; white-space: normal;
  border-bottom: 1px solid var(--muted); }}
tbody th {{ font-weight: 500; white-space: normal; min-width: 7rem; max-width: 20rem; }}
tbody th, tbody td {{ border-bottom: 1px solid var(--grid); }}
td.prose, thead th.prose {{ text-align: left; }}
td.prose {{ white-space: normal; min-width: 14rem; max-width: 34rem; }}
.long {{ overflow-wrap: anywhere; min-width: 8rem; }}
.note {{ color: var(--muted); font-size: 0.92rem; margin: 0.6rem 0 0; }}
.verdict {{ display: flex; gap: 0.7rem; align-items: flex-start; max-width: none; margin: 1.4rem 0;
  padding: 0.8rem 1rem; border: 1px solid; border-left-width: 5px; border-radius: 6px; }}
.verdict svg {{ flex: none; width: 1.4rem; height: 1.4rem; margin-top: 0.05rem; fill: none;
  stroke: currentColor; stroke-width: 2.4; stroke-linecap: round; stroke-linejoin: round; }}
.verdict span {{ color: var(--ink); }}
.good {{ color: var(--good); background: var(--good-surface); }}
.bad {{ color: var(--bad); background: var(--bad-surface); }}
pre {{ margin: 0; padding: 0.8rem 1rem; background: var(--surface); border-radius: 6px;
  white-space: pre-wrap; overflow-wrap: anywhere;
  font: 0.88rem/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }}
dl {{ display: grid; grid-template-columns: minmax(7rem, max-content) 1fr; gap: 0.35rem 1.5rem;
  margin: 1rem 0; }}
dt {{ color: var(--muted); }}
dd {{ margin: 0; min-width: 0; }}
footer {{ color: var(--muted); font-size: 0.9rem; padding-top: 2.5rem; padding-bottom: 2.5rem; }}
@media screen and (max-width: 659px) {{
  .for-wide {{ display: none; }}
  .for-narrow {{ display: block; }}
  header {{ padding-top: 1.5rem; }}
  h1 {{ font-size: 1.55rem; }}
  dl {{ display: block; }}
  dd {{ margin: 0 0 0.7rem; }}
  tbody th {{ min-width: 6rem; max-width: 9rem; }}
}}
"""

PRINT = """
@media print {
  @page { margin: 16mm 15mm; }
  body { font-size: 10.5pt; print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  main, header, footer { max-width: none; padding-left: 0; padding-right: 0; }
  nav { display: none; }
  header { padding-top: 0; }
  section { margin-top: 1.6rem; }
  h2, figcaption { break-after: avoid; page-break-after: avoid; }
  .chart-box, .table, .verdict, .sample, tr { break-inside: avoid; page-break-inside: avoid; }
  .scroll { overflow: visible; background: none; }
  table { font-size: 9pt; }
  th, td { white-space: normal; padding-left: 0.8rem; }
  td.prose { min-width: 0; }
  thead { display: table-header-group; }
}
"""
