"""The setup of a run: from its plan to everything that its first step needs, one thing after the other.

A configuration has three forms here: `plan.config` is what was asked for; `config` has what follows from the
texts, too; `settings` is its half about training, in which memory has decided what was automatic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from distgpt.core.base.errors import Say, UsageError
from distgpt.core.base.files import without_locks
from distgpt.core.base.interrupts import PendingSignals
from distgpt.core.comm.agree import on_every_rank, on_root, shared
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
from distgpt.core.saved.checkpoint import State
from distgpt.core.saved.modelfile import Description, load_description
from distgpt.core.saved.rundir import RunDirectory
from distgpt.core.train.announce import facts, note_changes, note_new, note_resumed, note_settings
from distgpt.core.train.assessment import METRICS, Assessment, Validation, bytes_per_token
from distgpt.core.train.checkpoints import Checkpoints
from distgpt.core.train.memory import fit_to_memory, have_memory
from distgpt.core.train.plan import Plan, refuse_unsuited
from distgpt.core.train.progress import EVALUATING, Activity, Pace, Progress
from distgpt.core.train.report import Reading, Report
from distgpt.core.train.restore import begin_anew, learned_first, restore
from distgpt.core.train.resume import best_on_disk, refuse_changed_text
from distgpt.core.train.run import Run, Seams
from distgpt.core.train.seams import Listener, ModelKind, Times, kind_of
from distgpt.core.train.sharing import Choose, OptimizerState, Start, Strategy, agree_on_strategy
from distgpt.core.train.step import Step
from distgpt.core.train.whereabouts import whereabouts

PLAIN = Seams()


def open_run(plan: Plan, stage: Stage, choose: Choose, listener: Listener, seams: Seams = PLAIN) -> Run:
    """Set up a run: texts, memory, model, weights, files, compiled loops, and what watches it. Collective.

    `choose` returns the strategy that the settings ask for. All ranks take the same steps in this order.
    """
    comm, say, checkpoint, directory = stage.comm, listener.noted, plan.checkpoint, plan.directory
    before = plan.origin.run if checkpoint and plan.origin else None

    # Texts come first: the size of the vocabulary and the steps of epochs follow from them.
    report_compiling(comm, say)  # also what tokenizes may have to be compiled
    tokenizer = AUTO if checkpoint else plan.config.train.tokenizer  # a resumed run has its own
    texts = read_texts(comm, plan.config, tokenizer, plan.origin, directory.path.parent, say)
    config, corpus, batches = texts.config, texts.corpus, texts.batches
    if checkpoint:
        on_root(comm, lambda: refuse_changed_text(checkpoint, plan.state, plan.changes, batches.fingerprint))
    seq_len, validation = config.model.seq_len, None
    if corpus.val is not None:
        windows = on_every_rank(comm, lambda: corpus.held_out_windows(seq_len, config.train.val_tokens))
        validation = Validation(windows, corpus.is_text)
    metrics = [
        METRICS[name](comm, Path(path), corpus.tokenizer, seq_len)
        for name, path in config.train.metrics.items()
    ]
    is_evaluated = validation is not None or bool(metrics)

    # Memory is counted before the model is made: too little of it is refused in words, and decides how the
    # model computes. A GPU compiles meanwhile.
    preferred = micro_batches_so_far(plan.state, before, choose, comm.size)
    setup = set_up(config, stage, choose, is_evaluated, preferred)
    settings, strategy, placement = setup.settings, setup.strategy, setup.strategy.placement

    # Weights come before the run's directory: of a run that cannot begin nothing is left on the disk.
    described = setup.kind.describe(comm, config, corpus.tokenizer)
    model, state = setup.build()
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
        tokens = validation.count if validation else 0
        has_best = on_root(comm, lambda: best_on_disk(directory, checkpoint, plan.state, tokens, say))
        best = plan.state.best if has_best else None

    # Now all that a user can have got wrong was refused, and rank 0 writes.
    where = whereabouts(stage)
    event = {"stage": stage.name, "ranks": comm.size, **where, "changes": plan.changes}
    on_root(comm, lambda: _write(directory, config, corpus.tokenizer, progress, checkpoint, event))
    token_bytes = on_root(comm, lambda: bytes_per_token(corpus, batches))
    times = Times(stage.begun + plan.uncounted, plan.state.seconds)
    if comm.rank == 0:
        note_changes(plan.changes, plan.state.step, say)
        note_settings(config, corpus, batches, is_evaluated, say)
        if checkpoint:
            note_resumed(config.train, plan.state, batches, say)
        else:
            note_new(config.train, model, batches, token_bytes, say)
        if directory.lock.lacks_locks():
            say(without_locks(directory.path))
        hosts, first = where["hosts"], progress.step
        shown = facts(stage, hosts, config, directory.path, model, batches, validation, first, times)
        listener.started(shown)
        stage.notes.report_to(say)

    # Loops are compiled after the first lines, as that may take a minute, and before anything measures time.
    compile_once_per_node(stage, setup.kernels, config, strategy)
    start = Start(
        comm,
        stage.threads,
        known=partial(shares_so_far, plan.state, settings, comm.size),
        fits=partial(have_memory, setup.fitted, stage, setup.kernels, strategy, is_evaluated),
        say=say,
    )
    micro_batches = strategy.micro_batches(settings, comm.rank, model, start)  # some measure the ranks
    exchange = strategy.exchange(comm, state, settings, say)  # some are tried out, in the model's buffers

    # What watches the run, and is watched: each is made of those above it.
    signals, activity, judge = PendingSignals(), Activity(), seams.judge(settings, progress)
    disk, gathering = seams.disk(directory, settings, model, described, say), state.gathering(comm)
    checkpoints = Checkpoints(
        model, state.optimizer, directory, described, settings, say, comm, best, disk, gathering
    )
    last = settings.steps if plan.until is None else plan.until
    clock = seams.clock(settings, last, times, Pace(progress, placement.rounds), model, validation)
    reading = Reading(batches, settings.batch_size, token_bytes, clock)
    # Kernels with a queue leave out an update that is not finite, without `objection`.
    waits = judge.waits or not setup.kernels.capabilities.is_async
    step = Step(
        state.optimizer,
        comm,
        settings,
        exchange,
        micro_batches=micro_batches,
        objection=judge.objection if waits else None,
        inspector=seams.inspector(comm, model, settings) if seams.inspector else None,
        activity=activity,
    )
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
        assessment=Assessment(
            model, comm, validation, metrics, corpus.tokenizer, signals, partial(activity.enter, EVALUATING)
        ),
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
    )
    return replace(run, guards=tuple(seams.guards(run)))


def open_steps(asked: RunConfig, stage: Stage, choose: Choose, say: Say) -> tuple[Step, Batches]:
    """Return only the steps of a run, with data and weights, without directory and evaluation. Collective."""
    comm, t = stage.comm, asked.train
    on_root(comm, lambda: refuse_unsuited(t, comm.size, on_gpu=stage.on_gpu))
    on_root(comm, choose(t, comm.size).refuse_unmeasurable)
    origin = load_description(Path(t.init), comm) if t.init else None
    if origin is not None:
        on_root(comm, lambda: kind_of(t).refuse_origin(origin, Path(t.init), t, resumed=False))
    texts = read_texts(comm, asked, t.tokenizer, origin, Path("runs"), say)
    return make_steps(texts.config, stage, choose, say), texts.batches


def make_steps(config: RunConfig, stage: Stage, choose: Choose, say: Say) -> Step:
    """Return the steps of a run, with random weights or those of --init. Collective."""
    comm = stage.comm
    setup = set_up(config, stage, choose)
    model, state = setup.build()
    setup.kind.load_frozen(comm, model, setup.settings)
    begin_anew(comm, state, setup.settings, None)
    stage.notes.report_to(say)
    compile_once_per_node(stage, setup.kernels, config, setup.strategy)
    micro_batches = setup.strategy.micro_batches(setup.settings, comm.rank, model)
    exchange = setup.strategy.exchange(comm, state, setup.settings, say)
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

    @property
    def fitted(self) -> RunConfig:
        """Return the configuration with automatic values resolved."""
        return replace(self.config, train=self.settings)

    def build(self) -> tuple[Model, OptimizerState]:
        """Return the model and the optimizer's state of this rank, whose values are not there yet."""
        comm, placement = self.stage.comm, self.strategy.placement
        model = self.kind.build(self.config, self.kernels)
        model.train(comm.size, placement.own(model.layout, comm.rank))
        return model, placement.state(model, comm.rank)


def set_up(
    config: RunConfig, stage: Stage, choose: Choose, is_evaluated: bool = False, preferred: int = 0
) -> Setup:
    """Choose how ranks share a step, the kernels, and what fits into memory. Collective.

    `preferred` is the number of micro-batches to take if they fit.
    """
    comm, t = stage.comm, config.train
    strategy = choose(t, comm.size)
    agree_on_strategy(comm, strategy)  # first: ranks that differ would wait for each other
    strategy.refuse_unable(comm, on_gpu=stage.on_gpu)
    kernels = stage.kernels(t.dtype, t.matmul_backend, "training")
    settings = fit_to_memory(config, stage, kernels, strategy, is_evaluated, preferred)
    # A GPU compiles for the sizes of this run, in threads: that needs no weights.
    stage.compile_ahead(t.dtype, partial(rehearse, config=config, strategy=strategy))
    return Setup(config, settings, stage, kernels, kind_of(t), strategy)


def micro_batches_so_far(state: State, before: RunConfig | None, choose: Choose, ranks: int) -> int:
    """Return the micro-batches of a step so far, which keep the order of sums; 0: memory decides anew.

    `before`: the configuration so far, of a run that resumes. If that has fixed their number, a change of it
    may ask for another one.
    """
    if before is None or state.ranks != ranks or choose(before.train, ranks).counted_by:
        return 0
    return state.micro_batches


def shares_so_far(state: State, settings: TrainConfig, ranks: int, hosts: int) -> list[int] | None:
    """Return the sequences of each rank in a micro-batch so far; None if that cannot be so again."""
    known = state.shares or []
    is_same = state.ranks == len(known) == ranks and state.hosts == hosts
    return known if is_same and sum(known) * settings.grad_accum == settings.batch_size else None


def _write(
    directory: RunDirectory,
    config: RunConfig,
    tokenizer: Tokenizer,
    progress: Progress,
    checkpoint: Path | None,
    event: dict[str, object],
) -> None:
    """Create the run's directory, and note in its history where it begins, and from what."""
    directory.create(config, tokenizer.to_json(), progress.step, progress.evaluation_pending)
    if directory.finished_at() not in (None, progress.step):  # a run that goes on from elsewhere is not
        directory.summary.unlink(missing_ok=True)
    origin: dict[str, object] = {"from": None, "branch": False}
    if checkpoint:
        origin = {"from": str(checkpoint.absolute()), "branch": not directory.owns(checkpoint)}
    directory.remember({"step": progress.step, **origin, **event})


def compile_once_per_node(stage: Stage, kernels: Kernels, config: RunConfig, strategy: Strategy) -> None:
    """Let the first rank of each node fill the cache of compiled loops, and the others load them. Collective.

    The ranks of GPUs share that work (`Stage.compile_ahead`).
    """
    for first in (True, False):
        if (stage.comm.local_rank == 0) is first and not kernels.capabilities.is_async:
            rehearse(kernels, replace(config, model=small(config.model)), strategy)
        stage.comm.barrier()


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
    lanes_for(model, 1).feed([Feed(0, 0, [0], 1, likeliest=1)])  # samples
