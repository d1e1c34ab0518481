"""Markdown tables of a campaign, from its result file: trials, findings, and the cost of an interruption."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

Rows = list[dict[str, Any]]


def read(path: Path) -> tuple[dict[str, Any], Rows]:
    """Return the first line and the trials of a result file, without an incomplete last line."""
    whole = path.read_bytes().rpartition(b"\n")[0]
    head, *rows = [json.loads(line) for line in whole.split(b"\n")]
    return head, rows


def quantile(values: Iterable[float], part: float) -> float:
    """Return the smallest value that is at least as large as this share of the values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)] if ordered else math.nan


def tables(head: dict[str, Any], rows: Rows) -> str:
    environment = head["environment"]
    lines = [
        f"{len(rows):,} trials of seed {head['seed']} in {sum(row['seconds'] for row in rows) / 3600:.2f} h, "
        f"commit {environment.get('commit')}, {environment['processor']}, {environment['cores']} cores.",
        "",
        "| done to a run | trials | interrupted | rejected | something wrong | seconds lost: median | p99 |",
        "|---|---|---|---|---|---|---|",
    ]
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    lines += [_kind(kind, [row for row in rows if row["kind"] == kind]) for kind in sorted(kinds)]
    lines += [
        _kind("all", rows),
        "",
        "| a save stalls the steps by | saves | median | p99 |",
        "|---|---|---|---|",
    ]
    for mode in dict.fromkeys(row["mode"] for row in rows):
        stalls = [
            1e3 * s for row in rows if row["mode"] == mode for each in row["attempts"] for s in each["stalls"]
        ]
        if stalls:
            lines.append(
                f"| {mode} | {len(stalls):,} | {median(stalls):.1f} ms | {quantile(stalls, 0.99):.1f} ms |"
            )
    wrong = Counter(text.partition(":")[0] for row in rows for text in row["wrong"])
    lines += (
        ["", "| wrong | times | the first trials |", "|---|---|---|"] if wrong else ["", "Nothing was wrong."]
    )
    for name, times in wrong.most_common():
        seen = [row["trial"] for row in rows if any(text.startswith(f"{name}:") for text in row["wrong"])]
        lines.append(f"| {name} | {times} | {', '.join(map(str, seen[:6]))} |")
    return "\n".join(lines)


def _kind(name: str, rows: Rows) -> str:
    lost = [each["lost"] for row in rows for each in row["attempts"] if "lost" in each]
    interrupted = sum(bool(each["came"] and each["code"]) for row in rows for each in row["attempts"])
    costs = f"{median(lost):.2f} | {quantile(lost, 0.99):.2f}" if lost else " | "
    refused, wrong = (sum(bool(row.get(what)) for row in rows) for what in ("refused", "wrong"))
    return f"| {name} | {len(rows):,} | {interrupted:,} | {refused:,} | {wrong:,} | {costs} |"
