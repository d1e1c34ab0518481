"""metrics.jsonl read with mistrust: whole lines, each of one step, with numbers by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distgpt.checked import checked, parse_json
from distgpt.errors import DataError
from distgpt.files import read_small

MOST_METRICS = 1 << 30  # bytes
MOST_STEPS = 1 << 53  # as many as a picture's axis can tell apart


def recorded(path: Path) -> Iterator[dict[str, Any]]:
    """Every line; values may be None."""
    return (parsed(line, number, path) for number, line in enumerate(whole_lines(path), 1))


def whole_lines(path: Path) -> list[bytes]:
    """Without the half line that a killed run may have left at the end."""
    content = read_small(path, MOST_METRICS)
    return content[: content.rfind(b"\n") + 1].splitlines()


def parsed(line: bytes, number: int, path: Path) -> dict[str, Any]:
    """Return the numbers of a line by name; a DataError names a line without metrics."""
    try:
        found: dict[str, Any] = parse_json(line)
        checked(dict[str, float | None], found)
        step = checked(int, found["step"])
    except (ValueError, KeyError):
        raise DataError(f"{path}: line {number} holds no metrics") from None
    if not 0 <= step < MOST_STEPS:
        raise DataError(f"{path}: line {number} is of an impossible step")
    return found
