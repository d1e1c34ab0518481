"""`distgpt bench scaling`: real training on 1, 2, … ranks, sums by themselves, and what they predict."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, NoReturn

from distgpt.comm.api import CHUNK_BYTES
from distgpt.comm.cores import usable_cores
from distgpt.config import RunConfig
from distgpt.config.presets import resolve
from distgpt.errors import UsageError
from distgpt.machine.launchers import find_launcher
from distgpt.measure.bench import allreduce, exchanging
from distgpt.measure.bench.alphabeta import AlphaBeta, Network, OverNetwork, fit, parse_network
from distgpt.measure.bench.results import BenchOptions, Row, say
from distgpt.measure.bench.scaling_page import MOST_RANKS, all_charts, text
from distgpt.measure.jobs import train
from distgpt.training.exchange.choose import ONE_CALL
from distgpt.units import count

MODES = ("strong", "weak")  # the whole batch stays the same, or each rank's
STEPS = 20  # without --steps: the first two are not counted
SIZES = allreduce.SIZES[:10]  # 8 bytes to 2 MiB

Exchange = Callable[[int, float], float]  # seconds of an Allreduce among so many ranks, of so many bytes


@dataclass(frozen=True, slots=True)
class ScalingOptions(BenchOptions):
    """The command line. `settings` are those of `distgpt train`."""

    measured_ranks: str = "1,2"
    threads: int | None = None
    preset: str | None = None
    strong: bool = False
    weak: bool = False
    predict: str = "8,64,1024"
    network: str | None = None
    ranks_per_node: int = 1
    seconds: float = 10.0
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def modes(self) -> Sequence[str]:
        chosen = [mode for mode, is_chosen in zip(MODES, (self.strong, self.weak), strict=True) if is_chosen]
        return chosen or MODES

    @property
    def numbers_of_ranks(self) -> list[int]:
        """In ascending order, beginning with 1."""
        return sorted({1, *numbers("--ranks", self.measured_ranks)})

    @property
    def threads_per_rank(self) -> int:
        """The same in all runs, so that only ranks change."""
        return self.threads or max(1, len(usable_cores()) // max(self.numbers_of_ranks))


def bench(options: ScalingOptions) -> None:
    chosen, run = resolve(options.preset, None, {"steps": STEPS, **options.settings}, _no_weights)
    found = {"preset": chosen, **scaling(options, run, say)}
    options.finish("scaling", chosen, found, text(found), all_charts(found))


def _no_weights(path: str) -> NoReturn:
    raise UsageError("bench scaling trains new models: leave --init out")


def numbers(flag: str, words: str) -> list[int]:
    """ "1,2,4" → [1, 2, 4]"""
    split = [word.strip() for word in words.split(",")]
    if not all(word.isdecimal() and 1 <= int(word) <= MOST_RANKS for word in split):
        raise UsageError(
            f"{flag} {words!r}: numbers of ranks from 1 to {MOST_RANKS:,} are needed, as in 1,2,4"
        )
    return sorted({int(word) for word in split})


# -- measuring


def scaling(options: ScalingOptions, run: RunConfig, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure, fit, predict: everything that goes into the file.

    The runs lie in `options.out` for a while, which all hosts must see, and are deleted.
    """
    ranks, batch, threads = options.numbers_of_ranks, run.train.batch_size, options.threads_per_rank
    predict = numbers("--predict", options.predict)
    network = parse_network(options.network) if options.network else None
    for n in ranks:
        if "strong" in options.modes and batch % n:
            raise UsageError(
                f"a batch of {count(batch, 'sequence')} cannot be cut for {n} ranks: choose another "
                "--batch-size or --ranks, or --weak alone"
            )
    launcher = find_launcher(options.launcher, options.hostfile)
    load = os.getloadavg()[0]  # of others: nothing of ours runs yet
    options.prepare()
    with tempfile.TemporaryDirectory(prefix=".runs-", dir=options.out.resolve()) as scratch:

        @cache
        def summary(ranks: int, batch: int) -> dict[str, Any]:
            """Of a run of so many ranks with so many sequences in all."""
            what = f"training on {count(ranks, 'rank')}"
            say(f"{what}, {count(batch, 'sequence')} a step")
            words = ["--stage", "mpi" if ranks > 1 else "serial", "--threads", threads]
            config, out = run.with_values({"batch_size": batch}), Path(scratch, f"{ranks}-{batch}")
            return train(what, config, out, words, launcher if ranks > 1 else None, ranks)

        fullest, cores = places(options, max(ranks))
        alone = summary(1, batch)
        points = [(batch, alone["step_s_median"])]
        if batch > 1:
            few = max(1, batch // max(2, *ranks))
            points.append((few, summary(1, few)["step_s_median"]))
        gradient = alone["parameters"] * (8 if run.train.dtype == "float64" else 4)
        job = Job(batch, run.model.seq_len, gradient, *affine(points))
        shared = {n: crowded(n, threads, fullest, cores) for n in ranks}
        measured = []
        for mode in options.modes:
            for n in ranks:
                step = summary(n, batch if mode == "strong" else batch * n)["step_s_median"]
                measured.append(compared(mode, n, step, job, alone["step_s_median"], shared[n]))
        among = max((n for n in ranks if n > 1 and not shared[n]), default=2)
        say(f"sums over {count(among, 'rank')} by size")
        summed = sums(options, among, gradient, run.train.grad_sync)
    found = {
        "stage": "mpi",
        "threads": threads,
        "cores": cores,
        "load_before": load,
        "batch_size": batch,
        "seq_len": job.seq_len,
        "parameters": alone["parameters"],
        "dtype": run.train.dtype,
        "gradient_bytes": gradient,
        "measured": measured,
        "allreduce": summed,
    }
    return found | predictions(found, points, run.train.grad_sync, predict, network, options.ranks_per_node)


def places(options: ScalingOptions, ranks: int) -> tuple[int, int]:
    """Most ranks on a host, and its cores; if there may be several hosts, as the ranks say."""
    if ranks < 2 or (options.hostfile is None and options.launcher is None):
        return ranks, len(usable_cores())
    found = _allreduce(options, ranks, SIZES[:1])
    fullest = found["ranks_per_node"]
    return fullest, max(1, round(fullest * found["cores_per_rank"]))


def crowded(ranks: int, threads: int, fullest: int, cores: int) -> bool:
    """Whether a host has more of their threads than cores, if one is filled before the next."""
    return min(ranks, fullest) * threads > cores


def sums(options: ScalingOptions, ranks: int, gradient: int, grad_sync: str) -> Row:
    """Sums by size, most densely around the gradient's: it comes first, so it is always measured."""
    near = [gradient // parts // 4 * 4 for parts in (1, 2, 4, 8)]
    sizes = [gradient, *(n for n in SIZES if n < min(near)), *reversed(near[1:])]
    return _allreduce(options, ranks, sizes, summed_by(grad_sync))


def summed_by(grad_sync: str) -> str:
    """The algorithm that comes nearest to what a run does."""
    return grad_sync if grad_sync in ONE_CALL else "packed"


def _allreduce(
    options: ScalingOptions, ranks: int, sizes: Sequence[int], algorithms: str | None = None
) -> Row:
    same = {key: getattr(options, key) for key in ("hostfile", "launcher", "seconds")}
    words = ",".join(map(str, sizes))
    return allreduce.start(
        allreduce.AllreduceOptions(ranks=ranks, sizes=words, algorithms=algorithms, **same)
    )


# -- predicting


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


def by_exchange(mode: str, ranks: int, job: Job, dtype: str, exchange: Exchange) -> dict[str, float]:
    """The step by each way to exchange gradients."""
    rows = job.batch / ranks if mode == "strong" else job.batch
    itemsize = 8 if dtype == "float64" else 4
    passes, summed = job.per_row * rows, partial(exchange, ranks)
    return exchanging.steps(passes, job.fixed, ranks, job.gradient_bytes, itemsize, summed)


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


def fitted(summed: dict[str, Any], grad_sync: str) -> AlphaBeta:
    """The α–β model of the algorithm that the runs sum gradients with."""
    grad_sync = summed_by(grad_sync)
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
    job = Job(found["batch_size"], found["seq_len"], found["gradient_bytes"], *affine(points))
    modes = list(dict.fromkeys(row["mode"] for row in found["measured"]))
    here = fitted(found["allreduce"], grad_sync)
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
                "by_exchange": by_exchange(*way, job, found["dtype"], far.seconds),
            }
            for way in wanted
            if job.possible(*way)
        ],
        "not_predicted": [{"mode": mode, "ranks": n} for mode, n in wanted if not job.possible(mode, n)],
        "takes_over": {mode: takes_over(mode, job, far.seconds) for mode in modes},
    }
