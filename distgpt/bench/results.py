"""The files that measurements leave: one JSON object each, with the environment they were made in."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from distgpt.environment import environment
from distgpt.errors import DataError
from distgpt.storage import atomic_file, storage_errors

KINDS = ("forward", "train", "allreduce", "scaling")


def save(folder: Path, kind: str, name: str, found: dict[str, Any]) -> Path:
    """Write what was found to {kind}-{name}.json, in the place of an earlier one."""
    path = folder / f"{kind}-{re.sub(r'[^A-Za-z0-9.]+', '-', name).strip('-')}.json"
    with storage_errors("make", folder):
        folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"kind": kind, "name": name, "environment": environment(), **found}, indent=1)
    with atomic_file(path) as file:
        file.write(text.encode() + b"\n")
    return path


def load_all(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """All results in a folder, in the order of their names, and the files that are none."""
    with storage_errors("read", folder):
        paths = sorted(folder.glob("*.json"))
        texts = [(path.name, path.read_text(encoding="utf-8", errors="replace")) for path in paths]
    results, foreign = [], []
    for name, text in texts:
        found = _parsed(text)
        if found is None:
            foreign.append(name)
        else:
            results.append(found)
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
