"""The choice of a way to decode, by what a model computes with."""

from __future__ import annotations

import numpy as np

from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.generate.plain_slots import PLAIN
from distgpt.core.generate.slots import SlotKind
from distgpt.core.model.model import Model


def fastest(model: Model) -> SlotKind:
    """Return the fastest kind of slots for a model as it is now. Imports only that one.

    On CPUs a token takes one compiled call, but in float64, which no tile computes, and while a model is
    trained, as packing its weights anew takes longer than a few tokens.
    """
    kernels = model.kernels
    if kernels.capabilities.is_async:
        from distgpt.inference.decoding.batched import BATCHED

        return BATCHED
    if isinstance(kernels, CpuKernels) and kernels.dtype != np.float64 and not model.is_trained:
        from distgpt.inference.decoding.compiled import COMPILED

        return COMPILED
    return PLAIN
