"""From a plan to a trainer that is ready on every rank: corpus, size, build, restore."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from distgpt.comm.agree import on_every_rank, on_root, shared
from distgpt.comm.api import Comm
from distgpt.config import ModelConfig, RunConfig, TrainConfig
from distgpt.data.batches import Batches
from distgpt.data.loading import AUTO, Corpus, DataRequest, load_corpus
from distgpt.data.tokenizers.naming import Tokenizer
from distgpt.errors import DataError, Say, StorageError, UsageError, printable
from distgpt.evaluation.assessment import Assessment, HellaSwag, Validation, load_hellaswag
from distgpt.kernels.api import Kernels
from distgpt.machine.stages import Stage
from distgpt.model.model import Model, miniature
from distgpt.model.optim import AdamW, Outer
from distgpt.model.passes import Pass
from distgpt.saved.modelfile import Description, load_description
from distgpt.saved.tensors import read_header, verify_data
from distgpt.training.badsteps import BadSteps
from distgpt.training.balance import described_shares, even_shares, measured_shares, places
from distgpt.training.gradsync.choose import BY_TRIAL, optimizer_for, refuse_unsuited, rehearse_exchange
from distgpt.training.gradsync.outer import is_local
from distgpt.training.gradsync.schedules import own_shard
from distgpt.training.loop import Trainer
from distgpt.training.plan import Plan
from distgpt.training.progress import Progress
from distgpt.training.recording import Listener, Recorder
from distgpt.training.restore import begin_anew, restore
from distgpt.training.resume import described
from distgpt.training.saving import Saver
from distgpt.training.sizing import SPARE, copy_bytes, fit_to_memory, needed
from distgpt.training.step import Step
from distgpt.units import count


def open_run(plan: Plan, stage: Stage, listener: Listener) -> Trainer:
    """Return the trainer, its weights loaded. All is checked before anything is written. Collective."""
    comm = stage.comm
    run, corpus, hellaswag = _load_texts(comm, plan, listener.noted)
    kernels = stage.kernels(run.train.dtype, run.train.matmul_backend)
    evaluated = corpus.val is not None or hellaswag is not None
    fitted = fit_to_memory(run, stage, kernels, evaluated, plan.micro_batches(comm.size))
    trainer = _build(run, fitted, comm, kernels, plan, corpus, hellaswag, listener)
    _load_state(trainer, plan)
    on_root(comm, lambda: _write(trainer, plan, stage))
    if comm.rank == 0:
        _note_surprises(plan, trainer, corpus, listener.noted)
        listener.started(_facts(trainer, stage))
        stage.notes.report_to(listener.noted)
    compile_once_per_node(stage, kernels, run)
    if fitted.balance == "auto" and comm.size > 1:
        _balance(trainer, plan, stage)
    return trainer


def _balance(trainer: Trainer, plan: Plan, stage: Stage) -> None:
    """Shares by speed: those of a checkpoint that was written in the same places, or new ones. Collective."""
    comm, t = trainer.comm, trainer.fitted
    trainer.places = places(comm, stage.threads)
    known, how = plan.shares(t, comm.size, trainer.places), "as before"
    shares = known or measured_shares(trainer.model, t, comm)
    if known is None:
        how = "measured now"
    if comm.largest(not on_every_rank(comm, lambda: _fits(trainer, stage, shares[comm.rank]))):
        shares, how = even_shares(t, comm.size), "as memory does not allow others"
    trainer.shares = shares
    trainer.listener.noted(f"--balance auto: {described_shares(shares)}, {how}")


def _fits(trainer: Trainer, stage: Stage, share: int) -> bool:
    """Whether this rank has memory for so many sequences, and for what comes later."""
    comm, t, kernels = trainer.comm, trainer.fitted, trainer.model.kernels
    own = replace(trainer.run, train=replace(t, batch_size=share * comm.size * t.grad_accum))
    need = needed(own, kernels, comm.size, evaluated=bool(trainer.assessment))
    copied = copy_bytes(own, kernels, comm.size) if comm.rank == 0 and t.save == "async" else 0
    free, _ = stage.free_memory()
    return need.activations + need.evaluation + need.exchange + copied <= SPARE * free


def _write(trainer: Trainer, plan: Plan, stage: Stage) -> None:
    """Create the run's directory, or note in its history from where it resumes."""
    plan.directory.create(
        trainer.run, trainer.tokenizer.to_json(), trainer.progress.step, trainer.progress.evaluation_pending
    )
    if plan.checkpoint or plan.changes:
        path, directory = plan.checkpoint, plan.directory
        origin = {"from": path and str(path.absolute()), "branch": bool(path and not directory.owns(path))}
        where = {"stage": stage.name, "ranks": stage.comm.size}
        directory.remember({"step": trainer.progress.step, **origin, **where, "changes": plan.changes})


def open_steps(run: RunConfig, stage: Stage, say: Say) -> tuple[Step, Batches]:
    """Return only the steps of a run, with data and weights, without directory and evaluation. Collective."""
    comm, t = stage.comm, run.train
    on_root(comm, lambda: refuse_unsuited(t, comm.size, on_gpu=False))
    if t.balance == "auto" and comm.size > 1:
        raise shared(UsageError("--balance auto is for training: ranks are measured with even shares"))
    if t.grad_sync == BY_TRIAL and not is_local(t, comm.size):
        raise shared(
            UsageError("--grad-sync auto chooses while it trains: measure one of the others by its name")
        )
    origin = load_description(Path(t.init), comm) if t.init else None
    if origin is not None and origin.rounded:
        on_root(comm, lambda: origin.refuse_training(t.init))
    run, corpus = _load_corpus(comm, run, t.tokenizer, origin, say)
    kernels = stage.kernels(t.dtype, t.matmul_backend)
    fitted = fit_to_memory(run, stage, kernels, evaluated=False)
    model, batches = _model(run, kernels, comm), _batches(run, corpus)
    optimizer = optimizer_for(model, t, comm)
    begin_anew(comm, model, optimizer, t)
    step = Step(model, optimizer, comm, fitted)
    stage.notes.report_to(say)
    compile_once_per_node(stage, kernels, run)
    return step, batches


def _load_texts(comm: Comm, plan: Plan, say: Say) -> tuple[RunConfig, Corpus, HellaSwag | None]:
    """The run with its vocabulary size, what it is trained and validated on, and HellaSwag. Collective."""
    t = plan.run.train
    tokenizer = AUTO if plan.checkpoint else t.tokenizer  # a resumed run has its own
    run, corpus = _load_corpus(comm, plan.run, tokenizer, plan.origin, say)
    if not t.hellaswag:
        return run, corpus, None
    return run, corpus, load_hellaswag(comm, Path(t.hellaswag), corpus.tokenizer, run.model.seq_len)


def _load_corpus(
    comm: Comm, run: RunConfig, tokenizer: str, origin: Description | None, say: Say
) -> tuple[RunConfig, Corpus]:
    """A model that is trained further keeps its tokenizer, and its vocabulary size."""
    t = run.train
    existing = origin.tokenizer if origin else None
    wanted = DataRequest(
        t.data, tokenizer, run.model.seq_len, t.val_fraction, t.verify_data, existing=existing
    )
    corpus = load_corpus(comm, wanted, say)
    size = on_root(comm, lambda: _vocab_size(run, origin, corpus.tokenizer))
    return replace(run, model=replace(run.model, vocab_size=size)), corpus


def _vocab_size(run: RunConfig, origin: Description | None, tokenizer: Tokenizer) -> int:
    size = run.model.vocab_size or (origin.run.model.vocab_size if origin else 0) or tokenizer.size
    if size < tokenizer.size:
        raise UsageError(f"vocab_size is {size}, but the tokenizer has {tokenizer.size} tokens for this text")
    return size


def _build(
    run: RunConfig,
    fitted: TrainConfig,
    comm: Comm,
    kernels: Kernels,
    plan: Plan,
    corpus: Corpus,
    hellaswag: HellaSwag | None,
    listener: Listener,
) -> Trainer:
    """All objects of a run, their memory allocated, without weights yet."""
    t, model, progress = run.train, _model(run, kernels, comm), Progress()
    held_out = None if corpus.val is None else Validation(corpus.val, run.model.seq_len, t.val_tokens)
    optimizer, description = optimizer_for(model, t, comm), Description(run, corpus.tokenizer)
    saver = Saver(model, optimizer, plan.directory, description, fitted, listener.noted, comm)
    return Trainer(
        run=run,
        fitted=fitted,
        comm=comm,
        model=model,
        optimizer=optimizer,
        tokenizer=corpus.tokenizer,
        batches=_batches(run, corpus),
        assessment=Assessment(model, comm, held_out, hellaswag),
        directory=plan.directory,
        saver=saver,
        recorder=Recorder(run, plan.directory, listener, saver),
        bad=BadSteps(t, progress),
        progress=progress,
        listener=listener,
        origin=plan.checkpoint,
    )


def _model(run: RunConfig, kernels: Kernels, comm: Comm) -> Model:
    model = Model(run.model, kernels)
    model.train(comm.size, own_shard(run.train, model.layout.size, comm))
    return model


def _batches(run: RunConfig, corpus: Corpus) -> Batches:
    t = run.train
    return Batches(corpus.train, run.model.seq_len, t.batch_size, t.seed, t.shift_windows)


def _load_state(trainer: Trainer, plan: Plan) -> None:
    """Weights, moments and position of the checkpoint; else weights of a file, or new ones. Collective."""
    comm, path, model = trainer.comm, plan.checkpoint, trainer.model
    if path is None:
        begin_anew(comm, model, trainer.optimizer, plan.run.train)
        return
    on_root(comm, lambda: _refuse_changed_text(plan, trainer.batches.fingerprint))
    restore(comm, model, trainer.optimizer, path)
    trainer.load(plan.state)
    held_out = trainer.assessment.validation
    if plan.is_of_same_text(trainer.batches.fingerprint):
        tokens = held_out.count if held_out else 0
        known = on_root(comm, lambda: _saved_best(plan, path, tokens, trainer.listener.noted))
        progress = trainer.progress
        progress.best_loss, progress.best_step = known


def _refuse_changed_text(plan: Plan, fingerprint: str) -> None:
    """Refuse to resume with another text under the same name."""
    if not plan.is_of_same_text(fingerprint) and "data" not in plan.changes:
        raise DataError(
            f"the text has changed since {plan.checkpoint} was written: resume with the old text, with --data"
            " and another name, or start a new run"
        )


def _saved_best(plan: Plan, path: Path, tokens: int, say: Say) -> tuple[float, int | None]:
    """Return the lowest validation loss so far, if over as many tokens and if its weights are intact."""
    best, directory = plan.state.best, plan.directory
    if not best or not directory.owns(path) or best.tokens != tokens or not directory.best.exists():
        return math.inf, None
    try:
        verify_data(directory.best, read_header(directory.best))
    except (DataError, StorageError) as error:
        say(f"{error}; the next evaluation writes it anew")
        return math.inf, None
    return best.loss, best.step


def compile_once_per_node(stage: Stage, kernels: Kernels, run: RunConfig) -> None:
    """Let the first rank of each node fill the cache of compiled loops, and the others load them. Collective.

    A GPU's kernels are compiled for the sizes they meet, which a rehearsal with a small model does not show.
    """
    for first in (True, False):
        if (stage.comm.local_rank == 0) is first and not kernels.capabilities.is_async:
            _rehearse(kernels, run.model)
            if stage.comm.size > 1 or run.train.units:
                rehearse_exchange(kernels, run.train.wire)
        stage.comm.barrier()


def _rehearse(kernels: Kernels, config: ModelConfig) -> None:
    """One training step of a very small model of the same kind, which compiles every loop it needs."""
    model = miniature(config, kernels)
    model.train()
    tokens = kernels.integers(np.zeros(8))
    Pass(model, 1, 8, training=True).loss_and_gradients(tokens, tokens, 1.0, accumulate=False)
    AdamW(model, TrainConfig()).step(0, 1.0)
    outer = Outer(model, TrainConfig())
    outer.begin()
    outer.store_change_as_gradient()
    outer.step(1)


def _note_surprises(plan: Plan, trainer: Trainer, corpus: Corpus, say: Say) -> None:
    """Settings that have another effect than one may expect. For rank 0."""
    t = trainer.run.train
    if plan.changes:
        say(f"changed from step {plan.step} on: {described(plan.changes)}")
    if plan.resumed and plan.step == t.steps:
        say(f"all {t.steps:,} steps are done: more are asked for with --steps")
    if t.init and not plan.resumed:
        say(f"{printable(t.init)} is trained further, with a peak learning rate of {t.lr:g} (--lr)")
    tokens, window = len(corpus.train), trainer.run.model.seq_len + 1
    if tokens < window:
        say(f"the training text has {tokens} tokens, fewer than seq_len + 1 = {window}: windows repeat it")
    if t.warmup > t.steps > 0:
        say(f"--warmup {t.warmup} is longer than the run of {count(t.steps, 'step')}: --lr is never reached")
    if corpus.is_text and Path(t.data).suffix == ".jsonl":
        say(f"{printable(t.data)} is read as it is: distgpt data prepare takes the texts out of its lines")
    if plan.resumed and not plan.is_of_same_text(trainer.batches.fingerprint):
        say(f"{printable(t.data)} is another text than so far, and is read from here on")
    if t.val_fraction and not corpus.is_text:
        say("--val-fraction has no effect: shards have a part of their own for validation")
    if t.eval_every and not trainer.assessment:
        say("nothing is held out, so nothing is evaluated: see --val-fraction and --hellaswag")


def _facts(trainer: Trainer, stage: Stage) -> dict[str, Any]:
    """What the display shows when the run starts."""
    held_out = trainer.assessment.validation
    return {
        "stage": stage.name,
        "ranks": stage.comm.size,
        "threads": stage.threads,
        "parameters": trainer.model.layout.elements,
        "vocabulary": trainer.run.model.vocab_size,
        "corpus_tokens": trainer.batches.tokens,
        "held_out_tokens": held_out.count if held_out else 0,
        "first_step": trainer.progress.step,
        "steps": trainer.run.train.steps,
        "directory": str(trainer.directory.path),
    }
