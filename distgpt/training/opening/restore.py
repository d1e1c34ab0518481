"""Weights and moments of a checkpoint, or the first weights of a run, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from distgpt.comm.agree import on_root, shared
from distgpt.comm.api import Comm
from distgpt.comm.limits import granted_cores
from distgpt.config import ModelConfig, RunConfig, TrainConfig
from distgpt.data.batches import Batches
from distgpt.errors import DataError
from distgpt.kernels.api import Array
from distgpt.model.lora import AdaptedModel
from distgpt.model.model import Model
from distgpt.model.optim import AdamW
from distgpt.saved.adapter import load_frozen
from distgpt.saved.checkpoint import load_group
from distgpt.saved.modelfile import fill, read_shortened
from distgpt.saved.tensors import Tensors
from distgpt.tables import Table
from distgpt.training.exchange.checkpointing import host_buffer, restore_parts, restore_replicas


class FirstWeights(Protocol):
    """A row of the table of first weights: what random ones are replaced by, learned from the text."""

    note: str  # about it, for people
    tokens: int  # of the text, that it looks at

    def learn(self, tokens: Array, weights: Tensors, config: ModelConfig, threads: int) -> None:
        """Change these weights in place. Called on rank 0 alone, while the others wait."""


FIRST_WEIGHTS: Table[FirstWeights] = Table("first weights", "first weights", {})  # by init_weights


def restore(comm: Comm, model: Model, optimizer: AdamW, checkpoint: Path) -> None:
    """Fill them from a verified checkpoint. Collective."""
    _load_frozen(comm, model, optimizer.config)
    load_weights(comm, model, partial(load_group, checkpoint, "weights"))
    if optimizer.is_part:
        restore_parts(comm, model, optimizer, checkpoint)
        return
    moments: dict[str, Any] = {"m/": optimizer.m, "v/": optimizer.v}
    fill(comm, model, moments, partial(load_group, checkpoint, "optimizer"))
    if optimizer.outer:
        restore_replicas(comm, model, optimizer, optimizer.outer, checkpoint)


def begin_anew(comm: Comm, model: Model, optimizer: AdamW, t: TrainConfig, batches: Batches | None) -> None:
    """Bring model and optimizer into their state before the first step. Collective."""
    for moment in (optimizer.m, optimizer.v):
        model.kernels.zero(moment.flat)
    first_weights(comm, model, t, batches)
    if optimizer.outer:
        optimizer.outer.begin()


def learned_first(run: RunConfig) -> FirstWeights | None:
    """Return what first weights are learned by; None where they are random, or those of a file."""
    return None if run.train.init else FIRST_WEIGHTS.get(run.model.init_weights)


def first_weights(comm: Comm, model: Model, t: TrainConfig, batches: Batches | None) -> None:
    """Load the weights of the file that --init names, or draw new ones. Collective.

    Some are then learned from the tokens in `batches`, where the model wants that.
    """
    if isinstance(model, AdaptedModel):
        _load_frozen(comm, model, t)
    elif t.init:
        load_weights(comm, model, partial(read_shortened, Path(t.init)))
        if not model.is_finite():
            raise shared(DataError(f"{t.init} holds weights that are not finite"))
        return

    def draw(host: Tensors) -> None:
        for name, values in model.initial(t.seed):
            host[name][...] = values
        learned = None if t.init else FIRST_WEIGHTS.get(model.config.init_weights)
        if learned is not None and batches is not None:
            tokens, threads = batches.sample(learned.tokens), _threads_of_waiting(comm, model)
            learned.learn(tokens, host, model.config, threads)

    load_weights(comm, model, draw)


def _load_frozen(comm: Comm, model: Model, t: TrainConfig) -> None:
    """Load the model that adapters stand beside, where they are what is trained. Collective."""
    if isinstance(model, AdaptedModel):
        load_frozen(comm, model, Path(t.init))


def _threads_of_waiting(comm: Comm, model: Model) -> int:
    """Return how many threads rank 0 may use here: its own, and those of the ranks that wait for it."""
    own = comm.cores if model.kernels.capabilities.is_async else model.kernels.threads
    ranks = comm.local_size if comm.size > 1 else 1  # a stage of its own may lie beside others that work
    return max(1, min(granted_cores().whole, int(own * ranks + 1e-6)))


def load_weights(comm: Comm, model: Model, read: Callable[[Tensors], None]) -> None:
    """Rank 0 reads them, and each rank gets what it keeps. Collective."""
    if model.part is None:
        fill(comm, model, {"": model.weights}, read)
        return
    host = host_buffer(model, model.layout)
    on_root(comm, lambda: read(dict(host)))
    comm.broadcast(host.flat)
    for name, values in host.items():
        model.put(name, values)
