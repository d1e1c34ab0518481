"""Weights and moments of a checkpoint, or the first weights of a run, on every rank."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from distgpt.comm.agree import shared
from distgpt.comm.api import Comm
from distgpt.comm.limits import granted_cores
from distgpt.config import RunConfig, TrainConfig
from distgpt.data.batches import Batches
from distgpt.errors import DataError
from distgpt.model.bigrams import MOST_TOKENS, learn_bigrams
from distgpt.model.model import Model
from distgpt.saved.checkpoint import load_group
from distgpt.saved.modelfile import read_shortened
from distgpt.saved.tensors import Tensors
from distgpt.training.opening.model_kind import ModelKind
from distgpt.training.placement import WEIGHTS, OptimizerState


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
    """Bring model and optimizer into their state before the first step. Collective."""
    first_weights(comm, kind, model, state, t, batches)
    state.begin()


def learns_pairs(run: RunConfig) -> bool:
    """Return whether first weights are learned from pairs of tokens."""
    return run.model.init_weights == "bigrams" and not run.train.init


def first_weights(
    comm: Comm,
    kind: ModelKind,
    model: Model,
    state: OptimizerState,
    t: TrainConfig,
    batches: Batches | None,
) -> None:
    """Load the weights of the file that --init names, or draw new ones. Collective.

    Some are learned from pairs of the tokens in `batches`, where the model wants that.
    """
    if init := kind.begins_with(t):
        state.load_weights(comm, partial(read_shortened, Path(init)))
        if not model.is_finite():
            raise shared(DataError(f"{init} holds weights that are not finite"))
        return

    def draw(host: Tensors) -> None:
        for name, values in model.initial(t.seed):
            host[name][...] = values
        if model.config.init_weights == "bigrams" and not t.init and batches is not None:
            tokens, vocab = batches.sample(MOST_TOKENS), model.config.vocab_size
            centred = model.config.norm == "layernorm"
            threads = _threads_of_waiting(comm, model)
            learn_bigrams(tokens, host["wte"][:vocab], host["head.w"][:vocab], centred, threads)

    state.load_weights(comm, draw)


def _threads_of_waiting(comm: Comm, model: Model) -> int:
    """Return how many threads rank 0 may use here: its own, and those of the ranks that wait for it."""
    own = comm.cores if model.kernels.capabilities.is_async else model.kernels.threads
    ranks = comm.local_size if comm.size > 1 else 1  # a stage of its own may lie beside others that work
    return max(1, min(granted_cores().whole, int(own * ranks + 1e-6)))
