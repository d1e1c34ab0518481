"""The setup of a run, from its plan to its first step.

A configuration has three forms here: `plan.config` is the request, `config` adds settings derived from the
corpus, and `settings` is its training half with automatic values resolved by memory.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from distgpt.core.base.errors import DataError, Say, UsageError, escape
from distgpt.core.base.files import without_locks
from distgpt.core.base.interrupts import PendingSignals
from distgpt.core.comm.affinity import affinity
from distgpt.core.comm.agree import collective_error, on_root, raise_if_any
from distgpt.core.comm.api import Comm
from distgpt.core.comm.resources import granted_cores
from distgpt.core.components import Components, components
from distgpt.core.config import ModelConfig, RunConfig, TrainConfig
from distgpt.core.cpu import first_use
from distgpt.core.cpu.stages import Stage, report_compiling
from distgpt.core.data.batches import Batches
from distgpt.core.data.loading import Corpus, DataRequest, bytes_per_token, load_corpus
from distgpt.core.data.tokenizers import AUTO
from distgpt.core.model.model import Model, miniature
from distgpt.core.model.passes import Pass, cache_shape
from distgpt.core.ops.api import Array
from distgpt.core.ops.kernels import Kernels
from distgpt.core.saved.checkpoint import Best, State, load_group
from distgpt.core.saved.modelfile import Description, read_shortened
from distgpt.core.saved.tensors import Tensors
from distgpt.core.train.checkpoints import Checkpoints
from distgpt.core.train.gathering import EachRank, restore_gradient_sync
from distgpt.core.train.interfaces import Listener, ModelKind, Times
from distgpt.core.train.memory import fit_to_memory
from distgpt.core.train.parallel_strategy import WEIGHTS, GradientSync, OptimizerState, Start, Strategy
from distgpt.core.train.plan import Plan
from distgpt.core.train.progress import EVALUATING, Activity, Pace, Progress
from distgpt.core.train.report import Report, note_settings, run_environment, shown_hosts
from distgpt.core.train.resume import best_on_disk, refuse_changed_text
from distgpt.core.train.run import Limits, Run
from distgpt.core.train.step import Step

if TYPE_CHECKING:
    from distgpt.core.train.assessment import Metric, Validation

NO_LIMITS = Limits()
EVALUATIONS = 10  # of a run with --patience that sets no --eval-every


def open_run(
    plan: Plan,
    stage: Stage,
    listener: Listener,
    limits: Limits = NO_LIMITS,
    parts: Components | None = None,
) -> Run:
    """Set up data, memory, model, weights, files, compiled loops, and callbacks. Collective.

    All ranks follow the same order. `parts` creates the run's policies and callbacks; default: the components
    of the process.
    """
    parts = parts or components()
    say = listener.noted
    # Load data first, to set the vocabulary size and the steps of epochs.
    report_compiling(stage.comm, say)  # tokenizers may also have to be compiled
    texts = _texts_of(plan, stage.comm, say)
    # Estimate memory before creating the model, for a clear error message and to choose how to compute. A GPU
    # compiles in the meantime.
    before = plan.origin.run if plan.checkpoint and plan.origin else None
    preferred = micro_batches_so_far(plan.state, before, stage.comm.size) if before else 0
    setup = set_up(texts.config, stage, texts.is_evaluated, preferred)
    # Load weights before creating the directory, so that an invalid run leaves no files.
    trained = _load(plan, setup, texts, say)
    # All user errors have been raised, so rank 0 can write.
    times = Times(stage.begun + plan.uncounted, plan.state.seconds)
    where = _open_directory(plan, setup, texts, trained, times, listener)
    # Compile after the first output, because it may take a minute, and before any time is measured.
    compile_once_per_node(stage, setup.kernels, texts.config, setup.strategy)
    run = _assemble(plan, setup, texts, trained, times, where, listener, parts)
    run = replace(run, callbacks=tuple(parts.callbacks(run, limits)))
    run.load_guards(plan.state)
    if run.comm.rank == 0:
        say(run.assembled())
    return run


def _texts_of(plan: Plan, comm: Comm, say: Say) -> Texts:
    """Load a plan's data and evaluation data. A resumed run must find its own corpus."""
    asked = plan.config
    tokenizer = AUTO if plan.checkpoint else asked.train.tokenizer  # a resumed run has its own
    texts = read_texts(comm, asked, tokenizer, plan.origin, plan.directory.path.parent, say)
    if checkpoint := plan.checkpoint:
        fingerprint = texts.batches.fingerprint
        on_root(comm, lambda: refuse_changed_text(checkpoint, plan.state, plan.changes, fingerprint))
    if texts.corpus.val is None and not asked.train.metrics:
        return texts
    from distgpt.core.train.assessment import load_metrics, load_validation  # loads all of evaluation

    validation = load_validation(comm, texts.config, texts.corpus)
    return replace(texts, validation=validation, metrics=load_metrics(comm, texts.config, texts.corpus))


@dataclass(frozen=True, slots=True)
class Trained:
    """The trained state before the first step of this process."""

    state: OptimizerState
    described: Description
    progress: Progress
    best: Best | None  # the weights are on the disk; only on rank 0


def _load(plan: Plan, setup: Setup, texts: Texts, say: Say) -> Trained:
    """Create the model and optimizer state, then load a checkpoint or initialize them."""
    comm = setup.stage.comm
    described = setup.kind.describe(comm, texts.config, texts.corpus.tokenizer)
    model, state = setup.build()
    on_root(comm, lambda: described.refuse_unreadable(model.layout))  # fail now, not after hours of training
    setup.kind.load_frozen(comm, model, setup.settings)
    progress = Progress()
    checkpoint = plan.checkpoint
    if not checkpoint:
        if comm.rank == 0 and (learned := learned_first(texts.config.model, setup.settings)):
            say(learned.note)
        begin_anew(comm, state, setup.settings, texts.batches)
        return Trained(state, described, progress, best=None)
    restore(comm, state, checkpoint)
    progress.load(plan.state)
    texts.batches.skipped = plan.state.skipped
    best = None
    if "val" not in plan.changes and plan.state.corpus == texts.batches.fingerprint:
        is_intact = partial(best_on_disk, plan.directory, checkpoint, plan.state, texts.held_out, say)
        best = plan.state.best if on_root(comm, is_intact) else None
    return Trained(state, described, progress, best)


def _open_directory(
    plan: Plan, setup: Setup, texts: Texts, trained: Trained, times: Times, listener: Listener
) -> dict[str, Any]:
    """Create the run's directory, record its start and origin, and print the facts of the run.

    Return hosts, batch job, launcher and MPI.
    """
    stage = setup.stage
    comm = stage.comm
    config = texts.config
    corpus = texts.corpus
    batches = texts.batches
    directory = plan.directory
    progress = trained.progress
    say = listener.noted
    where = run_environment(stage)

    def create() -> None:
        checkpoint = plan.checkpoint
        event = {
            "step": progress.step,
            "from": checkpoint and str(checkpoint.absolute()),
            "branch": checkpoint is not None and not directory.owns(checkpoint),
            "stage": stage.name,
            "ranks": comm.size,
            **where,
            "changes": plan.changes,
        }
        directory.create(config, corpus.tokenizer.to_json(), event, progress.evaluation_pending)

    on_root(comm, create)
    if comm.rank == 0:
        note_settings(plan, config.train, corpus, batches, say)
        if not plan.checkpoint and (init := config.train.init):
            use = setup.kind.use_of_init(config.train)
            say(f"{escape(init)} {use}, with a peak learning rate of {config.train.lr:g} (--lr)")
        if directory.lock.lacks_locks():
            say(without_locks(directory.path))
        seconds = 60 * config.train.train_minutes
        facts: dict[str, object] = {
            "stage": stage.name,
            "dtype": config.train.dtype,
            "ranks": comm.size,
            "threads": stage.threads,
            "hosts": shown_hosts(where["hosts"]),
            "parameters": trained.state.optimizer.model.layout.elements,
            "vocabulary": config.model.vocab_size,
            "corpus_tokens": batches.n_tokens,
            "held_out_tokens": texts.held_out,
            "first_step": progress.step,
            "steps": config.train.steps,
            "epochs": config.train.epochs,
            "seconds": seconds,
            "seconds_left": times.begun - times.spent + seconds - time.monotonic() if seconds else None,
            "directory": str(directory.path),
        }
        listener.started(facts)
        stage.notes.report_to(say)
    return where


def _assemble(
    plan: Plan,
    setup: Setup,
    texts: Texts,
    trained: Trained,
    times: Times,
    where: dict[str, Any],
    listener: Listener,
    parts: Components,
) -> Run:
    """Create the components of a run in order of dependency."""
    say = listener.noted
    stage = setup.stage
    comm = stage.comm
    settings = setup.settings
    batches = texts.batches
    state = trained.state
    model = state.optimizer.model
    progress = trained.progress
    placement = setup.strategy.placement
    start = Start(comm, stage.threads, plan.state, say)
    micro_batches = setup.strategy.micro_batches(settings, comm.rank, model, start)  # some measure the ranks
    gradient_sync = checked_gradient_sync(comm, state, settings, say)
    if lost := restore_gradient_sync(comm, gradient_sync, model, plan.checkpoint):
        say(lost)
    signals = PendingSignals()
    activity = Activity()
    step_policy = parts.step_policy(settings, progress)
    gathering = EachRank(comm, gradient_sync, model) if gradient_sync.saved else state.gathering(comm)
    checkpoints = Checkpoints(
        model,
        state.optimizer,
        plan.directory,
        trained.described,
        replace(settings, save="sync") if gradient_sync.saved else settings,
        say,
        comm,
        trained.best,
        parts.disk(plan.directory, settings, model, trained.described, say),
        gathering,
        parts.retention(settings),
    )
    assessment = None
    if texts.is_evaluated:
        from distgpt.core.train.assessment import Assessment, Scorer

        scorer = Scorer(model, comm, signals, partial(activity.enter, EVALUATING))
        assessment = Assessment(scorer, texts.validation, texts.metrics, texts.corpus.tokenizer)
    last = settings.steps if plan.until is None else plan.until
    pace = Pace(progress, placement.rounds)
    budget = parts.budget(settings, last, times, pace, model, texts.validation)
    token_bytes = on_root(comm, lambda: bytes_per_token(texts.corpus, batches))
    report = Report(
        comm.rank, texts.config, plan.directory, listener, checkpoints, batches, token_bytes, budget
    )
    # Asynchronous kernels skip updates that are not finite, without `rejection_reason`.
    waits = step_policy.waits or not setup.kernels.capabilities.is_async
    step = Step(
        state.optimizer,
        comm,
        settings,
        gradient_sync,
        micro_batches=micro_batches,
        rejection_reason=step_policy.rejection_reason if waits else None,
        activity=activity,
    )
    return Run(
        config=texts.config,
        settings=settings,
        stage=stage,
        where=where,
        placement=placement,
        optimizer_state=state,
        tokenizer=texts.corpus.tokenizer,
        batches=batches,
        step=step,
        assessment=assessment,
        directory=plan.directory,
        start=plan.checkpoint,
        progress=progress,
        budget=budget,
        checkpoints=checkpoints,
        report=report,
        signals=signals,
        step_policy=step_policy,
        launch=step.launch,
    )


def make_steps(config: RunConfig, stage: Stage, say: Say) -> Step:
    """Return a run's `Step`, with random weights or --init's. Collective."""
    comm = stage.comm
    setup = set_up(config, stage)
    model, state = setup.build()
    setup.kind.load_frozen(comm, model, setup.settings)
    begin_anew(comm, state, setup.settings, None)
    stage.notes.report_to(say)
    compile_once_per_node(stage, setup.kernels, config, setup.strategy)
    micro_batches = setup.strategy.micro_batches(setup.settings, comm.rank, model)
    gradient_sync = checked_gradient_sync(comm, state, setup.settings, say)
    return Step(state.optimizer, comm, setup.settings, gradient_sync, micro_batches=micro_batches)


@dataclass(frozen=True, slots=True)
class Texts:
    """The data of a run on this rank, and the resulting configuration."""

    config: RunConfig  # includes vocabulary size and the steps of epochs
    corpus: Corpus
    batches: Batches
    validation: Validation | None = None  # uses held-out text
    metrics: Sequence[Metric] = ()  # additional metrics

    @property
    def is_evaluated(self) -> bool:
        return bool(self.validation or self.metrics)

    @property
    def held_out(self) -> int:
        """The number of held-out tokens."""
        return self.validation.count if self.validation else 0


def read_texts(
    comm: Comm, asked: RunConfig, tokenizer: str, origin: Description | None, runs: Path, say: Say
) -> Texts:
    """Load the corpus. A pretrained model keeps its tokenizer and vocabulary. Collective.

    Tokenized text is stored in a directory in `runs`, for other runs with the same data.
    """
    t = asked.train
    wanted = DataRequest(
        t.data,
        tokenizer,
        asked.model.seq_len,
        t.val_fraction,
        t.verify_data,
        existing=origin.tokenizer if origin else None,
        val=t.val,
        kept=runs / "tokenized",
        kind=t.text_kind,
    )
    corpus = load_corpus(comm, wanted, say)
    known = corpus.tokenizer.size
    size = asked.model.vocab_size or (origin.run.model.vocab_size if origin else 0) or known
    if size < known:
        raise collective_error(
            UsageError(f"vocab_size ({size}) must be at least {known}, the size of the tokenizer")
        )
    config = replace(asked, model=replace(asked.model, vocab_size=size))
    batches = corpus.batches(comm, config)
    rows = math.ceil(t.epochs * batches.windows_per_epoch)
    if rows:
        config = config.with_values({"steps": max(1, -(-rows // t.batch_size))})
    if t.patience and corpus.val is None:
        raise collective_error(UsageError("--patience requires validation data: --val or --val-fraction"))
    if t.patience and not t.eval_every:
        config = config.with_values({"eval_every": max(1, config.train.steps // EVALUATIONS)})
    return Texts(config, corpus, batches)


@dataclass(frozen=True, slots=True)
class Setup:
    """The choices for taking a run's steps on this job, from settings and memory.

    The same on all ranks. Nothing large is allocated yet.
    """

    config: RunConfig
    settings: TrainConfig  # training settings with automatic values resolved
    stage: Stage
    kernels: Kernels
    kind: ModelKind
    strategy: Strategy

    def build(self) -> tuple[Model, OptimizerState]:
        """Return this rank's model and optimizer state, without values."""
        comm = self.stage.comm
        placement = self.strategy.placement
        model = self.kind.build(self.config, self.kernels)
        model.allocate_master_weights(comm.size, placement.own(model.layout, comm.rank))
        self.strategy.make_gradients(comm, model, self.stage.notes.add)
        return model, placement.state(model, comm.rank)


def set_up(config: RunConfig, stage: Stage, is_evaluated: bool = False, preferred: int = 0) -> Setup:
    """Choose how ranks share a step, the kernels, and settings that fit into memory. Collective.

    `preferred` is the number of micro-batches to try first.
    """
    comm = stage.comm
    t = config.train
    strategy = components().strategy(t, comm.size)
    if strategy.placement.option and (extension := custom_gradient_sync()):
        raise collective_error(UsageError(f"{extension} and {strategy.placement.option} cannot be combined"))
    strategy.refuse_unable(comm, on_gpu=stage.on_gpu)
    kind = components().model(t)
    if not kind.trained(config).specs:  # an extension's kind may train nothing in this model
        what = type(kind).__name__
        raise collective_error(UsageError(f"this model has no tensors that {what!r} trains"))
    kernels = stage.kernels(t.dtype, t.matmul_backend)
    settings = fit_to_memory(config, stage, kernels, strategy, is_evaluated, preferred)
    return Setup(config, settings, stage, kernels, kind, strategy)


def custom_gradient_sync() -> str:
    """Return the name of an extension's method that creates exchanges; "" if there is none."""
    gradient_sync = type(components()).gradient_sync
    return "" if gradient_sync.__module__.startswith("distgpt.") else gradient_sync.__qualname__


def checked_gradient_sync(comm: Comm, state: OptimizerState, t: TrainConfig, say: Say) -> GradientSync:
    """Return the exchange. If an extension creates it, test it with known gradients. Collective."""
    gradient_sync = components().gradient_sync(comm, state, t, say)
    if not custom_gradient_sync() or gradient_sync.ready:  # cannot be tested without a backward pass
        return gradient_sync
    model = state.optimizer.model
    k, grads = model.kernels, model.grads
    k.zero(grads.with_flags)
    k.put(grads.flat[:1], np.array([comm.rank + 1], k.accum_dtype))  # one element: some send only the largest
    gradient_sync.before_backward(0)
    gradient_sync.sum_gradients(0)
    mean, right = (
        float(k.to_host(grads.flat[:1])[0]) * gradient_sync.scales(1.0).gradients,
        (comm.size + 1) / 2,
    )
    wrong = (
        f"{custom_gradient_sync()}: the mean of a gradient over the ranks is {mean:g}; it must be {right:g}"
    )
    raise_if_any(comm, "" if math.isclose(mean, right, rel_tol=0.01) else wrong)
    k.zero(grads.with_flags)
    return gradient_sync


def micro_batches_so_far(state: State, before: RunConfig, ranks: int) -> int:
    """Return the previous number of micro-batches, to keep the order of sums; 0: choose by memory.

    `before` is the previous configuration. If a strategy fixed the number then, a change may require another.
    """
    if state.ranks != ranks or components().strategy(before.train, ranks).counted_by:
        return 0
    return state.micro_batches


def compile_once_per_node(stage: Stage, kernels: Kernels, config: RunConfig, strategy: Strategy) -> None:
    """Compile loops on the first rank of each node, then load them on the others. Collective."""
    t = config.train
    work = partial(warmup_pass, config=replace(config, model=miniature(config.model)), strategy=strategy)

    def start() -> Callable[[], None]:
        from distgpt.core.cpu import compile_workers

        return compile_workers.start(stage, t.dtype, t.matmul_backend, work)

    for first in (True, False):
        if (stage.comm.local_rank == 0) is first and not kernels.capabilities.is_async:
            with first_use.with_help(start) if first else nullcontext():  # the others only load
                work(kernels)
        stage.comm.barrier(resting=True)  # leave the cores to the compiling rank


def warmup_pass(kernels: Kernels, config: RunConfig, strategy: Strategy) -> None:
    """Run one training step of a small model, to compile every loop it needs."""
    model = components().model(config.train).build(config, kernels)
    model.allocate_master_weights()
    tokens = kernels.integers(np.zeros(config.model.seq_len))
    positions = tokens if config.train.is_of_examples else None
    work = Pass(model, 1, config.model.seq_len, training=True, positions=positions)
    work.loss_and_gradients(tokens, tokens, 1.0, accumulate=False)
    components().optimizer(config.train)(model, TrainConfig(extra=config.train.extra)).step(0, 1.0)
    strategy.warmup_pass(model)
    # Generation feeds one token at a time with a cache, which uses other loops, and other GPU kernels.
    sample, cache = Pass(model, 1, 1, training=False), kernels.zeros(*cache_shape(config.model))
    start, before = kernels.integers([0]), kernels.integers([0])
    hidden = sample.forward(tokens[:1], cache, start, before=before)
    sample.logits(kernels.zeros(1, config.model.padded_vocab), hidden)


# Weights and moments from a checkpoint, or initial weights.


class FirstWeights(Protocol):
    """Initial weights learned from the corpus instead of random ones."""

    note: str  # a message for the log
    tokens: int  # number of tokens to learn from

    def learn(self, tokens: Array, weights: Tensors, config: ModelConfig, threads: int) -> None:
        """Change the weights in place. Called only on rank 0, while the other ranks wait."""


def restore(comm: Comm, state: OptimizerState, checkpoint: Path) -> None:
    """Load weights and moments from a verified checkpoint. Collective."""
    state.load_weights(comm, partial(load_group, checkpoint, WEIGHTS))
    state.restore(comm, checkpoint)


def begin_anew(comm: Comm, state: OptimizerState, t: TrainConfig, batches: Batches | None) -> None:
    """Initialize model and optimizer before the first step. Collective.

    Weights are loaded from --init, or initialized. If the settings require it, some are learned from the
    tokens in `batches`.
    """
    model = state.optimizer.model
    if init := components().model(t).begins_with(t):
        state.load_weights(comm, partial(read_shortened, Path(init)))
        if not model.is_finite():
            raise collective_error(DataError(f"{init} has weights that are not finite"))
    else:
        state.load_weights(comm, partial(_draw, comm, model, t, batches))
    state.begin()  # last, because it may copy the weights


def learned_first(model: ModelConfig, t: TrainConfig) -> FirstWeights | None:
    """Return the method that learns initial weights; None if they are random or from a file."""
    return None if t.init else components().first_weights(model.init_weights)


def _draw(comm: Comm, model: Model, t: TrainConfig, batches: Batches | None, host: Tensors) -> None:
    """Fill tensors on rank 0 with initial weights."""
    for name, values in model.initial(t.seed):
        host[name][...] = values
    learned = learned_first(model.config, t)
    if learned is not None and batches is not None:
        tokens = batches.sample(learned.tokens)
        with affinity().unbound():  # also use the cores of waiting ranks
            learned.learn(tokens, host, model.config, _threads_of_waiting(comm, model))


def _threads_of_waiting(comm: Comm, model: Model) -> int:
    """Return the number of threads rank 0 may use, including the waiting ranks' threads."""
    own = comm.cores if model.kernels.capabilities.is_async else model.kernels.threads
    ranks = comm.local_size if comm.size > 1 else 1  # a serial stage may run next to busy processes
    return max(1, min(granted_cores().whole, int(own * ranks + 1e-6)))
