"""Setup of inference: load a model, allocate slots that fit into memory, create an engine."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path

from distgpt.core.base.errors import DataError
from distgpt.core.base.files import bundled
from distgpt.core.comm.agree import collective_error, on_root
from distgpt.core.comm.api import Comm
from distgpt.core.comm.resources import granted_memory
from distgpt.core.components import components
from distgpt.core.cpu.stages import Stage
from distgpt.core.data.tokenizers import Tokenizer
from distgpt.core.generate.engine import Engine
from distgpt.core.generate.request import Sampling
from distgpt.core.generate.slots import Choice, Feed, Slots
from distgpt.core.model.model import Architecture, Model, miniature
from distgpt.core.saved.modelfile import Description, open_model
from distgpt.core.saved.tensors import fingerprint
from distgpt.core.saved.weights import weights_of

SAMPLE = "sample.safetensors"

MOST_SLOTS = 32  # default maximum of concurrent samples
CACHE_BYTES = 4 << 30  # default maximum of keys and values on a CPU


def slot_bytes(model: Model, lookup: int = 0) -> int:
    """Return the bytes of one slot of `slots_for`, including logits of `lookup` drafted tokens."""
    return components().slots(model).slot_bytes(model) + 4 * lookup * model.config.padded_vocab


def slots_that_fit(
    model: Model, wanted: int = MOST_SLOTS, memory: int | None = None, ranks: int = 1, lookup: int = 0
) -> int:
    """Return how many of the `wanted` slots fit into `memory` bytes, at least one.

    By default, use half of a GPU's free memory, because prompts also need some. On a CPU, use CACHE_BYTES, or
    half of each rank's available memory if that is less.
    """
    if memory is None:
        free = model.kernels.free_memory()
        memory = free // 2 if free is not None else min(CACHE_BYTES, granted_memory(ranks).free // 2)
    return max(1, min(wanted, memory // slot_bytes(model, lookup)))


def agreed_slots(model: Model, wanted: int, comm: Comm, memory: int | None = None, lookup: int = 0) -> Slots:
    """Allocate as many slots as fit on every rank, each with `memory` bytes. Collective."""
    fitting = -comm.allreduce_max(-slots_that_fit(model, wanted, memory, comm.local_size, lookup))
    return slots_for(model, fitting)


def slots_for(model: Model, count: int) -> Slots:
    """Create slots of the fastest kind for a model's current weights."""
    return components().slots(model).make(model, count)


def warmup_pass(model: Model) -> None:
    """Compile, autotune and record everything that decoding needs, outside of measured time.

    On a CPU, a small model compiles the same loops. A GPU compiles kernels for the model's sizes.
    """
    is_async = model.kernels.capabilities.is_async
    small = model
    if not is_async:
        small = model.alike(Model(Architecture(miniature(model.config)), model.kernels))
    slots = slots_for(small, 1)
    first = min(7, small.config.seq_len - 1)  # prompt tokens
    slots.feed([Feed(0, 0, [0] * first, 1)])
    drawn = Choice(Sampling(temperature=1.0), 0.5, 0)
    for i in range(3):  # a GPU records the second pass and replays it in the third
        slots.feed([Feed(0, min(i, first), [0], 1, choice=drawn)])
    if slots.can_drop and small.config.seq_len > 1:
        slots.drop(0, 1, 1)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A loaded model and its sources."""

    model: Model
    tokenizer: Tokenizer
    comm: Comm
    spec: ModelSpec
    path: Path
    dtype: str

    def slots(self, wanted: int, lookup: int) -> Slots:
        """Allocate as many of the `wanted` slots as fit on every rank. Collective."""
        return agreed_slots(self.model, wanted, self.comm, self.spec.cache_memory, lookup)

    def engine(self, slots: Slots) -> Engine:
        return Engine(slots, self.tokenizer)

    @property
    def files(self) -> set[Path]:
        """The weights file, and the files merged into it. For the rank that reads files."""
        return self._named or {self.path}

    @property
    def _named(self) -> set[Path]:
        """The files that the user named, which may differ from the model's file."""
        return {weights_of(each) for each in (self.spec.weights, self.spec.part) if each}

    def fingerprint(self, drops: bool) -> str:
        """Hash everything that changes answers: weights, dtype and context.

        `drops`: whether slots drop their older half past the context, which older versions recomputed.
        """
        known = [fingerprint(self.path), self.dtype, self.model.config.seq_len]
        known += sorted(fingerprint(each) for each in self._named - {self.path})
        known += ["drops"] if drops else []
        return sha256(json.dumps(known).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model to load, its compute dtype, and the memory for its keys and values (None: the default).

    Without weights: the bundled sample. `context`: context length; None: the training context. `part`: a file
    to merge into the weights.
    """

    weights: Path | None
    dtype: str
    context: int | None = None
    cache_memory: int | None = None
    part: Path | None = None

    def load(self, stage: Stage) -> LoadedModel:
        """Load the model and its tokenizer, and compile everything. Collective."""
        comm = stage.comm
        path = self.weights or on_root(comm, lambda: bundled("weights", SAMPLE))

        def usual(about: Description) -> str:
            return stage.auto_dtype(weights=about.layout.elements).name

        model, about, path, dtype = open_model(
            stage, path, self.dtype, self.context, usual=usual, part=self.part
        )
        if (tokenizer := about.tokenizer) is None:
            raise collective_error(DataError(f"{path} has no tokenizer; use it from Python, with tokens"))
        if comm.rank == 0:
            stage.notes.report_to(partial(print, file=sys.stderr))
        warmup_pass(model)
        return LoadedModel(model, tokenizer, comm, self, path, dtype)
