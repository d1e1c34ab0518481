"""metrics.jsonl of a run, read with mistrust: whole lines, each of one step, with numbers by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from distgpt.core.base.checked import parse_json
from distgpt.core.base.errors import DataError
from distgpt.core.base.files import read_small

MOST_METRICS = 1 << 30  # bytes
MOST_STEPS = 1 << 53  # as many as a picture's axis can tell apart
# The names of losses in nats per token, in metrics and summaries, and of the same in bits per byte.
IN_BITS = {"loss": "train_bits_per_byte", "val_loss": "bits_per_byte"}


@dataclass(frozen=True, slots=True)
class Metrics:
    """A line: the numbers of one step by name. None: not finite."""

    step: int
    numbers: dict[str, float | None]


def read_metrics(path: Path) -> Iterator[Metrics]:
    """Yield all whole lines."""
    return (parse_metrics(line, number, path) for number, line in enumerate(whole_lines(path), 1))


def whole_lines(path: Path) -> list[bytes]:
    """Return the lines, without the half line that a killed run may have left at the end."""
    content = read_small(path, MOST_METRICS)
    return content[: content.rfind(b"\n") + 1].splitlines()


def parse_metrics(line: bytes, number: int, path: Path) -> Metrics:
    """Return the metrics in a line; a DataError names a line without any."""
    no_metrics = DataError(f"{path}: line {number} holds no metrics")
    try:
        document = parse_json(line)
    except ValueError:
        raise no_metrics from None
    if not isinstance(document, dict):
        raise no_metrics
    numbers: dict[str, float | None] = {}
    for name, value in document.items():
        if isinstance(value, bool | str | list | dict):
            raise no_metrics
        numbers[name] = value
    step = numbers.pop("step", None)
    if not isinstance(step, int):
        raise no_metrics
    if not 0 <= step < MOST_STEPS:
        raise DataError(f"{path}: line {number} is of an impossible step")
    return Metrics(step, numbers)
