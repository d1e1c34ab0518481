"""What more ranks would do: a step of one rank, and an α–β model of its sums, for numbers nobody measured.

A rank's step is a line in the number of its sequences. How a step grows by each way to exchange gradients,
with S(n) the seconds that the sum of n bytes takes, P(n) those of a sum in parts, piece by piece, G(n) those
of its second half without pieces, f a few numbers (loss and flags, where these do not travel with the
gradients; the norm of shards), and B the backward pass, at best:

| way                | exposed exchange                                   |
|--------------------|----------------------------------------------------|
| allreduce          | S(n)                                               |
| bfloat16           | P(n / 2) + S(f)                                    |
| overlapped         | the longer one of S(n) - B and S(bucket)           |
| sharded            | P(n) / 2 + G(n) + 2 S(f); a rank updates a part    |
| sharded, bfloat16  | P(n / 2) / 2 + G(n) + 2 S(f): weights are not cut  |
| local, H steps     | S(n) / H + 2 S(f)                                  |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from alphabeta import AlphaBeta, Network, OverNetwork, fit

from distgpt.core.model.model import flag_count
from distgpt.measure.bench.allreduce import SHARED
from distgpt.measure.jobs import Row
from distgpt.parallel.overlapped import BUCKET
from distgpt.parallel.reductions import PIECE

MOST_RANKS = 1 << 20  # that predictions are made for
ROUND = 16  # local steps
BACKWARD = 2 / 3  # the backward pass's share of both passes

Exchange = Callable[[int, float], float]  # seconds of an Allreduce among this many ranks, of this many bytes
Sum = Callable[[float], float]  # seconds of an Allreduce of this many bytes


def summed_by(summed: str | None) -> str:
    """Return the algorithm nearest to what a run does. `summed`: what its summary tells of that."""
    return SHARED if summed == SHARED else "allreduce"


def affine(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """A line through the steps of one rank: seconds without rows, and per row, neither negative."""
    (few, short), (many, long) = min(points), max(points)
    if few == many:
        return 0.0, long / many
    per_row = min(max(0.0, (long - short) / (many - few)), long / many)
    return long - per_row * many, per_row


@dataclass(frozen=True, slots=True)
class Job:
    """What is trained. Strong: `batch` sequences in all; weak: as many on every rank.

    A step of one rank takes `fixed` seconds (the update), and `per_row` for each sequence.
    """

    batch: int
    seq_len: int
    gradient_bytes: int
    fixed: float
    per_row: float

    def seconds(self, rows: float) -> float:
        return self.fixed + self.per_row * rows

    def possible(self, mode: str, ranks: int) -> bool:
        """Whether every rank gets whole sequences."""
        return mode == "weak" or self.batch % ranks == 0

    def speeds(self, mode: str, ranks: int, step: float, alone: float) -> Row:
        """What a step of so many seconds comes to. `alone` is the step of one rank."""
        weight = 1 if mode == "strong" else ranks
        speedup = weight * alone / step
        return {
            "mode": mode,
            "ranks": ranks,
            "step_s": step,
            "tokens_per_s": weight * self.batch * self.seq_len / step,
            "speedup": speedup,
            "efficiency": speedup / ranks,
        }


def compared(mode: str, ranks: int, step: float, job: Job, alone: float, shared: bool) -> Row:
    """A measured step as a row of the table."""
    batch = job.batch * (1 if mode == "strong" else ranks)
    return {**job.speeds(mode, ranks, step, alone), "batch": batch, "shares_cores": shared}


def forecast(mode: str, ranks: int, job: Job, exchange: Exchange) -> Row:
    """A predicted step: a rank's part of the batch, then the sum; they do not overlap, nor in training."""
    own = job.seconds(job.batch / ranks if mode == "strong" else job.batch)
    summed = exchange(ranks, job.gradient_bytes)
    speeds = job.speeds(mode, ranks, own + summed, job.seconds(job.batch))
    return {**speeds, "compute_s": own, "allreduce_s": summed}


def by_exchange(
    mode: str, ranks: int, job: Job, dtype: str, model: AlphaBeta | OverNetwork
) -> dict[str, float]:
    """The step by each way to exchange gradients."""
    rows = job.batch / ranks if mode == "strong" else job.batch
    itemsize = 8 if dtype == "float64" else 4
    is_by_host = isinstance(model, OverNetwork) and ranks > 1 < model.ranks_per_node
    steps = partial(steps_by_exchange, job.per_row * rows, job.fixed, ranks, job.gradient_bytes, itemsize)
    summed, by_host = partial(model.seconds, ranks), partial(model.in_parts, ranks)
    flat = partial(model.flat_in_parts, ranks) if isinstance(model, OverNetwork) else by_host
    found = steps(summed, flat)
    if is_by_host:
        found["hierarchical, bfloat16"] = steps(summed, by_host)["bfloat16"]
    return found


def steps_by_exchange(
    passes: float,
    update: float,
    ranks: int,
    size: int,
    itemsize: int,
    summed: Sum,
    in_parts: Sum,
    piece: float = PIECE,
) -> dict[str, float]:
    """Return a step's seconds by the words of its options; `passes` and `update` are those of one rank.

    `piece`: elements that are summed in parts at a time.
    """
    alone = passes + update
    if ranks == 1:
        return {"allreduce": alone}

    def overlapped(add: Sum, share: float) -> float:
        return max(add(share * size) - BACKWARD * passes, add(share * BUCKET * itemsize))

    def cut(size: float, elements: float) -> float:
        pieces = max(1, math.ceil(elements / piece))
        return pieces * in_parts(size / pieces)

    few, count = summed(flag_count(ranks) * itemsize), size / itemsize
    shards = passes + update / ranks + 2 * few + in_parts(size) / 2
    return {
        "allreduce": alone + summed(size),
        "bfloat16": alone + cut(size / 2, count) + few,
        "overlapped": alone + overlapped(summed, 1) + few,
        "overlapped, bfloat16": alone + overlapped(in_parts, 0.5) + few,
        "sharded": shards + cut(size, count) / 2,
        "sharded, bfloat16": shards + cut(size / 2, count) / 2,
        f"outer-every {ROUND}": alone + summed(size) / ROUND + 2 * few,
    }


def takes_over(mode: str, job: Job, exchange: Exchange) -> int | None:
    """The first power of two of ranks that spend half of a step or more on the exchange.

    A batch can be cut down to one sequence per rank: strong scaling ends there.
    """
    ranks = 2
    while ranks <= (job.batch if mode == "strong" else MOST_RANKS):
        found = forecast(mode, ranks, job, exchange)
        if found["allreduce_s"] >= found["compute_s"]:
            return ranks
        ranks *= 2
    return None


def fitted(summed: dict[str, Any]) -> AlphaBeta:
    """The α–β model of the algorithm that the runs sum gradients with."""
    measured = {row["algorithm"] for row in summed["rows"]}
    algorithm = summed_by(SHARED if measured == {SHARED} else None)
    table = [(row["bytes"], row["seconds"]) for row in summed["rows"] if row["algorithm"] == algorithm]
    form = "ring" if "Open MPI" in summed["library"] else "scatter-gather"
    form = "memory" if algorithm == SHARED else form
    return fit(table, summed["ranks"], form)


def predictions(
    found: dict[str, Any],
    points: Sequence[tuple[int, float]],
    ranks: Sequence[int],
    network: Network | None,
    ranks_per_node: int,
) -> dict[str, Any]:
    """Fit the models to what was `found`, predict for `ranks`, and add predictions to the measured rows.

    `points` are rows and seconds of one rank's steps; `network` joins hosts, if it is not the one measured.
    """
    job = Job(found["batch_size"], found["seq_len"], found["gradient_bytes"], *affine(points))
    modes = list(dict.fromkeys(row["mode"] for row in found["measured"]))
    here = fitted(found["allreduce"])
    for row in found["measured"]:
        row["predicted_step_s"] = forecast(row["mode"], row["ranks"], job, here.seconds)["step_s"]
    off = [
        abs(row["predicted_step_s"] / row["step_s"] - 1)
        for row in found["measured"]
        if row["ranks"] > 1 and not row["shares_cores"]
    ]
    far = OverNetwork(here, network, ranks_per_node) if network else here
    wanted = [(mode, n) for mode in modes for n in ranks]
    return {
        "compute": {"points": list(map(list, points)), "fixed": job.fixed, "row": job.per_row},
        "model": asdict(here),
        "off_by": max(off, default=None),
        "network": str(network) if network else None,
        "ranks_per_node": ranks_per_node if network else None,
        "predicted": [
            {
                **forecast(*way, job, far.seconds),
                "by_exchange": by_exchange(*way, job, found["dtype"], far),
            }
            for way in wanted
            if job.possible(*way)
        ],
        "not_predicted": [{"mode": mode, "ranks": n} for mode, n in wanted if not job.possible(mode, n)],
        "takes_over": {mode: takes_over(mode, job, far.seconds) for mode in modes},
    }
