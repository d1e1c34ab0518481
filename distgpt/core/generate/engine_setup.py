"""The beginning of inference: a model from its file, lanes as far as memory allows, an engine on them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import numpy as np

from distgpt.core.base.errors import DataError
from distgpt.core.base.files import bundled
from distgpt.core.base.tables import Table
from distgpt.core.comm.agree import on_root, shared
from distgpt.core.comm.api import Comm
from distgpt.core.comm.limits import granted_memory
from distgpt.core.cpu.decoding.variants import NO_VARIANTS, Variants
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.cpu.stages import Stage
from distgpt.core.data.tokenizers import Tokenizer
from distgpt.core.generate import compiled_lanes, uncompiled_lanes
from distgpt.core.generate.engine import CHUNK, Engine
from distgpt.core.generate.lanes import Draw, Feed, Lanes
from distgpt.core.model.model import Architecture, Model, miniature
from distgpt.core.saved.modelfile import Description
from distgpt.core.saved.named import weights_of
from distgpt.core.saved.opening import ALONE, Beside, open_model
from distgpt.core.saved.tensors import fingerprint

SAMPLE = "sample.safetensors"

MOST_LANES = 32  # samples side by side, unless asked for otherwise
CACHE_BYTES = 4 << 30  # the most memory for keys and values on a CPU, unless asked for otherwise
CHUNK_QUEUED = 2048  # tokens of prompts at once on a GPU, which fewer would not fill


def lane_bytes(model: Model, lookup: int = 0) -> int:
    """Return the memory of one lane of `lanes_for`, with the scores of `lookup` guesses."""
    return _kind(model).lane_bytes(model) + 4 * lookup * model.config.padded_vocab


def lanes_that_fit(
    model: Model, wanted: int = MOST_LANES, memory: int | None = None, ranks: int = 1, lookup: int = 0
) -> int:
    """Return how many of the wanted lanes fit `memory` bytes, but one at least.

    Without `memory`: half of what is free on a GPU, beside which prompts need some; on a CPU CACHE_BYTES, or
    half of what is available for each of its `ranks` if that is less.
    """
    if memory is None:
        free = model.kernels.free_memory()
        memory = free // 2 if free is not None else min(CACHE_BYTES, granted_memory(ranks).free // 2)
    return max(1, min(wanted, memory // lane_bytes(model, lookup)))


def agreed_lanes(
    model: Model,
    wanted: int,
    comm: Comm,
    memory: int | None = None,
    lookup: int = 0,
    variants: Variants = NO_VARIANTS,
) -> Lanes:
    """Make as many lanes as fit the memory of every rank, each of which has `memory`. Collective."""
    fitting = -comm.allreduce_max(-lanes_that_fit(model, wanted, memory, comm.local_size, lookup))
    return lanes_for(model, fitting, variants)


def lanes_for(model: Model, count: int, variants: Variants = NO_VARIANTS) -> Lanes:
    """The fastest lanes there are for this model, as it is now."""
    return _kind(model).make(model, count, variants)


class LaneKind(NamedTuple):
    """A kind of lanes: how to make a number of them for a model, and the bytes that one takes."""

    make: Callable[[Model, int, Variants], Lanes]
    lane_bytes: Callable[[Model], int]


COMPILED = LaneKind(compiled_lanes.compiled_lanes, compiled_lanes.lane_bytes)
UNCOMPILED = LaneKind(
    lambda model, count, _: uncompiled_lanes.UncompiledLanes(model, count), uncompiled_lanes.lane_bytes
)
LANES: Table[LaneKind] = Table("lanes", "lanes", {"compiled": COMPILED, "uncompiled": UNCOMPILED})


def _kind(model: Model) -> LaneKind:
    if is_compiled(model):
        return COMPILED
    return LANES["batched"] if model.kernels.capabilities.is_async else UNCOMPILED


def is_compiled(model: Model) -> bool:
    """Return whether its tokens take one compiled call: on CPUs, but for float64 and while it is trained."""
    kernels = model.kernels
    on_cpu = isinstance(kernels, CpuKernels) and kernels.dtype != np.float64
    return on_cpu and not model.is_trained


def engine_for(
    model: Model, tokenizer: Tokenizer | None, wanted: int = MOST_LANES, memory: int | None = None
) -> Engine:
    """An engine with up to `wanted` lanes, in up to `memory` bytes."""
    lanes = lanes_for(model, lanes_that_fit(model, wanted, memory))
    return Engine(lanes, tokenizer, chunk_for(model))


def chunk_for(model: Model) -> int:
    """Return how many tokens of prompts to compute at once."""
    return CHUNK_QUEUED if model.kernels.capabilities.is_async else CHUNK


def rehearse(model: Model) -> None:
    """Compile, choose and record all that decoding needs, so that its time does not count.

    On a CPU a small model compiles the same loops; a GPU's kernels are compiled for the sizes of the model.
    """
    is_async = model.kernels.capabilities.is_async
    small = model if is_async else model.alike(miniature(model.config, model.kernels))
    lanes, first = lanes_for(small, 1), min(7, small.config.seq_len - 1)
    for feed in (
        Feed(0, 0, [0] * first, 1),
        *(Feed(0, min(i, first), [0], 1, likeliest=1, draw=Draw(1.0, 0.5)) for i in range(3)),
    ):
        lanes.feed([feed])
    if lanes.can_drop and small.config.seq_len > 1:
        lanes.drop(0, 1, 1)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready, and what it was made of."""

    model: Model
    tokenizer: Tokenizer
    comm: Comm
    spec: ModelSpec
    path: Path
    dtype: str
    variants: Variants = NO_VARIANTS  # in memory before lanes ask how much is left
    tokenizers: Mapping[str, Tokenizer] = field(default_factory=dict)  # of variants, by name, in their order

    def lanes(self, wanted: int, lookup: int) -> Lanes:
        """Make as many lanes as are wanted and fit the memory of every rank. Collective."""
        return agreed_lanes(self.model, wanted, self.comm, self.spec.cache_memory, lookup, self.variants)

    def engine(self, lanes: Lanes) -> Engine:
        return Engine(lanes, self.tokenizer, chunk_for(self.model))

    @property
    def files(self) -> set[Path]:
        """Return the weights file, and what is merged into it. On the rank that reads files."""
        return self._named or {self.path}

    @property
    def _named(self) -> set[Path]:
        """Return the files that the user has named, which need not be the one that the model is in."""
        return {weights_of(each) for each in (self.spec.weights, *self.spec.beside.files) if each}

    def fingerprint(self, drops: bool) -> str:
        """Tell its answers from those of other weights, in another dtype, or of another context.

        `drops`: past the context its lanes drop their older half, which earlier versions computed anew.
        """
        known = [fingerprint(self.path), self.dtype, self.model.config.seq_len]
        known += sorted(fingerprint(each) for each in self._named - {self.path})
        known += ["drops"] if drops else []
        return sha256(json.dumps(known).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Names a model, how it computes, and the memory for its keys and values (None: the usual).

    Without weights: the bundled sample. `context`: its context length; None: that of training.
    """

    weights: Path | None
    dtype: str
    context: int | None = None
    cache_memory: int | None = None
    beside: Beside = ALONE

    def load(self, stage: Stage) -> LoadedModel:
        """Load the model and its tokenizer, and compile everything. Collective."""
        comm = stage.comm
        path = self.weights or Path(on_root(comm, lambda: str(bundled("weights", SAMPLE))))
        named = self.beside.variants(path, stage, self.dtype)

        def usual(about: Description) -> str:
            return stage.dtype_for_generation(about.run.model.n_embd, about.layout.elements).name

        if cost := stage.cost_of(self.dtype):
            stage.notes.add(cost)
        model, about, path, dtype = open_model(
            stage, path, self.dtype, self.context, usual=usual, beside=self.beside
        )
        if (tokenizer := about.tokenizer) is None:
            raise shared(DataError(f"{path} has no tokenizer: use it from Python, with tokens"))
        saved = tokenizer.to_json()
        tokenizers = {
            name: own if own and own.to_json() != saved else tokenizer
            for name, own in named.tokenizers.items()
        }
        if comm.rank == 0:
            stage.notes.report_to(partial(print, file=sys.stderr))
        stage.compile_ahead(dtype, lambda kernels: rehearse(Model(Architecture(model.config), kernels)))
        rehearse(model)
        variants = named.packed(model.config)
        return LoadedModel(model, tokenizer, comm, self, path, dtype, variants, tokenizers)
