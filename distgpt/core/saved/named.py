"""Names that users give weights: a file, the directory of a run, or a name that a table knows."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from distgpt.core.base.tables import Table
from distgpt.core.saved.rundir import find_weights


class WeightsSource(Protocol):
    """A row of the table of weights, by what their names begin with before a colon."""

    def __call__(self, name: str, fetches: bool) -> Path:
        """Return the weights file of this name. Without `fetches` refuse one that is not on this machine."""


WEIGHTS: Table[WeightsSource] = Table("weights", "weights of", {})


def weights_of(name: Path, fetches: bool = True) -> Path:
    """Return the weights file of this name. What is not on this machine is fetched, or refused."""
    key, _, rest = str(name).partition(":")
    source = WEIGHTS.get(key) if rest and not name.exists() else None
    return find_weights(name) if source is None else source(rest, fetches)
