"""The forward-pass study: time the mean loss over thousands of names with different methods.

    python benchmarks/forward_study.py --preset S --preset MS5 --peer PYTHON
    mpirun -n 2 python benchmarks/forward_study.py --method mpi        # measures these ranks

Ranks and threads share batches of names of equal length (mean_loss.py). All methods use the same weights, in
separate processes. If losses differ, the program fails.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from forward_peers import measure_plain, measure_torch, python_seconds
from forward_work import (
    METHODS,
    NAMES,
    Job,
    blocks,
    is_scaled,
    measure,
    refuse_different_losses,
    row_of,
    with_speedups,
)
from peer_process import refuse_without_torch, torch_version
from record import end_with_errors

from distgpt.cluster.jobs.launchers import Launcher, find_launcher
from distgpt.cluster.jobs.processes import run
from distgpt.cluster.launch.environment import launched_as
from distgpt.commands.bench import result_options, to_options, together
from distgpt.commands.options import FiniteRange, launch_options
from distgpt.core.base.errors import UsageError
from distgpt.core.config import DTYPES, ON_GPU
from distgpt.core.cpu.stages import open_stage
from distgpt.gpu.probe import driver
from distgpt.measure import jobs
from distgpt.measure.jobs import BenchOptions, Row, say

ALL_METHODS = ("python", *METHODS, "torch", "torch-batched")
IN_DOUBLE = ("python", "serial")  # always on one thread


@dataclass(frozen=True, slots=True)
class StudyOptions(BenchOptions):
    """The command line. `measure_only` is for child processes, which print JSON."""

    presets: Sequence[str] = ()
    names: int | None = None
    methods: Sequence[str] = ()
    dtypes: Sequence[str] = ("float32",)
    threads: int | None = None
    repeats: int = 5
    patience: float = 60.0
    measure_only: bool = False
    peer: str | None = None

    def job(self, preset: str, method: str, dtype: str, names: int | None = None) -> Job:
        names, threads = names or self.names or NAMES[preset], self.threads or 0
        return Job(preset, method, names, dtype, threads, self.repeats, self.patience)

    @property
    def is_rank(self) -> bool:
        """Return whether this process measures itself instead of starting others."""
        return self.measure_only or launched_as() > 1

    def only_job(self) -> Job:
        methods = self.methods or (["mpi"] if launched_as() > 1 else ["batched"])
        presets = self.presets or ("S",)
        if max(map(len, (presets, methods, self.dtypes))) > 1:
            raise UsageError("an mpirun job measures one preset, method and dtype; pass one of each")
        return self.job(presets[0], methods[0], self.dtypes[0])


@click.command("forward_study.py", help=__doc__, context_settings={"show_default": True})
@together(
    click.option("--measure", "measure_only", is_flag=True, hidden=True),  # set for child processes
    result_options(name=""),
    click.option(
        "--patience",
        type=FiniteRange(0, min_open=True),
        default=60.0,
        help="Limit for all passes of a method, in seconds; slower methods use fewer names.",
    ),
    click.option("--repeats", type=click.IntRange(1), default=5, help="Passes to take the median of."),
    click.option("--threads", type=click.IntRange(1), help="Threads per process  [default: share of cores]"),
    launch_options,
    click.option("--dtype", "dtypes", type=click.Choice(DTYPES), multiple=True, default=("float32",)),
    click.option(
        *("--method", "methods"),
        type=click.Choice(ALL_METHODS),
        multiple=True,
        help="Method to measure; repeatable. Without it, measure all available ones.",
    ),
    click.option("--names", type=click.IntRange(1), help="Number of names  [default: the published number]"),
    click.option(
        *("--preset", "presets"),
        type=click.Choice(list(NAMES)),
        multiple=True,
        help="Model and names; repeatable  [default: S]",
    ),
)
@click.option("--peer", help="Python with PyTorch.")
def main(**given: Any) -> None:
    options = to_options(StudyOptions, given)
    if options.is_rank:
        measure_as_rank(options.only_job(), options.threads)
        return
    presets, study = options.presets or ("S",), study_of(options)
    options.prepare()
    found = {"rows": study.rows(presets)}
    options.finish("forward", "-".join(presets), found, blocks(found))


def study_of(options: StudyOptions) -> Study:
    """Check that this machine can measure everything, before the first measurement."""
    peer = options.peer or sys.executable
    if options.peer is not None or any(method.startswith("torch") for method in options.methods):
        refuse_without_torch("--peer", peer)
    methods, launcher = methods_and_launcher(options)
    if not options.methods:
        with_torch = torch_version(peer) is not None
        methods = ["python", *methods, *(["torch", "torch-batched"] if with_torch else [])]
    return Study(options, methods, launcher, peer)


def stage_of(method: str) -> str:
    return method if method in ("mpi", "cuda", "mpi-cuda") else "serial"


def methods_and_launcher(options: StudyOptions) -> tuple[Sequence[str], Launcher | None]:
    """Return the methods to measure, once each, and the launcher, after checking them."""
    methods = list(dict.fromkeys(options.methods))
    if "bfloat16" in options.dtypes and set(methods) <= set(IN_DOUBLE) and methods:
        names = " and ".join(methods)
        raise UsageError(f"--method {names} computes in float64; for --dtype bfloat16, choose another method")
    launcher = None
    with_ranks = any(method.startswith("mpi") for method in methods)
    try:
        launcher = find_launcher(options.launcher, options.hostfile)
    except UsageError:
        if with_ranks or options.launcher or options.hostfile:
            raise
    for method in methods:
        for dtype in dtypes_of(method, options.dtypes):
            jobs.check_gpu(stage_of(method), dtype, options.launcher, options.hostfile)
    return methods or _available(launcher), launcher


def _available(launcher: Launcher | None) -> list[str]:
    gpus = driver()
    return ["serial", "batched"] + ["mpi"] * (launcher is not None) + ["cuda"] * bool(gpus and gpus.gpus)


def dtypes_of(method: str, dtypes: Sequence[str]) -> Sequence[str]:
    return ["float64"] if method in IN_DOUBLE else list(dict.fromkeys(dtypes))


class Study:
    """The methods to measure and the information to start them."""

    def __init__(
        self, options: StudyOptions, methods: Sequence[str], launcher: Launcher | None, peer: str
    ) -> None:
        self.options, self.methods, self.launcher = options, methods, launcher
        self.peer = peer

    def rows(self, presets: Sequence[str]) -> list[Row]:
        work = [self.jobs(name, self.options.names or NAMES[name]) for name in presets]
        return with_speedups([row for jobs in work for row in self.compare(jobs)])

    def jobs(self, preset: str, names: int) -> list[Job]:
        """Return the measurements of a preset for each method and dtype, slow ones first."""
        found = []
        for method in sorted(self.methods, key=ALL_METHODS.index):
            if method == "python" and not (self.options.methods or self._suits_python(preset, names)):
                continue
            for dtype in dtypes_of(method, self.options.dtypes):
                job = self.options.job(preset, method, dtype, names)
                found.append(replace(job, threads=1) if method in IN_DOUBLE else job)
        return found

    def _suits_python(self, preset: str, names: int) -> bool:
        """Return whether to measure plain Python by default: the preset microgpt, if it is fast enough."""
        return preset == "microgpt" and python_seconds(preset, names) < self.options.patience / 2

    def compare(self, to_do: Sequence[Job]) -> list[Row]:
        """Measure jobs with the same names and weights and check that their losses agree."""
        rows = []
        for job in to_do:
            say(f"{job.preset}: {job.method}, {job.dtype}, {job.names:,} names")
            rows.append(row_of(job, self.measure(job)))
        refuse_different_losses([row for row in rows if not is_scaled(row)])
        for row in filter(is_scaled, rows):
            self.check_part(row)
        return rows

    def measure(self, job: Job) -> dict[str, Any]:
        if job.method.startswith("torch"):
            return measure_torch(self.peer, job)
        command = [*this_program(), *map(str, words_of(job))]
        if self.launcher is not None and job.method.startswith("mpi"):
            command = self.launcher.command(self.options.ranks, command)
        ended = run(command, env=jobs.unsteered())
        return jobs.answer(ended, f"--method {job.method} of preset {job.preset}")

    def check_part(self, part: Row) -> None:
        """Compare a loss over the first names with a batched pass over the same names."""
        job = self.options.job(part["preset"], "batched", "float64", part["measured"])
        say(f"{job.preset}: the same {job.names:,} names batched, to compare with {part['method']}")
        again = self.measure(replace(job, repeats=1, patience=math.inf))
        refuse_different_losses([part, row_of(job, again)])


def this_program() -> list[str]:
    """Return the command that started this program. Tests run it inside another program."""
    line = sys.orig_argv
    at = [number for number, word in enumerate(line) if word.endswith(Path(__file__).name)]
    return line[: at[0] + 1] if at else [sys.executable, __file__]


def words_of(job: Job) -> list[object]:
    words: list[object] = ["--measure"]
    for key in ("preset", "method", "names", "dtype", "repeats", "patience"):
        words += [f"--{key}", getattr(job, key)]
    return words + (["--threads", job.threads] if job.threads and job.method not in ON_GPU else [])


def measure_as_rank(job: Job, threads: int | None) -> None:
    """Measure one method on these ranks. Rank 0 prints the result."""
    if job.method == "python":
        print(json.dumps(measure_plain(job)))
        return
    stage = open_stage(stage_of(job.method), threads)
    found = measure(job, stage)
    if stage.comm.rank == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    end_with_errors(main)
