"""`distgpt bench train`: measure the speed, memory and share of the machine's peak of a real training run."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from distgpt.cluster.jobs.launchers import Launcher, find_launcher
from distgpt.core.base.errors import UsageError
from distgpt.core.base.formatting import duration
from distgpt.core.base.formatting import size as in_bytes
from distgpt.core.comm.agree import gather
from distgpt.core.config import WITH_MPI, GpuConfig, RunConfig
from distgpt.core.config.run_request import asked_for
from distgpt.core.cpu.stages import open_stage
from distgpt.core.model.counts import operations
from distgpt.core.model.model import Architecture
from distgpt.core.saved.rundir import RunDirectory
from distgpt.core.train.plan import DTYPE, new_run
from distgpt.measure import jobs
from distgpt.measure.estimate import foreseen
from distgpt.measure.jobs import BenchOptions, Row, say
from distgpt.measure.profile.session import peak_gflops
from distgpt.show.page import Block, Column, tabulated

STEPS = 20  # default of --steps


@dataclass(frozen=True, slots=True)
class TrainOptions(BenchOptions):
    """Options of the command. `settings` are settings of `distgpt train`."""

    stage: str = "serial"
    threads: int | None = None
    gpu: GpuConfig = field(default_factory=GpuConfig)
    preset: str = "tiny"
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def dtype(self) -> str:
        return str(self.settings.get("dtype", "float32"))

    @property
    def matmul(self) -> str:
        return str(self.settings.get("matmul", "auto"))

    def stage_words(self) -> list[object]:
        gpu = self.gpu
        words: list[object] = ["--stage", self.stage, "--dtype", self.dtype]
        words += ["--threads", self.threads] if self.threads is not None else []
        words += [] if gpu.graphs else ["--set", "cuda_graph=false"]
        words += [] if gpu.allreduce == GpuConfig().allreduce else ["--allreduce", gpu.allreduce]
        return words + [f"--{flag}" for flag in ("deterministic", "tf32") if getattr(gpu, flag)]


def measure_peak(options: TrainOptions) -> None:
    """Print the matmul speed of all ranks together, measured on these ranks at the same time."""
    stage = open_stage(options.stage, options.threads, options.gpu)
    kernels = stage.kernels(options.dtype, options.matmul)
    stage.comm.barrier()
    mega = gather(stage.comm, int(peak_gflops(kernels) * 1e3))
    if stage.comm.rank == 0:
        print(json.dumps({"gflops": sum(mega) / 1e3}))


def bench(options: TrainOptions) -> None:
    request = replace(asked_for(options.settings, options.preset), fetches=False)
    run = foreseen(options.stage, request, options.gpu.tf32)
    options = replace(options, settings={**options.settings, DTYPE: run.train.dtype})
    launcher, run = prepared(options)
    with scratch_folder(options) as scratch:
        say(f"distgpt train, {options.stage}")
        row, trained = train(options, run, launcher, scratch / "run")
    result = {"rows": [row], **with_peak([row], trained, measured_peak(options, launcher))}
    options.finish("train", f"{options.preset}-{options.stage}", result, blocks(result))


def prepared(options: TrainOptions) -> tuple[Launcher | None, RunConfig]:
    """Return the launcher and the run. Raise an error if the options cannot be measured here."""
    launcher = find_launcher(options.launcher, options.hostfile) if options.stage in WITH_MPI else None
    jobs.check_gpu(options.stage, options.dtype, options.launcher, options.hostfile)
    run = new_run(asked_for({"steps": STEPS, **options.settings}, options.preset))
    options.prepare()
    return launcher, run


@contextmanager
def scratch_folder(options: TrainOptions) -> Iterator[Path]:
    """Create a temporary directory for runs next to the results, so that all hosts can access it."""
    with tempfile.TemporaryDirectory(prefix=".runs-", dir=options.out.resolve()) as scratch:
        yield Path(scratch)


def train(
    options: TrainOptions, run: RunConfig, launcher: Launcher | None, out: Path
) -> tuple[Row, RunConfig]:
    """Train into `out`. Return the table's row, and the run with the vocabulary size."""
    summary = jobs.train("distgpt train", run, out, options.stage_words(), launcher, options.ranks)
    if "tokens_per_s" not in summary:
        raise UsageError("the run took no steps; set --steps")
    losses = jobs.read_losses(out)
    row = {key: value for key, value in summary.items() if key != "environment"}
    row |= {"preset": options.preset, "first_loss": losses[0], "final_loss": losses[-1]}
    return row, RunDirectory(out).saved() or run


def measured_peak(options: TrainOptions, launcher: Launcher | None) -> float:
    """Return the matmul GFLOP/s of all ranks together."""
    say("the machine's peak")
    words: list[object] = ["bench", "train", "--measure-peak", "--preset", options.preset]
    words += ["--set", f"matmul={options.matmul}", *options.stage_words()]
    return float(jobs.ask("distgpt bench", words, launcher, options.ranks)["gflops"])


def with_peak(rows: Sequence[Row], run: RunConfig, peak: float) -> dict[str, Any]:
    """Add to each row its GFLOP/s and share of the peak. Return FLOPs per token and the peak."""
    counted = operations(Architecture(run.model))
    each = counted.forward + counted.backward
    for row in rows:
        row["gflops"] = row["tokens_per_s"] * each / 1e9
        row["mfu"] = row["gflops"] / peak
    return {"operations_per_token": each, "peak_gflops": peak}


# -- showing

COLUMNS: tuple[Column, ...] = (
    *((key, key, str) for key in ("preset", "stage", "dtype", "ranks", "threads")),
    ("tokens/s", "tokens_per_s", "{:,.0f}".format),
    ("step", "step_s_median", duration),
    ("of the peak", "mfu", "{:.0%}".format),
    ("memory", "peak_memory", lambda each: in_bytes(sum(each) if isinstance(each, list) else each)),
    ("on GPUs", "peak_gpu_memory", lambda each: in_bytes(sum(each))),
    ("first loss", "first_loss", "{:.3f}".format),
    ("last loss", "final_loss", "{:.3f}".format),
)


def blocks(found: dict[str, Any]) -> list[Block]:
    return [tabulated(COLUMNS, found["rows"], note=peak_note(found))]


def peak_note(found: dict[str, Any]) -> str:
    return f"The peak: {found['peak_gflops']:,.0f} GFLOP/s in matmuls, measured on all ranks concurrently."
