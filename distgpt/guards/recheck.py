"""Guard against silent errors of a processor or its memory: one rank recomputes another one's gradients.

Every --recheck-every steps the gradients of one rank's first micro-batch, as they are used, are compared with
those that another rank computes from the same rows: bit by bit where bits must agree, else within rounding.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from zlib import crc32

import numpy as np

from distgpt.core.base.errors import MismatchError
from distgpt.core.comm.agree import gather_bytes, shared
from distgpt.core.comm.api import Comm
from distgpt.core.config import TrainConfig
from distgpt.core.data.batches import seeded_hashes
from distgpt.core.model.model import Model

SALT = 1 << 40  # other random numbers than those of the batches
ROUNDING = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 5e-2}  # of loss and norm, relative


@dataclass(frozen=True, slots=True)
class Digest:
    """A checksum of gradients and their loss, and the loss and the gradient norm themselves."""

    bits: int
    loss: float
    norm: float


class Recheck:
    """Decides whose gradients another rank recomputes at a step, and compares both. The same on all ranks."""

    def __init__(self, comm: Comm, model: Model, config: TrainConfig) -> None:
        self._comm, self._model, self._config = comm, model, config
        self._known: list[list[str]] = []  # by rank: its host, and what its bits depend on

    def pair(self, step: int) -> tuple[int, int] | None:
        """Return a rank and the one that recomputes its gradients, the same one if alone; None: not now."""
        every, size = self._config.recheck_every, self._comm.size
        if not every or (step + 1) % every:
            return None
        numbers = seeded_hashes(
            self._config.seed, np.array([SALT + 2 * step, SALT + 2 * step + 1], np.uint64)
        )
        rank = int(numbers[0] % size)
        return rank, (rank + 1 + int(numbers[1] % (size - 1))) % size if size > 1 else rank

    def begin(self, step: int, compute: Callable[[int], None]) -> Callable[[], None] | None:
        """Recompute another rank's gradients if it is this rank's turn, by `compute(rank)`.

        Return what compares them, to be called when this rank has its own gradients; None if nothing is due.
        """
        pair = self.pair(step)
        if pair is None:
            return None
        again = None
        if self._comm.rank == pair[1]:
            compute(pair[0])
            again = self.digest()
        return lambda: self._compare(step, pair, self.digest() if self._comm.rank == pair[0] else None, again)

    def digest(self) -> Digest:
        """Return the digest of the gradients that the model holds now. Waits for them."""
        k, grads = self._model.kernels, self._model.grads
        total = k.scalars(1)
        k.sum_squares(total, grads.flat)
        bits = crc32(k.to_host(grads.flat).data.cast("B"))
        return Digest(bits, float(k.to_host(grads.flags)[0]), math.sqrt(float(k.to_host(total)[0])))

    def _compare(self, step: int, pair: tuple[int, int], own: Digest | None, again: Digest | None) -> None:
        """Compare what the first rank of the pair has found with what the second one has. Collective."""
        if not self._known:
            about = json.dumps([platform.node(), self._bits_depend_on()]).encode()
            self._known = [json.loads(text) for text in gather_bytes(self._comm, about)]
        found = json.dumps([asdict(digest) if digest else None for digest in (own, again)]).encode()
        digests = [json.loads(text) for text in gather_bytes(self._comm, found)]
        first, second = Digest(**digests[pair[0]][0]), Digest(**digests[pair[1]][1])
        (host, bits), (other, others) = (self._known[rank] for rank in pair)
        if not self._are_same(first, second, to_the_bit=bool(bits) and bits == others):
            who = f"rank {pair[0]} on {host} and rank {pair[1]} on {other}"
            if pair[0] == pair[1]:
                who = f"rank {pair[0]} on {host}, asked twice,"
            what = f"{who} found different gradients for the same data at step {step + 1}"
            hint = "memory or a processor has failed there: test both; earlier checkpoints are kept"
            raise shared(MismatchError(f"{what}; {hint}"))

    def _are_same(self, first: Digest, second: Digest, to_the_bit: bool) -> bool:
        if to_the_bit:
            return first.bits == second.bits and first.loss == second.loss
        tolerance = ROUNDING[self._config.dtype]
        pairs = ((first.loss, second.loss), (first.norm, second.norm))
        return all(math.isclose(one, other, rel_tol=tolerance) for one, other in pairs)

    def _bits_depend_on(self) -> str:
        """Return what two ranks need in common for the same bits; "" where nothing ensures them."""
        if self._model.kernels.capabilities.is_async:
            return ""
        from distgpt.core.cpu.compiling.processor import processor

        return f"{processor()} {self._model.kernels.threads}"
