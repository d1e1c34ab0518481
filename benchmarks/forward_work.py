"""One measurement of the forward-pass study. Since names and weights are the same, losses must agree."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mean_loss import MeanLoss, Sequences
from timing import timed

from distgpt.core.base.errors import DisagreementError
from distgpt.core.base.files import bundled
from distgpt.core.base.formatting import count, three_digits
from distgpt.core.comm.agree import gather
from distgpt.core.comm.resources import peak_memory
from distgpt.core.config.presets import preset
from distgpt.core.cpu.stages import Stage
from distgpt.core.model import layers
from distgpt.core.model.model import Architecture, Model
from distgpt.core.ops.kernels import Kernels
from distgpt.measure.jobs import Row
from distgpt.show.page import Block, Column, tabulated

METHODS = ("serial", "batched", "mpi", "cuda", "mpi-cuda")  # distgpt's methods, in table order
ONE_AT_A_TIME = ("serial",)
NAMES = {
    "microgpt": 1000,
    "S": 2000,
    "M": 5000,
    "L": 10000,
    "VL": 20000,
    "XL": 30000,
}  # microgpt is not in the study
NAMES |= dict.fromkeys(("MS5", "MM5", "ML5", "MVL5", "MXL5"), 5000)

SEED = 1  # seed of the initial weights
BOUNDARY = 0  # the token at both ends of a name; letters are 1 … 26
ORDER = 11  # shuffles the names, since the file is sorted
ROWS = 1 << 10  # Smaller batches have more overhead; larger ones exceed the caches.
MOST_ROWS_ON_GPU = 1 << 18
ONE = 1  # token, so a batch has a single sequence


AGREE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 3e-2}  # relative tolerance of the less precise type


@dataclass(frozen=True, slots=True)
class Job:
    """A measurement. `threads` 0: the stage's share of the cores."""

    preset: str
    method: str
    names: int
    dtype: str = "float32"
    threads: int = 0
    repeats: int = 5
    patience: float = 60.0


def measure(job: Job, stage: Stage) -> dict[str, Any]:
    """Return seconds by rank 0's clock, the loss and memory. Collective."""
    kernels, comm = stage.kernels(job.dtype), stage.comm
    model = initialised(job.preset, kernels)
    every = sequences(job.names)
    mean_loss = MeanLoss(model, ONE if job.method in ONE_AT_A_TIME else rows_at_once(model, stage))

    def work(names: int) -> float:
        return mean_loss(every.first(names), comm)

    def agreed(seconds: float) -> float:
        return comm.allreduce_max(int(seconds * 1e9)) / 1e9

    found = timed(work, job.names, job.repeats, job.patience, agreed)
    found["peak_memory"] = gather(comm, peak_memory())
    if stage.on_gpu:
        found["peak_gpu_memory"] = gather(comm, stage.taken_memory())
    return found | {"ranks": comm.size, "threads": kernels.threads}


def initialised(name: str, kernels: Kernels) -> Model:
    model = Model(Architecture(preset(name).model), kernels)
    model.initialise(SEED)
    return model


def sequences(names: int) -> Sequences:
    return Sequences.of([tokens_of(name) for name in bundled_names(names)])


def rows_at_once(model: Model, stage: Stage) -> int:
    """Return the predictions per batch. On a GPU, they fill up to half of the free memory."""
    if not stage.on_gpu:
        return ROWS
    c, k = model.config, model.kernels
    elements = sum(layers.activation_widths(c).values()) + 4 * c.n_embd  # a layer and its input and output
    wide = 8 * (c.n_head + 13)  # statistics and tokens, at most 8 bytes each
    free = (stage.free_memory()[0] - k.logits_bytes) // 2
    return max(1, min(MOST_ROWS_ON_GPU, free // (elements * int(k.dtype.itemsize) + wide)))


def tokens_of(name: str) -> list[int]:
    return [BOUNDARY, *(ord(letter) - ord("a") + 1 for letter in name), BOUNDARY]


def bundled_names(count: int) -> list[str]:
    """Return that many bundled names, repeated if necessary."""
    names = bundled("data", "names.txt").read_text().split()
    random.Random(ORDER).shuffle(names)
    return [names[i % len(names)] for i in range(count)]


def row_of(job: Job, found: dict[str, Any]) -> Row:
    """Return a table row. If fewer names were `measured`, scale `seconds` by the number of predictions."""
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
    }


def refuse_different_losses(rows: Sequence[Row]) -> None:
    """Raise UsageError if a loss differs by more than rounding from the most precise row."""
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
    """Add each row's speedup over serial for the same work, if serial was measured."""
    serial = {(row["preset"], row["names"]): row["seconds"] for row in rows if row["method"] == "serial"}
    plain = [serial.get((row["preset"], row["names"])) for row in rows]
    return [row | {"speedup": s and s / row["seconds"]} for row, s in zip(rows, plain, strict=True)]


def is_scaled(row: Row) -> bool:
    return bool(row["measured"] < row["names"])


def seconds(row: Row) -> str:
    return three_digits(row["seconds"]) + "*" * is_scaled(row)


def times(row: Row) -> str:
    return three_digits(row["speedup"]) if row["speedup"] else ""


def _megabytes(row: Row) -> str:
    """Format the memory of all processes and their GPU memory."""
    gpu = row.get("peak_gpu_memory")
    return f"{sum(row['peak_memory']) / 1e6:,.0f}" + (f" + {sum(gpu) / 1e6:,.0f} GPU" if gpu else "")


COLUMNS: tuple[Column, ...] = (
    ("preset", "preset", str),
    ("method", "method", str),
    ("dtype", "dtype", str),
    ("ranks × threads", "", lambda row: f"{row['ranks']} × {row['threads']}"),
    ("seconds", "", seconds),
    ("× serial", "", times),
    ("names/s", "", lambda row: f"{row['names'] / row['seconds']:,.0f}"),
    ("peak MB", "", _megabytes),
)


def blocks(found: dict[str, Any]) -> list[Block]:
    """Return the table. A star marks extrapolated values."""
    rows = found["rows"]
    notes = [
        f"* {row['preset']}, {row['method']}: in proportion from {row['measured']:,} of "
        f"{count(row['names'], 'name')}"
        for row in rows
        if is_scaled(row)
    ]
    if any(row["method"].startswith("torch") for row in rows):
        notes.append("torch keeps the memory it has freed, which makes it faster and larger")
    return [tabulated(COLUMNS, rows, "Mean loss over all names", "; ".join(notes))]
