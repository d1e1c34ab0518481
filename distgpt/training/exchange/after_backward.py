"""Sum all gradients after the backward pass; every rank then updates all weights."""

from __future__ import annotations

from collections.abc import Callable

from distgpt.training.exchange.api import Exchange
from distgpt.training.exchange.reductions import Reduction


class AfterBackward(Exchange):
    """One reduction of the whole flat buffer."""

    def __init__(self, name: str, reduction: Reduction, size: int, sum_flags: Callable[[], None]) -> None:
        """`reduction` sums the first `size` elements of the flat buffer, `sum_flags` those after them."""
        self.name, self._size, self._sum_flags = name, size, sum_flags
        self._reduction = reduction

    def sum_gradients(self, step: int) -> None:
        self._reduction.sum(0, self._size, step)
        self._sum_flags()

    def free(self) -> None:
        self._reduction.free()
