"""One measurement of the forward-pass study: the mean loss of a preset by a method over a number of names."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any

from distgpt.comm.agree import gather_ints
from distgpt.comm.cores import peak_memory
from distgpt.config.presets import preset
from distgpt.errors import UsageError
from distgpt.kernels.api import Kernels
from distgpt.machine.stages import Stage
from distgpt.measure.bench.equal_lengths import MeanLoss, Sequences
from distgpt.measure.bench.published import ONE_AT_A_TIME
from distgpt.measure.bench.scalar import Shape, dot
from distgpt.measure.bench.scalar import mean_loss as scalar_mean_loss
from distgpt.measure.peer.timing import timed
from distgpt.model.counts import operations
from distgpt.model.layers import Block
from distgpt.model.model import Architecture, Model
from distgpt.units import count

SEED = 1  # of the weights
BOUNDARY = 0  # at both ends of a name; 1 … 26 for the letters
ORDER = 11  # the seed that shuffles the names: the file is sorted by alphabet
ROWS = 1 << 10  # fewer take longer to start, the activations of more leave the caches
MOST_ROWS_ON_GPU = 1 << 18
ONE = 1  # token: a batch then holds a single sequence


@dataclass(frozen=True, slots=True)
class Job:
    """What to measure. `threads` 0: the stage's share of the cores."""

    preset: str
    method: str
    names: int
    dtype: str = "float32"
    threads: int = 0
    repeats: int = 5
    patience: float = 60.0


def measure(job: Job, stage: Stage) -> dict[str, Any]:
    """Seconds by rank 0's clock, loss and memory. Collective."""
    if job.method == "python":
        return measure_scalar(job)
    kernels, comm = stage.kernels(job.dtype), stage.comm
    model = initialised(job.preset, kernels)
    every = sequences(job.names)
    mean_loss = MeanLoss(model, ONE if job.method in ONE_AT_A_TIME else rows_at_once(model, stage))

    def work(names: int) -> float:
        return mean_loss(first(every, names), comm)

    def agreed(seconds: float) -> float:
        return comm.largest(int(seconds * 1e9)) / 1e9

    found = timed(work, job.names, job.repeats, job.patience, agreed)
    found["peak_memory"] = gather_ints(comm, peak_memory())
    if stage.device is not None:
        found["peak_gpu_memory"] = gather_ints(comm, int(stage.device.taken()))
    return found | {"ranks": comm.size, "threads": kernels.threads}


def measure_scalar(job: Job) -> dict[str, Any]:
    """Measure plain Python: one pass, without warm-up."""
    _refuse_slow(job)
    from distgpt.kernels.reference import ReferenceKernels

    model = initialised(job.preset, ReferenceKernels("float64"))
    weights = {name: values.tolist() for name, values in model.params.items()}
    shape = Shape(model.config.n_layer, model.config.n_head, model.config.norm_eps)
    names = [tokens_of(name) for name in bundled_names(job.names)]
    begun = time.perf_counter()
    loss = scalar_mean_loss(weights, shape, names)
    seconds = time.perf_counter() - begun
    found = {"measured": job.names, "seconds": seconds, "all_seconds": [seconds], "loss": loss}
    return found | {"peak_memory": [peak_memory()], "ranks": 1, "threads": 1}


def python_seconds(name: str, names: int) -> float:
    """An estimate for plain Python, from the time of a long dot product."""
    many = [1.0] * (1 << 16)
    begun = time.perf_counter()
    dot(many, many)
    product = (time.perf_counter() - begun) / len(many)
    tokens = len(sequences(names).tokens) - names
    return product * tokens * operations(Architecture(preset(name).model)).forward / 2


def _refuse_slow(job: Job) -> None:
    """Refuse what plain Python would take longer for than `patience`."""
    expected = python_seconds(job.preset, job.names)
    if expected > job.patience:
        within = int(job.names * job.patience / expected)
        way = (
            f"--names {within} fits into the {job.patience:g} s of --patience"
            if within
            else "raise --patience"
        )
        raise UsageError(
            f"plain Python would take about {expected:,.0f} s for {count(job.names, 'name')} "
            f"of {job.preset}: {way}, or leave --method python out"
        )


def initialised(name: str, kernels: Kernels) -> Model:
    """The preset's model with the weights that every method computes with."""
    model = Model(preset(name).model, kernels)
    model.initialise(SEED)
    return model


def sequences(names: int) -> Sequences:
    return Sequences.of([tokens_of(name) for name in bundled_names(names)])


def first(every: Sequences, names: int) -> Sequences:
    if names == len(every.lengths):
        return every
    lengths = every.lengths[:names]
    return Sequences(every.tokens[: lengths.sum()], lengths)


def rows_at_once(model: Model, stage: Stage) -> int:
    """Predictions in a batch: on a GPU as many as fit into half of its free memory."""
    if stage.device is None:
        return ROWS
    c, k = model.config, model.kernels
    elements = sum(Block.activations(c).values()) + 4 * c.n_embd  # one layer's, and what is around it
    wide = 8 * (c.n_head + 13)  # statistics and tokens, of 8 bytes at most
    free = (stage.free_memory()[0] - k.logits_bytes) // 2
    return max(1, min(MOST_ROWS_ON_GPU, free // (elements * int(k.dtype.itemsize) + wide)))


def tokens_of(name: str) -> list[int]:
    return [BOUNDARY, *(ord(letter) - ord("a") + 1 for letter in name), BOUNDARY]


def bundled_names(count: int) -> list[str]:
    """That many of the bundled names, the same in every run; from the start again when they run out."""
    from distgpt.data.loading import bundled

    names = bundled("data", "names.txt").read_text().split()
    random.Random(ORDER).shuffle(names)
    return [names[i % len(names)] for i in range(count)]
