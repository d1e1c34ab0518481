"""Named arrays over the rows of a batch, and the same for every slab of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from distgpt.kernels.api import Array


class Names(SimpleNamespace):
    """Arrays as attributes. Absent names read as None, as kernels expect it."""

    def __getattr__(self, name: str) -> Any:
        return None


class Rows:
    """`widths` says how many numbers each array has a row; 0 makes it one-dimensional."""

    def __init__(
        self, allocate: Callable[..., Array], widths: dict[str, int], slabs: Sequence[slice]
    ) -> None:
        n = slabs[-1].stop
        self.all = Names(
            **{name: allocate(n, width) if width else allocate(n) for name, width in widths.items()}
        )
        self.slabs = [Names(**{name: x[rows] for name, x in vars(self.all).items()}) for rows in slabs]

    def beside(self, *others: Rows) -> Rows:
        """These and other arrays over the same rows under one roof; nothing is copied."""
        joined = object.__new__(Rows)
        joined.all = _union(self.all, *(other.all for other in others))
        joined.slabs = [_union(*names) for names in zip(self.slabs, *(o.slabs for o in others), strict=True)]
        return joined

    def cut(self, slabs: Sequence[slice]) -> Rows:
        """The first rows of the same arrays, in other slabs."""
        n, cut = slabs[-1].stop, object.__new__(Rows)
        cut.all = Names(**{name: x[:n] for name, x in vars(self.all).items()})
        cut.slabs = [Names(**{name: x[rows] for name, x in vars(self.all).items()}) for rows in slabs]
        return cut

    def add(self, name: str, array: Array) -> None:
        """An array that is not cut into slabs."""
        for names in (self.all, *self.slabs):
            setattr(names, name, array)

    def swap(self, one: str, other: str) -> None:
        """Let two names change places, everywhere."""
        for names in (self.all, *self.slabs):
            a, b = getattr(names, one), getattr(names, other)
            setattr(names, one, b)
            setattr(names, other, a)


def _union(*parts: Names) -> Names:
    return Names(**{name: array for part in parts for name, array in vars(part).items()})
