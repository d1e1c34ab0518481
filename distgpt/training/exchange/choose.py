"""From the settings to a strategy: which component places, cuts and sums. Only these are imported."""

from __future__ import annotations

from collections.abc import Callable

from distgpt.comm.api import Comm
from distgpt.components import EXCHANGES, MICRO_BATCHES, PLACEMENTS, load
from distgpt.config import TrainConfig
from distgpt.errors import Say
from distgpt.model.model import Model
from distgpt.training.exchange.api import Exchange
from distgpt.training.micro_batches import MicroBatches
from distgpt.training.placement import OptimizerState, Placement
from distgpt.training.strategy import Start, Strategy

ONE_CALL = ("allreduce", "chunked")  # these send everything as it lies in memory, the loss with it

MakeExchange = Callable[[Comm, OptimizerState, TrainConfig, Say], Exchange]
MakeMicroBatches = Callable[[TrainConfig, int, int, Model, Start | None], MicroBatches]


class Chosen(Strategy):
    """The strategy that the settings ask for. "" is the name of a plain part."""

    def __init__(self, config: TrainConfig, ranks: int) -> None:
        place: type[Placement] = Placement
        if name := placement_name(config, ranks):
            place = load(PLACEMENTS[name])
        super().__init__(config, ranks, place(config, ranks))
        self._micro_batches, self._exchange = micro_batches_name(config, ranks), exchange_name(config, ranks)
        self.counted_by = "--reproducible-parts" if config.reproducible_parts else ""

    def names(self) -> list[str]:
        placement, micro_batches, exchange = super().names()
        return [placement, self._micro_batches or micro_batches, self._exchange or exchange]

    def fixed_count(self, t: TrainConfig) -> int:
        return t.reproducible_parts // self.ranks or super().fixed_count(t)

    def micro_batches(
        self, t: TrainConfig, rank: int, model: Model, start: Start | None = None
    ) -> MicroBatches:
        if not self._micro_batches:
            return super().micro_batches(t, rank, model, start)
        make: MakeMicroBatches = load(MICRO_BATCHES[self._micro_batches])
        return make(t, self.ranks, rank, model, start)

    def exchange(self, comm: Comm, state: OptimizerState, t: TrainConfig, say: Say) -> Exchange:
        return exchange_for(comm, state, t, say)

    def reserve(self, comm: Comm, model: Model, t: TrainConfig) -> None:
        count, wire = parts_made(t, self.ranks), model.kernels.wire
        if count and wire:
            from distgpt.training.exchange.reductions import ReduceScatterGather

            for _ in range(count):
                ReduceScatterGather(comm, model.grads.flat, t.gradient_dtype, 0, wire)

    def rehearse(self, model: Model) -> None:
        super().rehearse(model)
        if model.kernels.capabilities.is_async:
            return
        if self._exchange:
            from distgpt.training.exchange.reductions import rehearse_reductions

            rehearse_reductions(model.kernels, self.config.gradient_dtype)
        if self.config.reproducible_parts:
            from distgpt.training.exchange.reproducible import rehearse_tree

            rehearse_tree(model.kernels)


def exchange_for(comm: Comm, state: OptimizerState, t: TrainConfig, say: Say) -> Exchange:
    """Return the exchange that `t` asks for. `say` gets what --grad-sync auto has chosen. Collective."""
    name = exchange_name(t, comm.size)
    if not name:
        return Strategy(t, comm.size).exchange(comm, state, t, say)
    make: MakeExchange = load(EXCHANGES[name])
    return make(comm, state, t, say)


def placement_name(t: TrainConfig, ranks: int) -> str:
    """Return a name of PLACEMENTS, "" for replicas."""
    if ranks == 1:
        return ""
    return "local steps" if t.outer_every else "sharded" if t.grad_sync == "sharded" else ""


def micro_batches_name(t: TrainConfig, ranks: int) -> str:
    """Return a name of MICRO_BATCHES, "" for even parts that the backward pass adds up."""
    if t.reproducible_parts:
        return "reproducible parts"
    return "balanced" if t.balance == "auto" and ranks > 1 else ""


def exchange_name(t: TrainConfig, ranks: int) -> str:
    """Return a name of EXCHANGES, "" for one Allreduce of everything as it lies in memory."""
    if ranks == 1:
        return ""
    if t.outer_every:
        return "local steps"
    if t.grad_sync not in ONE_CALL:
        return t.grad_sync
    return "in parts" if t.gradient_dtype != "float32" or t.reproducible_parts else ""


def parts_made(t: TrainConfig, ranks: int) -> int:
    """Return how many `ReduceScatterGather` a rank may have on a GPU at once; with NCCL it may have fewer."""
    name = exchange_name(t, ranks)
    if not name or (t.gradient_dtype == "float32" and not t.reproducible_parts):
        return int(name == "sharded")
    return 2 if name == "auto" else 1
