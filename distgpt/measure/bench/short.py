"""The losses of short sequences by one compiled call of each worker, where model and kernels allow it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distgpt.kernels.api import Array
from distgpt.kernels.cpu import CpuKernels
from distgpt.kernels.decoding import losses
from distgpt.kernels.decoding.walk import kind_of
from distgpt.kernels.decoding.weights import packed_weights
from distgpt.model.int8 import angles_of
from distgpt.model.model import Model


def short_sequences(model: Model) -> ShortSequences | None:
    plain = type(model.kernels) is CpuKernels  # not those whose matrices are in int8
    return ShortSequences(model) if plain and losses.fits(model.config, model.kernels.dtype) else None


class ShortSequences:
    """Sums the losses of sequences that are short enough."""

    def __init__(self, model: Model) -> None:
        self._model, self._kind = model, kind_of(model.config)
        self._most = losses.longest(model.config) + 1  # tokens of a sequence
        self._memory = [losses.memory_of(model.config) for _ in range(model.kernels.threads)]

    def sum(self, tokens: Array, lengths: Array, shares: Sequence[Array]) -> tuple[list[Array], float]:
        """What is left of each worker's share, places in order of their lengths; the sum of the others."""
        model = self._model
        packed = packed_weights(model.config, model.params, angles_of(model.positions))
        packed = packed._replace(embedding=model.params["wte"])  # row by row
        starts, sums = np.cumsum(lengths) - lengths, np.zeros(len(shares))
        cuts = [int(np.searchsorted(lengths[own], self._most, side="right")) for own in shares]

        def work(i: int) -> None:
            own, memory = shares[i][: cuts[i]], self._memory[i]
            sums[i] = losses.sum_losses(self._kind, packed, tokens, starts[own], lengths[own], memory)

        model.kernels.each(work, len(shares))
        return [own[cut:] for own, cut in zip(shares, cuts, strict=True)], float(sums.sum())
