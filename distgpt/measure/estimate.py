"""Estimates of runs: parameters, FLOPs, memory and disk are computed, time is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from distgpt.core.base.errors import Say, UsageError
from distgpt.core.base.formatting import count, duration, long_duration, size, size_in_column, three_digits
from distgpt.core.comm.affinity import affinity
from distgpt.core.comm.api import SerialComm
from distgpt.core.comm.resources import Grants, usable_cores
from distgpt.core.components import components
from distgpt.core.config import ON_GPU, GpuConfig, RunConfig, TrainConfig
from distgpt.core.config.run_request import RunRequest
from distgpt.core.cpu.stages import Stage, expected_dtype, open_stage
from distgpt.core.data.batches import ArrayTokens, Batches
from distgpt.core.data.textfile import BUNDLED_TEXTS
from distgpt.core.model.counts import operations, parameters
from distgpt.core.model.model import Architecture, flag_count
from distgpt.core.ops.kernels import Kernels
from distgpt.core.train.memory import SPARE, fitting, needed
from distgpt.core.train.parallel_strategy import GradientSync, Strategy
from distgpt.core.train.plan import DTYPE, is_open, new_run, reject_unsuited
from distgpt.core.train.step import Step
from distgpt.corpora.mixture import paths_of, sources_of
from distgpt.corpora.prepare.tokenized import vocabulary_size
from distgpt.corpora.shards import Manifest, is_shards, read_manifest

Facts = dict[str, Any]

NO_LIMIT = 1 << 62  # bytes
CUTS = (1, 3)  # layers: the difference is the cost of two layers, the rest that of embedding and head
ENOUGH = 1 << 10  # tokens for full speed of a CPU's matmuls
LEAST, SECONDS = 3, 4.0  # time at least 3 steps of each cut, and for 4 seconds;
PATIENCE = 30.0  # after 30 seconds, one step of each is enough


@dataclass(frozen=True, slots=True)
class Question:
    """A run to estimate. `rate` is one rank's speed in tokens/s and replaces the measurement."""

    run: RunConfig
    stage: str
    ranks: int = 1
    threads: int | None = None
    gpu: GpuConfig = field(default_factory=GpuConfig)
    tokens: int | None = None  # instead of steps
    rate: float | None = None
    measured: bool | None = None
    gpu_memory: float | None = None  # GiB


@dataclass(frozen=True, slots=True)
class Site:
    """Resources for the run: kernels that can at least compute sizes, and a stage or why it is missing."""

    kernels: Kernels
    stage: Stage | None
    missing: str
    free: int | None  # bytes that a rank can use
    where: str


def estimate(question: Question, say: Say, ready: Stage | None = None) -> Facts:
    """Return all facts, ready for JSON. `say` is called before slow work.

    If this rank's stage is already open, pass it as `ready`: with multiple ranks it cannot be opened again.
    """
    _refuse_nonsense(question)
    t = question.run.train
    paths = [Path(name) for name in sources_of(t.data) or [t.data] if name not in BUNDLED_TEXTS]
    shards = next((read_manifest(path) for path in paths if is_shards(path)), None)
    # Evaluation needs memory.
    assessed = bool(t.eval_every or t.val or t.val_fraction or t.hellaswag or (shards and shards.of("val")))
    site = _site(question, ready)
    run, ranks = _with_vocabulary(question.run, shards), question.ranks
    strategy = components().strategy(run.train, ranks)
    settled, trouble = _settled(run, site, strategy, assessed)
    each = settled.batch_size // (settled.grad_accum * ranks)
    model, train = Architecture(run.model), replace(run, train=settled)
    per_step = settled.batch_size * run.model.seq_len
    flops = operations(model)
    time = _time(question, train, site, each, flops.forward + flops.backward, say)
    steps = settled.steps if question.tokens is None else -(-question.tokens // per_step)
    minutes = settled.train_minutes if question.tokens is None else 0.0
    if minutes and "step_s" in time:
        steps = max(1, int(60 * minutes / time["step_s"]))
    need = needed(train, site.kernels, strategy, assessed)
    counted, trained = parameters(model), components().model(run.train).trained(run)
    wide = site.kernels.accum_dtype.itemsize
    gradients = (trained.size + flag_count(ranks)) * wide
    return {
        "stage": question.stage,
        "ranks": ranks,
        "threads": site.kernels.threads if question.stage not in ON_GPU else None,
        "dtype": settled.dtype,
        "parameters": asdict(counted) | {"total": counted.total},
        "flops_per_token": asdict(flops) | {"forward": flops.forward, "backward": flops.backward},
        "batch": {
            "tokens_per_step": per_step,
            "sequences": settled.batch_size,
            "seq_len": run.model.seq_len,
            "rounds": settled.grad_accum,
            "sequences_per_rank_and_round": each,
        },
        "steps": steps,
        "tokens": steps * per_step,
        "minutes": minutes or None,  # time limit that replaces steps
        "memory": {
            "recompute": settled.recompute,
            "weights": need.weights,
            "gradients": gradients,
            "moments": need.optimizer - gradients,
            "activations": need.activations,
            "validation": need.evaluation,
            "exchange": need.exchange,
            "update": need.update,
            "total": need.total,
            "free": site.free,
            "where": site.where,
            "trouble": trouble,
        },
        "checkpoint_bytes": strategy.placement.saved_buffers(is_common=True) * trained.elements * wide,
        "checkpoints_kept": settled.keep,
        "weights_file_bytes": trained.elements * wide,
        "allreduce_bytes": gradients if ranks > 1 else 0,
        "allreduce_every": strategy.placement.rounds.length,
        "time": time | ({"total_s": settled.ensemble * steps * time["step_s"]} if "step_s" in time else {}),
    }


def foreseen(stage: str, request: RunRequest, tf32: bool) -> RunConfig:
    """Return the configuration of a new run in this stage on this machine."""
    config = new_run(request)
    return (
        config.with_values({DTYPE: expected_dtype(stage, config, tf32).name}) if is_open(request) else config
    )


def _refuse_nonsense(question: Question) -> None:
    if question.stage in ("serial", "cuda") and question.ranks > 1:
        raise UsageError(f"stage {question.stage!r} has one rank; --ranks requires mpi or mpi-cuda")
    if question.rate is not None and question.measured:
        raise UsageError("--rate and --measure cannot be combined")
    if question.gpu_memory is not None and question.stage not in ON_GPU:
        raise UsageError(f"--gpu-memory requires stage {' or '.join(ON_GPU)}, not {question.stage!r}")
    reject_unsuited(question.run.train, question.ranks, on_gpu=question.stage in ON_GPU)


def _with_vocabulary(run: RunConfig, shards: Manifest | None) -> RunConfig:
    """Return the run with the tokenizer's vocabulary size, if it sets none."""
    if run.model.vocab_size:
        return run
    size = shards.vocab_size if shards else vocabulary_size(run.train.tokenizer, *paths_of(run.train.data))
    return replace(run, model=replace(run.model, vocab_size=size))


def _site(question: Question, ready: Stage | None) -> Site:
    """Return one rank's site. The ranks of a CPU stage are assumed to fill machines like this one."""
    t, name = question.run.train, question.stage
    if name not in ON_GPU:
        # Ignore the limits of a batch system: a job may give each rank as much as this process has.
        share = partial(affinity().share, grants=Grants())
        cpus = float(len(usable_cores()))
        cores, request = share(cpus, 1), question.threads
        threads = share(cpus / question.ranks, question.ranks) if request is None else request
        stage = ready or open_stage("serial", threads, question.gpu)
        neighbours = max(1, min(question.ranks, cores // stage.threads))
        free, where = stage.free_memory(0 if ready else neighbours)
        kernels = stage.kernels(t.dtype, t.matmul_backend)
        return Site(kernels, stage, "", free, where)
    given = None if question.gpu_memory is None else int(question.gpu_memory * 2**30)
    try:
        stage = ready or open_stage("cuda", question.threads, question.gpu)
    except UsageError as error:
        if question.threads is not None:
            raise
        from distgpt.gpu.stage import kernels_for_estimate

        imagined = kernels_for_estimate(t.dtype, given)
        return Site(imagined, None, str(error), given, "a GPU of that size")
    free, where = stage.free_memory()
    return Site(stage.kernels(t.dtype, t.matmul_backend), stage, "", given or free, where)


def _settled(run: RunConfig, site: Site, strategy: Strategy, assessed: bool) -> tuple[TrainConfig, str]:
    """Resolve "auto" settings. If nothing fits, return the smallest settings and the reason."""
    free = NO_LIMIT if site.free is None else site.free
    try:
        return fitting(run, site.kernels, strategy, free, site.where, assessed)[0], ""
    except UsageError as error:
        t = run.train
        how = "block" if t.recompute == "auto" else t.recompute
        grad_accum = t.grad_accum or t.batch_size // strategy.ranks
        return replace(t, recompute=how, grad_accum=grad_accum), str(error)


def _time(question: Question, run: RunConfig, site: Site, each: int, flops: int, say: Say) -> Facts:
    """Return the time of a step from a given or measured rate, or why it is unknown."""
    t, ranks = run.train, question.ranks
    tokens = t.batch_size // ranks * run.model.seq_len
    if question.rate is not None:
        rate, source = question.rate, {"source": "given"}
    else:
        sequences = enough_sequences(run, site.kernels, each)
        missing = site.missing or _unmeasurable(run, site, sequences)
        if missing and question.measured:
            raise UsageError(f"--measure: {missing}")
        if missing or question.measured is False:
            return {"rate_per_rank": None, "source": "none", "missing": missing}
        say(f"measuring steps with {sequences} × {run.model.seq_len} tokens")
        if site.stage:
            site.stage.notes.report_to(say)
        timing = measure(run, site.kernels, sequences)
        rate = tokens / (tokens * timing["token_s"] + timing["update_s"])
        source = {"source": "measured", **timing}
    seconds = tokens / rate
    return {
        **source,
        "rate_per_rank": rate,
        "rate": rate * ranks,
        "step_s": seconds,
        "flops_per_s_and_rank": rate * flops,
    }


def _unmeasurable(run: RunConfig, site: Site, sequences: int) -> str:
    """Return why the models to measure do not fit in memory, or ""."""
    needs = sum(needed(model, site.kernels, Strategy(model.train, 1)).total for model in cuts(run, sequences))
    if site.stage and needs < SPARE * site.stage.free_memory()[0]:
        return ""
    return f"measuring requires {size(needs)} of free memory"


# Timing a step of a model, by steps of the same model with fewer layers


def cuts(run: RunConfig, sequences: int) -> list[RunConfig]:
    """Return the runs to measure: the model with fewer layers, on one rank, in one micro-batch.

    A small model is measured whole.
    """
    train = replace(
        run.train, batch_size=sequences, grad_accum=1, reproducible_parts=0, grad_sync="allreduce"
    )
    layers = CUTS if run.model.n_layer > CUTS[-1] else (run.model.n_layer,)
    return [RunConfig(replace(run.model, n_layer=n_layer), train) for n_layer in layers]


def enough_sequences(run: RunConfig, kernels: Kernels, most: int) -> int:
    """Return the number of sequences per pass that is as fast as `most`. A GPU needs `most`."""
    if kernels.capabilities.is_async:
        return most
    each = max(kernels.threads, -(-ENOUGH // run.model.seq_len))
    return min(most, each - each % kernels.threads)


def measure(run: RunConfig, kernels: Kernels, sequences: int) -> Facts:
    """Return the seconds of all layers for the forward and backward pass of one token, and for an update.

    Times real steps on random tokens. The cuts alternate, so that a disturbance affects all cuts.
    """
    trials = [Trial(each, kernels) for each in cuts(run, sequences)]
    for trial in trials:
        trial.step()  # compiles, records, tunes
    times: list[list[tuple[float, float]]] = []  # seconds of a step and of its update, by round and cut
    begun = perf_counter()
    while not times or perf_counter() < begun + (SECONDS if len(times) >= LEAST else PATIENCE):
        times.append([(seconds_of(trial.step), seconds_of(trial.update)) for trial in trials])
    steps, updates = np.moveaxis(np.array(times), 2, 0)
    layers = tuple(trial.layers for trial in trials)
    per_pass, per_update = (
        _extrapolated(layers, np.median(each, axis=0).tolist(), run.model.n_layer)
        for each in (steps - updates, updates)
    )
    result = {"token_s": per_pass / (sequences * run.model.seq_len), "update_s": per_update}
    return result | {"cuts": layers, "sequences": sequences, "steps": len(times)}


class Trial:
    """A small model with everything to train it."""

    def __init__(self, run: RunConfig, kernels: Kernels) -> None:
        model, t = components().model(run.train).build(run, kernels), run.train
        self.layers = run.model.n_layer
        model.allocate_master_weights()
        model.initialise(t.seed)
        self.optimizer = components().optimizer(t)(model, t)
        self.trained = Step(self.optimizer, SerialComm(), t, GradientSync())
        n_tokens = t.batch_size * run.model.seq_len + 1
        ids = np.random.default_rng(t.seed).integers(0, run.model.vocab_size, n_tokens, np.uint32)
        self.batches = Batches(ArrayTokens(ids), run.model.seq_len, t.batch_size, t.seed)

    def step(self) -> None:
        self.trained.launch(0, self.batches).wait()

    def update(self) -> None:
        self.optimizer.step(0, 1.0)
        self.optimizer.model.kernels.to_host(self.optimizer.norm)  # waits


def seconds_of(work: Callable[[], None]) -> float:
    begun = perf_counter()
    work()
    return perf_counter() - begun


def _extrapolated(layers: tuple[int, ...], times: list[float], n_layer: int) -> float:
    """Extrapolate the time linearly from both measurements; a single one covers all layers."""
    each = max(0.0, (times[-1] - times[0]) / max(1, layers[-1] - layers[0]))
    return times[-1] + (n_layer - layers[-1]) * each


Rows = Iterator[tuple[str, str]]

# -- showing

MARGIN = 13  # width of the page's first column
FLOPS = {"layers": "layers", "output": "head", "attention": "attention"}
MEMORY = ("weights", "gradients", "moments", "activations", "validation", "exchange", "update", "total")


def render_terminal(name: str, facts: Facts) -> str:
    threads = f" of {count(facts['threads'], 'thread')}" if facts["threads"] else ""
    title = f"{name} on stage {facts['stage']}: {count(facts['ranks'], 'rank')}{threads}, {facts['dtype']}"
    rows = (row for part in (_model, _batch, _memory_rows, _disk, _time_rows) for row in part(facts))
    return "\n".join([title, "", *(f"{label:<{MARGIN}}{text}".rstrip() for label, text in rows)])


def _model(facts: Facts) -> Rows:
    sizes, flops = facts["parameters"], facts["flops_per_token"]
    yield "parameters", f"{sizes['total']:,}"
    yield "", ", ".join(f"{kind} {n:,}" for kind, n in sizes["kinds"].items())
    parts = ", ".join(f"{name} {_mega(flops[key])}" for name, key in FLOPS.items())
    yield "MFLOP/token", f"{_mega(flops['forward'])} forward ({parts}), {_mega(flops['backward'])} backward"


def _batch(facts: Facts) -> Rows:
    batch, ranks = facts["batch"], facts["ranks"]
    where = f"on each of {ranks} ranks" if ranks > 1 else "on the only rank"
    sequences = f"{count(batch['sequences'], 'sequence')} of {batch['seq_len']:,}"
    micro = count(batch["rounds"], "micro-batch")
    yield "batch", f"{batch['tokens_per_step']:,} tokens per step: {sequences}"
    yield "", f"in {micro} of {batch['sequences_per_rank_and_round']} {where}"
    length, minutes = f"{facts['steps']:,} steps, {facts['tokens']:,} tokens", facts["minutes"]
    if minutes:
        is_known = facts["time"]["rate_per_rank"] is not None
        length = f"about {length} in {minutes:.3g} minutes" if is_known else f"{minutes:.3g} minutes"
    yield "length", length


def _memory_rows(facts: Facts) -> Rows:
    memory = facts["memory"]
    yield "", ""
    rank = "each rank" if facts["ranks"] > 1 else "the only rank"
    yield "memory", f"of {rank}, with --recompute {memory['recompute']}"
    for kind in MEMORY:
        if memory[kind]:
            yield "", f"{kind:<12}{size_in_column(memory[kind]):>11}"
    if memory["free"] is not None:
        yield "", f"{'free':<12}{size_in_column(memory['free']):>11}  on {memory['where']}"
    if memory["trouble"]:
        yield "", f"not enough: {memory['trouble']}"
    elif memory["free"] is None:
        yield "", "assumes unlimited memory; set the GPU's with --gpu-memory GIB"
    yield "", ""


def _disk(facts: Facts) -> Rows:
    checkpoint, weights = (size(facts[key]) for key in ("checkpoint_bytes", "weights_file_bytes"))
    kept = f"keeps up to {facts['checkpoints_kept']}"
    yield "disk", f"checkpoint {checkpoint}, {kept}; weights {weights}"
    if facts["allreduce_bytes"]:
        every = facts["allreduce_every"]
        what = "gradients per step" if every == 1 else f"weight changes every {every} steps"
        yield "allreduce", f"{size(facts['allreduce_bytes'])} of {what}"


def _time_rows(facts: Facts) -> Rows:
    time, ranks = facts["time"], facts["ranks"]
    if time["rate_per_rank"] is None:
        yield "time", f"not measured{': ' if time['missing'] else ''}{time['missing']}"
        yield (
            "",
            "to estimate the time, run this on the training machine, or set --rate",
        )
        return
    flops = f"{three_digits(time['flops_per_s_and_rank'] / 1e12)} TFLOP/s"
    together = f", {time['rate']:,.0f} on {ranks} ranks" if ranks > 1 else ""
    yield "speed", f"{time['rate_per_rank']:,.0f} tokens/s on one rank ({flops}){together}"
    if time["source"] == "measured":
        whole = f"{duration(time['token_s'])} per token, {duration(time['update_s'])} per update"
        yield "", f"measured here in {count(time['steps'], 'step')}: {whole}"
    else:
        yield "", "set with --rate"
    if ranks > 1:
        yield "", "excludes the allreduce and contention between ranks on one machine"
    step, total = duration(time["step_s"]), long_duration(time["total_s"])
    yield "time", f"{step} per step, {total} in total, excluding evaluations and checkpoints"


def _mega(operations: int) -> str:
    return f"{operations / 1e6:,.1f}" if operations < 1e9 else f"{operations / 1e6:,.0f}"
