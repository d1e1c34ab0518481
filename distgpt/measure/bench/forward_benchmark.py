"""`distgpt bench forward`: methods on the same names and weights, each measured in processes of its own."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from distgpt.comm.launched import launched_as
from distgpt.errors import DisagreementError, UsageError
from distgpt.formatting import count
from distgpt.jobs.launchers import Launcher, find_launcher
from distgpt.measure import jobs
from distgpt.measure.bench.forward import Job, measure, sequences
from distgpt.measure.bench.results import BenchOptions, Row, say
from distgpt.measure.published import METHODS, NAMES
from distgpt.show.page import Block, Column, Paragraph, tabulated
from distgpt.stages import ON_GPU, open_stage

AGREE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 3e-2}  # relative, by the coarser of the two types
IN_DOUBLE = ("python", "serial")  # on one thread, whatever the others do


@dataclass(frozen=True, slots=True)
class ForwardOptions(BenchOptions):
    """The command line. Without `methods` all that work here; `measure_only`: as a child that prints JSON."""

    presets: Sequence[str] = ()
    names: int | None = None
    methods: Sequence[str] = ()
    dtypes: Sequence[str] = ("float32",)
    threads: int | None = None
    repeats: int = 5
    patience: float = 60.0
    measure_only: bool = False

    def job(self, preset: str, method: str, dtype: str, names: int | None = None) -> Job:
        names, threads = names or self.names or NAMES[preset], self.threads or 0
        return Job(preset, method, names, dtype, threads, self.repeats, self.patience)

    @property
    def is_rank(self) -> bool:
        """Whether this process measures itself, alone or as a rank, instead of starting others."""
        return self.measure_only or launched_as() > 1

    def only_job(self) -> Job:
        """Return what a rank measures."""
        methods = self.methods or (["mpi"] if launched_as() > 1 else ["batched"])
        presets = self.presets or ("S",)
        if max(map(len, (presets, methods, self.dtypes))) > 1:
            raise UsageError(
                "launched as one job, bench forward measures one preset, method and dtype: name one"
            )
        return self.job(presets[0], methods[0], self.dtypes[0])


def bench(options: ForwardOptions) -> None:
    if options.is_rank:
        job = options.only_job()
        stage = open_stage(stage_of(job.method), options.threads)
        found = measure(job, stage)
        if stage.comm.rank == 0:
            print(json.dumps(found))
        return
    benchmark = Benchmark(options, *methods_and_launcher(options))
    presets = options.presets or ("S",)
    options.prepare()
    work = [(name, options.names or NAMES[name]) for name in presets]
    rows = with_speedups([row for each in work for row in benchmark.compare(benchmark.jobs(*each))])
    found = {"rows": rows}
    options.finish("forward", "-".join(presets), found, blocks(found))


# -- what can be measured here


def stage_of(method: str) -> str:
    """Return the stage that a method of ours runs in."""
    return method if method in ("mpi", "cuda", "mpi-cuda") else "serial"


def methods_and_launcher(options: ForwardOptions) -> tuple[Sequence[str], Launcher | None]:
    """Return the methods to measure, once each, and the launcher; refuse what cannot be measured here."""
    launcher = _launcher(options)
    methods = list(dict.fromkeys(options.methods)) or _available(launcher)
    if "bfloat16" in options.dtypes and set(methods) <= set(IN_DOUBLE):
        names = " and ".join(methods)
        raise UsageError(f"--method {names} computes in float64: --dtype bfloat16 needs another")
    for method in options.methods:
        for dtype in dtypes_of(method, options.dtypes):
            jobs.check_gpu(stage_of(method), dtype, options.launcher, options.hostfile)
    return methods, launcher


def _launcher(options: ForwardOptions) -> Launcher | None:
    """Return the launcher; None where there is none and none is needed."""
    try:
        return find_launcher(options.launcher, options.hostfile)
    except UsageError:
        if (
            options.launcher
            or options.hostfile
            or any(method.startswith("mpi") for method in options.methods)
        ):
            raise
        return None


def _available(launcher: Launcher | None) -> list[str]:
    """Return the methods that this machine has."""
    from distgpt.gpu.probe import driver

    gpus = driver()
    return ["serial", "batched"] + ["mpi"] * (launcher is not None) + ["cuda"] * bool(gpus and gpus.gpus)


def dtypes_of(method: str, dtypes: Sequence[str]) -> Sequence[str]:
    """Return the dtypes that the method is measured in, once each."""
    return ["float64"] if method in IN_DOUBLE else list(dict.fromkeys(dtypes))


# -- measuring


class Benchmark:
    """The methods to measure, and what it takes to start them."""

    order: Sequence[str] = METHODS  # the slow ones first: they are what the others are compared with

    def __init__(
        self, options: ForwardOptions, methods: Sequence[str], launcher: Launcher | None = None
    ) -> None:
        self.options, self.methods, self.launcher = options, methods, launcher

    def jobs(self, preset: str, names: int) -> list[Job]:
        """Return what to measure of a preset, by every method and dtype."""
        found = []
        for method in sorted(self.methods, key=self.order.index):
            for dtype in dtypes_of(method, self.options.dtypes):
                job = self.options.job(preset, method, dtype, names)
                found.append(replace(job, threads=1) if method in IN_DOUBLE else job)
        return found

    def compare(self, to_do: Sequence[Job]) -> list[Row]:
        """Return rows of jobs with the same names and weights, whose losses must agree."""
        rows = []
        for job in to_do:
            say(f"{job.preset}: {job.method}, {job.dtype}, {job.names:,} names")
            rows.append(row_of(job, self.measure(job)))
        refuse_different_losses([row for row in rows if not is_scaled(row)])
        for row in filter(is_scaled, rows):
            self.check_part(row)
        return rows

    def measure(self, job: Job) -> dict[str, Any]:
        """Measure in processes of their own."""
        words: list[object] = ["bench", "forward", *words_of(job)]
        launcher = self.launcher if job.method.startswith("mpi") else None
        return jobs.ask(what_of(job), words, launcher, self.options.ranks)

    def check_part(self, part: Row) -> None:
        """Compare a loss over the first names only with that of a batched pass over just these."""
        job = self.options.job(part["preset"], "batched", "float64", part["measured"])
        say(f"{job.preset}: the same {job.names:,} names batched, to compare with {part['method']}")
        again = self.measure(replace(job, repeats=1, patience=math.inf))
        refuse_different_losses([part, row_of(job, again)])


def words_of(job: Job) -> list[object]:
    """Return the options that make a process measure this job."""
    words: list[object] = ["--measure"]
    for key in ("preset", "method", "names", "dtype", "repeats", "patience"):
        words += [f"--{key}", getattr(job, key)]
    return words + (["--threads", job.threads] if job.threads and job.method not in ON_GPU else [])


def what_of(job: Job) -> str:
    """Name a job in an error."""
    return f"--method {job.method} of preset {job.preset}"


def row_of(job: Job, found: dict[str, Any]) -> Row:
    """Return a table's row. Where fewer names were `measured`, `seconds` grow with their predictions."""
    tokens, measured = (sequences(names).predictions for names in (job.names, found["measured"]))
    kept = ("ranks", "threads", "measured", "all_seconds", "loss", "peak_memory")
    return {
        "preset": job.preset,
        "method": job.method,
        "dtype": job.dtype,
        "names": job.names,
        **{key: found[key] for key in kept},
        "tokens": tokens,
        "seconds": found["seconds"] * tokens / measured,
        "peak_gpu_memory": found.get("peak_gpu_memory"),
        "speedup": None,
        "speedup_scaled": False,
    }


def refuse_different_losses(rows: Sequence[Row]) -> None:
    """Refuse losses over the same names that differ from the most precise row's by more than rounding."""
    by_precision = sorted(rows, key=lambda row: list(AGREE).index(row["dtype"]))
    for row in rows:
        reference = by_precision[0]
        tolerance = max(AGREE[reference["dtype"]], AGREE[row["dtype"]])
        distance = abs(row["loss"] / reference["loss"] - 1)
        if not distance <= tolerance:
            raise DisagreementError(
                f"preset {row['preset']}: {row['method']} in {row['dtype']} finds a loss of "
                f"{row['loss']:.10g}, {reference['method']} in {reference['dtype']} "
                f"{reference['loss']:.10g}: they differ by {distance:.1e}, and may by {tolerance:g}"
            )


def with_speedups(rows: Sequence[Row]) -> list[Row]:
    """Add how much faster each row is than serial on the same work, where that was measured too."""
    serial = {(row["preset"], row["names"]): row for row in rows if row["method"] == "serial"}
    return [row | speedup(row, serial.get((row["preset"], row["names"]))) for row in rows]


def speedup(row: Row, plain: Row | None) -> Row:
    """Return the speed-up over the plain way, and whether either was measured on a part of the names."""
    if plain is None:
        return {"speedup": None, "speedup_scaled": False}
    return {
        "speedup": plain["seconds"] / row["seconds"],
        "speedup_scaled": is_scaled(row) or is_scaled(plain),
    }


# -- showing: a star marks what rests on a part of the names


def is_scaled(row: Row) -> bool:
    """Whether its seconds are scaled up from those of a part of the names."""
    return bool(row["measured"] < row["names"])


def _number(value: float, digits: int) -> str:
    """Format with one decimal from 10 on, below that with this many significant digits."""
    return f"{value:,.1f}" if value >= 10 else f"{value:#.{digits}g}"


def seconds(row: Row) -> str:
    return _number(row["seconds"], 3) + "*" * is_scaled(row)


def times(row: Row) -> str:
    """Format how many times as fast as the plain way it is, if that was measured."""
    return _number(row["speedup"], 2) + "*" * row.get("speedup_scaled", False) if row["speedup"] else ""


def _megabytes(row: Row) -> str:
    """Format the memory of all of its processes, and what they took on GPUs."""
    gpu = row.get("peak_gpu_memory")
    return f"{sum(row['peak_memory']) / 1e6:,.0f}" + (f" + {sum(gpu) / 1e6:,.0f} GPU" if gpu else "")


COLUMNS: tuple[Column, ...] = (
    ("preset", "preset", str),
    ("method", "method", str),
    ("dtype", "dtype", str),
    ("ranks × threads", "", lambda row: f"{row['ranks']} × {row['threads']}"),
    ("seconds", "", seconds),
    ("× serial", "", times),
    ("names/s", "", lambda row: f"{row['names'] / row['seconds']:,.0f}" + "*" * is_scaled(row)),
    ("peak MB", "", _megabytes),
)


def blocks(found: dict[str, Any]) -> list[Block]:
    return [tabulated(COLUMNS, found["rows"]), *map(Paragraph, scaled_notes(found["rows"]))]


def scaled_notes(rows: Sequence[Row]) -> list[str]:
    """Return a line for each row that rests on a part of the names, and the meaning of a star."""
    notes = [
        f"{row['preset']}, {row['method']}: in proportion from {row['measured']:,} of "
        f"{count(row['names'], 'name')}"
        for row in rows
        if is_scaled(row)
    ]
    return [*notes, "* in proportion, or compared with what is"] if notes else []
