"""The packed weights of a model, kept from one call to the next as long as its weights are the same."""

from __future__ import annotations

import numpy as np

from distgpt.kernels.decoding.weights import Weights, packed_weights
from distgpt.kernels.fused.marks import marks_of
from distgpt.kernels.pool import pool_of
from distgpt.model.int8 import Int8Model, angles_of
from distgpt.model.model import Model


def packed_of(model: Model) -> Weights:
    """What a model's weights are now, in the form of the walk. On CPUs, in float32, bfloat16 or int8.

    Anybody may write into its parameters, so those that were packed are known by their marks alone: reading
    them all takes a small part of the time of packing them.
    """
    if isinstance(model, Int8Model):
        return model.packed
    marks = marks_of(model.params.flat, pool_of(model.kernels.threads))
    kept = model.packing  # another thread may ask, too
    if kept is None or not np.array_equal(kept[0], marks):
        kept = model.packing = None  # before there are two
        kept = marks, packed_weights(model.config, model.params, angles_of(model.positions))
        model.packing = kept
    found: Weights = kept[1]
    return found
