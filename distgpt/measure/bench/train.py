"""`distgpt bench train`: real training runs, the share of the machine's peak they reach, and PyTorch's."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from distgpt.comm.agree import gather_ints
from distgpt.comm.cores import usable_cores
from distgpt.comm.serial import SerialComm
from distgpt.config import GpuConfig, RunConfig
from distgpt.errors import UsageError
from distgpt.machine.launchers import find_launcher
from distgpt.machine.stages import ON_GPU, WITH_MPI, opened
from distgpt.measure import jobs
from distgpt.measure.bench.results import Row, prepare, save
from distgpt.measure.peaks import measure_peaks
from distgpt.model.counts import operations
from distgpt.model.model import Architecture
from distgpt.saved.rundir import RunDirectory
from distgpt.show.charts import Bar, BarChart
from distgpt.show.page import Block, Table
from distgpt.show.tables import terminal_table
from distgpt.training.plan import configure
from distgpt.units import duration
from distgpt.units import size as in_bytes

STEPS = 20  # without --steps
OURS, THEIRS = "distgpt", "PyTorch"
# PyTorch is faster if the memory allocator keeps what is freed, which glibc's can.
KEEP_FREED = ("--keep-freed",) if sys.platform == "linux" else ()


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """The command line. `settings` are those of `distgpt train`; `peer` is "torch" or nothing."""

    stage: str = "serial"
    threads: int | None = None
    gpu: GpuConfig = field(default_factory=GpuConfig)
    ranks: int = 2
    hostfile: Path | None = None
    launcher: str | None = None
    preset: str = "tiny"
    peer: str | None = None
    peer_python: str = sys.executable
    peer_words: Sequence[str] = KEEP_FREED
    rounds: int = 3
    name: str | None = None
    out: Path = Path("bench")
    as_json: bool = False
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
    stage = opened(options.stage, options.threads, options.gpu)
    kernels = stage.kernels(options.dtype)
    stage.comm.barrier()
    mega = gather_ints(stage.comm, int(measure_peaks(kernels).gflops * 1e3))
    if stage.comm.rank == 0:
        print(json.dumps({"gflops": sum(mega) / 1e3}))


def bench(options: TrainOptions) -> None:
    found = measure(options)
    print(json.dumps(found) if options.as_json else text(found), flush=True)
    name = options.name or f"{options.preset}-{options.stage}"
    _say(f"written to {save(options.out, 'train', name, found)}")


def measure(options: TrainOptions) -> dict[str, Any]:
    """Train, in turn with the peer if there is one, and measure the peak."""
    launcher = find_launcher(options.launcher, options.hostfile) if options.stage in WITH_MPI else None
    _refuse_peer(options)
    jobs.check_gpu(options.stage, options.dtype, options.launcher, options.hostfile)
    _, run = configure(SerialComm(), options.preset, None, {"steps": STEPS, **options.settings})
    prepare(options.out)
    pairs = []
    with tempfile.TemporaryDirectory(prefix=".runs-", dir=options.out.resolve()) as scratch:
        for turn in range(options.rounds if options.peer else 1):
            _say(f"distgpt train, {options.stage}" + (f", round {turn + 1}" if options.peer else ""))
            out = Path(scratch) / f"run{turn}"
            summary = jobs.train("distgpt train", run, out, options.stage_words(), launcher, options.ranks)
            own = _row(summary, jobs.read_losses(out))
            trained = RunDirectory(out).saved() or run  # which knows the vocabulary
            _say("the peer" if options.peer else "the machine's peak")
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
    words: list[object] = ["train", "--threads", options.all_threads, *options.peer_words]
    words += ["--steps", max(1, t.steps - 2), "--batch-size", t.batch_size, "--lr", t.lr]
    words += ["--weight-decay", t.weight_decay, "--clip", t.clip]
    words += ["--beta1", t.beta1, "--beta2", t.beta2, "--eps", t.eps]
    words += ["--schedule", "linear" if t.schedule == "linear" else "constant"]
    switches = {"tied": "--untied", "norm_gain": "--no-norm-gain", "final_norm": "--no-final-norm"}
    switches |= {"bias": "--no-bias"}
    for key, value in jobs.for_torch(run.model).items():
        if key in switches:
            words += [] if value else [switches[key]]
        elif key == "embed_norm":
            words += ["--embed-norm"] if value else []
        else:
            words += [f"--{key.replace('_', '-')}", value]
    return jobs.ask_peer(options.peer_python, *words)


def _found(
    options: TrainOptions, run: RunConfig, pairs: Sequence[tuple[Row, Row | None]], gflops: float
) -> dict[str, Any]:
    ours, theirs = [a for a, _ in pairs], [b for _, b in pairs if b is not None]
    counted = operations(Architecture(run.model))
    each = counted.forward + counted.backward
    rows = [_middle(ours) | {"who": OURS, "preset": options.preset}]
    if theirs:
        peer = _middle(theirs)
        kept = ("tokens_per_s", "step_s_median", "first_loss", "final_loss", "threads")
        rows.append(
            {"who": THEIRS, "preset": options.preset, "dtype": "float32", "ranks": 1}
            | {key: peer[key] for key in kept}
            | {"peak_memory": [peer["peak_rss_bytes"]], "version": peer["torch"]}
        )
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
        "peer_keeps_freed": bool(theirs) and "--keep-freed" in options.peer_words,
        "runs": [{"ours": a, "peer": b} for a, b in pairs],
    }


def _middle(rows: Sequence[Row]) -> Row:
    """The run of median speed; of an even number the faster one of the two in the middle."""
    return sorted(rows, key=lambda row: float(row["tokens_per_s"]))[len(rows) // 2]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# -- showing

# By the key in a row: the heading, and the text of a value. Older results have fewer keys.
COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "who": ("who", str),
    "preset": ("preset", str),
    "stage": ("stage", str),
    "dtype": ("dtype", str),
    "ranks": ("ranks", str),
    "threads": ("threads", str),
    "tokens_per_s": ("tokens/s", "{:,.0f}".format),
    "step_s_median": ("step", duration),
    "mfu": ("of the peak", "{:.0%}".format),
    "peak_memory": ("memory", lambda each: in_bytes(sum(each) if isinstance(each, list) else each)),
    "peak_gpu_memory": ("on GPUs", lambda each: in_bytes(sum(each))),
    "first_loss": ("first loss", "{:.3f}".format),
    "final_loss": ("last loss", "{:.3f}".format),
}


def table(rows: Sequence[Row]) -> Table:
    """The columns that some row has a value for."""
    shown = {key: column for key, column in COLUMNS.items() if any(row.get(key) is not None for row in rows)}
    cells = [
        ["" if row.get(key) is None else word(row[key]) for key, (_, word) in shown.items()] for row in rows
    ]
    return Table([heading for heading, _ in shown.values()], cells, "Training")


def text(found: dict[str, Any]) -> str:
    """For a terminal."""
    trained = table(found["rows"])
    notes = f"peak: {found['peak_gflops']:,.0f} GFLOP/s in matrix products, on all ranks at once"
    if found["ratio"] is not None:
        several = ", ".join(f"{ratio:.2f}" for ratio in found["ratios"])
        notes += f"\nratio: {found['ratio']:.2f} × PyTorch (pairs of runs: {several}), on random tokens"
        if found["peer_keeps_freed"]:
            notes += "\nPyTorch keeps the memory it has freed, which makes it faster and larger"
    return f"{terminal_table(trained.columns, trained.rows)}\n\n{notes}"


def blocks(found: dict[str, Any]) -> list[Block]:
    """For the report."""
    rows = found["rows"]
    bars = [
        Bar(", ".join(str(row[key]) for key in ("who", "stage") if row.get(key)), row["tokens_per_s"])
        for row in rows
    ]
    best = max(rows, key=lambda row: float(row["tokens_per_s"]))
    description = f"The fastest, {best['who']}, trains on {best['tokens_per_s']:,.0f} tokens a second."
    notes = []
    if found.get("peak_gflops"):
        notes.append(f"The peak: {found['peak_gflops']:,.0f} GFLOP/s in matrix products.")
    if found.get("ratio"):
        several = ", ".join(f"{ratio:.2f}" for ratio in found["ratios"])
        notes.append(f"Pairs of runs in turn: {several} × PyTorch, the median {found['ratio']:.2f}.")
    chart = BarChart("Tokens per second", description, "tokens/s", bars)
    return [chart, replace(table(rows), note=" ".join(notes))]
