"""Strategy: how ranks share a step. Placement, micro-batches and exchange, chosen once from the settings.

The plain strategy is data parallelism: every rank has a replica of the model and takes an even part of the
batch, and an Allreduce sums the gradients after the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from distgpt.core.base.errors import Say, UsageError
from distgpt.core.comm.agree import gather_bytes, named_ranks, ranks_by_text, shared
from distgpt.core.comm.api import Comm
from distgpt.core.config import TrainConfig
from distgpt.core.model.model import Model
from distgpt.core.train.exchange import AfterBackward, Allreduce, Exchange
from distgpt.core.train.micro_batches import MicroBatches
from distgpt.core.train.placement import OptimizerState, Placement


@dataclass(frozen=True, slots=True)
class Start:
    """Answers that micro-batches may need of a run that starts. All calls are collective."""

    comm: Comm
    threads: int | None
    known: Callable[[int], list[int] | None]  # (hosts): the shares of the checkpoint, if from these hosts
    fits: Callable[[Sequence[int]], bool]  # (shares): whether each rank has memory for its share
    say: Say


class Strategy:
    """Makes what a step needs to share its work with other ranks."""

    def __init__(self, config: TrainConfig, ranks: int, placement: Placement | None = None) -> None:
        self.config, self.ranks = config, ranks
        self.counted_by = ""  # an option that decides how many micro-batches a step has, instead of memory
        self.placement = placement or Placement(config, ranks)

    def names(self) -> list[str]:
        """Return the names of all that was chosen, on which ranks have to agree."""
        return [self.placement.name, MicroBatches.name, self.config.grad_sync]

    def fixed_count(self, t: TrainConfig) -> int:
        """Return the micro-batches of a step, where memory does not decide how many; else 0."""
        return t.grad_accum

    def micro_batches(
        self, t: TrainConfig, rank: int, model: Model, start: Start | None = None
    ) -> MicroBatches:
        """Return the micro-batches of a rank. Collective with `start`; without, even ones to count memory.

        `t`: the settings with automatic values resolved.
        """
        return MicroBatches(t, self.ranks)

    def exchange(self, comm: Comm, state: OptimizerState, t: TrainConfig, say: Say) -> Exchange:
        """Return the exchange. Collective."""
        if comm.size == 1:
            return Exchange()
        whole = state.optimizer.model.grads.with_flags  # as it lies in memory: the loss and flags with it
        reduction = Allreduce(comm, whole, chunked=t.grad_sync == "chunked")
        return AfterBackward(t.grad_sync, reduction, len(whole), lambda: None, 1.0 / comm.size)

    def refuse_unmeasurable(self) -> None:
        """Raise a UsageError where only a run that trains finds out how ranks share their work."""

    def refuse_unable(self, comm: Comm, on_gpu: bool) -> None:
        """Raise on all ranks a UsageError about what this job's MPI cannot do. Collective."""

    def reserve(self, comm: Comm, model: Model, t: TrainConfig) -> None:
        """Allocate what an exchange of this model allocates on a GPU, to be counted."""

    def rehearse(self, model: Model) -> None:
        """Compile every loop that placement, micro-batches and exchange may call, with a small model."""
        self.placement.rehearse(model)


Choose = Callable[[TrainConfig, int], Strategy]  # (settings, number of ranks)


def agree_on_strategy(comm: Comm, strategy: Strategy) -> None:
    """Refuse to start if ranks have chosen differently: they would wait for each other. Collective."""
    mine = ", ".join(strategy.names())
    owners = ranks_by_text(name.decode() for name in gather_bytes(comm, mine.encode()))
    if len(owners) > 1:
        found = "; ".join(f"{named_ranks(ranks)}: {names}" for names, ranks in owners.items())
        raise shared(UsageError(f"ranks share a step in different ways: {found}; start all alike"))
