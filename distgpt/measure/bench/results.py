"""The files that measurements leave: one JSON object each with its environment, and charts beside it."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from distgpt.errors import DataError
from distgpt.files import atomic_file, storage_errors
from distgpt.machine.facts import environment
from distgpt.show.charts import Chart, standalone
from distgpt.show.page import Table

KINDS = ("forward", "train", "allreduce", "scaling")

Row = dict[str, Any]
Columns = Mapping[str, Callable[[Row], str]]  # heading: the text of a row's cell


def tabulated(columns: Columns, rows: Sequence[Row], caption: str = "", note: str = "") -> Table:
    """Rows as a table, for a terminal and for a page."""
    return Table(list(columns), [[text(row) for text in columns.values()] for row in rows], caption, note)


def memory(row: Mapping[str, Any]) -> str:
    """Megabytes of all of a row's processes, and what they took on GPUs."""
    gpu = row.get("peak_gpu_memory")
    return f"{sum(row['peak_memory']) / 1e6:,.0f}" + (f" + {sum(gpu) / 1e6:,.0f} GPU" if gpu else "")


def prepare(folder: Path) -> None:
    """Make the folder, and check that it can be written to, before anything is measured for it."""
    with storage_errors("write to", folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


def save(folder: Path, kind: str, name: str, found: Row, charts: Mapping[str, Chart] | None = None) -> Path:
    """Write {kind}-{name}.json, replacing an earlier one, and {kind}-{name}{key}.svg for each chart."""
    words = re.sub(r"[^\w.]+", "-", name).strip("-")
    path = folder / f"{kind}-{words or 'unnamed'}.json"
    with storage_errors("make", folder):
        folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"kind": kind, "name": name, "environment": environment(), **found}, indent=1)
    with atomic_file(path) as file:
        file.write(text.encode() + b"\n")
    for ending, chart in (charts or {}).items():
        with atomic_file(path.with_name(f"{path.stem}{ending}.svg")) as file:
            file.write(standalone(chart).encode())
    return path


def load_all(folder: Path) -> tuple[list[Row], list[str]]:
    """All results in a folder by name, each with its "file", and the names of files that are none."""
    with storage_errors("read", folder):
        paths = sorted(folder.glob("*.json"))
        texts = [(path.name, path.read_text(encoding="utf-8", errors="replace")) for path in paths]
    results, foreign = [], []
    for name, text in texts:
        found = _parsed(text)
        if found is None:
            foreign.append(name)
        else:
            results.append(found | {"file": name})
    if not results:
        raise DataError(f"{folder} holds no results of distgpt bench")
    return results, foreign


def _parsed(text: str) -> Row | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    is_ours = isinstance(found, dict) and found.get("kind") in KINDS and "environment" in found
    return found if is_ours else None
