"""Weights and moments of a checkpoint, or the first weights of a run, on every rank."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Protocol

from distgpt.core.base.errors import DataError
from distgpt.core.base.tables import Table
from distgpt.core.comm.agree import shared
from distgpt.core.comm.api import Comm
from distgpt.core.comm.limits import granted_cores
from distgpt.core.config import ModelConfig, TrainConfig
from distgpt.core.data.batches import Batches
from distgpt.core.model.model import Model
from distgpt.core.ops.api import Array
from distgpt.core.saved.checkpoint import load_group
from distgpt.core.saved.modelfile import read_shortened
from distgpt.core.saved.tensors import Tensors
from distgpt.core.train.seams import ModelKind
from distgpt.core.train.sharing import WEIGHTS, OptimizerState


class FirstWeights(Protocol):
    """A row of the table of first weights: what random ones are replaced by, learned from the text."""

    note: str  # about it, for people
    tokens: int  # of the text, that it looks at

    def learn(self, tokens: Array, weights: Tensors, config: ModelConfig, threads: int) -> None:
        """Change these weights in place. Called on rank 0 alone, while the others wait."""


FIRST_WEIGHTS: Table[FirstWeights] = Table("first weights", "first weights", {})  # by init_weights


def restore(comm: Comm, model: Model, state: OptimizerState, checkpoint: Path) -> None:
    """Fill them from a verified checkpoint. Collective."""
    state.load_weights(comm, partial(load_group, checkpoint, WEIGHTS))
    state.restore(comm, checkpoint)


def begin_anew(
    comm: Comm,
    kind: ModelKind,
    model: Model,
    state: OptimizerState,
    t: TrainConfig,
    batches: Batches | None,
) -> None:
    """Bring model and optimizer into their state before the first step. Collective.

    Weights are those of the file that --init names, or new ones. Some of these are learned from the tokens in
    `batches`, where the model wants that.
    """
    if init := kind.begins_with(t):
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
        tokens, threads = batches.sample(learned.tokens), _threads_of_waiting(comm, model)
        learned.learn(tokens, host, model.config, threads)


def _threads_of_waiting(comm: Comm, model: Model) -> int:
    """Return how many threads rank 0 may use here: its own, and those of the ranks that wait for it."""
    own = comm.cores if model.kernels.capabilities.is_async else model.kernels.threads
    ranks = comm.local_size if comm.size > 1 else 1  # a stage of its own may lie beside others that work
    return max(1, min(granted_cores().whole, int(own * ranks + 1e-6)))
