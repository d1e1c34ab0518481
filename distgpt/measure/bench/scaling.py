"""What more ranks would do: measured steps, and an α–β model for numbers of ranks that nobody has here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

MODES = ("strong", "weak")  # the whole batch stays the same, or each rank's
MOST_RANKS = 1 << 20  # up to here it is looked for where communication takes over

Seconds = Callable[[int, float], float]  # of an Allreduce among so many ranks, of so many bytes


@dataclass(frozen=True, slots=True)
class Compute:
    """A step of one rank, which exchanges nothing: `fixed` (the update) and so much for each sequence."""

    fixed: float
    per_row: float

    def seconds(self, rows: float) -> float:
        return self.fixed + self.per_row * rows


def affine(points: Sequence[tuple[int, float]]) -> Compute:
    """Through the steps of one rank with few and with many rows; neither part is negative."""
    (few, short), (many, long) = min(points), max(points)
    if few == many:
        return Compute(0.0, long / many)
    per_row = min(max(0.0, (long - short) / (many - few)), long / many)
    return Compute(long - per_row * many, per_row)


@dataclass(frozen=True, slots=True)
class Job:
    """What is trained. Strong: `batch` sequences in all; weak: as many on every rank."""

    batch: int
    seq_len: int
    gradient_bytes: int

    def rows(self, mode: str, ranks: int) -> float:
        return self.batch / ranks if mode == "strong" else self.batch

    def tokens(self, mode: str, ranks: int) -> int:
        return self.batch * self.seq_len * (1 if mode == "strong" else ranks)

    def possible(self, mode: str, ranks: int) -> bool:
        """Whether every rank gets whole sequences."""
        return mode == "weak" or self.batch % ranks == 0


@dataclass(frozen=True, slots=True)
class Forecast:
    """A step among so many ranks, predicted."""

    mode: str
    ranks: int
    compute_s: float
    allreduce_s: float
    speedup: float
    tokens_per_s: float

    @property
    def step_s(self) -> float:
        return self.compute_s + self.allreduce_s

    @property
    def efficiency(self) -> float:
        return self.speedup / self.ranks

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "step_s": self.step_s, "efficiency": self.efficiency}


def forecast(mode: str, ranks: int, job: Job, compute: Compute, exchange: Seconds) -> Forecast:
    """A rank's part of the batch, then the sum: nothing of it overlaps, as nothing does in training."""
    alone = compute.seconds(job.batch)
    own, summed = compute.seconds(job.rows(mode, ranks)), exchange(ranks, job.gradient_bytes)
    rate = job.tokens(mode, ranks) / (own + summed)
    return Forecast(mode, ranks, own, summed, rate * alone / job.tokens(mode, 1), rate)


def takes_over(mode: str, job: Job, compute: Compute, exchange: Seconds) -> int | None:
    """The first power of two of ranks that spend half of a step or more on the exchange.

    A batch can be cut down to one sequence per rank: strong scaling ends there.
    """
    ranks = 2
    while ranks <= (job.batch if mode == "strong" else MOST_RANKS):
        found = forecast(mode, ranks, job, compute, exchange)
        if found.allreduce_s >= found.compute_s:
            return ranks
        ranks *= 2
    return None


def compared(mode: str, ranks: int, step: float, job: Job, alone: float, shared: bool) -> dict[str, Any]:
    """A measured step as a row of the table. `alone` is the step of one rank."""
    rate = job.tokens(mode, ranks) / step
    speedup = rate * alone / job.tokens(mode, 1)
    return {
        "mode": mode,
        "ranks": ranks,
        "batch": job.tokens(mode, ranks) // job.seq_len,
        "step_s": step,
        "tokens_per_s": rate,
        "speedup": speedup,
        "efficiency": speedup / ranks,
        "shares_cores": shared,
    }
