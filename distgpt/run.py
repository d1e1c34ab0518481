"""From a configuration to a trainer that is ready on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from distgpt import checkpoint
from distgpt.comm.agree import on_root, refuse_anywhere
from distgpt.comm.api import Comm
from distgpt.config import ModelConfig, RunConfig, TrainConfig, parse_toml
from distgpt.corpus.batches import Batches, refuse_uneven
from distgpt.corpus.reading import load_corpus
from distgpt.corpus.tokenizer import Ids, Tokenizer
from distgpt.errors import DataError, UsageError
from distgpt.kernels.api import Kernels
from distgpt.model import Model, miniature
from distgpt.modelfile import Description, load_description
from distgpt.optim import AdamW
from distgpt.passes import Pass
from distgpt.rundir import CHANGEABLE, RunDirectory, place_for, refuse_differences
from distgpt.settings import resolve
from distgpt.sizing import fitting
from distgpt.stages import Stage
from distgpt.train import Listener, Trainer


def configure(
    comm: Comm, preset: str | None, toml: Path | None, flags: Mapping[str, Any]
) -> tuple[str, RunConfig]:
    """The run's name and configuration as rank 0 makes them out, whose file it is. Collective."""

    def read() -> list[str]:
        name, run = resolve(preset, toml, flags)
        return [name, run.to_toml()]

    name, text = on_root(comm, read)
    return name, RunConfig().with_values(parse_toml(text, "rank 0's configuration"))


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run begins: its directory and, if it goes on, the verified checkpoint and that one's step."""

    directory: RunDirectory
    checkpoint: Path | None
    step: int


def open_run(
    run: RunConfig, stage: Stage, name: str, out: Path | None, resume: str | None, listener: Listener
) -> Trainer:
    """Data, directory, weights, the checkpoint to go on from. Collective; all is checked before any writing.

    Without `out` the run gets a new directory runs/<name>, or goes on in the last one of that name. `resume`
    is "auto", for the newest intact checkpoint in there, or the path of one.
    """
    comm, t = stage.comm, run.train
    on_root(comm, lambda: refuse_uneven(t.batch_size, comm.size, t.grad_accum))
    start = _start(comm, name, out, resume, listener)
    former = load_description(start.checkpoint / "weights.safetensors", comm) if start.checkpoint else None
    on_root(comm, lambda: _refuse_conflicts(run, start, former, going_on=resume is not None))
    if former and former.run.train.dtype != t.dtype and comm.rank == 0:
        listener.noted(f"goes on in {t.dtype}; it was {former.run.train.dtype} so far")
    known = former.tokenizer if former else None
    tokenizer, tokens = load_corpus(comm, t.data, t.tokenizer, run.model.seq_len, known)
    size = on_root(comm, lambda: _vocab_size(former.run if former else run, run, tokenizer))
    run = replace(run, model=replace(run.model, vocab_size=size))
    kernels = stage.kernels(t.dtype)
    recompute = _fitting(run, stage, kernels)
    trainer = _trainer(run, comm, kernels, recompute, start, tokenizer, tokens, listener)
    on_root(comm, lambda: start.directory.create(run, tokenizer.to_json()))
    if comm.rank == 0:
        listener.started(_facts(trainer, stage, len(tokens)))
        stage.notes.tell(listener.noted)
    _compile_once_per_node(stage, trainer.model.kernels, run.model)
    return trainer


def _start(comm: Comm, name: str, out: Path | None, resume: str | None, listener: Listener) -> Start:
    """Decided by rank 0, which verifies the checkpoint."""

    def decide() -> list[Any]:
        directory = RunDirectory(out or place_for(Path("runs"), name, going_on=resume == "auto"))
        found = _checkpoint(directory, resume, listener)
        step = int(checkpoint.load_state(found)["step"]) if found else 0
        return [str(directory.path), found and str(found), step]

    path, found, step = on_root(comm, decide)
    return Start(RunDirectory(Path(path)), found and Path(found), step)


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


def _fitting(run: RunConfig, stage: Stage, kernels: Kernels) -> str:
    """What each rank recomputes, by its own memory; where one has too little, none starts. Collective."""
    recompute, complaint = "", ""
    try:
        recompute = fitting(run, kernels, stage.comm.size, *stage.free_memory())
    except UsageError as error:
        complaint = str(error)
    refuse_anywhere(stage.comm, complaint)
    if kernels.queued and run.train.recompute == "auto":
        stage.notes.add(f"memory allows --recompute {recompute}")
    return recompute


def _trainer(
    run: RunConfig,
    comm: Comm,
    kernels: Kernels,
    recompute: str,
    start: Start,
    tokenizer: Tokenizer,
    tokens: Ids,
    listener: Listener,
) -> Trainer:
    """With its weights, the same on all ranks: new ones, or the checkpoint's."""
    t = run.train
    model = Model(run.model, kernels)
    model.train()
    batches = Batches(tokens, run.model.seq_len, t.batch_size, t.seed, t.shift_windows)
    optimizer, directory = AdamW(model, t), start.directory
    trainer = Trainer(run, comm, model, optimizer, recompute, tokenizer, batches, directory, listener)
    if start.checkpoint is not None:
        on_root(comm, lambda: _refuse_other_text(start.checkpoint, batches))
        trainer.restore(start.checkpoint, start.step)
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


def _facts(trainer: Trainer, stage: Stage, tokens: int) -> dict[str, Any]:
    """What is worth telling at the start of a run."""
    return {
        "stage": stage.name,
        "ranks": stage.comm.size,
        "threads": stage.threads,
        "parameters": trainer.model.layout.size,
        "vocabulary": trainer.run.model.vocab_size,
        "corpus_tokens": tokens,
        "first_step": trainer.step,
        "steps": trainer.run.train.steps,
        "directory": str(trainer.directory.path),
    }
