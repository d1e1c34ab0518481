"""Micro-batches: the rows of the global batch that a rank takes at once, and how their gradients add up."""

from __future__ import annotations

from distgpt.core.config import TrainConfig
from distgpt.core.data.batches import rank_rows


class MicroBatches:
    """Even parts of the batch. The gradients of each are added to those of the ones before it.

    micro.rows(rank, i)     # of the global batch, in micro-batch i of a rank
    micro.adds(i)           # whether the backward pass adds to the gradients that are there
    micro.done(i)           # after the backward pass
    """

    name = "even"
    shares: list[int] | None = None  # sequences of each rank, if a checkpoint has to keep them
    hosts = 0  # a checksum of the hosts that these shares are for

    def __init__(self, config: TrainConfig, ranks: int) -> None:
        """`config.grad_accum` is resolved: no longer automatic."""
        self.count = config.grad_accum or 1
        self.sequences = config.batch_size // (self.count * ranks)  # of this rank in one of them
        # Gradients are the mean over this rank's rows. The exchange makes the mean over the ranks.
        self.weight = self.sequences * ranks / config.batch_size
        self._batch_size, self._ranks = config.batch_size, ranks

    def rows(self, rank: int, i: int) -> slice:
        """Return the rows of a rank's micro-batch."""
        return rank_rows(self._batch_size, rank, self._ranks, i, self.count)

    def adds(self, i: int) -> bool:
        """Return whether gradients are added to those of the micro-batch before, or replace them."""
        return i > 0

    def done(self, i: int) -> None:
        """Take the gradients of a micro-batch from the buffer, if they are to be added in another order."""
