"""How ranks share a step: who computes which sequences, what is summed when, and who holds which weights.

The plain way is data parallelism: every rank has a replica of the model and takes an even part of the
batch, and an Allreduce sums the gradients after the backward pass. Each contract below is that plain way;
the other ways (`parallel/`) are derived from it.
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
    """Even parts of the batch. The gradients of each are added to those of the ones before it.

    micro.sequences_of(rank, i)  # of the global batch, in micro-batch i of a rank
    micro.collect(i)             # after the backward pass
    """

    accumulates = True  # whether the backward pass adds to the gradients of the micro-batch before
    shares: list[int] | None = None  # sequences of each rank, if a checkpoint has to keep them
    hosts = 0  # a checksum of the hosts that these shares are for

    def __init__(self, config: TrainConfig, ranks: int) -> None:
        """`config.grad_accum` is known by now (memory.py)."""
        self.count = config.grad_accum or 1
        self.n_sequences = config.batch_size // (self.count * ranks)  # of this rank in one of them
        # Of the mean over one micro-batch: their sum is then the mean over this rank's sequences, of which
        # `Exchange.scales` makes the mean over ranks.
        self.weight = 1 / self.count
        self._batch_size = config.batch_size
        self._ranks = ranks

    def sequences_of(self, rank: int, i: int) -> slice:
        """Return the sequences of a rank's micro-batch."""
        return rank_sequences(self._batch_size, rank, self._ranks, i, self.count)

    def collect(self, i: int) -> None:
        """Take the gradients of a micro-batch from the buffer, if they are to be added in another order."""


class Scales(NamedTuple):
    """Factors of what the ranks have summed: they make means over the tokens that count.

    They differ only where ranks sum the loss and the norm, but no gradients (`parallel/local_steps.py`).
    """

    loss: float
    gradients: float
    norm: float  # of the square root of `optimizer.norm`


class Exchange:
    """The exchange of a rank that is alone: it sums nothing. Those of several ranks are derived from it.

    All calls but `ready` and `scales` are collective.
    """

    name = "alone"  # for the summary: the value of --grad-sync, or the way that it came down to
    # Called in the backward pass; None: nothing is sent meanwhile. A recorded pass calls it while it is
    # recorded: what is to be done at each repetition, it hands to `Kernels.between`.
    ready: Ready | None = None
    waits_after_update = False  # whether `after_update` waits for other ranks
    mean_factor = 1.0  # makes the mean over ranks of their sum
    saved: Mapping[str, Array] = {}  # this rank's arrays that checkpoints hold, such as residuals

    def before_backward(self, step: int) -> None:
        """Prepare for the last backward pass of a step."""

    def sum_gradients(self, step: int) -> None:
        """Replace the gradients that this rank needs, and the loss and votes behind them, by their sums."""

    def scales(self, counted: float) -> Scales:
        """Return the scales of a step; `counted` is the fraction of the batch's targets that the loss counts.

        The optimizer takes the mean in its only pass over the gradients.
        """
        mean = self.mean_factor / counted
        return Scales(mean, mean, mean)

    def compute_norm(self, optimizer: AdamW) -> None:
        """Compute optimizer.norm ← Σ g² of all summed gradients."""
        optimizer.compute_norm()

    def after_update(self, step: int, is_changed: bool) -> None:
        """Send the weights that this rank has updated to those that need them."""

    def end_round(self, step: int) -> None:
        """Give all ranks the same weights after `step` steps, where their own steps have parted them."""


class Reduction(Protocol):
    """Sums elements start … stop of the flat buffer."""

    name: str = "allreduce"  # of an exchange by it alone

    def sum(self, start: int, stop: int, step: int) -> None:
        """Replace these elements by their sum over ranks. `step` seeds random rounding. Collective."""


class Allreduce(Reduction):
    """One Allreduce over the whole stretch, or one for each piece of it."""

    def __init__(self, comm: Comm, flat: Array, piece: int = 0) -> None:
        """`piece`: its elements, at most; 0: all."""
        self._comm, self._flat, self._piece = comm, flat, piece or len(flat)

    def sum(self, start: int, stop: int, step: int) -> None:
        for begin in range(start, stop, self._piece):
            self._comm.sum(self._flat[begin : min(begin + self._piece, stop)])


class AfterBackward(Exchange):
    """One reduction of the whole flat buffer; every rank then updates all weights."""

    def __init__(
        self, name: str, reduction: Reduction, size: int, sum_votes: Callable[[], None], mean_factor: float
    ) -> None:
        """`reduction` sums the first `size` elements of the flat buffer, `sum_votes` those after them.

        The plain reduction sums all. One that rounds gradients on their way must not round loss and votes.
        """
        self.name = name
        self._size = size
        self._sum_votes = sum_votes
        self._reduction = reduction
        self.mean_factor = mean_factor

    def sum_gradients(self, step: int) -> None:
        self._reduction.sum(0, self._size, step)
        self._sum_votes()


class Strategy:
    """Who computes which sequences, and holds which weights and gradients."""

    def __init__(self, config: TrainConfig, ranks: int) -> None:
        self.config, self.ranks = config, ranks
        self.count = 0  # micro-batches of a step, where neither memory nor --grad-accum decides how many
        self.counted_by = ""  # the option that does
        self.placement = Placement(config, ranks)

    def micro_batches(
        self, t: TrainConfig, rank: int, model: Model, start: Start | None = None
    ) -> MicroBatches:
        """Return the micro-batches of a rank. Collective with `start`; without, even ones to count memory.

        `t`: the settings with automatic values resolved.
        """
        return MicroBatches(t, self.ranks)

    def make_gradients(self, comm: Comm, model: Model, say: Say) -> None:
        """Make the memory for this rank's gradients. Collective."""
        model.make_gradients()

    def refuse_unable(self, comm: Comm, on_gpu: bool) -> None:
        """Raise on all ranks a UsageError about what this job's MPI cannot do. Collective."""

    def reserve(self, comm: Comm, model: Model, t: TrainConfig) -> None:
        """Allocate what an exchange of this model allocates on a GPU, to be counted."""

    def rehearse(self, model: Model) -> None:
        """Compile every loop that placement, micro-batches and exchange may call, with a small model."""
        self.placement.rehearse(model)


def allreduce(comm: Comm, state: OptimizerState, t: TrainConfig, say: Say) -> Exchange:
    """Return the exchange by one Allreduce of everything as it lies in memory, the loss and votes with it."""
    if comm.size == 1:
        return Exchange()
    whole = state.optimizer.model.grads.with_flags
    return AfterBackward("allreduce", Allreduce(comm, whole), len(whole), lambda: None, 1.0 / comm.size)


@dataclass(frozen=True, slots=True)
class Start:
    """Facts that micro-batches may need of a run that starts."""

    comm: Comm
    threads: int | None
    state: State  # of the checkpoint from which it starts
    say: Say


class Placement:
    """Every rank holds all weights and moments. Made from the settings before model and clock."""

    option = ""  # that asks for it
    may_copy = True  # whether rank 0 can save from a copy in its memory: it holds everything that is saved

    def __init__(self, config: TrainConfig, ranks: int) -> None:
        self.config, self.ranks = config, ranks
        self.rounds = Rounds()

    def own(self, layout: Layout, rank: int) -> slice | None:
        """Return the elements that a rank updates; None: all."""
        return None

    def state(self, model: Model, rank: int) -> OptimizerState:
        """Return the state of the optimizer that one rank keeps."""
        return OptimizerState(self.optimizer(model, rank=rank, ranks=self.ranks))

    def optimizer(self, model: Model, own: slice | None = None, rank: int = 0, ranks: int = 1) -> AdamW:
        return components().optimizer(self.config)(model, self.config, own, rank, ranks)

    def saved_buffers(self, is_common: bool) -> int:
        """Return how many buffers of the weights' size a checkpoint holds: weights and both moments.

        `is_common`: after a step that ends a round.
        """
        return 3

    def rehearse(self, model: Model) -> None:
        """Compile the loops by which weights are placed, with a small model."""


class OptimizerState:
    """The weights and moments that one rank keeps: before the first step, and from and to a checkpoint."""

    def __init__(self, optimizer: AdamW) -> None:
        self.optimizer = optimizer

    def load_weights(self, comm: Comm, read: Callable[[Tensors], None]) -> None:
        """Let rank 0 read weights, of which each rank gets what it keeps. Collective."""
        model = self.optimizer.model
        fill(comm, model, {"": model.weights}, read)

    def begin(self) -> None:
        """Bring moments into their state before the first step. The weights are there."""
        for moment in (self.optimizer.m, self.optimizer.v):
            self.optimizer.model.kernels.zero(moment.flat)

    def restore(self, comm: Comm, checkpoint: Path) -> None:
        """Fill moments from a verified checkpoint, whose weights are there. Collective."""
        moments = whole_moments(self.optimizer)
        fill(comm, self.optimizer.model, moments, partial(load_group, checkpoint, OPTIMIZER))

    def gathering(self, comm: Comm) -> Gathering:
        """Return what brings weights and moments to rank 0, which saves them."""
        return Gathering(comm)


def whole_moments(optimizer: AdamW) -> dict[str, FlatBuffer]:
    """Return moments by what their names in a file begin with; none where this rank has a part of them."""
    moments = {"m/": optimizer.m, "v/": optimizer.v}
    return {prefix: moment for prefix, moment in moments.items() if isinstance(moment, FlatBuffer)}


class Gathering:
    """Brings to rank 0 what is to be saved: it has everything already."""

    has_all = True  # whether rank 0 can save without the others

    def __init__(self, comm: Comm) -> None:
        self._comm = comm

    def groups(self, weights_alone: bool) -> Groups:
        """Return files of a checkpoint, or only of weights, to write in place of this rank's. For rank 0."""
        return {}

    def on_root(self, act: Callable[[], None]) -> None:
        """Call act() on rank 0 as `agree.on_root` does, while `act` may use the tensors. Collective."""
        on_root(self._comm, act)
