"""What a run will take: parameters, operations, memory and disk, counted, and time, where it was measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from distgpt.comm.cores import usable_cores
from distgpt.config import RECOMPUTE, GpuConfig, RunConfig, TrainConfig
from distgpt.data.batches import refuse_uneven
from distgpt.data.loading import AUTO
from distgpt.data.shards import Manifest, is_shards, read_manifest
from distgpt.data.text import BUNDLED_TEXTS, read_text, resolve_data
from distgpt.data.tokenizers.bpe import GPT2_SIZE
from distgpt.data.tokenizers.naming import build_tokenizer, load_tokenizer
from distgpt.errors import UsageError
from distgpt.kernels.api import Kernels
from distgpt.machine.stages import ON_GPU, Stage, open_stage
from distgpt.measure.estimate.timing import cuts, enough_sequences, layers_of_cuts, measure
from distgpt.model.counts import operations, parameters
from distgpt.model.model import Architecture, Model
from distgpt.model.passes import Pass
from distgpt.training.sizing import SPARE, Counting, divisors, fitting, needed

Facts = dict[str, Any]
Say = Callable[[str], None]

PREFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
NO_LIMIT = 1 << 62  # bytes
LEAST, MOST = 1e-6, 1e15  # of a number that the user gives
MOST_ROWS = 6  # numbers of sequences whose memory is told


@dataclass(frozen=True, slots=True)
class Question:
    """What the user asks. `rate` is one rank's, in tokens/s; it goes before measuring."""

    run: RunConfig
    stage: str
    ranks: int = 1
    threads: int | None = None
    gpu: GpuConfig = field(default_factory=GpuConfig)
    tokens: str | None = None
    rate: float | None = None
    measured: bool | None = None
    gpu_memory: float | None = None  # GiB


@dataclass(frozen=True, slots=True)
class Site:
    """Where the run would be: kernels that can at least count, and a stage, unless `missing` says why not."""

    kernels: Kernels
    stage: Stage | None
    missing: str
    free: int | None  # bytes that a rank could have
    where: str
    assessed: bool  # whether the run will measure itself on what is held out


def estimate(question: Question, say: Say) -> Facts:
    """Everything that can be said, as JSON can hold it. `say` is told what takes its time."""
    _refuse_nonsense(question)
    shards = _shards(question.run.train.data)
    site = _site(question, shards)
    run, ranks = _with_vocabulary(question.run, shards), question.ranks
    settled, trouble = _settled(run, site, ranks)
    model, train = Architecture(run.model), replace(run, train=settled)
    per_step = settled.batch_size * run.model.seq_len
    steps = settled.steps if question.tokens is None else -(-number(question.tokens) // per_step)
    memory = _memory(train, site, ranks) | {"trouble": trouble}
    counted, flops = parameters(model), operations(model)
    wide = site.kernels.wide.itemsize
    return {
        "stage": question.stage,
        "ranks": ranks,
        "threads": site.kernels.threads if question.stage not in ON_GPU else None,
        "dtype": settled.dtype,
        "parameters": asdict(counted) | {"total": counted.total},
        "flops_per_token": asdict(flops)
        | {"forward": flops.forward, "backward": flops.backward, "six_n": 6 * counted.total},
        "batch": {
            "tokens_per_step": per_step,
            "sequences": settled.batch_size,
            "seq_len": run.model.seq_len,
            "rounds": settled.grad_accum,
            "sequences_per_rank_and_round": _each(settled, ranks),
        },
        "steps": steps,
        "tokens": steps * per_step,
        "memory": memory,
        "checkpoint_bytes": 3 * model.layout.size * wide,  # weights and both moments
        "checkpoints_kept": settled.keep,
        "weights_file_bytes": model.layout.size * wide,
        "allreduce_bytes": (model.layout.size + 1) * wide if ranks > 1 else 0,  # and the loss
        "time": _time(question, train, site, steps, flops.forward + flops.backward, say),
    }


def number(text: str) -> int:
    """ "300000" or "10B" """
    digits, factor = (text[:-1], PREFIXES[text[-1].upper()]) if text[-1:].upper() in PREFIXES else (text, 1)
    try:
        value = round(float(digits) * factor)
    except (ValueError, OverflowError):
        value = 0
    if value < 1:
        raise UsageError(f"--tokens is {text!r}: it must be a number like 300000, 300M or 10B")
    return value


def _refuse_nonsense(question: Question) -> None:
    t = question.run.train
    for option, value in (("--rate", question.rate), ("--gpu-memory", question.gpu_memory)):
        if value is not None and not LEAST <= value <= MOST:
            raise UsageError(f"{option} is {value}: it must be at least {LEAST:g} and at most {MOST:g}")
    if question.stage in ("serial", "cuda") and question.ranks > 1:
        raise UsageError(f"stage {question.stage!r} has one rank: --ranks is for mpi and mpi-cuda")
    if question.rate is not None and question.measured:
        raise UsageError("--rate and --measure exclude each other")
    if question.gpu_memory is not None and question.stage not in ON_GPU:
        raise UsageError(f"stage {question.stage!r} uses no GPU: --gpu-memory is for {' and '.join(ON_GPU)}")
    refuse_uneven(t.batch_size, question.ranks, t.grad_accum or 1)


def _shards(data: str) -> Manifest | None:
    """What --data holds, if it is a folder of shards that lies here."""
    return read_manifest(Path(data)) if data not in BUNDLED_TEXTS and is_shards(Path(data)) else None


def _with_vocabulary(run: RunConfig, shards: Manifest | None) -> RunConfig:
    """Where the vocabulary is the tokenizer's."""
    if run.model.vocab_size:
        return run
    size = shards.vocab_size if shards else _tokenizer_size(run.train.tokenizer, resolve_data(run.train.data))
    return replace(run, model=replace(run.model, vocab_size=size))


def _tokenizer_size(word: str, text: Path) -> int:
    """The text is only read where its words are the vocabulary."""
    if word == "gpt2":
        return GPT2_SIZE
    if word in ("char", "word"):
        return build_tokenizer(word, read_text(text)).size
    return load_tokenizer("byte" if word == AUTO else word).size


def _site(question: Question, shards: Manifest | None) -> Site:
    """One rank's. A CPU stage's ranks are taken to fill machines like this one."""
    dtype, name = question.run.train.dtype, question.stage
    assessed = _assessed(question.run, shards)
    if name not in ON_GPU:
        cores = len(usable_cores())
        fair = max(1, cores // question.ranks)
        stage = open_stage("serial", fair if question.threads is None else question.threads, question.gpu)
        neighbours = max(1, min(question.ranks, cores // stage.threads))
        free = stage.free_memory()[0] // neighbours
        return Site(stage.kernels(dtype), stage, "", free, "this machine", assessed)
    given = None if question.gpu_memory is None else int(question.gpu_memory * 2**30)
    try:
        stage = open_stage("cuda", question.threads, question.gpu)
    except UsageError as error:
        if question.threads is not None:
            raise
        from distgpt.gpu.accelerator import kernels_on_paper

        where = "a GPU of that size"
        return Site(kernels_on_paper(dtype), None, str(error), given, where, assessed)
    free, where = stage.free_memory()
    return Site(stage.kernels(dtype), stage, "", given or free, where, assessed)


def _settled(run: RunConfig, site: Site, ranks: int) -> tuple[TrainConfig, str]:
    """What "automatic" comes to, and what is wrong if nothing fits: then it is what takes least."""
    free = NO_LIMIT if site.free is None else site.free
    try:
        return fitting(run, site.kernels, ranks, free, site.where, site.assessed), ""
    except UsageError as error:
        t = run.train
        how = "block" if t.recompute == "auto" else t.recompute
        return replace(t, recompute=how, grad_accum=t.grad_accum or t.batch_size // ranks), str(error)


def _assessed(run: RunConfig, shards: Manifest | None) -> bool:
    t = run.train
    return bool(t.eval_every or t.val_fraction or t.hellaswag or (shards and shards.of("val")))


def _each(t: TrainConfig, ranks: int) -> int:
    return t.batch_size // (t.grad_accum * ranks)


def _memory(run: RunConfig, site: Site, ranks: int) -> Facts:
    """Bytes on each rank, by what they hold, and in all for other choices."""
    kernels, t = site.kernels, run.train

    def need(how: str, rounds: int) -> Any:
        changed = replace(run, train=replace(t, recompute=how, grad_accum=rounds))
        return needed(changed, kernels, ranks, site.assessed)

    chosen = need(t.recompute, t.grad_accum)
    gradients = (Architecture(run.model).layout.size + 1) * kernels.wide.itemsize
    logits = _logits(run, kernels, _each(t, ranks))
    per_rank = t.batch_size // ranks
    possible = divisors(per_rank)
    sizes = [n for n in possible if _each(t, ranks) / 2 ** (MOST_ROWS - 3) <= n] or possible
    return {
        "recompute": t.recompute,
        "weights": chosen.weights,
        "gradients": gradients,
        "moments": chosen.optimizer - gradients,
        "activations": chosen.activations - logits,
        "logits": logits,
        "validation": chosen.evaluation,
        "total": chosen.total,
        "free": site.free,
        "where": site.where,
        "choices": [
            {"sequences": n, **{how: need(how, per_rank // n).total for how in RECOMPUTE if how != "auto"}}
            for n in sizes[:MOST_ROWS]
        ],
    }


def _logits(run: RunConfig, kernels: Kernels, sequences: int) -> int:
    counting = cast(Kernels, Counting(kernels))
    rows, width = Pass(Model(run.model, counting), sequences, run.model.seq_len, training=True).logits_shape
    size: int = rows * width * kernels.dtype.itemsize
    return size


def _time(question: Question, run: RunConfig, site: Site, steps: int, flops: int, say: Say) -> Facts:
    """From a rate that is given or measured; without one, why there is none."""
    t, ranks = run.train, question.ranks
    tokens = t.batch_size // ranks * run.model.seq_len
    if question.rate is not None:
        rate, source = question.rate, {"source": "given"}
    else:
        sequences = enough_sequences(run, site.kernels, _each(t, ranks))
        missing = site.missing or _unmeasurable(run, site, sequences)
        if missing and question.measured:
            raise UsageError(f"--measure: {missing}")
        if missing or question.measured is False:
            return {"rate_per_rank": None, "source": "none", "missing": missing}
        layers = " and ".join(map(str, layers_of_cuts(run)))
        say(f"measuring steps with {layers} layers, {sequences} × {run.model.seq_len} tokens at a time")
        timing = measure(run, site.kernels, sequences)
        rate, source = timing.rate(tokens), {"source": "measured", **asdict(timing)}
    seconds = tokens / rate
    return {
        **source,
        "rate_per_rank": rate,
        "rate": rate * ranks,
        "step_s": seconds,
        "total_s": steps * seconds,
        "flops_per_s_and_rank": rate * flops,
    }


def _unmeasurable(run: RunConfig, site: Site, sequences: int) -> str:
    """What is wrong where the models to measure have too little room."""
    size = sum(needed(model, site.kernels, 1).total for model in cuts(run, sequences))
    return (
        ""
        if site.stage and size < SPARE * site.stage.free_memory()[0]
        else (f"measuring takes {size / 2**30:.3g} GiB of memory, which are not free here")
    )
