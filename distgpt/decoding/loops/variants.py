"""Variants of a model's weights, one of which each row of a batch may name. Here: that there are none.

The decoder calls these functions at each place where a variant may add to a matmul. Numba takes them from the
class of `variants` when it compiles the decoder, so one without variants has no instruction for them.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from distgpt.core.cpu.compiling.jit import FORCED, by_types
from distgpt.core.ops.api import Array

QKV, OUT, FC, GATES, PROJ = range(5)  # the matmuls of a layer; FC and GATES read the same input


class Variants(Protocol):
    """A NamedTuple of arrays, whose static methods are compiled loops that get it as their first argument.

    Rows name a variant by its number, from 1 on; 0 is the model itself.
    """

    @property
    def highest(self) -> int:
        """Return the highest number; 0: there are none."""

    def for_rows(self, count: int) -> Variants:
        """Return them with scratch memory for this many rows."""

    @staticmethod
    def read_hidden(variants: Variants) -> bool:
        """Tell whether the input of PROJ is to be read. No matmul has made it, so all threads wait for it."""

    @staticmethod
    def read_row(variants: Variants, place: int, layer: int, row: int, variant: int, x: Array) -> None:
        """Read x (1, k), the input of a matmul in one row."""

    @staticmethod
    def add_columns(
        variants: Variants, place: int, layer: int, which: Array, begin: int, end: int, c: Array
    ) -> None:
        """Columns begin … end of c += what the variant of each row makes of its input."""


class NoVariants(NamedTuple):
    """`Variants` of which there are none."""

    @property
    def highest(self) -> int:
        return 0

    def for_rows(self, count: int) -> NoVariants:
        return self

    @staticmethod
    def read_hidden(variants):
        return False

    @staticmethod
    def read_row(variants, place, layer, row, variant, x):
        pass

    @staticmethod
    def add_columns(variants, place, layer, which, begin, end, c):
        pass


NO_VARIANTS = NoVariants()


@by_types(**FORCED)
def read_hidden(variants):
    return variants.instance_class.read_hidden


@by_types(**FORCED)
def read_row(variants, place, layer, row, variant, x):
    return variants.instance_class.read_row


@by_types(**FORCED)
def add_columns(variants, place, layer, which, begin, end, c):
    return variants.instance_class.add_columns
