"""Steps on more ranks than there are: one rank's steps, and an α–β model of the sum over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from distgpt.comm.api import CHUNK_BYTES
from distgpt.measure.bench.alphabeta import AlphaBeta, Network, OverNetwork, fit

MODES = ("strong", "weak")  # the whole batch stays the same, or each rank's
MOST_RANKS = 1 << 20  # that predictions are made for

Seconds = Callable[[int, float], float]  # of an Allreduce among so many ranks, of so many bytes


@dataclass(frozen=True, slots=True)
class Compute:
    """Seconds of a step of one rank: `fixed` (the update), and `per_row` for each sequence."""

    fixed: float
    per_row: float

    def seconds(self, rows: float) -> float:
        return self.fixed + self.per_row * rows


def affine(points: Sequence[tuple[int, float]]) -> Compute:
    """The line through steps of one rank with few and with many rows; neither part is negative."""
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
    """A predicted step of so many ranks."""

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
    """A rank's part of the batch, then the sum: nothing overlaps, as nothing does in training."""
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


def fitted(summed: dict[str, Any], grad_sync: str) -> AlphaBeta:
    """The α–β model of the algorithm that the runs sum gradients with."""
    table = [(row["bytes"], row["seconds"]) for row in summed["rows"] if row["algorithm"] == grad_sync]
    form = "ring" if "Open MPI" in summed["library"] else "scatter-gather"
    return fit(table, summed["ranks"], form, CHUNK_BYTES if grad_sync == "chunked" else None)


def predictions(
    found: dict[str, Any],
    points: Sequence[tuple[int, float]],
    grad_sync: str,
    ranks: Sequence[int],
    network: Network | None,
    ranks_per_node: int,
) -> dict[str, Any]:
    """Fit the models to what was `found`, predict for `ranks`, and add predictions to the measured rows.

    `points` are rows and seconds of one rank's steps; `network` joins hosts, if it is not the one measured.
    """
    job = Job(found["batch_size"], found["seq_len"], found["gradient_bytes"])
    modes = list(dict.fromkeys(row["mode"] for row in found["measured"]))
    here, compute = fitted(found["allreduce"], grad_sync), affine(points)
    for row in found["measured"]:
        row["predicted_step_s"] = forecast(row["mode"], row["ranks"], job, compute, here.seconds).step_s
    far = OverNetwork(here, network, ranks_per_node) if network else here
    every = [(mode, n, job.possible(mode, n)) for mode in modes for n in ranks]
    return {
        "compute": {
            "points": [list(point) for point in points],
            "fixed": compute.fixed,
            "row": compute.per_row,
        },
        "model": here.as_json(),
        "network": str(network) if network else None,
        "ranks_per_node": ranks_per_node if network else None,
        "predicted": [
            forecast(mode, n, job, compute, far.seconds).as_json() for mode, n, possible in every if possible
        ],
        "not_predicted": [{"mode": mode, "ranks": n} for mode, n, possible in every if not possible],
        "takes_over": {mode: takes_over(mode, job, compute, far.seconds) for mode in modes},
    }
