"""The tables and charts of `distgpt bench forward`, for a terminal and for the report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distgpt.config.presets import preset
from distgpt.measure.bench.results import Row
from distgpt.model.counts import parameters
from distgpt.model.model import Architecture
from distgpt.show.charts import Bar, BarChart, LineChart, line
from distgpt.show.page import Block, Column, tabulated
from distgpt.show.tables import terminal_table
from distgpt.units import count


def scaled(r: Row) -> bool:
    """Whether its seconds are in proportion to those of a part of the names."""
    return bool(r["measured"] < r["names"])


def _number(value: float, digits: int) -> str:
    """One decimal from 10 on, below that so many significant digits."""
    return f"{value:,.1f}" if value >= 10 else f"{value:#.{digits}g}"


def seconds(r: Row) -> str:
    return _number(r["seconds"], 3) + "*" * scaled(r)


def times(r: Row) -> str:
    """How many times as fast as the plain way, if that was measured."""
    return _number(r["speedup"], 2) + "*" * r.get("speedup_scaled", False) if r["speedup"] else ""


def memory(r: Row) -> str:
    """Megabytes of all of its processes, and what they took on GPUs."""
    gpu = r.get("peak_gpu_memory")
    return f"{sum(r['peak_memory']) / 1e6:,.0f}" + (f" + {sum(gpu) / 1e6:,.0f} GPU" if gpu else "")


def _way(r: Row) -> str:
    return "batched" if r["batched"] else "one at a time"


# A star marks what rests on a part of the names.
COLUMNS: tuple[Column, ...] = (
    ("preset", "preset", str),
    ("method", "method", str),
    ("dtype", "dtype", str),
    ("ranks × threads", "", lambda r: f"{r['ranks']} × {r['threads']}"),
    ("seconds", "", seconds),
    ("× serial", "", times),
    ("names/s", "", lambda r: f"{r['names'] / r['seconds']:,.0f}" + "*" * scaled(r)),
    ("peak MB", "", memory),
    ("published s", "published_s", "{:,.2f}".format),
)
ABLATION: tuple[Column, ...] = (
    ("preset", "preset", str),
    ("names", "", _way),
    ("dtype", "dtype", str),
    ("seconds", "", seconds),
    ("× plain", "", times),
)


def text(found: dict[str, Any]) -> str:
    """For a terminal."""
    rows, parts = found["rows"], found["ablation"]
    notes = [
        f"{r['preset']}, {r['method']}: in proportion from {r['measured']:,} of {count(r['names'], 'name')}"
        for r in [*rows, *parts]
        if scaled(r)
    ]
    if notes:
        notes.append("* in proportion, or compared with what is")
    if any(r["method"].startswith("torch") for r in rows):
        notes.append("torch keeps the memory it has freed, which makes it faster and larger")
    if any(r["published_s"] for r in rows):
        notes.append(
            "published: seconds of the study on its own machine, with its own PyTorch, C++ (serial) and CUDA"
        )
    tables = [tabulated(COLUMNS, rows)] + ([tabulated(ABLATION, parts)] if parts else [])
    shown = [terminal_table(table.columns, table.rows) for table in tables]
    return "\n\n".join([*shown, *(["\n".join(notes)] if notes else [])])


def blocks(found: dict[str, Any]) -> list[Block]:
    """For the report: curves of a sweep, else bars."""
    rows = found["rows"]
    note = "*: in proportion from a part of the names." if any(map(scaled, rows)) else ""
    shown: list[Block] = [*charts(found).values()] or _speedups(rows)
    shown.append(tabulated(COLUMNS, rows, "Mean loss over all names", note))
    return [*shown, _ablation(found["ablation"])] if found.get("ablation") else shown


def charts(found: dict[str, Any]) -> dict[str, LineChart]:
    """Of a sweep: seconds by size. The key ends the chart's file name."""
    if found["sweep"] is None:
        return {}
    rows, by_names = found["rows"], found["sweep"] == "input"
    lines: dict[str, list[tuple[float, float]]] = {}
    in_part = {_who(r) for r in rows if scaled(r)}
    for r in rows:
        size = r["names"] if by_names else parameters(Architecture(preset(r["preset"]).model)).total
        lines.setdefault(_who(r), []).append((size, r["seconds"]))
    presets = ", ".join(dict.fromkeys(r["preset"] for r in rows))
    over = "names" if by_names else "parameters"
    several = not by_names and len({r["names"] for r in rows}) > 1
    grows = ", more names for larger models" if several else ""
    description = (
        f"Seconds for the mean loss over all names, by the number of {over}{grows}; presets {presets}."
    )
    if in_part:
        description += " Dashed and with a star: some of its sizes were measured on a part of the names only."
    title = f"Forward pass: seconds over {over}{grows}"
    series = [
        line(name + " *" * (name in in_part), sorted(points), dashed=name in in_part)
        for name, points in lines.items()
    ]
    return {"": LineChart(title, description, over, "seconds", series, log_x=True, log_y=True)}


def _who(r: Row) -> str:
    return f"{r['method']}, {r['dtype']}"


def _speedups(rows: Sequence[Row]) -> list[Block]:
    """Bars for each preset that was also measured one name at a time."""
    shown: list[Block] = []
    for name in dict.fromkeys(r["preset"] for r in rows):
        own = [r for r in rows if r["preset"] == name and r["speedup"]]
        if len(own) > 1:
            bars = [Bar(_who(r), r["speedup"], f"{times(r)} ×") for r in own]
            best = max(own, key=lambda r: float(r["speedup"]))
            description = (
                f"The fastest, {best['method']} in {best['dtype']}, is {times(best)} times as fast as serial."
            )
            title = f"{name}: speed-up over one name at a time"
            shown.append(BarChart(title, description, "times as fast", bars))
    return shown


def _ablation(rows: Sequence[Row]) -> BarChart:
    bars = [
        Bar(f"{r['preset']}: {_way(r)}, {r['dtype']}", r["speedup"], f"{times(r)} × ({r['seconds']:,.3g} s)")
        for r in rows
    ]
    best = max(rows, key=lambda r: float(r["speedup"]))
    description = (
        f"On one thread; {_way(best)} in {best['dtype']} is {times(best)} times as fast as the plain way."
    )
    return BarChart("What batches and single precision bring", description, "times as fast", bars)
