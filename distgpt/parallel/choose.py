"""From the settings to a strategy: which component places, cuts and sums. Only these are imported."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from distgpt.components import MICRO_BATCHES, PLACEMENTS, UNNAMED_EXCHANGES
from distgpt.core.base.errors import Say, UsageError
from distgpt.core.base.tables import imported, paths_in
from distgpt.core.comm.agree import on_every_rank, refuse_anywhere
from distgpt.core.comm.api import Comm
from distgpt.core.config import TrainConfig
from distgpt.core.model.model import Model
from distgpt.core.ops.kernels import Kernels
from distgpt.core.train.sharing import Exchange, MicroBatches, OptimizerState, Placement, Start, Strategy
from distgpt.parallel.node_memory import gradients_in_node

WITHOUT_THREADS = (
    "--grad-sync overlapped needs an MPI with MPI_THREAD_MULTIPLE, which this one does not grant"
)
WITHOUT_NCCL = (
    "--grad-sync overlapped on GPUs needs NCCL (pip install nvidia-nccl-cu13, or -cu12), a GPU for every rank"
    " and --allreduce auto or nccl"
)

MakeExchange = Callable[[Comm, OptimizerState, TrainConfig, Say], Exchange]
MakeMicroBatches = Callable[[TrainConfig, int, int, Model, Start | None], MicroBatches]


class Chosen(Strategy):
    """The strategy that the settings ask for. "" is the name of a plain part."""

    def __init__(self, config: TrainConfig, ranks: int) -> None:
        place: type[Placement] = Placement
        if name := placement_name(config, ranks):
            place = imported(PLACEMENTS[name], f"the placement {name!r}")
        super().__init__(config, ranks, place(config, ranks))
        self._micro_batches, self._exchange = micro_batches_name(config, ranks), exchange_name(config, ranks)
        if config.reproducible_parts:
            self.count, self.counted_by = config.reproducible_parts // ranks, "--reproducible-parts"

    def names(self) -> list[str]:
        placement, micro_batches, exchange = super().names()
        return [placement, self._micro_batches or micro_batches, self._exchange or exchange]

    def micro_batches(
        self, t: TrainConfig, rank: int, model: Model, start: Start | None = None
    ) -> MicroBatches:
        if not self._micro_batches:
            return super().micro_batches(t, rank, model, start)
        make: MakeMicroBatches = imported(MICRO_BATCHES[self._micro_batches], self._micro_batches)
        return make(t, self.ranks, rank, model, start)

    def make_gradients(self, comm: Comm, model: Model, say: Say) -> None:
        if self._shares_memory(comm.size == comm.local_size, model.kernels):
            model.make_gradients(partial(gradients_in_node, comm, model.kernels, say))
        else:
            super().make_gradients(comm, model, say)

    def _shares_memory(self, on_one_node: bool, kernels: Kernels) -> bool:
        """Return whether ranks of a node, if there are several, sum in memory that they share."""
        t = self.config
        if self.ranks == 1 or kernels.capabilities.is_async or t.grad_sync != "allreduce":
            return False
        return t.gradient_dtype == "float32" if on_one_node else not t.reproducible_parts

    def exchange(self, comm: Comm, state: OptimizerState, t: TrainConfig, say: Say) -> Exchange:
        return exchange_for(comm, state, t, say)

    def refuse_unmeasurable(self) -> None:
        if self._micro_batches == "balanced":
            raise UsageError("--balance auto is for training: ranks are measured with even shares")

    def refuse_unable(self, comm: Comm, on_gpu: bool) -> None:
        refuse_anywhere(comm, _lacking(self.config, comm, on_gpu) if comm.size > 1 else "")
        if self._exchange:
            on_every_rank(comm, lambda: _maker(self._exchange))

    def reserve(self, comm: Comm, model: Model, t: TrainConfig) -> None:
        wire = model.kernels.wire  # with NCCL, shards of float32 are summed without this memory
        if wire and self.ranks > 1 and (t.gradient_dtype != "float32" or self._exchange == "sharded"):
            from distgpt.parallel.reductions import ReduceScatterGather

            ReduceScatterGather(comm, model.grads.flat, t.gradient_dtype, 0, wire)

    def rehearse(self, model: Model) -> None:
        super().rehearse(model)
        if model.kernels.capabilities.is_async:
            return
        if self._exchange:
            from distgpt.parallel.reductions import rehearse_reductions

            rehearse_reductions(model.kernels, self.config.gradient_dtype)
        if self.ranks > 1 and self.config.grad_sync == "allreduce":
            from distgpt.parallel.reductions import rehearse_shared_sum

            rehearse_shared_sum(model.kernels)
        if self.config.reproducible_parts:
            from distgpt.parallel.reproducible import rehearse_tree

            rehearse_tree(model.kernels)


def exchange_for(comm: Comm, state: OptimizerState, t: TrainConfig, say: Say) -> Exchange:
    """Return the exchange that `t` asks for. Collective."""
    if comm.size == 1:
        return Exchange()
    return _maker(exchange_name(t, comm.size) or "in parts")(comm, state, t, say)


def _maker(name: str) -> MakeExchange:
    """Import what makes an exchange."""
    make: MakeExchange = imported(exchanges()[name], f"--grad-sync {name}")
    return make


def placement_name(t: TrainConfig, ranks: int) -> str:
    """Return a name of PLACEMENTS, "" for replicas."""
    if ranks == 1:
        return ""
    if t.outer_every:
        return "local steps"
    return "sharded" if t.grad_sync == "sharded" else ""


def micro_batches_name(t: TrainConfig, ranks: int) -> str:
    """Return a name of MICRO_BATCHES, "" for even parts that the backward pass adds up."""
    if t.reproducible_parts:
        return "reproducible parts"
    return "balanced" if t.balance == "auto" and ranks > 1 else ""


def exchange_name(t: TrainConfig, ranks: int) -> str:
    """Return a name in `exchanges`, "" for one Allreduce of everything as it lies in memory."""
    if ranks == 1:
        return ""
    if t.outer_every:
        return "local steps"
    if t.grad_sync != "allreduce":
        return t.grad_sync
    return "in parts" if t.gradient_dtype != "float32" or t.reproducible_parts else ""


def exchanges() -> dict[str, str]:
    """Return where each exchange lies, but for those of one call."""
    return {**UNNAMED_EXCHANGES, **paths_in("exchanges")}


def _lacking(t: TrainConfig, comm: Comm, on_gpu: bool) -> str:
    """Return what this job's MPI or NCCL lacks for such an exchange; "" if nothing."""
    if t.grad_sync == "overlapped" and on_gpu:
        return "" if comm.queued else WITHOUT_NCCL
    if t.grad_sync == "overlapped":
        return "" if comm.is_threadsafe else WITHOUT_THREADS
    return ""
