"""`distgpt bench forward`: every method on the same names and weights, each in a process of its own."""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from distgpt.comm.cores import usable_cores
from distgpt.comm.launched import launched_as
from distgpt.errors import DisagreementError, UsageError
from distgpt.machine.launchers import Launcher, find_launcher
from distgpt.machine.stages import ON_GPU, open_stage
from distgpt.measure import jobs
from distgpt.measure.bench.forward import Job, initialised, measure, python_seconds, sequences
from distgpt.measure.bench.results import BenchOptions, Row, say
from distgpt.measure.bench.study_page import charts, scaled, text
from distgpt.measure.published import METHODS, NAMES, ONE_AT_A_TIME, SERIES, STAGE_OF, study_seconds

MOST_NAMES = 512  # in a batch of PyTorch's, as in the study
AGREE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 3e-2}  # relative, by the coarser of the two types
MORE_NAMES = (500, 1000, 2000, 5000, 10000, 20000, 30000)
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
    peer: str | None = None
    sweep: str | None = None
    ablation: bool = False
    measure_only: bool = False

    def job(self, preset: str, method: str, dtype: str, names: int | None = None) -> Job:
        names, threads = names or self.names or NAMES[preset], self.threads or 0
        return Job(preset, method, names, dtype, threads, self.repeats, self.patience)


def bench(options: ForwardOptions) -> None:
    options = replace(
        options, methods=list(dict.fromkeys(options.methods)), dtypes=list(dict.fromkeys(options.dtypes))
    )
    if options.measure_only or launched_as() > 1:
        _measure(options)
        return
    presets, name = _presets(options)
    contest = _contest(options)
    options.prepare()
    rows = study(contest, presets, options.names, options.sweep)
    chosen = presets if options.ablation else ()
    parts = [part for each in chosen for part in ablation(contest, each, options.names or NAMES[each])]
    found = {"rows": rows, "sweep": options.sweep, "ablation": parts}
    options.finish("forward", name, found, text(found), charts(found))


def _measure(options: ForwardOptions) -> None:
    """Measure one method as these ranks; rank 0 prints the result."""
    methods = options.methods or (["mpi"] if launched_as() > 1 else ["batched"])
    presets = options.presets or ("S",)
    several = [each for each in (presets, methods, options.dtypes) if len(each) > 1]
    if several or options.sweep or options.ablation:
        raise UsageError("launched as one job, bench forward measures one preset, method and dtype: name one")
    stage = open_stage(STAGE_OF.get(methods[0], "serial"), options.threads)
    found = measure(options.job(presets[0], methods[0], options.dtypes[0]), stage)
    if stage.comm.rank == 0:
        print(json.dumps(found))


def _presets(options: ForwardOptions) -> tuple[Sequence[str], str]:
    """The presets to measure, and a name for the results."""
    if options.sweep in SERIES:
        return options.presets or SERIES[options.sweep], options.sweep
    presets = options.presets or ("S",)
    if options.sweep == "input" and len(presets) > 1:
        raise UsageError("--sweep input is over the names of one --preset")
    return presets, "-".join((*presets, options.sweep)) if options.sweep else "-".join(presets)


# -- what can be measured here


def _contest(options: ForwardOptions) -> Contest:
    """Refuse what cannot be measured here, before anything is."""
    peer, launcher = options.peer or sys.executable, _launcher(options)
    needs_torch = options.peer is not None or any(method.startswith("torch") for method in options.methods)
    if needs_torch and jobs.torch_version(peer) is None:
        raise UsageError(f"--peer {Path(peer).name} cannot import torch: name a Python that can")
    methods = options.methods or _available(peer, launcher)
    check_dtypes(methods, options.dtypes)
    for method in options.methods:
        for dtype in dtypes_of(method, options.dtypes):
            jobs.check_gpu(STAGE_OF.get(method, ""), dtype, options.launcher, options.hostfile)
    return Contest(options, methods, peer, launcher)


def _launcher(options: ForwardOptions) -> Launcher | None:
    """The launcher; None where there is none and none is needed."""
    try:
        return find_launcher(options.launcher, options.hostfile)
    except UsageError:
        if options.launcher or options.hostfile or any(map(_with_mpi, options.methods)):
            raise
        return None


def _with_mpi(method: str) -> bool:
    return STAGE_OF.get(method, "").startswith("mpi")


def _available(peer: str, launcher: Launcher | None) -> list[str]:
    """The methods that this machine has."""
    from distgpt.gpu.probe import driver

    found = ["python", "serial", "batched"] + ["mpi"] * (launcher is not None)
    gpus = driver()
    found += ["cuda"] * bool(gpus and gpus.gpus)
    return found + ["torch", "torch-batched"] * (jobs.torch_version(peer) is not None)


def check_dtypes(methods: Sequence[str], dtypes: Sequence[str]) -> None:
    if "bfloat16" in dtypes and set(methods) <= set(IN_DOUBLE):
        raise UsageError(
            f"--method {' and '.join(methods)} computes in float64: --dtype bfloat16 needs another"
        )


def dtypes_of(method: str, dtypes: Sequence[str]) -> Sequence[str]:
    """The dtypes that the method is measured in."""
    return ["float64"] if method in IN_DOUBLE else dtypes


# -- measuring


@dataclass(frozen=True, slots=True)
class Contest:
    """The methods to measure, and what it takes to start them."""

    options: ForwardOptions
    methods: Sequence[str]
    peer: str
    launcher: Launcher | None

    def jobs(self, preset: str, names: int) -> list[Job]:
        """The slow methods first: they are what the others are compared with."""
        found = []
        for method in sorted(self.methods, key=METHODS.index):
            if method == "python" and not self.options.methods and not self._suits_python(preset, names):
                continue
            for dtype in dtypes_of(method, self.options.dtypes):
                job = self.options.job(preset, method, dtype, names)
                found.append(replace(job, threads=1) if method in IN_DOUBLE else job)
        return found

    def _suits_python(self, preset: str, names: int) -> bool:
        """Whether plain Python is measured unasked: at its own size, if it ends well within its time."""
        return preset == "microgpt" and python_seconds(preset, names) < self.options.patience / 2

    def compared(self, to_do: Sequence[Job]) -> list[Row]:
        """Rows of jobs with the same names and weights, whose losses must agree."""
        rows = []
        for job in to_do:
            say(f"{job.preset}: {job.method}, {job.dtype}, {job.names:,} names")
            found = self._by_torch(job) if job.method.startswith("torch") else self.by_us(job)
            rows.append(row(job, found))
        agree([each for each in rows if not scaled(each)])
        for each in filter(scaled, rows):
            self.check_part(each)
        return rows

    def by_us(self, job: Job) -> dict[str, Any]:
        words: list[object] = ["bench", "forward", "--measure"]
        for key in ("preset", "method", "names", "dtype", "repeats", "patience"):
            words += [f"--{key}", getattr(job, key)]
        if job.threads and job.method not in ON_GPU:
            words += ["--threads", job.threads]
        what = f"--method {job.method} of preset {job.preset}"
        return jobs.ask(what, words, self.launcher if _with_mpi(job.method) else None, self.options.ranks)

    def _by_torch(self, job: Job) -> dict[str, Any]:
        from distgpt.kernels.reference import ReferenceKernels

        model, every = initialised(job.preset, ReferenceKernels("float64")), sequences(job.names)
        with tempfile.TemporaryDirectory() as scratch:
            files = {what: f"{scratch}/{what}.npz" for what in ("weights", "names")}
            weights: dict[str, Any] = {name: np.array(values) for name, values in model.params.items()}
            np.savez(files["weights"], **weights)
            np.savez(files["names"], tokens=every.tokens, lengths=every.lengths)
            request = {
                "shape": jobs.for_torch(model.config),
                "threads": job.threads or len(usable_cores()),
                "dtype": job.dtype,
                "most": 1 if job.method in ONE_AT_A_TIME else MOST_NAMES,
                "repeats": job.repeats,
                "patience": job.patience,
            }
            return jobs.ask_peer(self.peer, "names", {**request, **files}) | {"ranks": 1}

    def check_part(self, part: Row) -> None:
        """Compare a loss over the first names only with that of a batched pass over just these."""
        job = self.options.job(part["preset"], "batched", "float64", part["measured"])
        say(f"{job.preset}: the same {job.names:,} names batched, to compare with {part['method']}")
        agree([part, row(job, self.by_us(replace(job, repeats=1, patience=math.inf)))])


def study(contest: Contest, presets: Sequence[str], names: int | None, sweep: str | None) -> list[Row]:
    """One comparison per preset, or per number of names of one preset."""
    if sweep == "input":
        most = names or NAMES[presets[0]]
        work = [(presets[0], count) for count in (*(count for count in MORE_NAMES if count < most), most)]
    else:
        work = [(name, names or NAMES[name]) for name in presets]
    return with_speedups([r for each in work for r in contest.compared(contest.jobs(*each))])


def ablation(contest: Contest, preset: str, names: int) -> list[Row]:
    """What batches and single precision bring, alone and together, on one thread."""
    each = [(method, dtype) for method in ("serial", "batched") for dtype in ("float64", "float32")]
    rows = contest.compared([replace(contest.options.job(preset, *how, names), threads=1) for how in each])
    return [r | {"batched": r["method"] == "batched"} | _speedup(r, rows[0]) for r in rows]


def row(job: Job, found: dict[str, Any]) -> Row:
    """`seconds` are those of all names: where fewer were `measured`, in proportion to their predictions."""
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
        "published_s": study_seconds(job.preset, job.method, job.names),
        "speedup": None,
        "speedup_scaled": False,
    }


def agree(rows: Sequence[Row]) -> None:
    """Refuse losses over the same names that differ from the most precise row's by more than rounding."""
    by_precision = sorted(rows, key=lambda each: list(AGREE).index(each["dtype"]))
    for each in rows:
        reference = by_precision[0]
        tolerance = max(AGREE[reference["dtype"]], AGREE[each["dtype"]])
        distance = abs(each["loss"] / reference["loss"] - 1)
        if not distance <= tolerance:
            raise DisagreementError(
                f"preset {each['preset']}: {each['method']} in {each['dtype']} finds a loss of "
                f"{each['loss']:.10g}, {reference['method']} in {reference['dtype']} "
                f"{reference['loss']:.10g}: they differ by {distance:.1e}, and may by {tolerance:g}"
            )


def with_speedups(rows: Sequence[Row]) -> list[Row]:
    """How much faster each is than serial on the same work, where that was measured too."""
    serial = {(r["preset"], r["names"]): r for r in rows if r["method"] == "serial"}
    return [r | _speedup(r, serial.get((r["preset"], r["names"]))) for r in rows]


def _speedup(r: Row, plain: Row | None) -> Row:
    """Over the plain way; `speedup_scaled` where either was measured on a part of the names."""
    if plain is None:
        return {"speedup": None, "speedup_scaled": False}
    return {"speedup": plain["seconds"] / r["seconds"], "speedup_scaled": scaled(r) or scaled(plain)}
