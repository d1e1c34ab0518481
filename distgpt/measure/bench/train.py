"""`distgpt bench train`: real training runs, the share of the machine's peak they reach, and PyTorch's."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from distgpt.comm.agree import gather_ints
from distgpt.comm.cores import usable_cores
from distgpt.comm.serial import SerialComm
from distgpt.config import GpuConfig, RunConfig
from distgpt.errors import UsageError
from distgpt.machine.launchers import find_launcher
from distgpt.machine.stages import ON_GPU, WITH_MPI, open_stage
from distgpt.measure import jobs
from distgpt.measure.bench.results import BenchOptions, Row, say
from distgpt.measure.peaks import measure_peaks
from distgpt.model.counts import operations
from distgpt.model.model import Architecture
from distgpt.saved.rundir import RunDirectory
from distgpt.show.charts import Bar, BarChart
from distgpt.show.page import Block, Column, tabulated
from distgpt.show.tables import terminal_table
from distgpt.training.plan import configure
from distgpt.units import duration
from distgpt.units import size as in_bytes

STEPS = 20  # without --steps
OURS, THEIRS = "distgpt", "PyTorch"
# PyTorch is faster if the memory allocator keeps what is freed, which glibc's can.
KEEP_FREED = {"keep_freed": sys.platform == "linux"}


@dataclass(frozen=True, slots=True)
class TrainOptions(BenchOptions):
    """The command line. `settings` are those of `distgpt train`; `peer` is "torch" or nothing."""

    stage: str = "serial"
    threads: int | None = None
    gpu: GpuConfig = field(default_factory=GpuConfig)
    preset: str = "tiny"
    peer: str | None = None
    peer_python: str = sys.executable
    peer_switches: Mapping[str, bool] = field(default_factory=lambda: KEEP_FREED)
    rounds: int = 3
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def dtype(self) -> str:
        return str(self.settings.get("dtype", "float32"))

    @property
    def all_threads(self) -> int:
        """Threads of all ranks together, which the peer gets."""
        ranks = self.ranks if self.stage in WITH_MPI else 1
        return self.threads * ranks if self.threads else len(usable_cores())

    def stage_words(self) -> list[object]:
        """The stage and its settings, as options for a child."""
        gpu = self.gpu
        words: list[object] = ["--stage", self.stage, "--dtype", self.dtype]
        words += ["--threads", self.threads] if self.threads is not None else []
        words += [] if gpu.graphs else ["--no-cuda-graph"]
        words += [] if gpu.allreduce == GpuConfig().allreduce else ["--allreduce", gpu.allreduce]
        return words + ["--deterministic"] * gpu.deterministic + ["--tf32"] * gpu.tf32


def measure_peak(options: TrainOptions) -> None:
    """As these ranks: print what matrix products reach on all of them at once."""
    stage = open_stage(options.stage, options.threads, options.gpu)
    kernels = stage.kernels(options.dtype)
    stage.comm.barrier()
    mega = gather_ints(stage.comm, int(measure_peaks(kernels).gflops * 1e3))
    if stage.comm.rank == 0:
        print(json.dumps({"gflops": sum(mega) / 1e3}))


def bench(options: TrainOptions) -> None:
    found = measure(options)
    options.finish("train", f"{options.preset}-{options.stage}", found, text(found))


def measure(options: TrainOptions) -> dict[str, Any]:
    """Train, in turn with the peer if there is one, and measure the peak."""
    launcher = find_launcher(options.launcher, options.hostfile) if options.stage in WITH_MPI else None
    _refuse_peer(options)
    jobs.check_gpu(options.stage, options.dtype, options.launcher, options.hostfile)
    _, run = configure(SerialComm(), options.preset, None, {"steps": STEPS, **options.settings})
    options.prepare()
    pairs = []
    with tempfile.TemporaryDirectory(prefix=".runs-", dir=options.out.resolve()) as scratch:
        for turn in range(options.rounds if options.peer else 1):
            say(f"distgpt train, {options.stage}" + (f", round {turn + 1}" if options.peer else ""))
            out = Path(scratch) / f"run{turn}"
            summary = jobs.train("distgpt train", run, out, options.stage_words(), launcher, options.ranks)
            own = _row(summary, jobs.read_losses(out))
            trained = RunDirectory(out).saved() or run  # which knows the vocabulary
            say("the peer" if options.peer else "the machine's peak")
            pairs.append((own, _train_peer(options, trained) if options.peer else None))
        words = ["bench", "train", "--measure-peak", "--preset", options.preset, *options.stage_words()]
        peak = jobs.ask("distgpt bench", words, launcher, options.ranks)
    return _found(options, trained, pairs, float(peak["gflops"]))


def _refuse_peer(options: TrainOptions) -> None:
    if not options.peer:
        return
    if options.stage in ON_GPU or options.dtype != "float32":
        raise UsageError("--peer torch trains on cores in float32: a GPU's figures come from make bench-gpu")
    if jobs.torch_version(options.peer_python) is None:
        python = Path(options.peer_python).name
        raise UsageError(f"--peer-python {python} cannot import torch: name a Python that can")


def _row(summary: Row, losses: Sequence[float | None]) -> Row:
    if "tokens_per_s" not in summary:
        raise UsageError("the run took no step: give --steps")
    row = {key: value for key, value in summary.items() if key != "environment"}
    return row | {"first_loss": losses[0], "final_loss": losses[-1]}


def _train_peer(options: TrainOptions, run: RunConfig) -> Row:
    """The same model, batch and number of steps, on random tokens."""
    t = run.train
    keys = ("batch_size", "lr", "weight_decay", "clip", "beta1", "beta2", "eps")
    request = {
        "shape": jobs.for_torch(run.model),
        "threads": options.all_threads,
        "steps": max(1, t.steps - 2),
        "schedule": "linear" if t.schedule == "linear" else "constant",
        **{key: getattr(t, key) for key in keys},
        **options.peer_switches,
    }
    return jobs.ask_peer(options.peer_python, "train", request)


def _found(
    options: TrainOptions, run: RunConfig, pairs: Sequence[tuple[Row, Row | None]], gflops: float
) -> dict[str, Any]:
    ours, theirs = [a for a, _ in pairs], [b for _, b in pairs if b is not None]
    counted = operations(Architecture(run.model))
    each = counted.forward + counted.backward
    rows = [{**_middle(ours), "who": OURS, "preset": options.preset}]
    if theirs:
        peer = _middle(theirs)
        kept = ("tokens_per_s", "step_s_median", "first_loss", "final_loss", "threads")
        same = {"who": THEIRS, "preset": options.preset, "dtype": "float32", "ranks": 1}
        memory = {"peak_memory": [peer["peak_rss_bytes"]], "version": peer["torch"]}
        rows.append(same | {key: peer[key] for key in kept} | memory)
    for row in rows:
        row["gflops"] = row["tokens_per_s"] * each / 1e9
        row["mfu"] = row["gflops"] / gflops
    ratios = [a["tokens_per_s"] / b["tokens_per_s"] for a, b in zip(ours, theirs, strict=False)]
    return {
        "rows": rows,
        "operations_per_token": each,
        "peak_gflops": gflops,
        "ratio": median(ratios) if ratios else None,
        "ratios": ratios,
        "peer_keeps_freed": bool(theirs) and options.peer_switches.get("keep_freed", False),
        "runs": [{"ours": a, "peer": b} for a, b in pairs],
    }


def _middle(rows: Sequence[Row]) -> Row:
    """The run of median speed; of an even number the faster one of the two in the middle."""
    return sorted(rows, key=lambda row: float(row["tokens_per_s"]))[len(rows) // 2]


# -- showing

COLUMNS: tuple[Column, ...] = (
    *((key, key, str) for key in ("who", "preset", "stage", "dtype", "ranks", "threads")),
    ("tokens/s", "tokens_per_s", "{:,.0f}".format),
    ("step", "step_s_median", duration),
    ("of the peak", "mfu", "{:.0%}".format),
    ("memory", "peak_memory", lambda each: in_bytes(sum(each) if isinstance(each, list) else each)),
    ("on GPUs", "peak_gpu_memory", lambda each: in_bytes(sum(each))),
    ("first loss", "first_loss", "{:.3f}".format),
    ("last loss", "final_loss", "{:.3f}".format),
)


def _notes(found: dict[str, Any]) -> list[str]:
    """Older results have fewer keys."""
    notes = []
    if found.get("peak_gflops"):
        notes.append(
            f"The peak: {found['peak_gflops']:,.0f} GFLOP/s in matrix products, on all ranks at once."
        )
    if found.get("ratio"):
        several = ", ".join(f"{ratio:.2f}" for ratio in found["ratios"])
        notes.append(f"{found['ratio']:.2f} × PyTorch, on random tokens; pairs of runs in turn: {several}.")
    if found.get("peer_keeps_freed"):
        notes.append("PyTorch keeps the memory it has freed, which makes it faster and larger.")
    return notes


def text(found: dict[str, Any]) -> str:
    """For a terminal."""
    table = tabulated(COLUMNS, found["rows"])
    return "\n".join([terminal_table(table.columns, table.rows), "", *_notes(found)])


def blocks(found: dict[str, Any]) -> list[Block]:
    """For the report."""
    rows = found["rows"]
    bars = [
        Bar(", ".join(str(row[key]) for key in ("who", "stage") if row.get(key)), row["tokens_per_s"])
        for row in rows
    ]
    best = max(rows, key=lambda row: float(row["tokens_per_s"]))
    description = f"The fastest, {best['who']}, trains on {best['tokens_per_s']:,.0f} tokens a second."
    chart = BarChart("Tokens per second", description, "tokens/s", bars)
    return [chart, tabulated(COLUMNS, rows, "Training", " ".join(_notes(found)))]
