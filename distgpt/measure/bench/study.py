"""The forward-pass study: every method on the same names and weights, each in a process of its own."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from distgpt.comm.cores import usable_cores
from distgpt.errors import DisagreementError, UsageError
from distgpt.machine.launchers import Launcher
from distgpt.machine.processes import distgpt_command, run
from distgpt.machine.stages import ON_GPU
from distgpt.measure.bench.forward import Job, python_seconds, sequences, started
from distgpt.measure.bench.methods import METHODS, ONE_AT_A_TIME
from distgpt.measure.bench.study_published import NAMES, published
from distgpt.measure.peer.running import answer, ask, for_torch, torch_version, unsteered

MOST_NAMES = 512  # in a batch of PyTorch's, as in the study
AGREE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 3e-2}  # relative, by the coarser of the two types
MORE_NAMES = (500, 1000, 2000, 5000, 10000, 20000, 30000)
SERIES = {"model": ("MS5", "MM5", "ML5", "MVL5", "MXL5"), "joint": ("S", "M", "L", "VL", "XL")}
IN_DOUBLE = ("python", "serial")  # on one thread, whatever the others do

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Contest:
    """What is asked of every method, and what it takes to start them."""

    methods: Sequence[str]
    dtypes: Sequence[str]
    ranks: int
    threads: int  # of each process; 0: its share of the cores
    repeats: int
    patience: float
    peer: str
    launcher: Launcher | None
    say: Callable[[str], None]
    chosen: bool = True  # the methods, by the user: each is measured everywhere, or there is an error

    def jobs(self, name: str, names: int) -> list[Job]:
        """The slow ones first: they are what the others are compared with."""
        found = []
        for method in sorted(self.methods, key=METHODS.index):
            if method == "python" and not self.chosen and not self._is_for_python(name, names):
                continue
            threads = 1 if method in IN_DOUBLE else self.threads
            for dtype in dtypes_of(method, self.dtypes):
                job = Job(name, method, names, dtype, threads, self.repeats, self.patience)
                found.append(job)
        return found

    def _is_for_python(self, name: str, names: int) -> bool:
        """Its own size, and well within its time."""
        return name == "microgpt" and python_seconds(name, names) < self.patience / 2

    def measured(self, job: Job) -> Row:
        self.say(f"{job.preset}: {job.method}, {job.dtype}, {job.names:,} names")
        found = self._by_torch(job) if job.method.startswith("torch") else self._by_us(job)
        return row(job, found)

    def compared(self, jobs: Sequence[Job]) -> list[Row]:
        """All of these, which have the same names and weights, and so have to agree."""
        rows = [self.measured(job) for job in jobs]
        agree(rows)
        for each in rows:
            if scaled(each):
                self._check_part(each)
        return rows

    def _by_us(self, job: Job) -> dict[str, Any]:
        words: list[object] = [
            "bench",
            "forward",
            "--measure",
            "--preset",
            job.preset,
            "--method",
            job.method,
        ]
        words += ["--names", job.names, "--dtype", job.dtype]
        words += ["--repeats", job.repeats, "--patience", job.patience]
        if job.threads and job.method not in ON_GPU:
            words += ["--threads", job.threads]
        command = distgpt_command(*words)
        if job.method in ("mpi", "mpi-cuda"):
            assert self.launcher is not None
            command = self.launcher.command(self.ranks, command)
        return answer(run(command, env=unsteered()), f"--method {job.method} of preset {job.preset}")

    def _by_torch(self, job: Job) -> dict[str, Any]:
        from distgpt.kernels.reference import ReferenceKernels

        model, every = started(job.preset, ReferenceKernels("float64")), sequences(job.names)
        request = {
            "shape": for_torch(model.config),
            "threads": job.threads or len(usable_cores()),
            "dtype": job.dtype,
            "most": 1 if job.method in ONE_AT_A_TIME else MOST_NAMES,
            "repeats": job.repeats,
            "patience": job.patience,
        }
        with tempfile.TemporaryDirectory() as scratch:
            files = [Path(scratch) / name for name in ("request.json", "weights.npz", "names.npz")]
            files[0].write_text(json.dumps(request))
            weights: dict[str, Any] = {name: np.array(values) for name, values in model.params.items()}
            np.savez(files[1], **weights)
            np.savez(files[2], tokens=every.tokens, lengths=every.lengths)
            return ask(self.peer, "peer_names.py", *files) | {"ranks": 1}

    def _check_part(self, part: Row) -> None:
        """A loss over the first names only is compared with that of a batched pass over just these."""
        job = Job(part["preset"], "batched", part["measured"], "float64", self.threads, 1, math.inf)
        self.say(f"{job.preset}: the same {job.names:,} names batched, to compare with {part['method']}")
        agree([part, row(job, self._by_us(job))], whole=False)


def dtypes_of(method: str, dtypes: Sequence[str]) -> list[str]:
    """Those of these that it computes in."""
    if method in IN_DOUBLE:
        return ["float64"]
    return [dtype for dtype in dtypes if dtype != "bfloat16" or method in ON_GPU]


def row(job: Job, found: dict[str, Any]) -> Row:
    """`seconds` are those of all names: where fewer were `measured`, in proportion to their predictions."""
    tokens = _predictions(job.names)
    share = tokens / _predictions(found["measured"])
    return {
        "preset": job.preset,
        "method": job.method,
        "dtype": job.dtype,
        "ranks": found["ranks"],
        "threads": found["threads"],
        "names": job.names,
        "measured": found["measured"],
        "tokens": tokens,
        "seconds": found["seconds"] * share,
        "all_seconds": found["all_seconds"],
        "loss": found["loss"],
        "peak_memory": found["peak_memory"],
        "peak_gpu_memory": found.get("peak_gpu_memory"),
        "published_s": published(job.preset, job.method, job.names),
        "speedup": None,
        "speedup_scaled": False,
    }


def _predictions(names: int) -> int:
    every = sequences(names)
    return len(every.tokens) - len(every.lengths)


def agree(rows: Sequence[Row], whole: bool = True) -> None:
    """All losses over the same names are that of the most precise row, within rounding."""
    same = [each for each in rows if not scaled(each)] if whole else list(rows)
    if not same:
        return
    order = list(AGREE)
    reference = min(same, key=lambda each: order.index(each["dtype"]))
    for each in same:
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


def _speedup(r: Row, plain: Row | None) -> dict[str, Any]:
    """Over the plain way; `speedup_scaled` where either was measured on a part of the names."""
    if plain is None:
        return {"speedup": None, "speedup_scaled": False}
    return {"speedup": plain["seconds"] / r["seconds"], "speedup_scaled": scaled(r) or scaled(plain)}


def scaled(r: Row) -> bool:
    """Whether its seconds are in proportion to those of a part."""
    return bool(r["measured"] < r["names"])


def study(contest: Contest, presets: Sequence[str], names: int | None, sweep: str | None) -> list[Row]:
    """One comparison per preset, or per number of names of one preset."""
    if sweep == "input":
        most = names or NAMES[presets[0]]
        counts = [*(count for count in MORE_NAMES if count < most), most]
        work = [(presets[0], count) for count in counts]
    else:
        work = [(name, names or NAMES[name]) for name in presets]
    return with_speedups([r for each in work for r in contest.compared(contest.jobs(*each))])


def ablation(contest: Contest, name: str, names: int) -> list[Row]:
    """What batches and single precision bring, alone and together, on one thread."""
    plain = Job(name, "serial", names, "float64", 1, contest.repeats, contest.patience)
    jobs = [replace(plain, method=m, dtype=d) for m in ("serial", "batched") for d in ("float64", "float32")]
    rows = contest.compared(jobs)
    return [r | {"batched": r["method"] == "batched"} | _speedup(r, rows[0]) for r in rows]


def possible(peer: str, launcher: Launcher | None) -> list[str]:
    """The methods that this machine has, where none were asked for."""
    from distgpt.gpu.probe import driver

    found = ["python", "serial", "batched"] + ["mpi"] * (launcher is not None)
    gpus = driver()
    found += ["cuda"] * bool(gpus and gpus.gpus)
    return found + ["torch", "torch-batched"] * (torch_version(peer) is not None)


def check_dtypes(methods: Sequence[str], dtypes: Sequence[str], chosen: bool) -> None:
    """Every type needs a method that computes in it, and every method that was asked for a type."""
    without = [method for method in methods if chosen and not dtypes_of(method, dtypes)]
    if without:
        raise UsageError(f"--method {without[0]} computes in float32 or float64: add one of them as --dtype")
    if "bfloat16" in dtypes and not any(method in ON_GPU for method in methods):
        raise UsageError("--dtype bfloat16 is for methods cuda and mpi-cuda: none of them is measured here")
