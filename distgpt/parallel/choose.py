"""Selects how ranks share a step. Only the code that the settings need is imported."""

from __future__ import annotations

from functools import partial

from distgpt.core.base.errors import Say, UsageError, reject_combination
from distgpt.core.comm.agree import raise_if_any
from distgpt.core.comm.api import Comm
from distgpt.core.config import TrainConfig
from distgpt.core.model.model import Model
from distgpt.core.train.parallel_strategy import (
    GradientSync,
    MicroBatches,
    OptimizerState,
    Placement,
    Start,
    Strategy,
)

WITHOUT_THREADS = "--grad-sync overlapped requires MPI_THREAD_MULTIPLE, which this MPI does not support"
WITHOUT_NCCL = (
    "--grad-sync overlapped on GPUs requires NCCL (pip install nvidia-nccl-cu13, or -cu12), a GPU per rank"
    " and --allreduce auto or nccl"
)


def placement(t: TrainConfig, ranks: int) -> Placement:
    """Return the assignment of weights and moments to ranks."""
    if ranks > 1 and t.outer_every:
        from distgpt.parallel.local_steps import LocalPlacement

        return LocalPlacement(t, ranks)
    if ranks > 1 and t.grad_sync == "sharded":
        from distgpt.parallel.sharded import ShardedPlacement

        return ShardedPlacement(t, ranks)
    return Placement(t, ranks)


def gradient_sync(comm: Comm, state: OptimizerState, t: TrainConfig, say: Say) -> GradientSync:
    """Return the exchange that sums the gradients over ranks. Collective."""
    if t.outer_every:
        from distgpt.parallel import local_steps

        return local_steps.make(comm, state, t)
    if t.grad_sync == "overlapped":
        from distgpt.parallel import overlapped

        return overlapped.make(comm, state.optimizer.model, t)
    if t.grad_sync == "sharded":
        from distgpt.parallel import sharded

        return sharded.make(comm, state.optimizer.model, t)
    from distgpt.parallel import reductions

    return reductions.make(comm, state.optimizer.model, t)


class Chosen(Strategy):
    """The strategy that the settings select."""

    def __init__(self, config: TrainConfig, ranks: int) -> None:
        super().__init__(config, ranks)
        self.placement = placement(config, ranks)
        if config.reproducible_parts:
            self.count, self.counted_by = config.reproducible_parts // ranks, "--reproducible-parts"

    def micro_batches(
        self, t: TrainConfig, rank: int, model: Model, start: Start | None = None
    ) -> MicroBatches:
        if t.reproducible_parts:
            from distgpt.parallel.reproducible import ReproducibleParts

            return ReproducibleParts(t, self.ranks, model)
        if t.balance == "auto" and self.ranks > 1 and start:  # memory is computed with even shares
            from distgpt.parallel.balance import balanced

            return balanced(t, self.ranks, rank, model, start)
        return MicroBatches(t, self.ranks)

    def make_gradients(self, comm: Comm, model: Model, say: Say) -> None:
        t, is_exact = self.config, self.config.gradient_dtype == "float32"
        sums_by_node = is_exact if comm.size == comm.local_size else not t.reproducible_parts
        on_cpus = self.ranks > 1 and not model.kernels.capabilities.is_async
        if on_cpus and t.grad_sync == "allreduce" and sums_by_node:
            from distgpt.parallel.node_memory import gradients_in_node

            model.make_gradients(partial(gradients_in_node, comm, model.kernels, say))
        else:
            super().make_gradients(comm, model, say)

    def refuse_unable(self, comm: Comm, on_gpu: bool) -> None:
        able, without = (comm.queued, WITHOUT_NCCL) if on_gpu else (comm.is_threadsafe, WITHOUT_THREADS)
        lacks = comm.size > 1 and self.config.grad_sync == "overlapped" and not able
        raise_if_any(comm, without if lacks else "")

    def reserve(self, comm: Comm, model: Model, t: TrainConfig) -> None:
        wire = model.kernels.wire  # NCCL sums float32 shards without this memory
        if wire and self.ranks > 1 and (t.gradient_dtype != "float32" or t.grad_sync == "sharded"):
            from distgpt.parallel.reductions import ReduceScatterGather

            ReduceScatterGather(comm, model.grads.flat, t.gradient_dtype, 0, wire)

    def warmup_pass(self, model: Model) -> None:
        super().warmup_pass(model)
        t = self.config
        if self.ranks > 1:
            from distgpt.parallel.node_memory import rehearse_shared_sum
            from distgpt.parallel.reductions import rehearse_reductions

            if t.grad_sync == "allreduce":
                rehearse_shared_sum(model.kernels)
            if t.grad_sync != "allreduce" or t.gradient_dtype != "float32" or t.reproducible_parts:
                rehearse_reductions(model.kernels, t.gradient_dtype)
        if t.reproducible_parts:
            from distgpt.parallel.reproducible import rehearse_tree

            rehearse_tree(model.kernels)


def check(t: TrainConfig, ranks: int, on_gpu: bool) -> None:
    """Raise a UsageError if the settings to share a step cannot be combined."""
    if t.reproducible_parts:
        from distgpt.parallel import reproducible

        reproducible.check(t, ranks, on_gpu)
    if ranks == 1:
        return
    others = {"deterministic (reproducible parts)": t.reproducible_parts}
    if t.outer_every:
        what = f"--outer-every {t.outer_every}"
        if t.grad_sync in ("overlapped", "sharded"):
            raise UsageError(
                f"{what} requires --grad-sync allreduce; {t.grad_sync} needs gradients every step"
            )
        reject_combination(what, others, "each rank has its own weights")
    if t.balance == "auto":
        reject_combination("--balance auto", {**others, "outer-every": t.outer_every}, "shares differ")
