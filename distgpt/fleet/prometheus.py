"""Metrics in the text format of Prometheus, for the server's page and for those of a training run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "distgpt_"

Labels = Mapping[str, object]
Sample = tuple[str, Labels, float]  # what follows the family's name, labels, value


@dataclass(frozen=True, slots=True)
class Family:
    """A metric with all its labels. `kind`: counter, gauge or histogram."""

    name: str
    kind: str
    help: str
    samples: list[Sample]


def page(families: Iterable[Family]) -> str:
    """Return the page of these families."""
    lines = []
    for family in families:
        name = PREFIX + family.name
        lines += [f"# HELP {name} {family.help}", f"# TYPE {name} {family.kind}"]
        lines += [f"{name}{more}{_labels(labels)} {_number(value)}" for more, labels, value in family.samples]
    return "\n".join([*lines, ""])


def _labels(labels: Labels) -> str:
    inside = ",".join(f'{name}="{_escaped(str(value))}"' for name, value in labels.items())
    return f"{{{inside}}}" if inside else ""


def _escaped(text: str) -> str:
    """Escape what ends a label, and what is no UTF-8, as a file's name may be."""
    text = text.encode(errors="replace").decode()
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: float) -> str:
    if isinstance(value, int) or math.isfinite(value):
        return repr(value).removesuffix(".0")
    return "NaN" if math.isnan(value) else f"{'+' if value > 0 else '-'}Inf"
