"""Random input tokens, against overfitting on a text that is read many times."""

from __future__ import annotations

from typing import Self

import numpy as np

from distgpt.core.config import RunConfig
from distgpt.core.data.batches import GOLDEN, Batches, Sequences, Tokens, mixed, seeded_hashes

SALT = 0x6E6F697365  # so that the noise does not depend on the order of the windows
BITS = 24  # of a token's hash that decide whether it is replaced; the others, by which token


class NoisyBatches(Batches):
    """Batches in which input tokens are replaced by tokens at random positions of their sequence.

    Targets stay. The noise of a sequence depends only on the seed and the sequence's number in the run.
    """

    noise = 0.0  # fraction of input tokens

    @classmethod
    def of_run(cls, tokens: Tokens, run: RunConfig) -> Self:
        result = super().of_run(tokens, run)
        result.noise = run.train.input_noise
        return result

    def fill(
        self,
        step: int,
        which: slice,
        x_out: Sequences,
        y_out: Sequences,
        positions_out: Sequences | None = None,
    ) -> None:
        super().fill(step, which, x_out, y_out, positions_out)
        keys = seeded_hashes(self._seed ^ SALT, self._numbers_of(step, which))
        hashes = mixed(keys[:, None] + np.arange(self.seq_len, dtype=np.uint64) * np.uint64(GOLDEN))
        is_replaced = hashes >> np.uint64(64 - BITS) < self.noise * (1 << BITS)
        others = (hashes % np.uint64(self.seq_len)).astype(np.int64)
        x_out[...] = np.where(is_replaced, np.take_along_axis(x_out, others, 1), x_out)
