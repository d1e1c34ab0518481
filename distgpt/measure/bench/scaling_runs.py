"""The runs behind `distgpt bench scaling`: real training in processes of its own, and sums by themselves."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distgpt.comm.api import CHUNK_BYTES
from distgpt.comm.cores import usable_cores
from distgpt.config import RunConfig
from distgpt.errors import UsageError
from distgpt.machine.launchers import Launcher, find_launcher
from distgpt.machine.processes import distgpt_command, run
from distgpt.measure.bench.allreduce_page import Wanted, launched
from distgpt.measure.bench.alphabeta import AlphaBeta, OverNetwork, fit
from distgpt.measure.bench.failing import raise_failure
from distgpt.measure.bench.network import Network
from distgpt.measure.bench.results import prepare
from distgpt.measure.bench.scaling import MODES, Job, affine, compared, forecast, takes_over
from distgpt.measure.peer.running import unsteered
from distgpt.saved.rundir import RunDirectory
from distgpt.units import count

SIZES = [8 << (2 * i) for i in range(10)]  # 8 bytes to 2 MiB
SMALLEST = SIZES[:1]


@dataclass(frozen=True, slots=True)
class Setup:
    """How the runs are made. `ranks` rise and begin with 1; no `hostfile`: all are on this machine."""

    run: RunConfig
    ranks: Sequence[int]
    threads: int
    modes: Sequence[str] = MODES
    hostfile: Path | None = None
    launcher: str | None = None
    seconds: float = 10.0  # for the sums

    @property
    def one_machine(self) -> bool:
        """Whether nothing but this machine can be meant."""
        return self.hostfile is None and self.launcher is None


@dataclass(frozen=True, slots=True)
class Places:
    """Where ranks go: `ranks_per_node` at most share one host's `cores`."""

    ranks_per_node: int
    cores: int

    def crowded(self, ranks: int, threads: int) -> bool:
        """Whether a host has more of their threads than cores, if one is filled before the next."""
        return min(ranks, self.ranks_per_node) * threads > self.cores


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is predicted: numbers of ranks, over which network, if it is another one than this."""

    ranks: Sequence[int]
    network: Network | None = None
    ranks_per_node: int = 1


def threads_per_rank(ranks: Sequence[int]) -> int:
    """The same for all runs, so that ranks are all that changes."""
    return max(1, len(usable_cores()) // max(ranks))


def checked(setup: Setup) -> Launcher:
    """Before anything runs: that each batch can be cut, and that ranks can be started."""
    batch = setup.run.train.batch_size
    for ranks in setup.ranks:
        if "strong" in setup.modes and batch % ranks:
            raise UsageError(
                f"a batch of {count(batch, 'sequence')} cannot be cut for {ranks} ranks: choose another "
                "--batch-size or --ranks, or --weak alone"
            )
    return find_launcher(setup.launcher, setup.hostfile)


def scaling(setup: Setup, outlook: Outlook, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure, fit, predict: everything that goes into the file.

    What the runs leave is for a time in `folder`, which all hosts are to see, and taken away.
    """
    launcher = checked(setup)
    prepare(folder)
    batch, widest = setup.run.train.batch_size, max(setup.ranks)
    with tempfile.TemporaryDirectory(prefix=".runs-", dir=folder.resolve()) as scratch:
        runs = _Runs(setup, launcher, Path(scratch), say)
        places = runs.places(widest)
        alone = runs.step(1, batch)
        points = [(batch, alone["step_s_median"])]
        if batch > 1:
            few = max(1, batch // max(2, widest))
            points.append((few, runs.step(1, few)["step_s_median"]))
        measured = []
        gradient = alone["parameters"] * (8 if setup.run.train.dtype == "float64" else 4)
        job = Job(batch, setup.run.model.seq_len, gradient)
        for mode in setup.modes:
            for ranks in setup.ranks:
                rows = batch if mode == "strong" else batch * ranks
                step = runs.step(ranks, rows)["step_s_median"]
                crowded = places.crowded(ranks, setup.threads)
                measured.append(compared(mode, ranks, step, job, alone["step_s_median"], crowded))
        apart = [n for n in setup.ranks if n > 1 and not places.crowded(n, setup.threads)]
        summed = runs.sums(max(apart, default=2), gradient)
    found = {
        "stage": "mpi",
        "threads": setup.threads,
        "cores": places.cores,
        "batch_size": batch,
        "seq_len": job.seq_len,
        "parameters": alone["parameters"],
        "dtype": setup.run.train.dtype,
        "gradient_bytes": gradient,
        "measured": measured,
        "allreduce": summed,
    }
    return found | predicted(found, setup, outlook, points)


def predicted(
    found: dict[str, Any], setup: Setup, outlook: Outlook, points: Sequence[tuple[int, float]]
) -> dict[str, Any]:
    """The model's numbers, and beside the measured rows what it says of them."""
    job = Job(found["batch_size"], found["seq_len"], found["gradient_bytes"])
    here, compute = fitted(found["allreduce"], setup.run.train.grad_sync), affine(points)
    for row in found["measured"]:
        told = forecast(row["mode"], row["ranks"], job, compute, here.seconds)
        row["predicted_step_s"] = told.step_s
    far = OverNetwork(here, outlook.network, outlook.ranks_per_node) if outlook.network else here
    return {
        "compute": {
            "points": [list(point) for point in points],
            "fixed": compute.fixed,
            "row": compute.per_row,
        },
        "model": here.as_json(),
        "network": str(outlook.network) if outlook.network else None,
        "ranks_per_node": outlook.ranks_per_node if outlook.network else None,
        "predicted": [
            forecast(mode, ranks, job, compute, far.seconds).as_json()
            for mode in setup.modes
            for ranks in outlook.ranks
            if job.possible(mode, ranks)
        ],
        "not_predicted": [
            {"mode": mode, "ranks": ranks}
            for mode in setup.modes
            for ranks in outlook.ranks
            if not job.possible(mode, ranks)
        ],
        "takes_over": {mode: takes_over(mode, job, compute, far.seconds) for mode in setup.modes},
    }


def fitted(summed: dict[str, Any], grad_sync: str) -> AlphaBeta:
    """To the way of summing that the runs take."""
    table = [(row["bytes"], row["seconds"]) for row in summed["rows"] if row["algorithm"] == grad_sync]
    form = "ring" if "Open MPI" in summed["library"] else "scatter-gather"
    return fit(table, summed["ranks"], form, CHUNK_BYTES if grad_sync == "chunked" else None)


class _Runs:
    """Starts what is measured; a run that was made already is not made again."""

    def __init__(self, setup: Setup, launcher: Launcher, scratch: Path, say: Callable[[str], None]) -> None:
        self._setup, self._launcher, self._scratch, self._say = setup, launcher, scratch, say
        self._known: dict[tuple[int, int], dict[str, Any]] = {}

    def step(self, ranks: int, batch: int) -> dict[str, Any]:
        """The summary of a run of so many ranks with so many sequences in all."""
        if (ranks, batch) not in self._known:
            self._say(f"training on {count(ranks, 'rank')}, {count(batch, 'sequence')} a step")
            self._known[ranks, batch] = self._trained(ranks, batch)
        return self._known[ranks, batch]

    def _trained(self, ranks: int, batch: int) -> dict[str, Any]:
        name = f"{ranks}-{batch}"
        config, out = self._scratch / f"{name}.toml", self._scratch / name
        config.write_text(self._setup.run.with_values({"batch_size": batch}).to_toml())
        where = ["--stage", "mpi" if ranks > 1 else "serial", "--threads", self._setup.threads]
        words = distgpt_command("train", *where, "--config", config, "--out", out, "--progress", "plain")
        ended = run(self._launcher.command(ranks, words) if ranks > 1 else words, env=unsteered())
        if ended.code:
            raise_failure(ended, f"training on {count(ranks, 'rank')}")
        summary: dict[str, Any] = json.loads(RunDirectory(out).summary.read_text())
        return summary

    def places(self, ranks: int) -> Places:
        """Of so many ranks; where they may be on several hosts, they are asked."""
        if self._setup.one_machine or ranks < 2:
            return Places(ranks, len(usable_cores()))
        found = self._allreduce(ranks, SMALLEST)
        fullest = found["ranks_per_node"]
        return Places(fullest, max(1, round(fullest * found["cores_per_rank"])))

    def sums(self, ranks: int, gradient: int) -> dict[str, Any]:
        """By size, most closely around the gradient's, which comes first: that one is there in any case."""
        self._say(f"sums over {count(ranks, 'rank')} by size")
        near = [gradient // parts // 4 * 4 for parts in (1, 2, 4, 8)]
        return self._allreduce(ranks, [gradient, *(n for n in SIZES if n < min(near)), *reversed(near[1:])])

    def _allreduce(self, ranks: int, sizes: Sequence[int]) -> dict[str, Any]:
        wanted = Wanted(
            sizes=",".join(map(str, sizes)),
            algorithms=self._setup.run.train.grad_sync,
            seconds=self._setup.seconds,
        )
        return launched(wanted, ranks, self._setup.hostfile, self._setup.launcher)
