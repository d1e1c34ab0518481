"""Numbers and tensors that are compared: to the bit, in units of the last place, and within rounding.

Rounding is taken to have grown no further than `measure/compare/agreement.py` has measured, in as many steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from distgpt.core.base.formatting import count
from distgpt.core.config import TrainConfig
from distgpt.core.saved.tensors import HostArray
from distgpt.measure.compare.agreement import MEASURED, TOLERANCES, Rounding, relative


def tolerance_of(one: TrainConfig, other: TrainConfig) -> Rounding:
    """Return how far rounding may take losses apart: in the coarser number format, in the fewer steps."""
    apart = max(TOLERANCES[t.dtype] for t in (one, other))
    return Rounding(min(MEASURED[t.optimizer, t.dtype].steps for t in (one, other)), apart)


def are_same(one: float | None, other: float | None) -> bool:
    """Return whether two numbers of metrics have the same bits; None, one that is not finite, has them."""
    return _finite(one) == _finite(other)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def distance(one: float | None, other: float | None) -> float:
    """Return the relative difference, infinite where one alone is not finite."""
    return 0.0 if are_same(one, other) else relative(one, other)


IN_RUN, HERE = "in the run", "here"


def numbers_apart(one: float | None, other: float | None, words: tuple[str, str] = (IN_RUN, HERE)) -> str:
    """Return two numbers and their relative difference in words."""
    if _finite(one) is None or _finite(other) is None:
        return "one of them is not finite"
    return f"{one!r} {words[0]}, {other!r} {words[1]}, a relative difference of {distance(one, other):.1e}"


def _in_units(apart: float) -> str:
    shown = f"{apart:,.0f}" if apart >= 1 else f"{apart:.2g}"
    return f"{shown} {'unit' if shown == '1' else 'units'} in the last place apart"


@dataclass(frozen=True, slots=True)
class Apart:
    """A tensor whose bits differ. `place` is that of the element that differs most."""

    name: str
    elements: int
    differing: int
    place: tuple[int, ...]
    run: float
    here: float
    units: float

    def words(self) -> str:
        elements = f"{self.differing:,} of {count(self.elements, 'element')}"
        at = f"[{', '.join(map(str, self.place))}]"
        return f"{self.name}: {elements}, most at {at}: {self.run!r} in the run, {self.here!r} here, " + (
            _in_units(self.units) if math.isfinite(self.units) else "one of them is not finite"
        )


def apart(name: str, run: HostArray, here: HostArray) -> Apart | None:
    """Compare a tensor of the run with the one here, of floats of the same width; None if no bit differs."""
    integer = np.dtype(f"i{run.dtype.itemsize}")
    one, other = (np.ascontiguousarray(array).reshape(-1) for array in (run, here))
    bits, others = one.view(integer), other.view(integer)
    differing = int(np.count_nonzero(bits != others))
    if not differing:
        return None
    # As integers floats are in their order, but for negative ones, which run backwards.
    lowest = np.iinfo(integer).min
    ordered = [np.where(each < 0, lowest - each, each).astype(np.float64) for each in (bits, others)]
    between = np.abs(ordered[0] - ordered[1])
    between[~(np.isfinite(one) & np.isfinite(other)) & (bits != others)] = math.inf
    most = int(np.argmax(between))
    place = tuple(int(i) for i in np.unravel_index(most, run.shape))
    return Apart(name, run.size, differing, place, float(one[most]), float(other[most]), float(between[most]))
