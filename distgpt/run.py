"""From a configuration to a trainer that is ready on every rank."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from distgpt import checkpoint
from distgpt.comm.agree import on_root, refuse_anywhere, shared
from distgpt.comm.api import Comm
from distgpt.comm.serial import SerialComm
from distgpt.config import ModelConfig, RunConfig, TrainConfig, parse_toml
from distgpt.corpus.batches import Batches, refuse_uneven
from distgpt.corpus.loading import Corpus, Wanted, load_corpus
from distgpt.corpus.reading import read_text
from distgpt.corpus.tokenizer import Tokenizer
from distgpt.errors import DataError, UsageError
from distgpt.evaluation.assessment import Assessment
from distgpt.evaluation.hellaswag import HellaSwag, parse_hellaswag
from distgpt.evaluation.validation import Validation
from distgpt.kernels.api import Kernels
from distgpt.model import Model, miniature
from distgpt.modelfile import Description, fill, load_description
from distgpt.optim import AdamW
from distgpt.passes import Pass
from distgpt.rundir import CHANGEABLE, RunDirectory, place_for, refuse_differences
from distgpt.settings import resolve
from distgpt.sizing import fitting
from distgpt.stages import Stage
from distgpt.train import Listener, Trainer
from distgpt.weightsfile import read_into


def configure(
    comm: Comm, preset: str | None, toml: Path | None, flags: Mapping[str, Any]
) -> tuple[str, RunConfig]:
    """The run's name and configuration as rank 0 makes them out, whose file it is. Collective."""

    def model_in(weights: str) -> ModelConfig:
        return load_description(Path(weights), SerialComm()).run.model

    def read() -> list[str]:
        name, run = resolve(preset, toml, flags, model_in)
        return [name, run.to_toml()]

    name, text = on_root(comm, read)
    return name, RunConfig().with_values(parse_toml(text, "rank 0's configuration"))


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run begins: its directory and, if it goes on, the verified checkpoint and that one's step."""

    directory: RunDirectory
    checkpoint: Path | None
    step: int
    best_loss: float = math.inf


def open_run(
    run: RunConfig, stage: Stage, name: str, out: Path | None, resume: str | None, listener: Listener
) -> Trainer:
    """Data, directory, weights, the checkpoint to go on from. Collective; all is checked before any writing.

    Without `out` the run gets a new directory runs/<name>, or goes on in the last one of that name. `resume`
    is "auto", for the newest intact checkpoint in there, or the path of one.
    """
    comm, t = stage.comm, run.train
    on_root(comm, lambda: refuse_uneven(t.batch_size, comm.size, t.grad_accum or 1))
    start = _start(comm, name, out, resume, listener)
    former = load_description(start.checkpoint / "weights.safetensors", comm) if start.checkpoint else None
    on_root(comm, lambda: _refuse_conflicts(run, start, former, going_on=resume is not None))
    if former and former.run.train.dtype != t.dtype and comm.rank == 0:
        listener.noted(f"goes on in {t.dtype}; it was {former.run.train.dtype} so far")
    origin = load_description(Path(t.init), comm) if t.init and not former else former
    corpus = _corpus(comm, run, origin, listener)
    size = on_root(comm, lambda: _vocab_size(origin.run if origin else run, run, corpus.tokenizer))
    run = replace(run, model=replace(run.model, vocab_size=size))
    examples = _hellaswag(comm, run, corpus.tokenizer)
    kernels = stage.kernels(t.dtype)
    settled = settle(run, stage, kernels, assessed=bool(corpus.val or examples))
    trainer = _trainer(run, settled, comm, kernels, start, corpus, examples, listener)
    on_root(comm, lambda: start.directory.create(run, corpus.tokenizer.to_json(), trainer.step))
    if comm.rank == 0:
        listener.started(_facts(trainer, stage))
        stage.notes.tell(listener.noted)
    _compile_once_per_node(stage, trainer.model.kernels, run.model)
    return trainer


def _corpus(comm: Comm, run: RunConfig, origin: Description | None, listener: Listener) -> Corpus:
    """For a model that is trained further: with the tokenizer it has, if it has one."""
    t = run.train
    existing = origin.tokenizer if origin else None
    wanted = Wanted(t.data, t.tokenizer, run.model.seq_len, t.val_fraction, t.verify_data, existing)
    return load_corpus(comm, wanted, listener.noted)


def _hellaswag(comm: Comm, run: RunConfig, tokenizer: Tokenizer) -> HellaSwag | None:
    """Rank 0 reads the file, and all ranks get its text."""
    if not run.train.hellaswag:
        return None
    path = Path(run.train.hellaswag)
    text = on_root(comm, lambda: read_text(path))
    try:
        return parse_hellaswag(text, path, tokenizer, run.model.seq_len)
    except DataError as error:
        raise shared(error) from None


def _start(comm: Comm, name: str, out: Path | None, resume: str | None, listener: Listener) -> Start:
    """Decided by rank 0, which verifies the checkpoint."""

    def decide() -> list[Any]:
        directory = RunDirectory(out or place_for(Path("runs"), name, going_on=resume == "auto"))
        found = _checkpoint(directory, resume, listener)
        state = checkpoint.load_state(found) if found else {"step": 0}
        return [str(directory.path), found and str(found), int(state["step"]), state.get("best_loss")]

    path, found, step, best = on_root(comm, decide)
    return Start(RunDirectory(Path(path)), found and Path(found), step, math.inf if best is None else best)


def _checkpoint(directory: RunDirectory, resume: str | None, listener: Listener) -> Path | None:
    if resume is None:
        return None
    if resume != "auto":
        path = Path(resume)
        if not path.is_dir():
            raise DataError(f"--resume {resume}: there is no such checkpoint directory")
        checkpoint.verify(path)
        return path
    newest = checkpoint.newest_intact(directory.checkpoints)
    if newest is None:
        listener.noted(f"no checkpoint in {directory.checkpoints} yet: starting from the beginning")
        return None
    path, damaged = newest
    for line in damaged:
        listener.noted(f"damaged checkpoint passed over: {line}")
    listener.noted(f"resuming from {path}")
    return path


def _refuse_conflicts(run: RunConfig, start: Start, former: Description | None, going_on: bool) -> None:
    """Neither the directory nor the checkpoint may belong to another run. For rank 0."""
    if start.step > run.train.steps:
        raise UsageError(
            f"{start.checkpoint} is at step {start.step}, past the {run.train.steps} steps asked for"
        )
    start.directory.refuse_conflict(run, going_on)
    if former:
        refuse_differences(f"{start.checkpoint} is of a run", former.run, run, CHANGEABLE)


def _vocab_size(former: RunConfig, run: RunConfig, tokenizer: Tokenizer) -> int:
    size = run.model.vocab_size or former.model.vocab_size or tokenizer.size
    if size < tokenizer.size:
        raise UsageError(
            f"vocab_size is {size}, but the tokenizer has {tokenizer.size} entries for this text"
        )
    return size


def settle(run: RunConfig, stage: Stage, kernels: Kernels, assessed: bool) -> TrainConfig:
    """What "automatic" comes to by each rank's memory; where one has too little, none starts. Collective."""
    comm, free = stage.comm, stage.free_memory()
    settled, complaint = run.train, ""
    try:
        settled = fitting(run, kernels, comm.size, *free, assessed)
    except UsageError as error:
        complaint = str(error)
    refuse_anywhere(comm, complaint)
    rounds = comm.largest(settled.grad_accum)  # as many as the rank with the least memory needs
    if settled.grad_accum != rounds:
        agreed = replace(run, train=replace(run.train, grad_accum=rounds))
        settled = fitting(agreed, kernels, comm.size, *free, assessed)
    if rounds > 1 and not run.train.grad_accum:
        each = run.train.batch_size // (rounds * comm.size)
        stage.notes.add(f"a step takes {rounds} rounds of {each} sequence(s) on each rank")
    if kernels.queued and run.train.recompute == "auto":
        stage.notes.add(f"memory allows --recompute {settled.recompute}")
    return settled


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
    t, seq_len = run.train, run.model.seq_len
    model = Model(run.model, kernels)
    model.train()
    batches = Batches(corpus.train, seq_len, t.batch_size, t.seed, t.shift_windows)
    held_out = Validation(corpus.val, seq_len, t.val_tokens) if corpus.val else None
    assessment = Assessment(model, comm, held_out, examples)
    optimizer, directory = AdamW(model, t), start.directory
    trainer = Trainer(
        run, settled, comm, model, optimizer, corpus.tokenizer, batches, assessment, directory, listener
    )
    if start.checkpoint is not None:
        on_root(comm, lambda: _refuse_other_text(start.checkpoint, batches))
        trainer.restore(start.checkpoint, start.step, start.best_loss)
    elif t.init:
        fill(comm, model, {"": model.weights}, partial(read_into, Path(t.init)))
    else:
        if comm.rank == 0:
            model.initialise(t.seed)
        comm.broadcast(model.weights.flat)
        model.refresh()
    return trainer


def _refuse_other_text(path: Path | None, batches: Batches) -> None:
    """A run does not go on with another text under the same name. For rank 0."""
    if path and checkpoint.load_state(path).get("corpus") != batches.fingerprint:
        raise DataError(
            f"the text has changed since {path} was written: go on with the old one, or start anew"
        )


def _compile_once_per_node(stage: Stage, kernels: Kernels, config: ModelConfig) -> None:
    """Let the first rank of each node fill the cache of compiled loops before the others look for them.

    A GPU's kernels are compiled for the sizes they meet, which a rehearsal with a small model does not show.
    """
    if stage.comm.local_rank == 0 and not kernels.queued:
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
