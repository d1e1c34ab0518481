"""The losses of short sequences by one compiled call of each worker, where model and kernels allow it."""

from __future__ import annotations

import numpy as np

from distgpt.kernels.api import Array
from distgpt.kernels.cpu import CpuKernels
from distgpt.kernels.decoding import losses
from distgpt.kernels.decoding.decode import kind_of
from distgpt.kernels.decoding.weights import packed_weights
from distgpt.model.model import Model
from distgpt.model.packed import angles_of


def short_sequences(model: Model) -> ShortSequences | None:
    plain = type(model.kernels) is CpuKernels  # not those whose matrices are in int8
    return ShortSequences(model) if plain and losses.fits(model.config, model.kernels.dtype) else None


class ShortSequences:
    """Sums the losses of sequences that are short enough."""

    def __init__(self, model: Model) -> None:
        self._model, self._kind = model, kind_of(model.config)
        self._most = losses.longest(model.config) + 1  # tokens of a sequence
        self._memory = [losses.memory_of(model.config) for _ in range(model.kernels.threads)]

    def begin(self, tokens: Array, lengths: Array) -> None:
        """What `sum` is about, with the weights as they are now."""
        model = self._model
        packed = packed_weights(model.config, model.params, angles_of(model.positions))
        self._weights = packed._replace(embedding=model.params["wte"])  # row by row
        self._tokens, self._lengths, self._starts = tokens, lengths, np.cumsum(lengths) - lengths

    def sum(self, worker: int, share: Array) -> tuple[float, Array]:
        """The sum of a worker's short sequences, and the others; places are in order of their lengths."""
        cut = int(np.searchsorted(self._lengths[share], self._most, side="right"))
        own, memory = share[:cut], self._memory[worker]
        starts, lengths = self._starts[own], self._lengths[own]
        total = losses.sum_losses(self._kind, self._weights, self._tokens, starts, lengths, memory)
        return total, share[cut:]
