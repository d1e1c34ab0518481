"""`distgpt bench forward`: the mean loss of a preset over names by several methods, timed and compared.

Names differ in length: they are evaluated in batches of equal length, which ranks and threads divide up.
Each method is measured in processes of its own.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from distgpt.comm.agree import gather_ints
from distgpt.comm.api import Comm
from distgpt.comm.cores import peak_memory
from distgpt.comm.launched import launched_as
from distgpt.config.presets import preset
from distgpt.errors import DisagreementError, UsageError
from distgpt.formatting import count, three_digits
from distgpt.jobs.launchers import Launcher, find_launcher
from distgpt.kernels.api import Array, Kernels, Work
from distgpt.measure import jobs
from distgpt.measure.bench.results import BenchOptions, Row, say
from distgpt.measure.published import METHODS, NAMES, ONE_AT_A_TIME
from distgpt.measure.timing import timed
from distgpt.model import layers
from distgpt.model.model import Model
from distgpt.model.passes import Pass
from distgpt.show.page import Block, Column, Paragraph, tabulated
from distgpt.stages import ON_GPU, Stage, open_stage

SEED = 1  # of the weights
BOUNDARY = 0  # at both ends of a name; 1 … 26 for the letters
ORDER = 11  # the seed that shuffles the names: the file is sorted by alphabet
ROWS = 1 << 10  # fewer take longer to start, the activations of more leave the caches
MOST_ROWS_ON_GPU = 1 << 18
ONE = 1  # token: a batch then holds a single sequence


@dataclass(frozen=True, slots=True)
class Job:
    """A measurement to make. `threads` 0: the stage's share of the cores."""

    preset: str
    method: str
    names: int
    dtype: str = "float32"
    threads: int = 0
    repeats: int = 5
    patience: float = 60.0


def measure(job: Job, stage: Stage, kind: type[MeanLoss] | None = None) -> dict[str, Any]:
    """Return seconds by rank 0's clock, the loss and memory. Collective."""
    kernels, comm = stage.kernels(job.dtype), stage.comm
    model = initialised(job.preset, kernels)
    every = sequences(job.names)
    if job.method in ONE_AT_A_TIME:
        mean_loss = MeanLoss(model, ONE)
    else:
        mean_loss = (kind or MeanLoss)(model, rows_at_once(model, stage))

    def work(names: int) -> float:
        return mean_loss(every.first(names), comm)

    def agreed(seconds: float) -> float:
        return comm.allreduce_max(int(seconds * 1e9)) / 1e9

    found = timed(work, job.names, job.repeats, job.patience, agreed)
    found["peak_memory"] = gather_ints(comm, peak_memory())
    if stage.device is not None:
        found["peak_gpu_memory"] = gather_ints(comm, int(stage.device.taken()))
    return found | {"ranks": comm.size, "threads": kernels.threads}


def initialised(name: str, kernels: Kernels) -> Model:
    """Return the preset's model with the weights that every method computes with."""
    model = Model(preset(name).model, kernels)
    model.initialise(SEED)
    return model


def sequences(names: int) -> Sequences:
    return Sequences.of([tokens_of(name) for name in bundled_names(names)])


def rows_at_once(model: Model, stage: Stage) -> int:
    """Return the predictions in a batch: on a GPU as many as fit into half of its free memory."""
    if stage.device is None:
        return ROWS
    c, k = model.config, model.kernels
    elements = sum(layers.Block.activations(c).values()) + 4 * c.n_embd  # one layer's, and what is around it
    wide = 8 * (c.n_head + 13)  # statistics and tokens, of 8 bytes at most
    free = (stage.free_memory()[0] - k.logits_bytes) // 2
    return max(1, min(MOST_ROWS_ON_GPU, free // (elements * int(k.dtype.itemsize) + wide)))


def tokens_of(name: str) -> list[int]:
    return [BOUNDARY, *(ord(letter) - ord("a") + 1 for letter in name), BOUNDARY]


def bundled_names(count: int) -> list[str]:
    """Return that many of the bundled names, always the same; from the start again when they run out."""
    from distgpt.data.loading import bundled

    names = bundled("data", "names.txt").read_text().split()
    random.Random(ORDER).shuffle(names)
    return [names[i % len(names)] for i in range(count)]


# -- the mean loss over sequences of different lengths


@dataclass(frozen=True, slots=True)
class Sequences:
    """Sequences of tokens, one after the other, and the length of each."""

    tokens: Array
    lengths: Array

    @classmethod
    def of(cls, sequences: Sequence[ArrayLike]) -> Sequences:
        arrays = [np.asarray(sequence).reshape(-1) for sequence in sequences]
        return cls(np.concatenate(arrays), np.array([len(array) for array in arrays]))

    def first(self, count: int) -> Sequences:
        lengths = self.lengths[:count]
        return Sequences(self.tokens[: lengths.sum()], lengths)

    @property
    def predictions(self) -> int:
        return len(self.tokens) - len(self.lengths)


class MeanLoss:
    """The mean cross-entropy over all predictions: of every token of every sequence but its first.

    A batch holds at most `most_tokens` predictions, or one sequence. Every worker has batches of its own, so
    that nobody waits for anybody before the end. Memory is kept from call to call.
    """

    def __init__(self, model: Model, most_tokens: int = 1 << 14) -> None:
        self.model, self._most = model, most_tokens
        self._workers: list[_Worker] = []

    def __call__(self, sequences: Sequences | Sequence[ArrayLike], comm: Comm | None = None) -> float:
        """Return the mean loss. Collective with a communicator: each rank takes an equal part."""
        every = sequences if isinstance(sequences, Sequences) else Sequences.of(sequences)
        k, (rank, size) = self.model.kernels, (comm.rank, comm.size) if comm is not None else (0, 1)
        shares = _shares(every.lengths, size * k.threads)[rank * k.threads : (rank + 1) * k.threads]
        workers, found = [self._worker(i) for i in range(len(shares))], np.zeros(1)
        sums = np.zeros(len(shares))

        def work(i: int) -> None:
            sums[i], rest = self.sum_apart(i, shares[i])
            workers[i].sum(list(equal_lengths(every, self._most, rest)))

        k.each(work, len(shares))
        found[0] = sums.sum()
        for worker in workers:
            found += k.to_host(worker.total)
        if comm is not None:
            comm.sum(found)
        return float(found[0]) / every.predictions

    def sum_apart(self, worker: int, share: Array) -> tuple[float, Array]:
        """Return a sum that is found without batches, and the indices of the other sequences."""
        return 0.0, share

    def _worker(self, number: int) -> _Worker:
        while len(self._workers) <= number:
            self._workers.append(_Worker(self.model))
        return self._workers[number]


class _Worker:
    """One worker's sum of losses, with memory for its largest batch and recorded work for each shape."""

    def __init__(self, model: Model) -> None:
        self._model, self._k = model, model.kernels
        self.total, self._mean = self._k.wide_zeros(1), self._k.wide_zeros(1)
        self._largest: Pass | None = None
        self._recorded: dict[tuple[int, int], tuple[Array, Array, Work]] = {}

    def sum(self, batches: Sequence[Array]) -> None:
        """total ← the sum of the losses of all predictions in these batches."""
        self._k.zero(self.total)
        shapes = [(len(batch), batch.shape[1] - 1) for batch in batches]
        if shapes:
            self._reserve(*max(shapes, key=prod))
        for batch, shape in zip(batches, shapes, strict=True):
            if shape not in self._recorded:
                self._recorded[shape] = self._work(shape)
            inputs, targets, work = self._recorded[shape]
            self._k.put(inputs, batch[:, :-1].reshape(-1))
            self._k.put(targets, batch[:, 1:].reshape(-1))
            work()

    def _work(self, shape: tuple[int, int]) -> tuple[Array, Array, Work]:
        assert self._largest is not None
        same = self._largest.shape == shape
        losses = self._largest if same else self._largest.reshaped(*shape)
        inputs, targets = (self._k.integers(np.zeros(prod(shape))) for _ in range(2))

        def work() -> None:
            losses.loss(self._mean, inputs, targets)
            self._k.sum(self.total, self._mean, prod(shape), accumulate=True)

        return inputs, targets, self._k.record(work)

    def _reserve(self, n_seq: int, seq_len: int) -> None:
        """Reserve memory for that many rows, which this worker alone computes."""
        if self._largest is None or self._largest.n_rows < n_seq * seq_len:
            self._recorded.clear()
            self._largest = None  # its memory first
            self._largest = Pass(self._model, n_seq, seq_len, training=False, workers=1)
            self._largest.expect_losses()


def equal_lengths(sequences: Sequences, most_tokens: int, own: Array) -> Iterator[Array]:
    """Yield batches (n, T + 1), shorter ones first, of the sequences whose indices are in `own`.

    Sequences of one length are cut into batches of nearly the same size.
    """
    starts = np.cumsum(sequences.lengths) - sequences.lengths
    starts, lengths = starts[own], sequences.lengths[own]
    for length in np.unique(lengths):
        at = starts[lengths == length, None] + np.arange(length)
        most = max(1, most_tokens // (int(length) - 1))
        for offsets in np.array_split(at, -(-len(at) // most)):
            yield sequences.tokens[offsets]


def _shares(lengths: Array, count: int) -> list[Array]:
    """Divide the indices of all sequences, sorted by length, into `count` parts.

    Every part has few lengths, and about as many predictions as the others.
    """
    order = np.argsort(lengths, kind="stable")
    ends = np.cumsum(lengths[order] - 1)
    return np.split(order, np.searchsorted(ends, ends[-1] * np.arange(1, count) / count, side="right"))


# -- the command

AGREE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 3e-2}  # relative, by the coarser of the two types
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
    measure_only: bool = False

    def job(self, preset: str, method: str, dtype: str, names: int | None = None) -> Job:
        names, threads = names or self.names or NAMES[preset], self.threads or 0
        return Job(preset, method, names, dtype, threads, self.repeats, self.patience)

    @property
    def is_rank(self) -> bool:
        """Return whether this process measures itself, alone or as a rank, instead of starting others."""
        return self.measure_only or launched_as() > 1

    def only_job(self) -> Job:
        """Return what a rank measures."""
        methods = self.methods or (["mpi"] if launched_as() > 1 else ["batched"])
        presets = self.presets or ("S",)
        if max(map(len, (presets, methods, self.dtypes))) > 1:
            raise UsageError(
                "launched as one job, bench forward measures one preset, method and dtype: name one"
            )
        return self.job(presets[0], methods[0], self.dtypes[0])


def bench(options: ForwardOptions) -> None:
    if options.is_rank:
        job = options.only_job()
        stage = open_stage(stage_of(job.method), options.threads)
        found = measure(job, stage)
        if stage.comm.rank == 0:
            print(json.dumps(found))
        return
    benchmark = Benchmark(options, *methods_and_launcher(options))
    presets = options.presets or ("S",)
    options.prepare()
    work = [(name, options.names or NAMES[name]) for name in presets]
    rows = with_speedups([row for each in work for row in benchmark.compare(benchmark.jobs(*each))])
    found = {"rows": rows}
    options.finish("forward", "-".join(presets), found, blocks(found))


# -- what can be measured here


def stage_of(method: str) -> str:
    """Return the stage that a method of ours runs in."""
    return method if method in ("mpi", "cuda", "mpi-cuda") else "serial"


def methods_and_launcher(options: ForwardOptions) -> tuple[Sequence[str], Launcher | None]:
    """Return the methods to measure, once each, and the launcher; refuse what cannot be measured here."""
    methods = list(dict.fromkeys(options.methods))
    if "bfloat16" in options.dtypes and set(methods) <= set(IN_DOUBLE) and methods:
        names = " and ".join(methods)
        raise UsageError(f"--method {names} computes in float64: --dtype bfloat16 needs another")
    launcher = None
    with_ranks = any(method.startswith("mpi") for method in methods)
    try:
        launcher = find_launcher(options.launcher, options.hostfile)
    except UsageError:
        if with_ranks or options.launcher or options.hostfile:
            raise
    for method in methods:
        for dtype in dtypes_of(method, options.dtypes):
            jobs.check_gpu(stage_of(method), dtype, options.launcher, options.hostfile)
    return methods or _available(launcher), launcher


def _available(launcher: Launcher | None) -> list[str]:
    """Return the methods that this machine has."""
    from distgpt.gpu.probe import driver

    gpus = driver()
    return ["serial", "batched"] + ["mpi"] * (launcher is not None) + ["cuda"] * bool(gpus and gpus.gpus)


def dtypes_of(method: str, dtypes: Sequence[str]) -> Sequence[str]:
    """Return the dtypes that the method is measured in, once each."""
    return ["float64"] if method in IN_DOUBLE else list(dict.fromkeys(dtypes))


# -- measuring


class Benchmark:
    """The methods to measure, and what it takes to start them."""

    order: Sequence[str] = METHODS  # the slow ones first: they are what the others are compared with

    def __init__(
        self, options: ForwardOptions, methods: Sequence[str], launcher: Launcher | None = None
    ) -> None:
        self.options, self.methods, self.launcher = options, methods, launcher

    def jobs(self, preset: str, names: int) -> list[Job]:
        """Return what to measure of a preset, by every method and dtype."""
        found = []
        for method in sorted(self.methods, key=self.order.index):
            for dtype in dtypes_of(method, self.options.dtypes):
                job = self.options.job(preset, method, dtype, names)
                found.append(replace(job, threads=1) if method in IN_DOUBLE else job)
        return found

    def compare(self, to_do: Sequence[Job]) -> list[Row]:
        """Return rows of jobs with the same names and weights, whose losses must agree."""
        rows = []
        for job in to_do:
            say(f"{job.preset}: {job.method}, {job.dtype}, {job.names:,} names")
            rows.append(row_of(job, self.measure(job)))
        refuse_different_losses([row for row in rows if not is_scaled(row)])
        for row in filter(is_scaled, rows):
            self.check_part(row)
        return rows

    def measure(self, job: Job) -> dict[str, Any]:
        """Measure in processes of their own."""
        words: list[object] = ["bench", "forward", *words_of(job)]
        launcher = self.launcher if job.method.startswith("mpi") else None
        return jobs.ask(what_of(job), words, launcher, self.options.ranks)

    def check_part(self, part: Row) -> None:
        """Compare a loss over the first names only with that of a batched pass over just these."""
        job = self.options.job(part["preset"], "batched", "float64", part["measured"])
        say(f"{job.preset}: the same {job.names:,} names batched, to compare with {part['method']}")
        again = self.measure(replace(job, repeats=1, patience=math.inf))
        refuse_different_losses([part, row_of(job, again)])


def words_of(job: Job) -> list[object]:
    """Return the options that make a process measure this job."""
    words: list[object] = ["--measure"]
    for key in ("preset", "method", "names", "dtype", "repeats", "patience"):
        words += [f"--{key}", getattr(job, key)]
    return words + (["--threads", job.threads] if job.threads and job.method not in ON_GPU else [])


def what_of(job: Job) -> str:
    """Name a job in an error."""
    return f"--method {job.method} of preset {job.preset}"


def row_of(job: Job, found: dict[str, Any]) -> Row:
    """Return a table's row. Where fewer names were `measured`, `seconds` grow with their predictions."""
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
    """Refuse losses over the same names that differ from the most precise row's by more than rounding."""
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
    """Add how much faster each row is than serial on the same work, where that was measured too."""
    serial = {(row["preset"], row["names"]): row["seconds"] for row in rows if row["method"] == "serial"}
    plain = [serial.get((row["preset"], row["names"])) for row in rows]
    return [row | {"speedup": s and s / row["seconds"]} for row, s in zip(rows, plain, strict=True)]


# -- showing: a star marks what was measured on a part of the names


def is_scaled(row: Row) -> bool:
    """Return whether a row's seconds are scaled up from those of a part of the names."""
    return bool(row["measured"] < row["names"])


def seconds(row: Row) -> str:
    return three_digits(row["seconds"]) + "*" * is_scaled(row)


def times(row: Row) -> str:
    """Format how many times as fast as the plain way it is, if that was measured."""
    return three_digits(row["speedup"]) if row["speedup"] else ""


def _megabytes(row: Row) -> str:
    """Format the memory of all of its processes, and what they took on GPUs."""
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
    return [tabulated(COLUMNS, found["rows"]), *map(Paragraph, scaled_notes(found["rows"]))]


def scaled_notes(rows: Sequence[Row]) -> list[str]:
    """Return a line for each row that was measured on a part of the names, which a star marks."""
    return [
        f"* {row['preset']}, {row['method']}: in proportion from {row['measured']:,} of "
        f"{count(row['names'], 'name')}"
        for row in rows
        if is_scaled(row)
    ]
