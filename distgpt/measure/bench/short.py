"""The losses of short sequences by one compiled call of each worker, where model and kernels allow it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distgpt.kernels.api import Array, Kernels
from distgpt.model.int8 import angles_of
from distgpt.model.model import Model


def short_sequences(model: Model) -> ShortSequences | None:
    return ShortSequences(model) if _computes(model.kernels) and _fits(model) else None


def _computes(kernels: Kernels) -> bool:
    if kernels.queued or kernels.dtype != np.float32:
        return False
    from distgpt.kernels.cpu import CpuKernels

    return isinstance(kernels, CpuKernels)


def _fits(model: Model) -> bool:
    from distgpt.kernels.decoding import losses

    return losses.fits(model.config, model.kernels.dtype)


class ShortSequences:
    """Sums losses of sequences of at most `longest` predictions."""

    def __init__(self, model: Model) -> None:
        from distgpt.kernels.decoding import losses, walk

        self._model, self._kind = model, walk.kind_of(model.config)
        self._longest = losses.longest(model.config)
        self._memory = [losses.memory_of(model.config) for _ in range(model.kernels.threads)]

    def sum(self, tokens: Array, lengths: Array, shares: Sequence[Array]) -> tuple[list[Array], float]:
        """What is left of each worker's share, places in order of their lengths; the sum of the others."""
        from distgpt.kernels.decoding import losses, weights

        config, params = self._model.config, self._model.params
        packed = weights.packed_weights(config, params, angles_of(self._model.positions))
        packed = packed._replace(embedding=params["wte"])
        starts, sums = np.cumsum(lengths) - lengths, np.zeros(len(shares))
        cuts = [int(np.searchsorted(lengths[own], self._longest + 1, side="right")) for own in shares]

        def work(i: int) -> None:
            own = shares[i][: cuts[i]]
            memory = self._memory[i]
            sums[i] = losses.sum_losses(self._kind, packed, tokens, starts[own], lengths[own], memory)

        self._model.kernels.each(work, len(shares))
        return [own[cut:] for own, cut in zip(shares, cuts, strict=True)], float(sums.sum())
