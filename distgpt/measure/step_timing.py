"""Times a training step of a model, by steps of the same model with fewer layers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from distgpt.core.comm.serial import SerialComm
from distgpt.core.components import components
from distgpt.core.config import RunConfig
from distgpt.core.data.batches import ArrayTokens, Batches
from distgpt.core.model.muon import OPTIMIZERS
from distgpt.core.ops.kernels import Kernels
from distgpt.core.train.sharing import Exchange
from distgpt.core.train.step import Step

CUTS = (1, 3)  # layers: their difference is the cost of two layers, the rest that of both ends
ENOUGH = 1 << 10  # tokens at which a CPU's matmuls reach full speed
LEAST, SECONDS = 3, 4.0  # time at least so many steps of each cut, and for so long;
PATIENCE = 30.0  # but one step of each is enough after so many seconds


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds for all layers: forward and backward of one token, and an update."""

    token_s: float
    update_s: float
    cuts: tuple[int, ...]  # layers of the models that were measured
    sequences: int  # at a time
    steps: int  # of each

    def rate(self, tokens: int) -> float:
        """Return tokens/s of a rank with this many tokens per update."""
        return tokens / (tokens * self.token_s + self.update_s)


def cuts(run: RunConfig, sequences: int) -> list[RunConfig]:
    """Return the runs to measure: the model with fewer layers, on one rank, in one micro-batch.

    A small model is measured whole.
    """
    train = replace(
        run.train, batch_size=sequences, grad_accum=1, reproducible_parts=0, grad_sync="allreduce"
    )
    layers = CUTS if run.model.n_layer > CUTS[-1] else (run.model.n_layer,)
    return [RunConfig(replace(run.model, n_layer=n_layer), train) for n_layer in layers]


def enough_sequences(run: RunConfig, kernels: Kernels, most: int) -> int:
    """Return how many sequences at once are as fast as `most`: a GPU needs all of them."""
    if kernels.capabilities.is_async:
        return most
    each = max(kernels.threads, -(-ENOUGH // run.model.seq_len))
    return min(most, each - each % kernels.threads)


def measure(run: RunConfig, kernels: Kernels, sequences: int) -> Timing:
    """Time real steps on random tokens, the cuts in turn, so that a disturbance hits all of them."""
    trials = [Trial(each, kernels) for each in cuts(run, sequences)]
    for trial in trials:
        trial.step()  # compiles, records, tunes
    times: list[list[tuple[float, float]]] = []  # by round and cut: of a step, and of its update
    begun = time.perf_counter()
    while not times or time.perf_counter() < begun + (SECONDS if len(times) >= LEAST else PATIENCE):
        times.append([(_seconds(trial.step), _seconds(trial.update)) for trial in trials])
    steps, updates = np.moveaxis(np.array(times), 2, 0)
    layers = tuple(trial.layers for trial in trials)
    per_pass, per_update = (
        _extrapolated(layers, np.median(each, axis=0).tolist(), run.model.n_layer)
        for each in (steps - updates, updates)
    )
    return Timing(per_pass / (sequences * run.model.seq_len), per_update, layers, sequences, len(times))


class Trial:
    """A small model and what it takes to train it."""

    def __init__(self, run: RunConfig, kernels: Kernels) -> None:
        model, t = components().model(run.train).build(run, kernels), run.train
        self.layers = run.model.n_layer
        model.allocate_master_weights()
        model.initialise(t.seed)
        self._optimizer = OPTIMIZERS[t.optimizer](model, t)
        self.trained = Step(self._optimizer, SerialComm(), t, Exchange())
        n_tokens = t.batch_size * run.model.seq_len + 1
        ids = np.random.default_rng(t.seed).integers(0, run.model.vocab_size, n_tokens, np.uint32)
        self.batches = Batches(ArrayTokens(ids), run.model.seq_len, t.batch_size, t.seed)

    def step(self) -> None:
        self.trained.launch(0, self.batches).wait()

    def update(self) -> None:
        self._optimizer.step(0, 1.0)
        self._optimizer.model.kernels.to_host(self._optimizer.norm)  # waits


def _seconds(work: Callable[[], None]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def _extrapolated(layers: tuple[int, ...], times: list[float], n_layer: int) -> float:
    """Return the time by a line through both measurements, or the only one."""
    if len(layers) == 1:
        return times[0]
    each = max(0.0, (times[1] - times[0]) / (layers[1] - layers[0]))
    return times[1] + (n_layer - layers[1]) * each
