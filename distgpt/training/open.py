"""From a configuration to a trainer that is ready on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from distgpt.comm.agree import on_root, shared
from distgpt.comm.api import Comm
from distgpt.config import ModelConfig, RunConfig, TrainConfig, parse_toml
from distgpt.config.resolving import resolve
from distgpt.data.batches import Batches, refuse_uneven
from distgpt.data.loading import AUTO, Corpus, Wanted, load_corpus
from distgpt.data.tokenizers.naming import Tokenizer
from distgpt.errors import DataError, UsageError
from distgpt.evaluation.assessment import Assessment, Validation
from distgpt.evaluation.hellaswag import HellaSwag, load_hellaswag
from distgpt.kernels.api import Kernels
from distgpt.machine.stages import Stage
from distgpt.model.model import Model, miniature
from distgpt.model.optim import AdamW
from distgpt.model.passes import Pass
from distgpt.saved.modelfile import Description, fill, load_description, read_description
from distgpt.saved.rundir import RunDirectory
from distgpt.saved.tensors import read_into
from distgpt.training.loop import Listener, Trainer
from distgpt.training.resume import Say, Start, find_start
from distgpt.training.sizing import settle
from distgpt.training.step import Step


def configure(
    comm: Comm, preset: str | None, toml: Path | None, flags: Mapping[str, Any], going_on: Path | None = None
) -> tuple[str, RunConfig]:
    """The run's name and configuration as rank 0 makes them out, whose file it is. Collective.

    A run that goes on in a directory needs the weights that it began with no more.
    """

    def model_in(weights: str) -> ModelConfig:
        saved = RunDirectory(going_on).saved() if going_on else None
        if saved and saved.train.init == weights:
            return saved.model
        return read_description(Path(weights)).run.model

    def read() -> list[str]:
        name, run = resolve(preset, toml, flags, model_in)
        return [name, run.to_toml()]

    name, text = on_root(comm, read)
    return name, RunConfig().with_values(parse_toml(text, "rank 0's configuration"))


def open_run(
    run: RunConfig, stage: Stage, name: str, out: Path | None, resume: str | None, listener: Listener
) -> Trainer:
    """Data, directory, weights, the checkpoint to go on from. Collective; all is checked before any writing.

    Without `out` the run gets a new directory runs/<name>, or goes on in the last one of that name. `resume`
    is "auto", for the newest intact checkpoint in there, or the path of one.
    """
    comm, t = stage.comm, run.train
    on_root(comm, lambda: refuse_uneven(t.batch_size, comm.size, t.grad_accum or 1))
    start = find_start(comm, name, out, resume, listener.noted)
    former = load_description(start.checkpoint / "weights.safetensors", comm) if start.checkpoint else None
    on_root(
        comm, lambda: start.refuse_conflicts(run, former.run if former else None, going_on=resume is not None)
    )
    origin = load_description(Path(t.init), comm) if t.init and not former else former
    run, corpus = _with_text(comm, run, former, origin, listener.noted)
    examples = (
        load_hellaswag(comm, Path(t.hellaswag), corpus.tokenizer, run.model.seq_len) if t.hellaswag else None
    )
    if comm.rank == 0:
        _note_surprises(run, former, corpus, examples, listener)
    kernels = stage.kernels(t.dtype)
    assessed = corpus.val is not None or examples is not None
    settled = settle(run, stage, kernels, assessed, start.rounds(comm.size))
    trainer = _trainer(run, settled, comm, kernels, start, corpus, examples, listener)
    on_root(comm, lambda: start.directory.create(run, corpus.tokenizer.to_json(), trainer.step))
    if comm.rank == 0:
        listener.started(_facts(trainer, stage))
        stage.notes.tell(listener.noted)
    _compile_once_per_node(stage, trainer.model.kernels, run.model)
    return trainer


def _with_text(
    comm: Comm, run: RunConfig, former: Description | None, origin: Description | None, say: Say
) -> tuple[RunConfig, Corpus]:
    """The run, its vocabulary known, and its text. A model that is trained further keeps its tokenizer."""
    t = run.train
    existing = origin.tokenizer if origin else None
    word = AUTO if former else t.tokenizer  # a run that goes on has found its own
    wanted = Wanted(t.data, word, run.model.seq_len, t.val_fraction, t.verify_data, existing=existing)
    corpus = load_corpus(comm, wanted, say)
    size = on_root(comm, lambda: _vocab_size(origin.run if origin else run, run, corpus.tokenizer))
    return replace(run, model=replace(run.model, vocab_size=size)), corpus


def _note_surprises(
    run: RunConfig, former: Description | None, corpus: Corpus, examples: HellaSwag | None, listener: Listener
) -> None:
    """What was asked for and will not be as one may think. For rank 0."""
    t = run.train
    if former and former.run.train.dtype != t.dtype:
        listener.noted(f"goes on in {t.dtype}; it was {former.run.train.dtype} so far")
    if t.val_fraction and not corpus.is_text:
        listener.noted("shards bring their part for validation: --val-fraction is for texts")
    if t.eval_every and corpus.val is None and examples is None:
        listener.noted("nothing is held out, so nothing is evaluated: see --val-fraction and --hellaswag")


def _vocab_size(former: RunConfig, run: RunConfig, tokenizer: Tokenizer) -> int:
    size = run.model.vocab_size or former.model.vocab_size or tokenizer.size
    if size < tokenizer.size:
        raise UsageError(
            f"vocab_size is {size}, but the tokenizer has {tokenizer.size} entries for this text"
        )
    return size


def _trainer(
    run: RunConfig,
    settled: TrainConfig,
    comm: Comm,
    kernels: Kernels,
    start: Start,
    corpus: Corpus,
    examples: HellaSwag | None,
    listener: Listener,
) -> Trainer:
    """With its weights, the same on all ranks: new ones, those of a file, or the checkpoint's."""
    t = run.train
    model, batches = _to_train(run, kernels, corpus)
    held_out = None if corpus.val is None else Validation(corpus.val, run.model.seq_len, t.val_tokens)
    assessment = Assessment(model, comm, held_out, examples)
    optimizer, directory = AdamW(model, t), start.directory
    trainer = Trainer(
        run, settled, comm, model, optimizer, corpus.tokenizer, batches, assessment, directory, listener
    )
    if start.checkpoint is not None:
        on_root(comm, lambda: start.refuse_other_text(batches.fingerprint))
        trainer.restore(start.checkpoint, start.step, start.best_loss(held_out.count if held_out else 0))
    else:
        _first_weights(comm, model, t)
    return trainer


def _to_train(run: RunConfig, kernels: Kernels, corpus: Corpus) -> tuple[Model, Batches]:
    """Without weights yet."""
    t = run.train
    model = Model(run.model, kernels)
    model.train()
    return model, Batches(corpus.train, run.model.seq_len, t.batch_size, t.seed, t.shift_windows)


def _first_weights(comm: Comm, model: Model, t: TrainConfig) -> None:
    """Those of a file, or new ones."""
    if t.init:
        fill(comm, model, {"": model.weights}, partial(read_into, Path(t.init)))
        if not model.is_finite():
            raise shared(DataError(f"{t.init} holds weights that are not finite"))
        return
    if comm.rank == 0:
        model.initialise(t.seed)
    comm.broadcast(model.weights.flat)
    model.refresh()


def open_steps(run: RunConfig, stage: Stage, say: Say) -> tuple[Step, Batches]:
    """A run's steps alone: its data, its weights, but no directory and nothing to evaluate. Collective."""
    comm, t = stage.comm, run.train
    on_root(comm, lambda: refuse_uneven(t.batch_size, comm.size, t.grad_accum or 1))
    origin = load_description(Path(t.init), comm) if t.init else None
    run, corpus = _with_text(comm, run, None, origin, say)
    kernels = stage.kernels(t.dtype)
    settled = settle(run, stage, kernels, assessed=False)
    model, batches = _to_train(run, kernels, corpus)
    _first_weights(comm, model, t)
    step = Step(model, AdamW(model, t), comm, settled)
    stage.notes.tell(say)
    _compile_once_per_node(stage, kernels, run.model)
    return step, batches


def _compile_once_per_node(stage: Stage, kernels: Kernels, config: ModelConfig) -> None:
    """Let the first rank of each node fill the cache of compiled loops, and then the others load them.

    A GPU's kernels are compiled for the sizes they meet, which a rehearsal with a small model does not show.
    """
    for first in (True, False):
        if (stage.comm.local_rank == 0) is first and not kernels.queued:
            rehearse(kernels, config)
        stage.comm.barrier()


def rehearse(kernels: Kernels, config: ModelConfig) -> None:
    """One training step of a very small model of the same kind: every loop it needs is compiled."""
    model = miniature(config, kernels)
    model.train()
    tokens = kernels.integers(np.zeros(8))
    Pass(model, 1, 8, training=True).loss_and_gradients(tokens, tokens, 1.0, accumulate=False)
    AdamW(model, TrainConfig()).step(0, 1.0)


def _facts(trainer: Trainer, stage: Stage) -> dict[str, Any]:
    """What is worth telling at the start of a run."""
    return {
        "stage": stage.name,
        "ranks": stage.comm.size,
        "threads": stage.threads,
        "parameters": trainer.model.layout.size,
        "vocabulary": trainer.run.model.vocab_size,
        "corpus_tokens": trainer.batches.tokens,
        "held_out_tokens": held_out.count if (held_out := trainer.assessment.validation) else 0,
        "first_step": trainer.step,
        "steps": trainer.run.train.steps,
        "directory": str(trainer.directory.path),
    }
