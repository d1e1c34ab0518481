"""The exchange between ranks in a step: six calls. For one rank, and as one sum after the backward pass.

exchange.before_backward(step)               # before the last backward pass of a step
exchange.ready(n)                            # within that pass: n gradients are final
exchange.sum_gradients(step)                 # gradients ← Σ over ranks
exchange.scales(learned)                     # factors that make means of the sums
exchange.compute_norm(optimizer)             # Σ g² of all summed gradients
exchange.after_update(step, is_changed)      # new weights → the ranks that need them
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from distgpt.core.comm.api import Comm
from distgpt.core.model.model import Model
from distgpt.core.model.optim import AdamW
from distgpt.core.model.passes import Ready
from distgpt.core.ops.api import Array


class Scales(NamedTuple):
    """Factors of what the ranks have summed: they make means over the tokens that count."""

    loss: float
    gradients: float
    norm: float  # of the square root of `optimizer.norm`


class Exchange:
    """The protocol, and the exchange of a single rank. All calls but `ready` and `scales` are collective."""

    name = "alone"  # the value of --grad-sync that asks for it
    ready: Ready | None = None  # None: nothing is sent during the backward pass
    is_settled = True  # whether it stays as it is: `auto` tries several first
    waits_after_update = False  # whether `after_update` waits for other ranks
    mean = 1.0  # the factor that makes the mean over ranks of their sum

    def before_backward(self, step: int) -> None:
        """Prepare for the last backward pass of a step."""

    def sum_gradients(self, step: int) -> None:
        """Replace the gradients that this rank needs, and the numbers appended to them, by their sums."""

    def scales(self, learned: float) -> Scales:
        """Return the scales of a step; `learned` is the part of the batch's tokens that counts.

        The optimizer takes the mean in its only pass over the gradients.
        """
        mean = self.mean / learned
        return Scales(mean, mean, mean)

    def compute_norm(self, optimizer: AdamW) -> None:
        """Compute optimizer.norm ← Σ g² of all summed gradients."""
        optimizer.compute_norm()

    def after_update(self, step: int, is_changed: bool) -> None:
        """Send the weights that this rank has updated to those that need them."""

    def end_round(self, step: int) -> None:
        """Give all ranks the same weights after `step` steps, where their own steps have parted them."""

    def waits(self, model: Model) -> list[tuple[str, Array]]:
        """Return the methods that wait for other ranks, in the order of a step, with what each sends."""
        return [("sum_gradients", model.grads.with_flags)]


class Reduction(Protocol):
    """Sums elements start … stop of the flat buffer."""

    def sum(self, start: int, stop: int, step: int) -> None:
        """Replace these elements by their sum over ranks. `step` seeds random rounding. Collective."""


class Allreduce(Reduction):
    """One Allreduce over the whole stretch; or one for each piece that stays in a cache."""

    def __init__(self, comm: Comm, flat: Array, chunked: bool = False) -> None:
        self._comm, self._flat, self._chunked = comm, flat, chunked

    def sum(self, start: int, stop: int, step: int) -> None:
        whole = start == 0 and stop == len(self._flat)  # then the same object at every step
        part = self._flat if whole else self._flat[start:stop]
        if self._chunked:
            self._comm.sum_chunked(part)
        else:
            self._comm.sum(part)


class AfterBackward(Exchange):
    """One reduction of the whole flat buffer; every rank then updates all weights."""

    def __init__(
        self, name: str, reduction: Reduction, size: int, sum_flags: Callable[[], None], mean: float
    ) -> None:
        """`reduction` sums the first `size` elements of the flat buffer, `sum_flags` those after them."""
        self.name, self._size, self._sum_flags = name, size, sum_flags
        self._reduction, self.mean = reduction, mean

    def sum_gradients(self, step: int) -> None:
        self._reduction.sum(0, self._size, step)
        self._sum_flags()
