"""A model's weights packed for decoding on CPUs, kept until they change."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from distgpt.core.cpu.pool import pool_of
from distgpt.core.model.model import Model
from distgpt.core.ops.api import Array
from distgpt.inference.decoding.loops.operands import operand_rows
from distgpt.inference.decoding.loops.weights import Weights, checksums_of, packed_weights


class Packing(NamedTuple):
    """Packed weights, as a model keeps them."""

    weights: Weights
    rows: Callable[[int, int, str], Array] = operand_rows  # memory for what multiplies them
    checksums: Array | None = None  # of what was packed; None: the model never changes


def packing_of(model: Model) -> Packing:
    """Return a model's weights as they are now, packed for decoding. On CPUs, in any type but float64.

    Anybody may write into its parameters, so checksums tell whether they have changed: reading them all
    takes a small part of the time of packing them.
    """
    known = model.packing  # another thread may change the attribute
    before = known.checksums if isinstance(known, Packing) else None
    if isinstance(known, Packing) and before is None:
        return known
    checksums = checksums_of(model.params.flat, pool_of(model.kernels.threads))
    if isinstance(known, Packing) and before is not None and np.array_equal(before, checksums):
        return known
    known = model.packing = None  # before there are two
    weights = packed_weights(model.config, model.params, model.positions.angles)
    model.packing = found = Packing(weights, checksums=checksums)
    return found
