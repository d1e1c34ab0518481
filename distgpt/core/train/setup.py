"""The setup of a run: from its plan to everything that its first step needs, one thing after the other.

A configuration has three forms here: `plan.config` is what was asked for; `config` has what follows from the
texts, too; `settings` is its half about training, in which memory has decided what was automatic.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from distgpt.core.base.errors import DataError, Say, UsageError
from distgpt.core.base.files import without_locks
from distgpt.core.base.interrupts import PendingSignals
from distgpt.core.base.tables import Table, part
from distgpt.core.comm.agree import on_root, shared
from distgpt.core.comm.api import Comm
from distgpt.core.comm.layout import layout
from distgpt.core.comm.resources import granted_cores
from distgpt.core.config import ModelConfig, RunConfig, TrainConfig
from distgpt.core.cpu import first_use
from distgpt.core.cpu.stages import Stage, report_compiling
from distgpt.core.data.batches import Batches
from distgpt.core.data.loading import Corpus, DataRequest, bytes_per_token, load_corpus
from distgpt.core.data.tokenizers import AUTO, Tokenizer
from distgpt.core.model.model import Model, miniature
from distgpt.core.model.muon import OPTIMIZERS
from distgpt.core.model.passes import Pass, cache_shape
from distgpt.core.ops.api import Array, Kernels
from distgpt.core.saved.checkpoint import State, load_group
from distgpt.core.saved.modelfile import Description, read_shortened
from distgpt.core.saved.rundir import RunDirectory
from distgpt.core.saved.tensors import Tensors
from distgpt.core.train.checkpoints import Checkpoints
from distgpt.core.train.memory import fit_to_memory
from distgpt.core.train.plan import Plan
from distgpt.core.train.progress import EVALUATING, Activity, Pace, Progress
from distgpt.core.train.report import (
    Reading,
    Report,
    facts,
    note_new,
    note_resumed,
    note_settings,
)
from distgpt.core.train.resume import best_on_disk, refuse_changed_text
from distgpt.core.train.run import Run, Seams
from distgpt.core.train.seams import Listener, ModelKind, Times, kind_of
from distgpt.core.train.sharing import (
    WEIGHTS,
    OptimizerState,
    Start,
    Strategy,
    exchange_for,
    strategy_for,
)
from distgpt.core.train.step import Step
from distgpt.core.train.whereabouts import whereabouts

if TYPE_CHECKING:
    from distgpt.core.train.assessment import MakeAssessment, Validation

PLAIN = Seams()


def open_run(plan: Plan, stage: Stage, listener: Listener, seams: Seams = PLAIN) -> Run:
    """Set up a run: texts, memory, model, weights, files, compiled loops, and what watches it. Collective.

    All ranks take the same steps in this order.
    """
    comm = stage.comm
    say = listener.noted
    checkpoint = plan.checkpoint
    directory = plan.directory
    before = plan.origin.run if checkpoint and plan.origin else None

    # Texts come first: the size of the vocabulary and the steps of epochs follow from them.
    report_compiling(comm, say)  # also what tokenizes may have to be compiled
    tokenizer = AUTO if checkpoint else plan.config.train.tokenizer  # a resumed run has its own
    texts = read_texts(comm, plan.config, tokenizer, plan.origin, directory.path.parent, say)
    config = texts.config
    corpus = texts.corpus
    batches = texts.batches
    if checkpoint:
        on_root(comm, lambda: refuse_changed_text(checkpoint, plan.state, plan.changes, batches.fingerprint))
    validation: Validation | None = None
    make_assessment: MakeAssessment | None = None
    if corpus.val is not None or config.train.metrics:
        from distgpt.core.train.assessment import prepare_assessment  # with all that scores

        validation, make_assessment = prepare_assessment(comm, config, corpus)
    is_evaluated = make_assessment is not None
    held_out = validation.count if validation else 0  # tokens

    # Memory is counted before the model is made: too little of it is refused in words, and decides how the
    # model computes. A GPU compiles meanwhile.
    preferred = micro_batches_so_far(plan.state, before, comm.size) if before else 0
    setup = set_up(config, stage, is_evaluated, preferred)
    settings = setup.settings
    strategy = setup.strategy
    placement = setup.strategy.placement

    # Weights come before the run's directory: of a run that cannot begin nothing is left on the disk.
    described = setup.kind.describe(comm, config, corpus.tokenizer)
    model, state = setup.build()
    on_root(comm, lambda: described.refuse_unreadable(model.layout))  # now, not after hours of training
    progress = Progress()
    setup.kind.load_frozen(comm, model, settings)
    if checkpoint:
        restore(comm, state, checkpoint)
        progress.load(plan.state)
        batches.skipped = plan.state.skipped
    else:
        if comm.rank == 0 and (learned := learned_first(config.model, settings)):
            say(learned.note)
        begin_anew(comm, state, settings, batches)
    best = None
    if checkpoint and "val" not in plan.changes and plan.state.corpus == batches.fingerprint:
        has_best = on_root(comm, lambda: best_on_disk(directory, checkpoint, plan.state, held_out, say))
        best = plan.state.best if has_best else None

    # Now all that a user can have got wrong was refused, and rank 0 writes.
    where = whereabouts(stage)
    event = {"stage": stage.name, "ranks": comm.size, **where, "changes": plan.changes}
    on_root(comm, lambda: _write(directory, config, corpus.tokenizer, progress, checkpoint, event))
    token_bytes = on_root(comm, lambda: bytes_per_token(corpus, batches))
    times = Times(stage.begun + plan.uncounted, plan.state.seconds)
    if comm.rank == 0:
        note_settings(config, corpus, batches, is_evaluated, plan.changes, plan.state.step, say)
        if checkpoint:
            note_resumed(config.train, plan.state, batches, say)
        else:
            note_new(config.train, model, batches, token_bytes, say)
        if directory.lock.lacks_locks():
            say(without_locks(directory.path))
        hosts = where["hosts"]
        first = progress.step
        shown = facts(stage, hosts, config, directory.path, model, batches, held_out, first, times)
        listener.started(shown)
        stage.notes.report_to(say)

    # Loops are compiled after the first lines, as that may take a minute, and before anything measures time.
    compile_once_per_node(stage, setup.kernels, config, strategy)
    fitted = replace(config, train=settings)
    start = Start(comm, stage.threads, stage.free_memory, fitted, plan.state, is_evaluated, say)
    micro_batches = strategy.micro_batches(settings, comm.rank, model, start)  # some measure the ranks
    exchange = exchange_for(comm, state, settings, say)

    # What watches the run, and is watched: each is made of those above it.
    signals = PendingSignals()
    activity = Activity()
    judge = seams.judge(settings, progress)
    disk = seams.disk(directory, settings, model, described, say)
    gathering = state.gathering(comm)
    outdated = seams.outdated(settings)
    checkpoints = Checkpoints(
        model, state.optimizer, directory, described, settings, say, comm, best, disk, gathering, outdated
    )
    last = settings.steps if plan.until is None else plan.until
    clock = seams.clock(settings, last, times, Pace(progress, placement.rounds), model, validation)
    reading = Reading(batches, settings.batch_size, token_bytes, clock)
    sample: Callable[..., str] | None = None
    if settings.sample_every and comm.rank == 0:
        from distgpt.core.train import sampling  # with all that generates

        sample = sampling.sample
    # Kernels with a queue leave out an update that is not finite, without `objection`.
    waits = judge.waits or not setup.kernels.capabilities.is_async
    step = Step(
        state.optimizer,
        comm,
        settings,
        exchange,
        micro_batches=micro_batches,
        objection=judge.objection if waits else None,
        activity=activity,
    )
    assessment = None
    if make_assessment:
        assessment = make_assessment(model, signals, partial(activity.enter, EVALUATING))
    run = Run(
        config=config,
        settings=settings,
        stage=stage,
        where=where,
        placement=placement,
        optimizer_state=state,
        tokenizer=corpus.tokenizer,
        batches=batches,
        step=step,
        assessment=assessment,
        directory=directory,
        start=checkpoint,
        progress=progress,
        clock=clock,
        identity=State(
            seed=settings.seed,
            ranks=comm.size,
            corpus=batches.fingerprint,
            micro_batches=settings.grad_accum,
            shares=micro_batches.shares,
            hosts=micro_batches.hosts,
        ),
        checkpoints=checkpoints,
        report=Report(comm.rank, config, directory, listener, checkpoints, reading),
        signals=signals,
        judge=judge,
        launch=step.launch,
        guards=(),
        sample=sample,
    )
    return replace(run, guards=tuple(seams.guards(run)))


def make_steps(config: RunConfig, stage: Stage, say: Say) -> Step:
    """Return the steps of a run, with random weights or those of --init. Collective."""
    comm = stage.comm
    setup = set_up(config, stage)
    model, state = setup.build()
    setup.kind.load_frozen(comm, model, setup.settings)
    begin_anew(comm, state, setup.settings, None)
    stage.notes.report_to(say)
    compile_once_per_node(stage, setup.kernels, config, setup.strategy)
    micro_batches = setup.strategy.micro_batches(setup.settings, comm.rank, model)
    exchange = exchange_for(comm, state, setup.settings, say)
    return Step(state.optimizer, comm, setup.settings, exchange, micro_batches=micro_batches)


@dataclass(frozen=True, slots=True)
class Texts:
    """The texts of a run on this rank, and what they add to its configuration."""

    config: RunConfig  # with the size of the vocabulary, and the steps that its epochs take
    corpus: Corpus
    batches: Batches


def read_texts(
    comm: Comm, asked: RunConfig, tokenizer: str, origin: Description | None, runs: Path, say: Say
) -> Texts:
    """Load the texts. A model that is trained further keeps its tokenizer and its vocabulary. Collective.

    What has to be tokenized once lies among the `runs`, for others on the same texts.
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
        raise shared(UsageError(f"vocab_size is {size}, but the tokenizer has {known} tokens for this text"))
    config = replace(asked, model=replace(asked.model, vocab_size=size))
    batches = corpus.batches(comm, config)
    rows = math.ceil(t.epochs * batches.windows_per_epoch)
    if rows:
        config = config.with_values({"steps": max(1, -(-rows // t.batch_size))})
    return Texts(config, corpus, batches)


@dataclass(frozen=True, slots=True)
class Setup:
    """How this job takes the steps of a run: what its settings choose, and what memory has decided.

    The same on all ranks. Nothing large is allocated yet.
    """

    config: RunConfig
    settings: TrainConfig  # of `config`, with automatic values resolved
    stage: Stage
    kernels: Kernels
    kind: ModelKind
    strategy: Strategy

    def build(self) -> tuple[Model, OptimizerState]:
        """Return the model and the optimizer's state of this rank, whose values are not there yet."""
        comm = self.stage.comm
        placement = self.strategy.placement
        model = self.kind.build(self.config, self.kernels)
        model.train(comm.size, placement.own(model.layout, comm.rank))
        self.strategy.make_gradients(comm, model, self.stage.notes.add)
        return model, placement.state(model, comm.rank)


def set_up(config: RunConfig, stage: Stage, is_evaluated: bool = False, preferred: int = 0) -> Setup:
    """Choose how ranks share a step, the kernels, and what fits into memory. Collective.

    `preferred` is the number of micro-batches to take if they fit.
    """
    comm = stage.comm
    t = config.train
    strategy = strategy_for(t, comm.size)
    strategy.refuse_unable(comm, on_gpu=stage.on_gpu)
    kind = kind_of(t)
    if not kind.trained(config).specs:  # kinds that are handed in may find none in this model
        raise shared(UsageError(f"this model has nothing that a kind of model {t.model_kind!r} trains"))
    kernels = stage.kernels(t.dtype, t.matmul_backend, "training")
    settings = fit_to_memory(config, stage, kernels, strategy, is_evaluated, preferred)
    # A GPU compiles for the sizes of this run, in threads: that needs no weights.
    stage.compile_ahead(t.dtype, partial(rehearse, config=config, strategy=strategy))
    return Setup(config, settings, stage, kernels, kind, strategy)


def micro_batches_so_far(state: State, before: RunConfig, ranks: int) -> int:
    """Return the micro-batches of a step so far, which keep the order of sums; 0: memory decides anew.

    `before`: the configuration so far. If that has fixed their number, a change may ask for another one.
    """
    if state.ranks != ranks or strategy_for(before.train, ranks).counted_by:
        return 0
    return state.micro_batches


def _write(
    directory: RunDirectory,
    config: RunConfig,
    tokenizer: Tokenizer,
    progress: Progress,
    checkpoint: Path | None,
    event: dict[str, object],
) -> None:
    """Create the run's directory, and note in its history where it begins, and from what."""
    origin: dict[str, object] = {"from": None, "branch": False}
    if checkpoint:
        origin = {"from": str(checkpoint.absolute()), "branch": not directory.owns(checkpoint)}
    begins = {"step": progress.step, **origin, **event}
    directory.create(config, tokenizer.to_json(), begins, progress.step, progress.evaluation_pending)


def compile_once_per_node(stage: Stage, kernels: Kernels, config: RunConfig, strategy: Strategy) -> None:
    """Let the first rank of each node fill the cache of compiled loops, and the others load them. Collective.

    The ranks of GPUs share that work (`Stage.compile_ahead`).
    """
    t = config.train
    work = partial(rehearse, config=replace(config, model=miniature(config.model)), strategy=strategy)

    def start() -> Callable[[], None]:
        return part("helpers", unhelped)(stage, t.dtype, t.matmul_backend, work)

    for first in (True, False):
        if (stage.comm.local_rank == 0) is first and not kernels.capabilities.is_async:
            with first_use.with_help(start) if first else nullcontext():  # the others load, and need none
                work(kernels)
        stage.comm.barrier(resting=True)  # the cores are for whoever compiles


def unhelped(stage: Stage, dtype: str, matmul: str, work: Callable[[Kernels], None]) -> Callable[[], None]:
    """Start no processes that compile what `work` needs; return what ends them."""
    return lambda: None


def rehearse(kernels: Kernels, config: RunConfig, strategy: Strategy) -> None:
    """Take one training step of such a model, which compiles every loop it needs."""
    model = kind_of(config.train).build(config, kernels)
    model.train()
    tokens = kernels.integers(np.zeros(config.model.seq_len))
    positions = tokens if config.train.is_of_examples else None
    work = Pass(model, 1, config.model.seq_len, training=True, positions=positions)
    work.loss_and_gradients(tokens, tokens, 1.0, accumulate=False)
    OPTIMIZERS[config.train.optimizer](model, TrainConfig()).step(0, 1.0)
    strategy.rehearse(model)
    # A sample takes a token at a time, which attends to a cache: other loops, and other kernels on a GPU.
    sample, cache = Pass(model, 1, 1, training=False), kernels.zeros(*cache_shape(config.model))
    hidden = sample.hidden(tokens[:1], cache, kernels.integers([0]))
    sample.logits(kernels.zeros(1, config.model.padded_vocab), hidden)


# Weights and moments of a checkpoint, or first weights


class FirstWeights(Protocol):
    """A row of the table of first weights: what random ones are replaced by, learned from the text."""

    note: str  # about it, for people
    tokens: int  # of the text, that it looks at

    def learn(self, tokens: Array, weights: Tensors, config: ModelConfig, threads: int) -> None:
        """Change these weights in place. Called on rank 0 alone, while the others wait."""


FIRST_WEIGHTS: Table[FirstWeights] = Table("first weights", "first weights", {})  # by init_weights


def restore(comm: Comm, state: OptimizerState, checkpoint: Path) -> None:
    """Fill weights and moments from a verified checkpoint. Collective."""
    state.load_weights(comm, partial(load_group, checkpoint, WEIGHTS))
    state.restore(comm, checkpoint)


def begin_anew(comm: Comm, state: OptimizerState, t: TrainConfig, batches: Batches | None) -> None:
    """Bring model and optimizer into their state before the first step. Collective.

    Weights are those of the file that --init names, or new ones. Some of these are learned from the tokens in
    `batches`, where the model wants that.
    """
    model = state.optimizer.model
    if init := kind_of(t).begins_with(t):
        state.load_weights(comm, partial(read_shortened, Path(init)))
        if not model.is_finite():
            raise shared(DataError(f"{init} holds weights that are not finite"))
    else:
        state.load_weights(comm, partial(_draw, comm, model, t, batches))
    state.begin()  # last: it may keep a copy of the weights


def learned_first(model: ModelConfig, t: TrainConfig) -> FirstWeights | None:
    """Return what first weights are learned by; None where they are random, or those of a file."""
    return None if t.init else FIRST_WEIGHTS.get(model.init_weights)


def _draw(comm: Comm, model: Model, t: TrainConfig, batches: Batches | None, host: Tensors) -> None:
    """Fill tensors on rank 0 with new weights."""
    for name, values in model.initial(t.seed):
        host[name][...] = values
    learned = learned_first(model.config, t)
    if learned is not None and batches is not None:
        tokens = batches.sample(learned.tokens)
        with layout().unbound():  # the cores of ranks that wait, too
            learned.learn(tokens, host, model.config, _threads_of_waiting(comm, model))


def _threads_of_waiting(comm: Comm, model: Model) -> int:
    """Return how many threads rank 0 may use here: its own, and those of the ranks that wait for it."""
    own = comm.cores if model.kernels.capabilities.is_async else model.kernels.threads
    ranks = comm.local_size if comm.size > 1 else 1  # a stage of its own may lie beside others that work
    return max(1, min(granted_cores().whole, int(own * ranks + 1e-6)))
