"""`distgpt bench scaling`: real training on 1, 2, … ranks, sums by themselves, and what they predict."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import click

from distgpt.comm.cores import usable_cores
from distgpt.config import RunConfig
from distgpt.config.presets import resolve
from distgpt.errors import UsageError
from distgpt.machine.launchers import Launcher, find_launcher
from distgpt.measure.bench import allreduce
from distgpt.measure.bench.alphabeta import parse_network
from distgpt.measure.bench.forecast import MODES, MOST_RANKS, Job, compared, predictions
from distgpt.measure.bench.results import prepare, save
from distgpt.measure.bench.scaling_page import all_charts, text
from distgpt.measure.jobs import train
from distgpt.units import count

STEPS = 20  # without --steps: the first two are not counted
SIZES = [8 << (2 * i) for i in range(10)]  # 8 bytes to 2 MiB


@dataclass(frozen=True, slots=True)
class ScalingOptions:
    """The command line. `settings` are those of `distgpt train`."""

    ranks: str = "1,2"
    hostfile: Path | None = None
    launcher: str | None = None
    threads: int | None = None
    preset: str | None = None
    strong: bool = False
    weak: bool = False
    predict: str = "8,64,1024"
    network: str | None = None
    ranks_per_node: int = 1
    seconds: float = 10.0
    name: str | None = None
    out: Path = Path("bench")
    as_json: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def modes(self) -> Sequence[str]:
        chosen = [mode for mode, is_chosen in zip(MODES, (self.strong, self.weak), strict=True) if is_chosen]
        return chosen or MODES

    @property
    def numbers_of_ranks(self) -> list[int]:
        """In ascending order, beginning with 1."""
        return sorted({1, *numbers("--ranks", self.ranks)})

    @property
    def threads_per_rank(self) -> int:
        """The same in all runs, so that only ranks change."""
        return self.threads or max(1, len(usable_cores()) // max(self.numbers_of_ranks))


def bench(options: ScalingOptions) -> None:
    chosen, run = resolve(options.preset, None, {"steps": STEPS, **options.settings}, _no_weights)
    found = {"preset": chosen, **scaling(options, run, partial(click.echo, err=True))}
    click.echo(json.dumps(found) if options.as_json else text(found))
    path = save(options.out, "scaling", options.name or chosen, found, all_charts(found))
    click.echo(f"written to {path}", err=True)


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


def scaling(options: ScalingOptions, run: RunConfig, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure, fit, predict: everything that goes into the file.

    The runs lie in `options.out` for a while, which all hosts must see, and are deleted.
    """
    ranks, batch = options.numbers_of_ranks, run.train.batch_size
    predict = numbers("--predict", options.predict)
    network = parse_network(options.network) if options.network else None
    launcher = _checked(options, run)
    prepare(options.out)
    with tempfile.TemporaryDirectory(prefix=".runs-", dir=options.out.resolve()) as scratch:
        runs = Runs(options, run, launcher, Path(scratch), say)
        places = runs.places(max(ranks))
        alone = runs.step(1, batch)
        points = [(batch, alone["step_s_median"])]
        if batch > 1:
            few = max(1, batch // max(2, *ranks))
            points.append((few, runs.step(1, few)["step_s_median"]))
        gradient = alone["parameters"] * (8 if run.train.dtype == "float64" else 4)
        job = Job(batch, run.model.seq_len, gradient)
        crowded = {n: places.crowded(n, options.threads_per_rank) for n in ranks}
        measured = []
        for mode in options.modes:
            for n in ranks:
                step = runs.step(n, batch if mode == "strong" else batch * n)["step_s_median"]
                measured.append(compared(mode, n, step, job, alone["step_s_median"], crowded[n]))
        apart = [n for n in ranks if n > 1 and not crowded[n]]
        summed = runs.sums(max(apart, default=2), gradient)
    found = {
        "stage": "mpi",
        "threads": options.threads_per_rank,
        "cores": places.cores,
        "batch_size": batch,
        "seq_len": job.seq_len,
        "parameters": alone["parameters"],
        "dtype": run.train.dtype,
        "gradient_bytes": gradient,
        "measured": measured,
        "allreduce": summed,
    }
    per_node = options.ranks_per_node
    return found | predictions(found, points, run.train.grad_sync, predict, network, per_node)


def _checked(options: ScalingOptions, run: RunConfig) -> Launcher:
    """Before anything runs, check that each batch can be cut and that ranks can be started."""
    batch = run.train.batch_size
    for ranks in options.numbers_of_ranks:
        if "strong" in options.modes and batch % ranks:
            raise UsageError(
                f"a batch of {count(batch, 'sequence')} cannot be cut for {ranks} ranks: choose another "
                "--batch-size or --ranks, or --weak alone"
            )
    return find_launcher(options.launcher, options.hostfile)


@dataclass(frozen=True, slots=True)
class Places:
    """Where ranks go: `ranks_per_node` at most share one host's `cores`."""

    ranks_per_node: int
    cores: int

    def crowded(self, ranks: int, threads: int) -> bool:
        """Whether a host has more of their threads than cores, if one is filled before the next."""
        return min(ranks, self.ranks_per_node) * threads > self.cores


@dataclass(frozen=True, slots=True)
class Runs:
    """Starts the runs that are measured, each of them once."""

    options: ScalingOptions
    run: RunConfig
    launcher: Launcher
    scratch: Path
    say: Callable[[str], None]
    _done: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)

    def step(self, ranks: int, batch: int) -> dict[str, Any]:
        """The summary of a run of so many ranks with so many sequences in all."""
        if (ranks, batch) not in self._done:
            self.say(f"training on {count(ranks, 'rank')}, {count(batch, 'sequence')} a step")
            stage, launcher = ("mpi", self.launcher) if ranks > 1 else ("serial", None)
            words = ["--stage", stage, "--threads", self.options.threads_per_rank]
            config = self.run.with_values({"batch_size": batch})
            out = self.scratch / f"{ranks}-{batch}"
            what = f"training on {count(ranks, 'rank')}"
            self._done[ranks, batch] = train(what, config, out, words, launcher, ranks)
        return self._done[ranks, batch]

    def places(self, ranks: int) -> Places:
        """Where so many ranks run; if that may be several hosts, ask the ranks."""
        if ranks < 2 or (self.options.hostfile is None and self.options.launcher is None):
            return Places(ranks, len(usable_cores()))
        found = self._allreduce(ranks, SIZES[:1])
        fullest = found["ranks_per_node"]
        return Places(fullest, max(1, round(fullest * found["cores_per_rank"])))

    def sums(self, ranks: int, gradient: int) -> dict[str, Any]:
        """Sums by size, most densely around the gradient's: it comes first, so it is always measured."""
        self.say(f"sums over {count(ranks, 'rank')} by size")
        near = [gradient // parts // 4 * 4 for parts in (1, 2, 4, 8)]
        return self._allreduce(ranks, [gradient, *(n for n in SIZES if n < min(near)), *reversed(near[1:])])

    def _allreduce(self, ranks: int, sizes: Sequence[int]) -> dict[str, Any]:
        options = allreduce.AllreduceOptions(
            ranks=ranks,
            hostfile=self.options.hostfile,
            launcher=self.options.launcher,
            sizes=",".join(map(str, sizes)),
            algorithms=self.run.train.grad_sync,
            seconds=self.options.seconds,
        )
        return allreduce.start(options)
