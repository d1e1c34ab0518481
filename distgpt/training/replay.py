"""Silent errors of a processor or its memory: one rank's gradients are at times computed again by another.

What is compared are those of its first micro-batch in a step, as they are used. Ranks whose bits must be the
same are compared by them, others within rounding.
"""

from __future__ import annotations

import json
import math
import platform
from dataclasses import asdict, dataclass
from zlib import crc32

import numpy as np

from distgpt.comm.agree import gather_bytes, shared
from distgpt.comm.api import Comm
from distgpt.comm.cores import boot_id
from distgpt.config import TrainConfig
from distgpt.data.batches import seeded_hashes
from distgpt.errors import DistgptError
from distgpt.kernels.api import Array, Kernels

SALT = 1 << 40  # so that these are other numbers than those of the batches
ROUNDING = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 5e-2}  # of loss and norm, relative


@dataclass(frozen=True, slots=True)
class Digest:
    """What is known of gradients and their loss: to the bit, and in size."""

    bits: int
    loss: float
    norm: float


class Replay:
    """Says whose gradients are computed again by whom at a step, and compares them. Alike on all ranks."""

    def __init__(self, comm: Comm, kernels: Kernels, config: TrainConfig) -> None:
        self._comm, self._kernels, self._config = comm, kernels, config
        self._known: list[list[str]] = []  # of each rank: its host, and what its bits depend on

    def pair(self, step: int) -> tuple[int, int] | None:
        """Of a step, counted from 0: a rank, and another one if there is one; None where nothing is due."""
        every, size = self._config.replay_every, self._comm.size
        if not every or (step + 1) % every:
            return None
        numbers = seeded_hashes(
            self._config.seed, np.array([SALT + 2 * step, SALT + 2 * step + 1], np.uint64)
        )
        rank = int(numbers[0] % size)
        return rank, (rank + 1 + int(numbers[1] % (size - 1))) % size if size > 1 else rank

    def digest(self, gradients: Array, loss: Array) -> Digest:
        """Waits for them."""
        k = self._kernels
        total = k.scalars(1)
        k.sum_squares(total, gradients)
        bits = crc32(memoryview(k.to_host(gradients)).cast("B"))
        return Digest(bits, float(k.to_host(loss)[0]), math.sqrt(float(k.to_host(total)[0])))

    def compare(self, step: int, pair: tuple[int, int], own: Digest | None, again: Digest | None) -> None:
        """With what the first rank found and the second one found again. Collective."""
        if not self._known:
            about = json.dumps([platform.node(), self._bits_depend_on()]).encode()
            self._known = [json.loads(text) for text in gather_bytes(self._comm, about)]
        found = json.dumps([asdict(digest) if digest else None for digest in (own, again)]).encode()
        told = [json.loads(text) for text in gather_bytes(self._comm, found)]
        first, second = Digest(**told[pair[0]][0]), Digest(**told[pair[1]][1])
        (host, bits), (other, others) = (self._known[rank] for rank in pair)
        if not self._are_same(first, second, to_the_bit=bool(bits) and bits == others):
            who = f"rank {pair[0]} on {host} and rank {pair[1]} on {other}"
            if pair[0] == pair[1]:
                who = f"rank {pair[0]} on {host}, asked twice,"
            what = f"{who} found different gradients for the same data at step {step + 1}"
            hint = "memory or a processor has failed there: test both; earlier checkpoints are kept"
            raise shared(DistgptError(f"{what}; {hint}"))

    def _are_same(self, first: Digest, second: Digest, to_the_bit: bool) -> bool:
        if to_the_bit:
            return first.bits == second.bits and first.loss == second.loss
        tolerance = ROUNDING[self._config.dtype]
        pairs = ((first.loss, second.loss), (first.norm, second.norm))
        return all(math.isclose(one, other, rel_tol=tolerance) for one, other in pairs)

    def _bits_depend_on(self) -> str:
        """What must be alike for the same bits; "" where nothing ensures them."""
        if self._kernels.capabilities.is_async:
            return ""
        if self._config.matmul == "auto":  # which each machine decides for itself
            return f"{boot_id()} {self._kernels.threads}"
        from distgpt.kernels.matmul.processor import processor

        return f"{processor()} {self._kernels.threads}"
