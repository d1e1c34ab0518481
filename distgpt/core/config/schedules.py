"""Schedules: how the learning rate falls after the warm-up. Their names are the choices of `schedule`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Schedule:
    """`rate` gives the learning rate from the peak, the last one, and the progress of the fall, 0 to 1."""

    rate: Callable[[float, float, float], float]
    falls_late: bool = False  # only in the last `decay_fraction` of the run


def linear(peak: float, last: float, progress: float) -> float:
    return last + (peak - last) * (1 - progress)


def cosine(peak: float, last: float, progress: float) -> float:
    return last + (peak - last) * (0.5 * (1 + math.cos(math.pi * progress)))


def constant(peak: float, last: float, progress: float) -> float:
    return peak


SCHEDULES = {
    "linear": Schedule(linear),
    "cosine": Schedule(cosine),
    "wsd": Schedule(linear, falls_late=True),
    "constant": Schedule(constant),
}
