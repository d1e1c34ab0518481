"""The forward-pass study's page: tables and charts. A star marks what was measured on a part of the names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distgpt.core.base.formatting import count, three_digits
from distgpt.core.config.presets import preset
from distgpt.core.model.counts import parameters
from distgpt.core.model.model import Architecture
from distgpt.measure.bench.results import Row
from distgpt.show.charts import Bar, BarChart, LineChart, line
from distgpt.show.page import Block, Column, tabulated


def is_scaled(row: Row) -> bool:
    """Return whether a row's seconds are scaled up from those of a part of the names."""
    return bool(row["measured"] < row["names"])


def seconds(row: Row) -> str:
    return three_digits(row["seconds"]) + "*" * is_scaled(row)


def times(row: Row) -> str:
    """Format how many times as fast as the plain way it is, if that was measured."""
    return three_digits(row["speedup"]) if row["speedup"] else ""


def _megabytes(row: Row) -> str:
    """Format the memory of all of its processes, and what they took on GPUs."""
    gpu = row.get("peak_gpu_memory")
    return f"{sum(row['peak_memory']) / 1e6:,.0f}" + (f" + {sum(gpu) / 1e6:,.0f} GPU" if gpu else "")


def _way(r: Row) -> str:
    return "batched" if r["batched"] else "one at a time"


COLUMNS: tuple[Column, ...] = (
    ("preset", "preset", str),
    ("method", "method", str),
    ("dtype", "dtype", str),
    ("ranks × threads", "", lambda row: f"{row['ranks']} × {row['threads']}"),
    ("seconds", "", seconds),
    ("× serial", "", times),
    ("names/s", "", lambda row: f"{row['names'] / row['seconds']:,.0f}"),
    ("peak MB", "", _megabytes),
    ("published s", "published_s", "{:,.2f}".format),
)
ABLATION: tuple[Column, ...] = (
    ("preset", "preset", str),
    ("names", "", _way),
    ("dtype", "dtype", str),
    ("seconds", "", seconds),
    ("× plain", "", times),
)


def blocks(found: dict[str, Any]) -> list[Block]:
    """Return curves of a sweep or else bars, and the tables."""
    rows, parts = found["rows"], found.get("ablation") or []
    notes = scaled_notes([*rows, *parts])
    if any(row["method"].startswith("torch") for row in rows):
        notes.append("torch keeps the memory it has freed, which makes it faster and larger")
    if any(row["published_s"] for row in rows):
        notes.append(
            "published: seconds of the study on its own machine, with its own PyTorch, C++ (serial) and CUDA"
        )
    shown: list[Block] = [*charts(found).values()] or _speedups(rows)
    shown.append(tabulated(COLUMNS, rows, "Mean loss over all names", "; ".join(notes)))
    return [*shown, _ablation(parts), tabulated(ABLATION, parts)] if parts else shown


def charts(found: dict[str, Any]) -> dict[str, LineChart]:
    """Return a sweep's chart, seconds by size. The key ends its file name."""
    if found.get("sweep") is None:
        return {}
    rows, by_names = found["rows"], found["sweep"] == "input"
    lines: dict[str, list[tuple[float, float]]] = {}
    in_part = {_who(r) for r in rows if is_scaled(r)}
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


def scaled_notes(rows: Sequence[Row]) -> list[str]:
    """Return a line for each row that was measured on a part of the names, which a star marks."""
    return [
        f"* {row['preset']}, {row['method']}: in proportion from {row['measured']:,} of "
        f"{count(row['names'], 'name')}"
        for row in rows
        if is_scaled(row)
    ]
