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
from distgpt.measure.peer.peer_modes import BEST, candidates, switches
from distgpt.model.counts import operations
from distgpt.model.model import Architecture
from distgpt.saved.rundir import RunDirectory
from distgpt.show.charts import Bar, BarChart
from distgpt.show.page import Block, Column, tabulated
from distgpt.show.tables import terminal_table
from distgpt.training.opening.plan import configure
from distgpt.units import duration
from distgpt.units import size as in_bytes

STEPS = 20  # without --steps
OURS, THEIRS = "distgpt", "PyTorch"
TRIED = 6  # steps, at the most, of each mode among which the fastest is looked for


@dataclass(frozen=True, slots=True)
class TrainOptions(BenchOptions):
    """The command line. `settings` are those of `distgpt train`; `peer` is "torch" or nothing.

    `peer_modes`: each is trained in every round, by the names of peer_modes.py.
    """

    stage: str = "serial"
    threads: int | None = None
    gpu: GpuConfig = field(default_factory=GpuConfig)
    preset: str = "tiny"
    peer: str | None = None
    peer_python: str = sys.executable
    peer_modes: Sequence[str] = ("keep-freed",)
    rounds: int = 3
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def dtype(self) -> str:
        return str(self.settings.get("dtype", "float32"))

    @property
    def matmul(self) -> str:
        return str(self.settings.get("matmul", "auto"))

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
    kernels = stage.kernels(options.dtype, options.matmul)
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
    runs: list[Row] = []
    modes: list[Row] = []
    with tempfile.TemporaryDirectory(prefix=".runs-", dir=options.out.resolve()) as scratch:
        for turn in range(options.rounds if options.peer else 1):
            say(f"distgpt train, {options.stage}" + (f", round {turn + 1}" if options.peer else ""))
            out = Path(scratch) / f"run{turn}"
            summary = jobs.train("distgpt train", run, out, options.stage_words(), launcher, options.ranks)
            own = _row(summary, jobs.read_losses(out))
            trained = RunDirectory(out).saved() or run  # which knows the vocabulary
            if options.peer:
                modes = modes or [_mode(asked, options, trained) for asked in options.peer_modes]
            runs.append({"ours": own, "peers": [_train_peer(options, trained, each) for each in modes]})
        say("the machine's peak")
        words: list[object] = ["bench", "train", "--measure-peak", "--preset", options.preset]
        words += ["--matmul", options.matmul, *options.stage_words()]
        peak = jobs.ask("distgpt bench", words, launcher, options.ranks)
    return _found(options, trained, modes, runs, float(peak["gflops"]))


def _refuse_peer(options: TrainOptions) -> None:
    if not options.peer:
        return
    if options.stage in ON_GPU or options.dtype not in ("float32", "bfloat16"):
        raise UsageError(
            "--peer torch trains on cores in float32 or bfloat16: a GPU's figures come from make bench-gpu"
        )
    for mode in options.peer_modes:
        try:
            switches(mode if mode != BEST else candidates(options.dtype)[0])
        except ValueError as error:
            raise UsageError(f"--peer-mode {error}") from None
    if jobs.torch_version(options.peer_python) is None:
        python = Path(options.peer_python).name
        raise UsageError(f"--peer-python {python} cannot import torch: name a Python that can")


def _row(summary: Row, losses: Sequence[float | None]) -> Row:
    if "tokens_per_s" not in summary:
        raise UsageError("the run took no step: give --steps")
    row = {key: value for key, value in summary.items() if key != "environment"}
    return row | {"first_loss": losses[0], "final_loss": losses[-1]}


def _mode(asked: str, options: TrainOptions, run: RunConfig) -> Row:
    """The mode asked for, or the fastest of the candidates, each tried for a few steps."""
    if asked != BEST:
        return {"asked": asked, "mode": asked}
    steps = min(TRIED, max(1, run.train.steps - 2))
    shortest = {}
    for mode in candidates(options.dtype):
        shortest[mode] = _train_peer(options, run, {"mode": mode}, steps)["step_s_min"]
    return {"asked": asked, "mode": min(shortest, key=shortest.__getitem__), "tried_step_s_min": shortest}


def _train_peer(options: TrainOptions, run: RunConfig, mode: Row, steps: int | None = None) -> Row:
    """The same model, batch and number of steps, on random tokens."""
    t = run.train
    keys = ("batch_size", "lr", "weight_decay", "clip", "beta1", "beta2", "eps")
    request = {
        "shape": jobs.for_torch(run.model),
        "threads": options.all_threads,
        "dtype": options.dtype,
        "steps": steps or max(1, t.steps - 2),
        "schedule": "linear" if t.schedule == "linear" else "constant",
        **{key: getattr(t, key) for key in keys},
        **switches(mode["mode"]),
    }
    say(f"PyTorch, {mode['mode']}" + (", to find its fastest mode" if steps else ""))
    return jobs.ask_peer(options.peer_python, "train", request)


def _found(
    options: TrainOptions, run: RunConfig, modes: Sequence[Row], runs: Sequence[Row], gflops: float
) -> dict[str, Any]:
    """`runs`: of each round ours, and PyTorch's in each of its modes."""
    counted = operations(Architecture(run.model))
    each = counted.forward + counted.backward
    ours = [run["ours"] for run in runs]
    rows = [{**_middle(ours), "who": OURS, "preset": options.preset}]
    peers = []
    for i, mode in enumerate(modes):
        theirs = [run["peers"][i] for run in runs]
        peer = _middle(theirs)
        kept = ("tokens_per_s", "step_s_median", "first_loss", "final_loss", "threads")
        same = {"who": THEIRS, "preset": options.preset, "dtype": options.dtype, "ranks": 1}
        memory = {"peak_memory": [peer["peak_rss_bytes"]], "version": peer["torch"]}
        rows.append(same | {"mode": mode["mode"]} | {key: peer[key] for key in kept} | memory)
        ratios = [a["tokens_per_s"] / b["tokens_per_s"] for a, b in zip(ours, theirs, strict=True)]
        memories = [sum(a["peak_memory"]) / b["peak_rss_bytes"] for a, b in zip(ours, theirs, strict=True)]
        more = {"ratio": median(ratios), "ratios": ratios, "memory_ratio": median(memories)}
        peers.append(mode | {"tokens_per_s": median(b["tokens_per_s"] for b in theirs)} | more)
    for row in rows:
        row["gflops"] = row["tokens_per_s"] * each / 1e9
        row["mfu"] = row["gflops"] / gflops
    return {
        "rows": rows,
        "operations_per_token": each,
        "peak_gflops": gflops,
        "peers": peers,
        "runs": runs,
    }


def _middle(rows: Sequence[Row]) -> Row:
    """The run of median speed; of an even number the faster one of the two in the middle."""
    return sorted(rows, key=lambda row: float(row["tokens_per_s"]))[len(rows) // 2]


# -- showing

COLUMNS: tuple[Column, ...] = (
    *((key, key, str) for key in ("who", "mode", "preset", "stage", "dtype", "ranks", "threads")),
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
    for peer in found.get("peers", []):
        several = ", ".join(f"{ratio:.2f}" for ratio in peer["ratios"])
        tried = len(peer.get("tried_step_s_min", ()))
        mode = peer["mode"] + (f", the fastest of {tried} modes" if tried else "")
        notes.append(
            f"{peer['ratio']:.2f} × PyTorch ({mode}) at {peer['memory_ratio']:.2f} × its memory, "
            f"on random tokens; pairs of runs in turn: {several}."
        )
    if any("keep-freed" in peer["mode"] for peer in found.get("peers", [])):
        notes.append("keep-freed: PyTorch keeps the memory it has freed, which makes it faster and larger.")
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
