"""A model's weights packed for decoding on CPUs, kept until they change."""

from __future__ import annotations

import numpy as np

from distgpt.core.cpu.decoding.weights import Weights, checksums_of, packed_weights
from distgpt.core.cpu.pool import pool_of
from distgpt.core.model.layers import LearnedPositions, Rope
from distgpt.core.model.model import Model
from distgpt.core.ops.api import Angles


def angles_of(positions: LearnedPositions) -> Angles | None:
    return positions.angles if isinstance(positions, Rope) else None


def packed_of(model: Model) -> Weights:
    """Return a model's weights as they are now, packed for decoding. On CPUs, in any type but float64.

    Anybody may write into its parameters, so checksums tell whether they have changed: reading them all
    takes a small part of the time of packing them.
    """
    if isinstance(model.packing, Weights):  # of a model that never changes
        return model.packing
    checksums = checksums_of(model.params.flat, pool_of(model.kernels.threads))
    known = model.packing  # another thread may change the attribute
    if known is None or not np.array_equal(known[0], checksums):
        known = model.packing = None  # before there are two
        known = checksums, packed_weights(model.config, model.params, angles_of(model.positions))
        model.packing = known
    return known[1]
