"""From a plan to a run that is ready on every rank: texts, memory, model, weights, and what guards them."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from distgpt.core.base.errors import DataError, Say, StorageError, UsageError
from distgpt.core.base.interrupts import PendingSignals
from distgpt.core.comm.agree import on_every_rank, on_root
from distgpt.core.comm.api import Comm
from distgpt.core.config import RunConfig, TrainConfig
from distgpt.core.cpu.stages import Stage, report_compiling
from distgpt.core.data.batches import Batches
from distgpt.core.data.loading import AUTO, Corpus, DataRequest, load_corpus
from distgpt.core.data.tokenizers import Tokenizer
from distgpt.core.generate.engine_setup import lanes_for
from distgpt.core.generate.lanes import Feed
from distgpt.core.model.model import Model, small
from distgpt.core.model.muon import OPTIMIZERS
from distgpt.core.model.passes import Pass
from distgpt.core.ops.api import Kernels
from distgpt.core.saved.checkpoint import Best, State
from distgpt.core.saved.modelfile import Description, load_description
from distgpt.core.saved.tensors import read_header, verify_data
from distgpt.core.train.announce import facts, note_short_text, note_surprises
from distgpt.core.train.assessment import METRICS, Assessment, Metric, Validation, bytes_per_token
from distgpt.core.train.checkpoints import Checkpoints
from distgpt.core.train.compatibility import refuse_unsuited
from distgpt.core.train.memory import fit_to_memory, have_memory
from distgpt.core.train.plan import Plan
from distgpt.core.train.progress import EVALUATING, Activity, Pace, Progress
from distgpt.core.train.report import Reading, Report
from distgpt.core.train.restore import begin_anew, learned_first, restore
from distgpt.core.train.run import Run, Seams
from distgpt.core.train.seams import Inspector, Judge, Listener, ModelKind, Votes, kind_of
from distgpt.core.train.sharing import (
    Choose,
    MicroBatches,
    OptimizerState,
    Placement,
    Start,
    Strategy,
    agree_on_strategy,
)
from distgpt.core.train.step import Step
from distgpt.core.train.whereabouts import whereabouts

PLAIN = Seams()


def open_run(plan: Plan, stage: Stage, choose: Choose, listener: Listener, seams: Seams = PLAIN) -> Run:
    """Return a run with its weights loaded. All is checked before anything is written. Collective.

    The model is built to count its memory (`fit_to_memory`), as it is, and in small to compile the loops.
    `choose` returns the strategy that the settings ask for.
    """
    comm, say = stage.comm, listener.noted
    config, corpus, metrics = _load_texts(comm, plan, say)
    config, batches = _with_batches(comm, config, corpus)
    strategy = _strategy(comm, choose, config)
    placement = strategy.placement
    kernels = stage.kernels(config.train.dtype, config.train.matmul_backend, "training")
    validation = _validation(comm, config, corpus)
    is_evaluated = validation is not None or bool(metrics)
    settings = fit_to_memory(config, stage, kernels, strategy, is_evaluated, plan.micro_batches(comm.size))
    # A GPU compiles for the sizes of this run meanwhile: that needs no weights.
    stage.compile_ahead(config.train.dtype, partial(_rehearse, run=config, strategy=strategy))

    kind = kind_of(config.train)
    described = kind.describe(comm, config, corpus.tokenizer)
    model, progress = _model(kind, config, kernels, comm, placement), Progress()
    state = placement.state(model, comm.rank)
    _load_state(plan, comm, kind, model, state, batches, progress, say)
    best = _saved_best(plan, comm, batches, validation, say)
    where = whereabouts(stage)
    on_root(comm, lambda: _write(plan, stage, where, config, corpus.tokenizer, progress))
    token_bytes = on_root(comm, lambda: bytes_per_token(corpus, batches))
    if comm.rank == 0:
        note_surprises(plan, config, corpus, batches, is_evaluated, say)
        note_short_text(plan, config.train, model, batches, token_bytes, say)
        listener.started(facts(plan, stage, where, config, model, batches, validation, progress))
        stage.notes.report_to(say)
    compile_once_per_node(stage, kernels, config, strategy)
    micro_batches = _micro_batches(plan, stage, config, settings, strategy, model, is_evaluated, say)
    disk, gathering = seams.disk(plan.directory, settings, model, described, say), state.gathering(comm)
    checkpoints = Checkpoints(
        model, state.optimizer, plan.directory, described, settings, say, comm, best, disk, gathering
    )
    signals, activity, judge = PendingSignals(), Activity(), seams.judge(settings, progress)
    on_batch = partial(activity.enter, EVALUATING)
    clock = seams.clock(plan, stage, settings, Pace(progress, placement.rounds), model, validation)
    reading = Reading(batches, settings.batch_size, token_bytes, clock)
    inspector = seams.inspector(comm, model, settings) if seams.inspector else None
    step = _step(strategy, state, comm, settings, micro_batches, judge, inspector, activity, say)
    run = Run(
        config=config,
        settings=settings,
        stage=stage,
        where=where,
        model=model,
        placement=placement,
        optimizer_state=state,
        tokenizer=corpus.tokenizer,
        batches=batches,
        step=step,
        assessment=Assessment(model, comm, validation, metrics, corpus.tokenizer, signals, on_batch),
        reading=reading,
        directory=plan.directory,
        start=plan.checkpoint,
        progress=progress,
        clock=clock,
        identity=_identity(settings, comm, batches, micro_batches),
        checkpoints=checkpoints,
        report=Report(comm.rank, config, plan.directory, listener, checkpoints, reading),
        signals=signals,
        judge=judge,
        votes=Votes(comm, signals, disk, clock),
        launch=step.launch,
        guards=(),
    )
    return replace(run, guards=tuple(seams.guards(run)))


def open_steps(run: RunConfig, stage: Stage, choose: Choose, say: Say) -> tuple[Step, Batches]:
    """Return only the steps of a run, with data and weights, without directory and evaluation. Collective."""
    comm, t = stage.comm, run.train
    on_root(comm, lambda: refuse_unsuited(t, comm.size, on_gpu=False))
    on_root(comm, choose(t, comm.size).refuse_unmeasurable)
    origin = load_description(Path(t.init), comm) if t.init else None
    if origin is not None:
        on_root(comm, lambda: kind_of(t).refuse_origin(origin, Path(t.init), t, resumed=False))
    run, corpus = _load_corpus(comm, run, t.tokenizer, origin, Path("runs"), say)
    batches = corpus.batches(comm, run)
    return make_steps(run, stage, choose, say), batches


def make_steps(run: RunConfig, stage: Stage, choose: Choose, say: Say) -> Step:
    """Return the steps of a run, with random weights or those of --init. Collective."""
    comm, t = stage.comm, run.train
    strategy = _strategy(comm, choose, run)
    kernels = stage.kernels(t.dtype, t.matmul_backend, "training")
    settings = fit_to_memory(run, stage, kernels, strategy, evaluated=False)
    stage.compile_ahead(t.dtype, partial(_rehearse, run=run, strategy=strategy))
    kind = kind_of(t)
    model = _model(kind, run, kernels, comm, strategy.placement)
    state = strategy.placement.state(model, comm.rank)
    kind.load_frozen(comm, model, t)
    begin_anew(comm, kind, model, state, t, None)
    stage.notes.report_to(say)
    compile_once_per_node(stage, kernels, run, strategy)
    micro_batches = strategy.micro_batches(settings, comm.rank, model)
    exchange = strategy.exchange(comm, state, settings, say)
    return Step(state.optimizer, comm, settings, exchange, micro_batches=micro_batches)


def _strategy(comm: Comm, choose: Choose, run: RunConfig) -> Strategy:
    """Return how ranks share a step, the same way on all. Collective."""
    strategy = choose(run.train, comm.size)
    agree_on_strategy(comm, strategy)
    return strategy


def _load_texts(comm: Comm, plan: Plan, say: Say) -> tuple[RunConfig, Corpus, list[Metric]]:
    """Return the run with its vocabulary size, its texts, and what else evaluations measure. Collective."""
    report_compiling(comm, say)  # also what tokenizes may have to be compiled
    t = plan.run.train
    tokenizer = AUTO if plan.checkpoint else t.tokenizer  # a resumed run has its own
    run, corpus = _load_corpus(comm, plan.run, tokenizer, plan.origin, plan.directory.path.parent, say)
    metrics = [
        METRICS[name](comm, Path(path), corpus.tokenizer, run.model.seq_len)
        for name, path in t.metrics.items()
    ]
    return run, corpus, metrics


def _load_corpus(
    comm: Comm, run: RunConfig, tokenizer: str, origin: Description | None, runs: Path, say: Say
) -> tuple[RunConfig, Corpus]:
    """Load the texts. A model that is trained further keeps its tokenizer and its vocabulary size.

    What has to be tokenized once lies among the `runs`, for others on the same texts.
    """
    t = run.train
    wanted = DataRequest(
        t.data,
        tokenizer,
        run.model.seq_len,
        t.val_fraction,
        t.verify_data,
        existing=origin.tokenizer if origin else None,
        val=t.val,
        kept=runs / "tokenized",
        kind=t.text_kind,
    )
    corpus = load_corpus(comm, wanted, say)
    size = on_root(comm, lambda: _vocab_size(run, origin, corpus.tokenizer))
    return replace(run, model=replace(run.model, vocab_size=size)), corpus


def _vocab_size(run: RunConfig, origin: Description | None, tokenizer: Tokenizer) -> int:
    size = run.model.vocab_size or (origin.run.model.vocab_size if origin else 0) or tokenizer.size
    if size < tokenizer.size:
        raise UsageError(f"vocab_size is {size}, but the tokenizer has {tokenizer.size} tokens for this text")
    return size


def _model(kind: ModelKind, run: RunConfig, kernels: Kernels, comm: Comm, placement: Placement) -> Model:
    model = kind.build(run, kernels)
    model.train(comm.size, placement.own(model.layout, comm.rank))
    return model


def _with_batches(comm: Comm, run: RunConfig, corpus: Corpus) -> tuple[RunConfig, Batches]:
    """Return the run with the steps that its epochs take, and its batches. Collective."""
    t, batches = run.train, corpus.batches(comm, run)
    rows = math.ceil(t.epochs * batches.windows_per_epoch)
    return (run.with_values({"steps": max(1, -(-rows // t.batch_size))}) if rows else run), batches


def _load_state(
    plan: Plan,
    comm: Comm,
    kind: ModelKind,
    model: Model,
    state: OptimizerState,
    batches: Batches,
    progress: Progress,
    say: Say,
) -> None:
    """Load the checkpoint's weights, moments and step; else weights of a file, or new ones. Collective."""
    if plan.checkpoint is not None:
        on_root(comm, lambda: _refuse_changed_text(plan, batches.fingerprint))
    kind.load_frozen(comm, model, plan.run.train)
    if plan.checkpoint is None:
        learned = learned_first(plan.run.model, plan.run.train)
        if comm.rank == 0 and learned is not None:
            say(learned.note)
        begin_anew(comm, kind, model, state, plan.run.train, batches)
        return
    restore(comm, model, state, plan.checkpoint)
    progress.load(plan.state)
    batches.skipped = plan.state.skipped


def _saved_best(
    plan: Plan, comm: Comm, batches: Batches, validation: Validation | None, say: Say
) -> Best | None:
    """Return the lowest validation loss so far, on rank 0, if its weights are there. Collective."""
    path, tokens = plan.checkpoint, validation.count if validation else 0
    if path is None or not plan.is_of_same_text(batches.fingerprint) or "val" in plan.changes:
        return None
    has_best = on_root(comm, lambda: _has_best(plan, path, tokens, say))
    return plan.state.best if has_best else None


def _refuse_changed_text(plan: Plan, fingerprint: str) -> None:
    """Refuse to resume with another text under the same name."""
    if not plan.is_of_same_text(fingerprint) and "data" not in plan.changes:
        raise DataError(
            f"the text has changed since {plan.checkpoint} was written: resume with the old text, with --data"
            " and another name, or start a new run"
        )


def _has_best(plan: Plan, path: Path, tokens: int, say: Say) -> bool:
    """Return whether the lowest validation loss is over as many tokens, and its weights are there, intact."""
    best, directory = plan.state.best, plan.directory
    if not best or not directory.owns(path) or best.tokens != tokens or not directory.best.exists():
        return False
    try:
        header = read_header(directory.best)
        verify_data(directory.best, header)
        if Best.from_metadata(header.metadata) in (best, None):
            return True
        problem = f"{directory.best} is not of step {best.step}, which was the best by step {plan.state.step}"
    except (DataError, StorageError, ValueError) as error:
        problem = str(error)
    say(f"{problem}; the next evaluation writes it anew")
    return False


def compile_once_per_node(stage: Stage, kernels: Kernels, run: RunConfig, strategy: Strategy) -> None:
    """Let the first rank of each node fill the cache of compiled loops, and the others load them. Collective.

    The ranks of GPUs share that work (`Stage.compile_ahead`).
    """
    for first in (True, False):
        if (stage.comm.local_rank == 0) is first and not kernels.capabilities.is_async:
            _rehearse(kernels, replace(run, model=small(run.model)), strategy)
        stage.comm.barrier()


def _rehearse(kernels: Kernels, run: RunConfig, strategy: Strategy) -> None:
    """Take one training step of such a model, which compiles every loop it needs."""
    model = kind_of(run.train).build(run, kernels)
    model.train()
    tokens = kernels.integers(np.zeros(run.model.seq_len))
    positions = tokens if run.train.is_of_examples else None
    work = Pass(model, 1, run.model.seq_len, training=True, positions=positions)
    work.loss_and_gradients(tokens, tokens, 1.0, accumulate=False)
    OPTIMIZERS[run.train.optimizer](model, TrainConfig()).step(0, 1.0)
    strategy.rehearse(model)
    lanes_for(model, 1).feed([Feed(0, 0, [0], 1, likeliest=1)])  # samples


def _write(
    plan: Plan,
    stage: Stage,
    where: dict[str, Any],
    config: RunConfig,
    tokenizer: Tokenizer,
    progress: Progress,
) -> None:
    """Create the run's directory, and note in its history where it begins, and from what."""
    plan.directory.create(config, tokenizer.to_json(), progress.step, progress.evaluation_pending)
    if plan.directory.finished_at() not in (None, progress.step):  # a run that goes on from elsewhere is not
        plan.directory.summary.unlink(missing_ok=True)
    path, directory = plan.checkpoint, plan.directory
    origin = {"from": path and str(path.absolute()), "branch": bool(path and not directory.owns(path))}
    used = {"stage": stage.name, "ranks": stage.comm.size, **where}
    directory.remember({"step": progress.step, **origin, **used, "changes": plan.changes})


def _micro_batches(
    plan: Plan,
    stage: Stage,
    config: RunConfig,
    settings: TrainConfig,
    strategy: Strategy,
    model: Model,
    is_evaluated: bool,
    say: Say,
) -> MicroBatches:
    """Return this rank's micro-batches. Collective."""
    comm = stage.comm
    known = partial(plan.shares, settings, comm.size)
    fits = partial(have_memory, config, settings, stage, model.kernels, strategy, is_evaluated)
    return strategy.micro_batches(settings, comm.rank, model, Start(comm, stage.threads, known, fits, say))


def _validation(comm: Comm, config: RunConfig, corpus: Corpus) -> Validation | None:
    """Read the held-out text. Collective."""
    if corpus.val is None:
        return None
    length, most = config.model.seq_len, config.train.val_tokens
    return on_every_rank(comm, lambda: Validation(corpus.held_out_windows(length, most), corpus.is_text))


def _identity(settings: TrainConfig, comm: Comm, batches: Batches, micro_batches: MicroBatches) -> State:
    return State(
        seed=settings.seed,
        ranks=comm.size,
        corpus=batches.fingerprint,
        micro_batches=settings.grad_accum,
        shares=micro_batches.shares,
        hosts=micro_batches.hosts,
    )


def _step(
    strategy: Strategy,
    state: OptimizerState,
    comm: Comm,
    settings: TrainConfig,
    micro_batches: MicroBatches,
    judge: Judge,
    inspector: Inspector | None,
    activity: Activity,
    say: Say,
) -> Step:
    """Kernels that work asynchronously leave out an update that is not finite, without `objection`."""
    optimizer = state.optimizer
    waits = judge.waits or not optimizer.model.kernels.capabilities.is_async
    return Step(
        optimizer,
        comm,
        settings,
        strategy.exchange(comm, state, settings, say),
        micro_batches=micro_batches,
        objection=judge.objection if waits else None,
        inspector=inspector,
        activity=activity,
    )
