"""The same bits on any number of ranks: gradients of fixed parts of the batch, added up in a fixed tree.

Unit u is made of rows u·B/U … of the global batch, whoever computes it. Two neighbours are added, then pairs
of neighbours, and so on: first those of one rank, which has a whole branch of the tree, then across ranks.
"""

from __future__ import annotations

import numpy as np

from distgpt.comm.api import Comm
from distgpt.config import TrainConfig
from distgpt.errors import UsageError
from distgpt.kernels.api import Array, Kernels
from distgpt.model.memory import FlatBuffer
from distgpt.training.gradsync.ways import spread
from distgpt.units import count


class Tree:
    """Adds up the units of one rank, whose gradients come one after the other in the same memory."""

    def __init__(self, grads: FlatBuffer, kernels: Kernels, units: int) -> None:
        self._sums = grads.with_flags[: grads.layout.size + 1]  # with the loss
        self._kernels, self._units = kernels, units
        self._branches = kernels.wide_zeros(units.bit_length() - 1, len(self._sums))

    def add(self, unit: int) -> None:
        """Take the gradients of a unit, counted from 0; after the last one they are those of all."""
        from distgpt.kernels.fused import wire

        level = ((unit + 1) & -(unit + 1)).bit_length() - 1  # so many branches end with this unit
        out = self._sums if unit == self._units - 1 else self._branches[level]
        k = self._kernels
        spread(len(out), k.each, k.threads, wire.join, out, self._sums, self._branches[:level])


def tree_sum(comm: Comm, value: Array) -> None:
    """value (1,) ← its sum over ranks, in the same tree. Collective."""
    every = np.zeros(comm.size, value.dtype)
    every[comm.rank] = value[0]
    comm.sum(every)  # of one number and zeros
    while len(every) > 1:
        every = every[::2] + every[1::2]
    value[0] = every[0]


def usual_units(batch_size: int) -> int:
    """The most of 8, 4, 2 and 1 that divides the batch."""
    return next(units for units in (8, 4, 2, 1) if batch_size % units == 0)


def check_units(t: TrainConfig, ranks: int, on_gpu: bool) -> None:
    """Raise a UsageError unless the bits can be the same."""
    units, what = t.units, f"--deterministic, with {count(t.units, 'unit')},"
    if on_gpu:
        raise UsageError(
            "--units is for CPU stages; on GPUs use --deterministic, but not --grad-sync auto, for the"
            " same bits in every run"
        )
    if units & (units - 1):
        raise UsageError(f"--units {units} is no power of two")
    if t.batch_size % units:
        raise UsageError(f"--units {units} does not divide --batch-size {t.batch_size}")
    if units % ranks:
        raise UsageError(f"{count(units, 'unit')} (--units) cannot be given to {ranks} ranks evenly")
    if ranks > 1 and (t.grad_sync not in ("auto", "packed", "sharded") or t.wire != "float32"):
        raise UsageError(
            f"{what} goes with --grad-sync packed or sharded and --wire float32: what the others round "
            "depends on the number of ranks"
        )
    if t.dtype == "float64" or t.matmul == "blas":
        raise UsageError(
            f"{what} goes with --dtype float32 or bfloat16 and matmul of our own: how the BLAS adds, which "
            "multiplies float64, depends on the number of threads"
        )
