"""Train on 1, 2, … ranks, time sums by themselves, and predict what 8, 64 or 1,024 ranks would do.

    python benchmarks/scaling.py --ranks 1,2 --network 25gbit,20us

Strong scaling cuts one batch into more parts; weak scaling gives every rank a batch of that size. Predictions
come from an α–β model (alphabeta.py) that is fitted to sums over these very ranks. Takes the settings of
`distgpt train`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import click
from alphabeta import parse_network
from predictions import MOST_RANKS, Job, affine, compared, predictions, summed_by
from record import end_with_errors
from scaling_page import blocks

from distgpt.cluster.jobs.launchers import find_launcher
from distgpt.commands.bench import result_options, to_options
from distgpt.commands.options import FiniteRange, settings
from distgpt.core.base.errors import UsageError
from distgpt.core.base.formatting import count
from distgpt.core.comm.resources import usable_cores
from distgpt.core.config import RunConfig
from distgpt.core.config.asked import asked_for, resolve
from distgpt.measure.bench import allreduce
from distgpt.measure.jobs import BenchOptions, Row, say, train

MODES = ("strong", "weak")  # the whole batch stays the same, or each rank's
STEPS = 20  # without --steps: the first two are not counted
SIZES = allreduce.SIZES[:10]  # 8 bytes to 2 MiB


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


@click.command("scaling.py", help=__doc__, context_settings={"show_default": True})
@click.option(
    *("--ranks", "measured_ranks"),
    default="1,2",
    show_default=True,
    metavar="N,…",
    help="Numbers of ranks to measure.",
)
@click.option("--hostfile", type=click.Path(path_type=Path), help="Hosts to start them on.")
@click.option("--launcher", help='What starts them: mpirun, or as in "srun --mpi=pmix".')
@click.option("--threads", type=click.IntRange(1), help="Per rank; cores / most ranks if left out.")
@click.option("--preset", help="Start from a named configuration; tiny if left out.")
@settings
@click.option("--strong", is_flag=True, help="Only with the whole batch the same.")
@click.option("--weak", is_flag=True, help="Only with each rank's batch the same.")
@click.option(
    "--predict", default="8,64,1024", show_default=True, metavar="N,…", help="Ranks to predict for."
)
@click.option(
    "--network", metavar="RATE,LATENCY", help="Predict for hosts on another one, as in 1gbit,100us."
)
@click.option(
    "--ranks-per-node", type=click.IntRange(1), default=1, show_default=True, help="With --network."
)
@click.option(
    "--seconds", type=FiniteRange(1), default=10.0, show_default=True, help="About how long for the sums."
)
@result_options(name="the preset's")
def main(**given: Any) -> None:
    options = to_options(ScalingOptions, given)
    if "init" in options.settings:
        raise UsageError("scaling.py trains new models: leave --init out")
    asked = asked_for({"steps": STEPS, **options.settings}, options.preset)
    run = resolve(asked)
    found = {"preset": asked.name, **scaling(options, run, say)}
    options.finish("scaling", asked.name, found, blocks(found))


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

        fullest, cores = ranks_and_cores(options, max(ranks))
        alone = summary(1, batch)
        points = [(batch, alone["step_s_median"])]
        if batch > 1:
            few = max(1, batch // max(2, *ranks))
            points.append((few, summary(1, few)["step_s_median"]))
        gradient = alone["parameters"] * (8 if run.train.dtype == "float64" else 4)
        job = Job(batch, run.model.seq_len, gradient, *affine(points))
        shared = {n: crowded(n, threads, fullest, cores) for n in ranks}
        measured, sums_by = [], {}
        for mode in options.modes:
            for n in ranks:
                ended = summary(n, batch if mode == "strong" else batch * n)
                step, sums_by[n] = ended["step_s_median"], ended["allreduce"]
                measured.append(compared(mode, n, step, job, alone["step_s_median"], shared[n]))
        among = max((n for n in ranks if n > 1 and not shared[n]), default=2)
        say(f"sums over {count(among, 'rank')} by size")
        summed = sums(options, among, gradient, summed_by(sums_by.get(among)))
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
    return found | predictions(found, points, predict, network, options.ranks_per_node)


def ranks_and_cores(options: ScalingOptions, ranks: int) -> tuple[int, int]:
    """Return the most ranks on a host, and its cores; if there may be several hosts, as the ranks say."""
    if ranks < 2 or (options.hostfile is None and options.launcher is None):
        return ranks, len(usable_cores())
    found = _allreduce(options, ranks, SIZES[:1])
    fullest = found["ranks_per_node"]
    return fullest, max(1, round(fullest * found["cores_per_rank"]))


def crowded(ranks: int, threads: int, fullest: int, cores: int) -> bool:
    """Return whether a host has more of their threads than cores, if one is filled before the next."""
    return min(ranks, fullest) * threads > cores


def sums(options: ScalingOptions, ranks: int, gradient: int, algorithm: str) -> Row:
    """Sums by size, most densely around the gradient's: it comes first, so it is always measured."""
    near = [gradient // parts // 4 * 4 for parts in (1, 2, 4, 8)]
    sizes = [gradient, *(n for n in SIZES if n < min(near)), *reversed(near[1:])]
    return _allreduce(options, ranks, sizes, algorithm)


def _allreduce(
    options: ScalingOptions, ranks: int, sizes: Sequence[int], algorithms: str | None = None
) -> Row:
    same = {key: getattr(options, key) for key in ("hostfile", "launcher", "seconds")}
    words = ",".join(map(str, sizes))
    return allreduce.start(
        allreduce.AllreduceOptions(ranks=ranks, sizes=words, algorithms=algorithms, **same)
    )


if __name__ == "__main__":
    end_with_errors(main)
