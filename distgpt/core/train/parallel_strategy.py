"""Parallel training: the assignment of sequences and weights to ranks, and the sums between them.

The default is data parallelism. Every rank has a copy of the model and an equal part of the batch, and one
Allreduce sums the gradients after the backward pass. Each interface below implements this default. Other
methods (`parallel/`) are subclasses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

from distgpt.core.base.errors import Say
from distgpt.core.comm.agree import on_root
from distgpt.core.comm.api import Comm
from distgpt.core.components import components
from distgpt.core.config import TrainConfig
from distgpt.core.data.batches import rank_sequences
from distgpt.core.model.memory import FlatBuffer, Layout
from distgpt.core.model.model import Model
from distgpt.core.model.optim import AdamW
from distgpt.core.model.passes import Ready
from distgpt.core.ops.api import Array
from distgpt.core.saved.checkpoint import State, load_group
from distgpt.core.saved.modelfile import fill
from distgpt.core.saved.tensors import Tensors
from distgpt.core.train.progress import Rounds

WEIGHTS, OPTIMIZER = "weights", "optimizer"  # stems of a checkpoint's files

Groups = dict[str, Mapping[str, Array]]  # the stem of a checkpoint's file → its tensors


class MicroBatches:
    """Equal parts of the batch, whose gradients accumulate.

    micro.sequences_of(rank, i)  # of the global batch, in micro-batch i of a rank
    micro.collect(i)             # after the backward pass
    """

    accumulates = True  # whether the backward pass adds to the previous micro-batch's gradients
    shares: list[int] | None = None  # sequences per rank, if a checkpoint must store them
    hosts = 0  # a checksum of the hosts that these shares are for

    def __init__(self, config: TrainConfig, ranks: int) -> None:
        """`config.grad_accum` must be resolved (memory.py)."""
        self.count = config.grad_accum or 1
        self.n_sequences = config.batch_size // (self.count * ranks)  # of this rank in a micro-batch
        # Weight of one micro-batch's mean, so that their sum is the mean over this rank's sequences.
        # `GradientSync.scales` then gives the mean over ranks.
        self.weight = 1 / self.count
        self._batch_size = config.batch_size
        self._ranks = ranks

    def sequences_of(self, rank: int, i: int) -> slice:
        """Return the sequences of a rank's micro-batch, as a slice of the global batch."""
        return rank_sequences(self._batch_size, rank, self._ranks, i, self.count)

    def collect(self, i: int) -> None:
        """Move a micro-batch's gradients out of the buffer, if they are summed in another order."""


class Scales(NamedTuple):
    """Factors that turn sums over ranks into means over the tokens that count.

    They differ only if ranks sum the loss and the norm, but no gradients (`parallel/local_steps.py`).
    """

    loss: float
    gradients: float
    norm: float  # applies to the square root of `optimizer.norm`


class GradientSync:
    """Gradient exchange of a single rank, which sums nothing. Base class for multiple ranks.

    All methods except `scales` and the callback `ready` are collective.
    """

    name = "alone"  # shown in the summary: the value of --grad-sync, or the method it resolved to
    # Called in the backward pass; None: no communication there. A recorded pass calls it only while
    # recording, so work for each replay must use `Kernels.between`.
    ready: Ready | None = None
    waits_after_update = False  # whether `after_update` waits for other ranks
    mean_factor = 1.0  # turns a sum over ranks into a mean
    saved: Mapping[str, Array] = {}  # this rank's arrays to save in checkpoints, such as residuals

    def before_backward(self, step: int) -> None:
        """Prepare for the last backward pass of a step."""

    def sum_gradients(self, step: int) -> None:
        """Replace this rank's gradients, the loss and the flags after them by their sums."""

    def scales(self, counted: float) -> Scales:
        """Return the scales of a step. `counted`: the fraction of targets in the batch that count.

        The optimizer applies the scale in its only pass over the gradients.
        """
        mean = self.mean_factor / counted
        return Scales(mean, mean, mean)

    def compute_norm(self, optimizer: AdamW) -> None:
        """Compute optimizer.norm ← Σ g² over all summed gradients."""
        optimizer.compute_norm()

    def after_update(self, step: int, is_changed: bool) -> None:
        """Send the weights that this rank has updated to the ranks that need them."""

    def end_round(self, step: int) -> None:
        """Make the weights the same on all ranks after `step` steps, if local steps have changed them."""


class Reduction(Protocol):
    """A sum over ranks of elements start to stop of the flat buffer."""

    name: str = "allreduce"  # the name of an exchange with only this reduction

    def sum(self, start: int, stop: int, step: int) -> None:
        """Replace the elements by their sum over ranks. `step` seeds random rounding. Collective."""


class Allreduce(Reduction):
    """One Allreduce over the whole range, or one per piece."""

    def __init__(self, comm: Comm, flat: Array, piece: int = 0) -> None:
        """`piece`: maximum elements per call; 0: all."""
        self._comm, self._flat, self._piece = comm, flat, piece or len(flat)

    def sum(self, start: int, stop: int, step: int) -> None:
        for begin in range(start, stop, self._piece):
            self._comm.sum(self._flat[begin : min(begin + self._piece, stop)])


class SyncAfterBackward(GradientSync):
    """One reduction of the whole flat buffer; then every rank updates all weights."""

    def __init__(
        self, name: str, reduction: Reduction, size: int, sum_flags: Callable[[], None], mean_factor: float
    ) -> None:
        """`reduction` sums the first `size` elements of the flat buffer, `sum_flags` the rest.

        The default reduction sums all elements. A reduction that rounds gradients must not round loss and
        flags.
        """
        self.name = name
        self._size = size
        self._sum_votes = sum_flags
        self._reduction = reduction
        self.mean_factor = mean_factor

    def sum_gradients(self, step: int) -> None:
        self._reduction.sum(0, self._size, step)
        self._sum_votes()


class Strategy:
    """The assignment of sequences, weights and gradients to ranks."""

    def __init__(self, config: TrainConfig, ranks: int) -> None:
        self.config, self.ranks = config, ranks
        self.count = 0  # micro-batches per step, if neither memory nor --grad-accum decides
        self.counted_by = ""  # the option that decides
        self.placement = Placement(config, ranks)

    def micro_batches(
        self, t: TrainConfig, rank: int, model: Model, start: Start | None = None
    ) -> MicroBatches:
        """Return a rank's micro-batches. Collective with `start`; without it, equal ones to estimate memory.

        `t` has automatic values resolved.
        """
        return MicroBatches(t, self.ranks)

    def make_gradients(self, comm: Comm, model: Model, say: Say) -> None:
        """Allocate this rank's gradients. Collective."""
        model.make_gradients()

    def refuse_unable(self, comm: Comm, on_gpu: bool) -> None:
        """Raise a UsageError on all ranks if this job's MPI lacks a required feature. Collective."""

    def reserve(self, comm: Comm, model: Model, t: TrainConfig) -> None:
        """Allocate an exchange's GPU memory, for the memory estimate."""

    def warmup_pass(self, model: Model) -> None:
        """Compile every loop of placement, micro-batches and exchange, with a small model."""
        self.placement.warmup_pass(model)


def allreduce(comm: Comm, state: OptimizerState, t: TrainConfig, say: Say) -> GradientSync:
    """Return an exchange with one Allreduce of the whole buffer, including loss and flags."""
    if comm.size == 1:
        return GradientSync()
    whole = state.optimizer.model.grads.with_flags
    return SyncAfterBackward("allreduce", Allreduce(comm, whole), len(whole), lambda: None, 1.0 / comm.size)


@dataclass(frozen=True, slots=True)
class Start:
    """Facts about a starting run, for micro-batches."""

    comm: Comm
    threads: int | None
    state: State  # state of the checkpoint it starts from
    say: Say


class Placement:
    """Every rank holds all weights and moments. Created before the model and the clock."""

    option = ""  # the option that selects this placement
    may_copy = True  # whether rank 0 can save from a copy, because it holds all saved tensors

    def __init__(self, config: TrainConfig, ranks: int) -> None:
        self.config, self.ranks = config, ranks
        self.rounds = Rounds()

    def own(self, layout: Layout, rank: int) -> slice | None:
        """Return the elements that a rank updates; None: all."""
        return None

    def state(self, model: Model, rank: int) -> OptimizerState:
        """Return the optimizer state of one rank."""
        return OptimizerState(self.optimizer(model, rank=rank, ranks=self.ranks))

    def optimizer(self, model: Model, own: slice | None = None, rank: int = 0, ranks: int = 1) -> AdamW:
        return components().optimizer(self.config)(model, self.config, own, rank, ranks)

    def saved_buffers(self, is_common: bool) -> int:
        """Return the number of weight-sized buffers in a checkpoint: weights and both moments.

        `is_common`: after a step that ends a round.
        """
        return 3

    def warmup_pass(self, model: Model) -> None:
        """Compile the loops that place weights, with a small model."""


class OptimizerState:
    """The weights and moments of one rank: initialization, saving and loading."""

    def __init__(self, optimizer: AdamW) -> None:
        self.optimizer = optimizer

    def load_weights(self, comm: Comm, read: Callable[[Tensors], None]) -> None:
        """Read weights on rank 0 and distribute each rank's part. Collective."""
        model = self.optimizer.model
        fill(comm, model, {"": model.weights}, read)

    def begin(self) -> None:
        """Initialize moments before the first step. The weights are already loaded."""
        for moment in (self.optimizer.m, self.optimizer.v):
            self.optimizer.model.kernels.zero(moment.flat)

    def restore(self, comm: Comm, checkpoint: Path) -> None:
        """Load moments from a verified checkpoint, after its weights. Collective."""
        moments = whole_moments(self.optimizer)
        fill(comm, self.optimizer.model, moments, partial(load_group, checkpoint, OPTIMIZER))

    def gathering(self, comm: Comm) -> StateGatherer:
        """Return the gatherer that collects weights and moments on rank 0 for saving."""
        return StateGatherer(comm)


def whole_moments(optimizer: AdamW) -> dict[str, FlatBuffer]:
    """Return moments by name prefix, or nothing if this rank holds only a part."""
    moments = {"m/": optimizer.m, "v/": optimizer.v}
    return {prefix: moment for prefix, moment in moments.items() if isinstance(moment, FlatBuffer)}


class StateGatherer:
    """Collects tensors to save on rank 0. In this default, rank 0 already has all."""

    has_all = True  # whether rank 0 can save without the other ranks

    def __init__(self, comm: Comm) -> None:
        self._comm = comm

    def groups(self, weights_alone: bool) -> Groups:
        """Return files of a checkpoint, or only of weights, that replace this rank's. For rank 0."""
        return {}

    def on_root(self, act: Callable[[], None]) -> None:
        """Call act() on rank 0 as `agree.on_root` does; `act` may use the tensors. Collective."""
        on_root(self._comm, act)
