"""`distgpt bench train`: real training runs, the share of the machine's peak they reach, and PyTorch's."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from distgpt.comm.agree import gather_ints
from distgpt.comm.cores import usable_cores
from distgpt.config import GpuConfig, RunConfig
from distgpt.errors import UsageError
from distgpt.machine.launchers import Launcher, find_launcher
from distgpt.machine.processes import distgpt_command, run
from distgpt.machine.stages import ON_GPU, WITH_MPI, opened
from distgpt.measure.bench.failing import check_gpu
from distgpt.measure.bench.results import memory, prepare, save
from distgpt.measure.peaks import measure_peaks
from distgpt.measure.peer.running import answer, ask, for_torch, torch_version, unsteered
from distgpt.model.counts import operations
from distgpt.model.model import Architecture
from distgpt.saved.rundir import RunDirectory
from distgpt.show.tables import terminal_table

COLUMNS = (
    "who",
    "stage",
    "ranks × threads",
    "tokens/s",
    "step s",
    "of the peak",
    "peak MB",
    "loss, first → last",
)
OURS, THEIRS = "distgpt", "PyTorch"

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Wanted:
    """The command line. `settings` are those of `distgpt train` that were given."""

    preset: str
    stage: str
    threads: int | None
    ranks: int
    hostfile: Path | None
    launcher: str | None
    settings: Mapping[str, Any]
    gpu: GpuConfig
    peer: str  # a Python, or nothing
    rounds: int

    @property
    def dtype(self) -> str:
        return str(self.settings.get("dtype", "float32"))


def measure_peak(wanted: Wanted) -> None:
    """As these ranks: what products reach on all of them at once."""
    stage = opened(wanted.stage, wanted.threads, wanted.gpu)
    kernels = stage.kernels(wanted.dtype)
    stage.comm.barrier()
    mega = gather_ints(stage.comm, int(measure_peaks(kernels).gflops * 1e3))
    if stage.comm.rank == 0:
        print(json.dumps({"gflops": sum(mega) / 1e3}))


def bench(wanted: Wanted, name: str, out: Path, as_json: bool) -> None:
    launcher = find_launcher(wanted.launcher, wanted.hostfile) if wanted.stage in WITH_MPI else None
    _refuse_peer(wanted)
    check_gpu(wanted.stage, wanted.dtype, wanted.launcher, wanted.hostfile)
    prepare(out)
    pairs = []
    with tempfile.TemporaryDirectory() as scratch:
        for turn in range(wanted.rounds if wanted.peer else 1):
            _say(f"distgpt train, {wanted.stage}" + (f", round {turn + 1}" if wanted.peer else ""))
            own, config = _train(wanted, launcher, Path(scratch) / f"run{turn}")
            _say("the peer" if wanted.peer else "the machine's peak")
            pairs.append((own, _peer(wanted, config) if wanted.peer else None))
        peak = _started(
            wanted, launcher, ["bench", "train", "--measure-peak", "--preset", wanted.preset], True
        )
    found = _found(wanted, config, pairs, float(peak["gflops"]))
    print(json.dumps(found) if as_json else page(found), flush=True)
    _say(f"written to {save(out, 'train', name, found)}")


def _refuse_peer(wanted: Wanted) -> None:
    if not wanted.peer:
        return
    if wanted.stage in ON_GPU or wanted.dtype != "float32":
        raise UsageError("--peer torch trains on cores in float32: a GPU's figures come from make bench-gpu")
    if torch_version(wanted.peer) is None:
        raise UsageError(
            f"--peer-python {Path(wanted.peer).name} cannot import torch: name a Python that can"
        )


def _started(
    wanted: Wanted, launcher: Launcher | None, words: Sequence[object], answers: bool
) -> dict[str, Any]:
    """A child in the stage that is measured, and the JSON that it answers with."""
    own: list[object] = [*words, "--stage", wanted.stage, "--dtype", wanted.dtype, *gpu_words(wanted.gpu)]
    if wanted.threads is not None:
        own += ["--threads", wanted.threads]
    command = distgpt_command(*own)
    if launcher is not None:
        command = launcher.command(wanted.ranks, command)
    ended = run(command, env=unsteered())
    return answer(ended, "distgpt " + str(words[0])) if answers or ended.code else {}


def gpu_words(gpu: GpuConfig) -> list[str]:
    """The options that it came from."""
    words = [] if gpu.graphs else ["--no-cuda-graph"]
    words += [] if gpu.allreduce == GpuConfig().allreduce else ["--allreduce", gpu.allreduce]
    return words + ["--deterministic"] * gpu.deterministic + ["--tf32"] * gpu.tf32


def _train(wanted: Wanted, launcher: Launcher | None, out: Path) -> tuple[Row, RunConfig]:
    words: list[object] = [
        "train",
        "--preset",
        wanted.preset,
        "--out",
        out,
        "--progress",
        "plain",
    ]
    for key, value in wanted.settings.items():
        flag = key.replace("_", "-")
        if key != "dtype":
            words += [_SWITCHES[key][not value]] if key in _SWITCHES else [f"--{flag}", value]
    _started(wanted, launcher, words, False)
    directory = RunDirectory(out)
    found: Row = json.loads(directory.summary.read_text())
    if "tokens_per_s" not in found:
        raise UsageError("the run took no step: give --steps")
    losses = [json.loads(line).get("loss") for line in directory.metrics.read_text().splitlines()]
    losses = [loss for loss in losses if loss is not None]
    found |= {"first_loss": losses[0], "final_loss": losses[-1]}
    found.pop("environment")
    config = directory.saved()
    assert config is not None
    return found, config


_SWITCHES = {
    "verify_data": ("--verify-data", "--trust-data"),
    "shift_windows": ("--shift-windows", "--fixed-windows"),
    "bias": ("--bias", "--no-bias"),
    "tied": ("--tied", "--untied"),
}


def _peer(wanted: Wanted, run: RunConfig) -> dict[str, Any]:
    """The same model, batch and number of steps, on random tokens, in PyTorch's fastest way."""
    t, shape = run.train, for_torch(run.model)
    words: list[object] = ["train", "--threads", peer_threads(wanted), "--batch-size", t.batch_size]
    words += ["--keep-freed"] if keeps_freed() else []
    words += [
        "--steps",
        max(1, t.steps - 2),
        "--lr",
        t.lr,
        "--weight-decay",
        t.weight_decay,
        "--clip",
        t.clip,
    ]
    words += ["--beta1", t.beta1, "--beta2", t.beta2, "--eps", t.eps]
    words += ["--schedule", "linear" if t.schedule == "linear" else "constant"]
    switches = {"tied": "--untied", "norm_gain": "--no-norm-gain", "final_norm": "--no-final-norm"}
    switches |= {"bias": "--no-bias"}
    for key, value in shape.items():
        if key in switches:
            words += [] if value else [switches[key]]
        elif key == "embed_norm":
            words += ["--embed-norm"] if value else []
        else:
            words += [f"--{key.replace('_', '-')}", value]
    return ask(wanted.peer, "peer_torch.py", *words)


def keeps_freed() -> bool:
    """Whether this system's memory allocator (glibc's) can be told to."""
    return sys.platform == "linux"


def peer_threads(wanted: Wanted) -> int:
    """As many as all our ranks have together."""
    ranks = wanted.ranks if wanted.stage in WITH_MPI else 1
    return wanted.threads * ranks if wanted.threads else len(usable_cores())


def _found(
    wanted: Wanted, run: RunConfig, pairs: Sequence[tuple[Row, dict[str, Any] | None]], gflops: float
) -> dict[str, Any]:
    ours, theirs = [a for a, _ in pairs], [b for _, b in pairs if b is not None]
    counted = operations(Architecture(run.model))
    each = counted.forward + counted.backward
    middle = _median_of(ours, lambda row: float(row["tokens_per_s"]))
    rows = [middle | {"who": OURS, "preset": wanted.preset}]
    if theirs:
        peer = _median_of(theirs, lambda row: float(row["tokens_per_s"]))
        kept = {
            key: peer[key] for key in ("tokens_per_s", "step_s_median", "first_loss", "final_loss", "threads")
        }
        memory = {"peak_memory": [peer["peak_rss_bytes"]], "version": peer["torch"]}
        rows.append(
            {"who": THEIRS, "preset": wanted.preset, "dtype": "float32", "ranks": 1, **kept, **memory}
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
        "peer_keeps_freed": bool(theirs) and keeps_freed(),
        "runs": [{"ours": a, "peer": b} for a, b in pairs],
    }


def _median_of(rows: Sequence[Row], speed: Callable[[Row], float]) -> Row:
    """The run in the middle; of an even number the faster one of the two there."""
    return sorted(rows, key=speed)[len(rows) // 2]


def page(found: dict[str, Any]) -> str:
    cells = [
        [
            row["who"],
            row.get("stage", ""),
            f"{row['ranks']} × {row['threads']}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['step_s_median']:.4f}",
            f"{row['mfu']:.0%}",
            memory(row),
            f"{row['first_loss']:.3f} → {row['final_loss']:.3f}",
        ]
        for row in found["rows"]
    ]
    last = f"peak: {found['peak_gflops']:,.0f} GFLOP/s in matrix products, on all ranks at once"
    if found["ratio"] is not None:
        several = ", ".join(f"{ratio:.2f}" for ratio in found["ratios"])
        last += f"\nratio: {found['ratio']:.2f} × PyTorch (pairs of runs: {several}), which saw random tokens"
        if found["peer_keeps_freed"]:
            last += "\nPyTorch keeps the memory it has freed, which makes it faster and larger"
    return f"{terminal_table(COLUMNS, cells)}\n\n{last}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
