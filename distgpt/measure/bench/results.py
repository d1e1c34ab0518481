"""The files that measurements leave: one JSON object each, with the environment they were made in."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distgpt.errors import DataError
from distgpt.files import atomic_file, storage_errors
from distgpt.machine.environment import environment

KINDS = ("forward", "train", "allreduce", "scaling")


def memory(row: Mapping[str, Any]) -> str:
    """Megabytes of all of a row's processes, and what they took on GPUs."""
    gpu = row.get("peak_gpu_memory")
    return f"{sum(row['peak_memory']) / 1e6:,.0f}" + (f" + {sum(gpu) / 1e6:,.0f} GPU" if gpu else "")


def prepare(folder: Path) -> None:
    """Make the folder, and see that it can be written to, before anything is measured for it."""
    with storage_errors("write to", folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


def save(folder: Path, kind: str, name: str, found: dict[str, Any]) -> Path:
    """Write what was found to {kind}-{name}.json, in the place of an earlier one."""
    words = re.sub(r"[^\w.]+", "-", name).strip("-")
    path = folder / f"{kind}-{words or 'unnamed'}.json"
    with storage_errors("make", folder):
        folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"kind": kind, "name": name, "environment": environment(), **found}, indent=1)
    with atomic_file(path) as file:
        file.write(text.encode() + b"\n")
    return path


def load_all(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
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


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    is_ours = isinstance(found, dict) and found.get("kind") in KINDS and "environment" in found
    return found if is_ours else None
