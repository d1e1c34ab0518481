"""Bitwise identical results on any number of ranks: gradients of fixed parts of the batch, added in a fixed
tree.

Part u has rows u·B/U … of the global batch, on any rank. Two neighbors are added, then pairs of neighbors,
and so on: first within each rank, which has a whole branch of the tree, then across ranks.
"""

from __future__ import annotations

from distgpt.core.base.errors import UsageError
from distgpt.core.base.formatting import count
from distgpt.core.config import TrainConfig
from distgpt.core.data.batches import rank_sequences
from distgpt.core.model.memory import FlatBuffer, Layout, Spec
from distgpt.core.model.model import Model
from distgpt.core.ops.kernels import Kernels
from distgpt.core.train.parallel_strategy import MicroBatches
from distgpt.parallel.node_memory import LINE, spread


class Tree:
    """Adds up the parts of one rank. Their gradients arrive one by one in the same memory."""

    def __init__(self, grads: FlatBuffer, kernels: Kernels, parts: int) -> None:
        self._sums = grads.with_flags[: grads.layout.size + 1]  # gradients, and the loss
        self._kernels, self._parts = kernels, parts
        self._branches = kernels.accum_zeros(parts.bit_length() - 1, len(self._sums))

    def add(self, part: int) -> None:
        """Add the gradients of a part, counted from 0. After the last part the buffer has the total."""
        from distgpt.parallel.loops import sums

        level = ((part + 1) & -(part + 1)).bit_length() - 1  # branches that end with this part
        out = self._sums if part == self._parts - 1 else self._branches[level]
        k = self._kernels
        spread(len(out), k.each, k.threads, sums.join, out, self._sums, self._branches[:level])


class ReproducibleParts(MicroBatches):
    """Each micro-batch is one part of the batch. The tree adds their gradients, not the backward pass."""

    accumulates = False

    def __init__(self, config: TrainConfig, ranks: int, model: Model) -> None:
        super().__init__(config, ranks)
        self._parts = config.reproducible_parts
        self.weight = 1 / self._parts  # already the mean over all ranks, so the sum needs no factor
        is_single = self._parts <= ranks  # a rank has one part, and nothing to add
        self._tree = None if is_single else Tree(model.grads, model.kernels, self.count)

    def sequences_of(self, rank: int, i: int) -> slice:
        # A rank has neighboring parts, a whole branch of the tree.
        return rank_sequences(self._batch_size, rank * self.count + i, self._parts, 0, 1)

    def collect(self, i: int) -> None:
        if self._tree:
            self._tree.add(i)


def rehearse_tree(kernels: Kernels) -> None:
    """Compile the loop that adds up the parts."""
    Tree(FlatBuffer(Layout([Spec("w", (LINE,))]), kernels.accum_zeros, flags=1), kernels, 1).add(0)


def usual_parts(batch_size: int) -> int:
    """Return the largest of 8, 4, 2 and 1 that divides the batch."""
    return next(parts for parts in (8, 4, 2, 1) if batch_size % parts == 0)


def check(t: TrainConfig, ranks: int, on_gpu: bool) -> None:
    """Raise a UsageError if the settings or ranks do not allow bitwise identical results."""
    parts, what = t.reproducible_parts, f"--deterministic, with {count(t.reproducible_parts, 'part')},"
    if on_gpu:
        raise UsageError(
            "--reproducible-parts requires a CPU stage; on GPUs, --deterministic makes runs bitwise identical"
        )
    if parts & (parts - 1):
        raise UsageError(f"--reproducible-parts ({parts}) must be a power of 2")
    if t.batch_size % parts:
        raise UsageError(f"--reproducible-parts ({parts}) must divide --batch-size ({t.batch_size})")
    if parts % ranks:
        raise UsageError(f"--reproducible-parts ({parts}) must be a multiple of the ranks ({ranks})")
    if ranks > 1 and (t.grad_sync == "overlapped" or t.gradient_dtype != "float32"):
        raise UsageError(
            f"{what} requires --grad-sync allreduce or sharded and --gradient-dtype float32; the "
            "other values round differently for each number of ranks"
        )
    if t.dtype == "float64" or t.matmul == "blas":
        raise UsageError(
            f"{what} requires --dtype float32 or bfloat16 and --matmul own; sums in the BLAS, which "
            "multiplies float64, depend on the number of threads"
        )
