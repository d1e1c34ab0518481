"""The forward-pass study's page: bars and a table. A star marks what was measured on a part of the names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from charts import Bar, BarChart

from distgpt.core.base.formatting import count, three_digits
from distgpt.measure.jobs import Row
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


def blocks(found: dict[str, Any]) -> list[Block]:
    """Return bars and the table."""
    rows = found["rows"]
    notes = scaled_notes(rows)
    if any(row["method"].startswith("torch") for row in rows):
        notes.append("torch keeps the memory it has freed, which makes it faster and larger")
    if any(row["published_s"] for row in rows):
        notes.append(
            "published: seconds of the study on its own machine, with its own PyTorch, C++ (serial) and CUDA"
        )
    return [*_speedups(rows), tabulated(COLUMNS, rows, "Mean loss over all names", "; ".join(notes))]


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


def scaled_notes(rows: Sequence[Row]) -> list[str]:
    """Return a line for each row that was measured on a part of the names, which a star marks."""
    return [
        f"* {row['preset']}, {row['method']}: in proportion from {row['measured']:,} of "
        f"{count(row['names'], 'name')}"
        for row in rows
        if is_scaled(row)
    ]
