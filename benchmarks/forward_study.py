"""The forward-pass study: the mean loss over thousands of names by every method, and its table.

    python benchmarks/forward_study.py --preset S --preset MS5 --ablation --peer PYTHON
    python benchmarks/forward_study.py --sweep input|model|joint

Adds to `distgpt bench forward`: plain Python and PyTorch; sweeps over names and models; what batches and
single precision bring; and the seconds that the study published. Our methods take short sequences through all
layers in one compiled call (short_sequences.py). All compute with the same weights; a loss that differs from
the others' ends the program.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import click
import microgpt_plain_python as plain
import numpy as np
from peer_process import ask_peer, for_torch, refuse_without_torch, torch_version
from record import end_with_errors
from short_sequences import ShortLoss

from distgpt.comm.cores import peak_memory, usable_cores
from distgpt.commands import bench
from distgpt.config.presets import preset as preset_named
from distgpt.errors import UsageError
from distgpt.formatting import count
from distgpt.jobs.processes import run
from distgpt.kernels.reference import ReferenceKernels
from distgpt.measure.bench.forward import COLUMNS as OURS
from distgpt.measure.bench.forward import (
    Benchmark,
    ForwardOptions,
    Job,
    bundled_names,
    initialised,
    is_scaled,
    measure,
    methods_and_launcher,
    scaled_notes,
    seconds,
    sequences,
    stage_of,
    times,
    tokens_of,
    what_of,
    with_speedups,
    words_of,
)
from distgpt.measure.bench.results import Row
from distgpt.measure.jobs import answer, unsteered
from distgpt.measure.published import METHODS, NAMES
from distgpt.model.counts import operations, parameters
from distgpt.model.model import Architecture
from distgpt.show.charts import Bar, BarChart, LineChart, line
from distgpt.show.page import Block, Column, tabulated
from distgpt.stages import open_stage

ALL_METHODS = ("python", *METHODS, "torch", "torch-batched")
SERIES = {"model": ("MS5", "MM5", "ML5", "MVL5", "MXL5"), "joint": ("S", "M", "L", "VL", "XL")}
MORE_NAMES = (500, 1000, 2000, 5000, 10000, 20000, 30000)
MOST_NAMES = 512  # in a batch of PyTorch's, as in the study

# Published seconds: the study's UT, BT, SC (double) and PC (float).
_TIMED = ("torch", "torch-batched", "serial", "cuda")
_SECONDS = {
    "S": (2.30, 0.93, 0.50, 0.14),
    "M": (6.66, 1.07, 10.76, 0.25),
    "L": (23.32, 2.41, 189.75, 0.76),
    "VL": (64.90, 6.14, 1342.22, 3.06),
    "XL": (127.71, 13.46, 4771.83, 9.18),
    "MS5": (4.33, 0.92, 1.23, 0.20),
    "MM5": (6.81, 1.10, 10.76, 0.26),
    "ML5": (12.45, 2.37, 93.53, 0.50),
    "MVL5": (20.20, 5.79, 327.28, 1.07),
    "MXL5": (32.29, 12.34, 784.64, 2.10),
}


@dataclass(frozen=True, slots=True)
class StudyOptions(ForwardOptions):
    """The command line."""

    peer: str | None = None
    sweep: str | None = None
    ablation: bool = False


@click.command("forward_study.py", help=__doc__)
@bench.forward_options(ALL_METHODS)
@click.option("--peer", help="A Python with PyTorch; this one if left out.")
@click.option(
    "--sweep",
    type=click.Choice(["input", "model", "joint"]),
    help="Over names; over MS5 to MXL5; over S to XL.",
)
@click.option("--ablation", is_flag=True, help="Also what batches and single precision bring, each alone.")
def main(**given: Any) -> None:
    options = bench.to_options(StudyOptions, given)
    if options.is_rank:
        measure_as_rank(options.only_job(), options.threads)
        return
    presets, name = presets_of(options)
    study = study_of(options)
    options.prepare()
    rows = study.rows(presets)
    chosen = presets if options.ablation else ()
    parts = [part for each in chosen for part in study.ablation(each, options.names or NAMES[each])]
    found = {"rows": rows, "sweep": options.sweep, "ablation": parts}
    options.finish("forward", name, found, blocks(found), charts(found))


def presets_of(options: StudyOptions) -> tuple[Sequence[str], str]:
    """Return the presets to measure, and a name for the results."""
    if options.sweep in SERIES:
        return options.presets or SERIES[options.sweep], options.sweep
    presets = options.presets or ("S",)
    if options.sweep == "input" and len(presets) > 1:
        raise UsageError("--sweep input is over the names of one --preset")
    return presets, "-".join((*presets, options.sweep)) if options.sweep else "-".join(presets)


def study_of(options: StudyOptions) -> Study:
    """Refuse what cannot be measured here, before anything is."""
    peer = options.peer or sys.executable
    if options.peer is not None or any(method.startswith("torch") for method in options.methods):
        refuse_without_torch("--peer", peer)
    methods, launcher = methods_and_launcher(options)
    if not options.methods:
        with_torch = torch_version(peer) is not None
        methods = ["python", *methods, *(["torch", "torch-batched"] if with_torch else [])]
    return Study(options, methods, launcher, peer)


class Study(Benchmark):
    """The methods of `distgpt bench forward`, plain Python and PyTorch."""

    order = ALL_METHODS

    def __init__(self, options: StudyOptions, methods: Sequence[str], launcher: Any, peer: str) -> None:
        super().__init__(options, methods, launcher)
        self.peer, self.sweep = peer, options.sweep

    def rows(self, presets: Sequence[str]) -> list[Row]:
        """Compare the methods on each preset, or on each number of names of the only one."""
        names = self.options.names
        work = [(name, names or NAMES[name]) for name in presets]
        if self.sweep == "input":
            most = work[0][1]
            work = [(presets[0], few) for few in (*(few for few in MORE_NAMES if few < most), most)]
        return with_speedups([with_published(row) for each in work for row in self.compare(self.jobs(*each))])

    def ablation(self, name: str, names: int) -> list[Row]:
        """Measure what batches and single precision bring, alone and together, on one thread."""
        each = [(method, dtype) for method in ("serial", "batched") for dtype in ("float64", "float32")]
        rows = self.compare([replace(self.options.job(name, *how, names), threads=1) for how in each])
        plain = rows[0]["seconds"]
        return [
            row | {"batched": row["method"] == "batched", "speedup": plain / row["seconds"]} for row in rows
        ]

    def jobs(self, preset: str, names: int) -> list[Job]:
        found = super().jobs(preset, names)
        if self.options.methods or self._suits_python(preset, names):
            return found
        return [job for job in found if job.method != "python"]

    def _suits_python(self, preset: str, names: int) -> bool:
        """Return whether plain Python is measured unasked: at its own size, if it ends well in time."""
        return preset == "microgpt" and python_seconds(preset, names) < self.options.patience / 2

    def measure(self, job: Job) -> dict[str, Any]:
        if job.method.startswith("torch"):
            return self._by_torch(job)
        command = [sys.executable, __file__, *map(str, words_of(job))]
        if self.launcher is not None and job.method.startswith("mpi"):
            command = self.launcher.command(self.options.ranks, command)
        return answer(run(command, env=unsteered()), what_of(job))

    def _by_torch(self, job: Job) -> dict[str, Any]:
        model, every = initialised(job.preset, ReferenceKernels("float64")), sequences(job.names)
        with tempfile.TemporaryDirectory() as scratch:
            files = {what: f"{scratch}/{what}.npz" for what in ("weights", "names")}
            weights: dict[str, Any] = {name: np.array(values) for name, values in model.params.items()}
            np.savez(files["weights"], **weights)
            np.savez(files["names"], tokens=every.tokens, lengths=every.lengths)
            request = {
                "shape": for_torch(model.config),
                "threads": job.threads or len(usable_cores()),
                "dtype": job.dtype,
                "most": 1 if job.method == "torch" else MOST_NAMES,
                "repeats": job.repeats,
                "patience": job.patience,
            }
            return ask_peer(self.peer, "names", {**request, **files}) | {"ranks": 1}


def with_published(row: Row) -> Row:
    """Add the study's seconds, where it measured the same amount of work by this method."""
    name, method = row["preset"], row["method"]
    same = method in _TIMED and name in _SECONDS and row["names"] == NAMES[name]
    return row | {"published_s": _SECONDS[name][_TIMED.index(method)] if same else None}


# -- one measurement of ours


def measure_as_rank(job: Job, threads: int | None) -> None:
    """Measure one method as these ranks; rank 0 prints the result."""
    if job.method == "python":
        print(json.dumps(measure_plain(job)))
        return
    stage = open_stage(stage_of(job.method), threads)
    found = measure(job, stage, ShortLoss)
    if stage.comm.rank == 0:
        print(json.dumps(found))


def measure_plain(job: Job) -> dict[str, Any]:
    """Measure plain Python: one pass, without warm-up; refuse what would take longer than `patience`."""
    expected = python_seconds(job.preset, job.names)
    if expected > job.patience:
        within = int(job.names * job.patience / expected)
        way = f"--names {within} fits into the {job.patience:g} s of --patience"
        raise UsageError(
            f"plain Python would take about {expected:,.0f} s for {count(job.names, 'name')} "
            f"of {job.preset}: {way if within else 'raise --patience'}, or leave --method python out"
        )
    model = initialised(job.preset, ReferenceKernels("float64"))
    weights = {name: values.tolist() for name, values in model.params.items()}
    shape = plain.Shape(model.config.n_layer, model.config.n_head, model.config.norm_eps)
    names = [tokens_of(name) for name in bundled_names(job.names)]
    begun = time.perf_counter()
    loss = plain.mean_loss(weights, shape, names)
    took = time.perf_counter() - begun
    found = {"measured": job.names, "seconds": took, "all_seconds": [took], "loss": loss}
    return found | {"peak_memory": [peak_memory()], "ranks": 1, "threads": 1}


def python_seconds(name: str, names: int) -> float:
    """Estimate plain Python's time, from that of a long dot product."""
    many = [1.0] * (1 << 16)
    begun = time.perf_counter()
    plain.dot(many, many)
    product = (time.perf_counter() - begun) / len(many)
    flops = operations(Architecture(preset_named(name).model)).forward
    return product * sequences(names).predictions * flops / 2


# -- showing


def _way(r: Row) -> str:
    return "batched" if r["batched"] else "one at a time"


COLUMNS: tuple[Column, ...] = (*OURS, ("published s", "published_s", "{:,.2f}".format))
ABLATION: tuple[Column, ...] = (
    ("preset", "preset", str),
    ("names", "", _way),
    ("dtype", "dtype", str),
    ("seconds", "", seconds),
    ("× plain", "", times),
)


def blocks(found: dict[str, Any]) -> list[Block]:
    """Return curves of a sweep or else bars, and the tables."""
    rows, parts = found["rows"], found.get("ablation") or []
    notes = scaled_notes([*rows, *parts])
    if any(row["method"].startswith("torch") for row in rows):
        notes.append("torch keeps the memory it has freed, which makes it faster and larger")
    if any(row["published_s"] for row in rows):
        notes.append(
            "published: seconds of the study on its own machine, with its own PyTorch, C++ (serial) and CUDA"
        )
    shown: list[Block] = [*charts(found).values()] or _speedups(rows)
    shown.append(tabulated(COLUMNS, rows, "Mean loss over all names", "; ".join(notes)))
    return [*shown, _ablation(parts), tabulated(ABLATION, parts)] if parts else shown


def charts(found: dict[str, Any]) -> dict[str, LineChart]:
    """Return a sweep's chart, seconds by size. The key ends its file name."""
    if found.get("sweep") is None:
        return {}
    rows, by_names = found["rows"], found["sweep"] == "input"
    lines: dict[str, list[tuple[float, float]]] = {}
    in_part = {_who(r) for r in rows if is_scaled(r)}
    for r in rows:
        size = r["names"] if by_names else parameters(Architecture(preset_named(r["preset"]).model)).total
        lines.setdefault(_who(r), []).append((size, r["seconds"]))
    presets = ", ".join(dict.fromkeys(r["preset"] for r in rows))
    over = "names" if by_names else "parameters"
    several = not by_names and len({r["names"] for r in rows}) > 1
    grows = ", more names for larger models" if several else ""
    description = (
        f"Seconds for the mean loss over all names, by the number of {over}{grows}; presets {presets}."
    )
    if in_part:
        description += " Dashed and with a star: some of its sizes were measured on a part of the names only."
    title = f"Forward pass: seconds over {over}{grows}"
    series = [
        line(name + " *" * (name in in_part), sorted(points), dashed=name in in_part)
        for name, points in lines.items()
    ]
    return {"": LineChart(title, description, over, "seconds", series, log_x=True, log_y=True)}


def _who(r: Row) -> str:
    return f"{r['method']}, {r['dtype']}"


def _speedups(rows: Sequence[Row]) -> list[Block]:
    """Bars for each preset that was also measured one name at a time."""
    shown: list[Block] = []
    for name in dict.fromkeys(r["preset"] for r in rows):
        own = [r for r in rows if r["preset"] == name and r["speedup"]]
        if len(own) > 1:
            bars = [Bar(_who(r), r["speedup"], f"{times(r)} ×") for r in own]
            best = max(own, key=lambda r: float(r["speedup"]))
            description = (
                f"The fastest, {best['method']} in {best['dtype']}, is {times(best)} times as fast as serial."
            )
            title = f"{name}: speed-up over one name at a time"
            shown.append(BarChart(title, description, "times as fast", bars))
    return shown


def _ablation(rows: Sequence[Row]) -> BarChart:
    bars = [
        Bar(f"{r['preset']}: {_way(r)}, {r['dtype']}", r["speedup"], f"{times(r)} × ({r['seconds']:,.3g} s)")
        for r in rows
    ]
    best = max(rows, key=lambda r: float(r["speedup"]))
    description = (
        f"On one thread; {_way(best)} in {best['dtype']} is {times(best)} times as fast as the plain way."
    )
    return BarChart("What batches and single precision bring", description, "times as fast", bars)


if __name__ == "__main__":
    end_with_errors(main)
