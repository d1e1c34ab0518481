"""From a configuration to a trainer that is ready on every rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from distgpt import checkpoint
from distgpt.comm.agree import on_root
from distgpt.config import ModelConfig, RunConfig, TrainConfig
from distgpt.corpus.batches import Batches, rank_rows
from distgpt.corpus.reading import load_corpus
from distgpt.corpus.tokenizer import Tokenizer
from distgpt.errors import DataError, UsageError
from distgpt.kernels.api import Kernels
from distgpt.model import Architecture, Model
from distgpt.optim import AdamW
from distgpt.passes import Pass
from distgpt.rundir import RunDirectory, free_name
from distgpt.stages import Stage
from distgpt.train import Listener, Trainer


def open_run(
    run: RunConfig, stage: Stage, name: str, out: Path | None, resume: str | None, listener: Listener
) -> Trainer:
    """Data, directory, weights, the checkpoint to go on from. Collective; all is checked before any writing.

    Without `out` the run gets a new directory runs/<name>. `resume` is "auto", for the newest intact
    checkpoint in `out`, or the path of one.
    """
    comm, t = stage.comm, run.train
    rank_rows(t.batch_size, comm.rank, comm.size, 0, t.grad_accum)  # refuses a batch that cannot be split
    tokenizer, tokens = load_corpus(comm, t.data, t.tokenizer, run.model.seq_len)
    run = replace(run, model=_with_vocabulary(run.model, tokenizer))
    directory, start = _directory(stage, run, name, out, resume, listener)
    if comm.rank == 0:
        listener.started(_facts(run, stage, directory, len(tokens), start[1] if start else 0))
    kernels = stage.kernels(t.dtype)
    _compile_once_per_node(stage, kernels, run.model)
    model = Model(run.model, kernels)
    batches = Batches(tokens, run.model.seq_len, t.batch_size, t.seed)
    trainer = Trainer(run, comm, model, AdamW(model, t), tokenizer, batches, directory, listener)
    if start is not None:
        trainer.restore(*start)
    else:
        if comm.rank == 0:
            model.initialise(t.seed)
        comm.broadcast(model.params.flat)
    return trainer


def _with_vocabulary(config: ModelConfig, tokenizer: Tokenizer) -> ModelConfig:
    if config.vocab_size == 0:
        return replace(config, vocab_size=tokenizer.size)
    if config.vocab_size < tokenizer.size:
        raise UsageError(
            f"vocab_size is {config.vocab_size}, but the tokenizer has {tokenizer.size} entries for this text"
        )
    return config


def _directory(
    stage: Stage, run: RunConfig, name: str, out: Path | None, resume: str | None, listener: Listener
) -> tuple[RunDirectory, tuple[Path, int] | None]:
    """The run's directory, and the checkpoint (with its step) to start from. Decided by rank 0."""

    def decide() -> list[Any]:
        directory = RunDirectory(out or free_name(Path("runs"), name))
        found = _checkpoint(directory, resume, listener)
        if found is not None and found[1] > run.train.steps:
            raise UsageError(f"{found[0]} is at step {found[1]}, past the {run.train.steps} steps asked for")
        directory.prepare(run, going_on=resume is not None)
        return [str(directory.path), found and [str(found[0]), found[1]]]

    path, found = on_root(stage.comm, decide)
    return RunDirectory(Path(path)), found and (Path(found[0]), found[1])


def _checkpoint(directory: RunDirectory, resume: str | None, listener: Listener) -> tuple[Path, int] | None:
    if resume is None:
        return None
    if resume != "auto":
        path = Path(resume)
        if not path.is_dir():
            raise DataError(f"--resume {resume}: there is no such checkpoint directory")
        return path, int(checkpoint.verify(path)["step"])
    newest = checkpoint.newest_intact(directory.checkpoints)
    if newest is None:
        listener.noted(f"no checkpoint in {directory.checkpoints} yet: starting from the beginning")
        return None
    path, damaged = newest
    for line in damaged:
        listener.noted(f"damaged checkpoint passed over: {line}")
    listener.noted(f"resuming from {path}")
    return path, int(checkpoint.load_state(path)["step"])


def _compile_once_per_node(stage: Stage, kernels: Kernels, config: ModelConfig) -> None:
    """Let the first rank of each node fill the cache of compiled loops before the others look for them."""
    if stage.comm.local_rank == 0:
        rehearse(kernels, config)
    stage.comm.barrier()


def rehearse(kernels: Kernels, config: ModelConfig) -> None:
    """One training step of a very small model of the same kind: every loop it needs is compiled."""
    small = replace(config, vocab_size=8, seq_len=8, n_layer=1, n_head=1, n_embd=16, mlp_width=0)
    model = Model(small, kernels)
    tokens = kernels.tokens(np.zeros(8, np.int32))
    Pass(model, 1, 8, training=True).loss_and_gradients(tokens, tokens, 1.0, accumulate=False)
    optimizer = AdamW(model, TrainConfig())
    optimizer.step(0, 1.0, optimizer.gradient_norm(1.0))


def _facts(
    run: RunConfig, stage: Stage, directory: RunDirectory, tokens: int, first_step: int
) -> dict[str, Any]:
    """What is worth telling at the start of a run."""
    return {
        "stage": stage.name,
        "ranks": stage.comm.size,
        "threads": stage.threads,
        "parameters": Architecture(run.model).layout.size,
        "vocabulary": run.model.vocab_size,
        "corpus_tokens": tokens,
        "first_step": first_step,
        "steps": run.train.steps,
        "directory": str(directory.path),
    }
