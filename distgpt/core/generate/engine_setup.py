"""The beginning of inference: a model from its file, slots as far as memory allows, an engine on them."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path

from distgpt.core.base.errors import DataError
from distgpt.core.base.files import bundled
from distgpt.core.comm.agree import on_root, shared
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

MOST_SLOTS = 32  # samples side by side, unless asked for otherwise
CACHE_BYTES = 4 << 30  # the most memory for keys and values on a CPU, unless asked for otherwise


def slot_bytes(model: Model, lookup: int = 0) -> int:
    """Return the memory of one slot of `slots_for`, with the logits of `lookup` guesses."""
    return components().slots(model).slot_bytes(model) + 4 * lookup * model.config.padded_vocab


def slots_that_fit(
    model: Model, wanted: int = MOST_SLOTS, memory: int | None = None, ranks: int = 1, lookup: int = 0
) -> int:
    """Return how many of the wanted slots fit `memory` bytes, but one at least.

    Without `memory`: half of what is free on a GPU, beside which prompts need some; on a CPU CACHE_BYTES, or
    half of what is available for each of its `ranks` if that is less.
    """
    if memory is None:
        free = model.kernels.free_memory()
        memory = free // 2 if free is not None else min(CACHE_BYTES, granted_memory(ranks).free // 2)
    return max(1, min(wanted, memory // slot_bytes(model, lookup)))


def agreed_slots(model: Model, wanted: int, comm: Comm, memory: int | None = None, lookup: int = 0) -> Slots:
    """Make as many slots as fit the memory of every rank, each of which has `memory`. Collective."""
    fitting = -comm.allreduce_max(-slots_that_fit(model, wanted, memory, comm.local_size, lookup))
    return slots_for(model, fitting)


def slots_for(model: Model, count: int) -> Slots:
    """Make slots of the fastest kind that there is for a model, as it is now."""
    return components().slots(model).make(model, count)


def rehearse(model: Model) -> None:
    """Compile, choose and record all that decoding needs, so that its time does not count.

    On a CPU a small model compiles the same loops; a GPU's kernels are compiled for the sizes of the model.
    """
    is_async = model.kernels.capabilities.is_async
    small = model
    if not is_async:
        small = model.alike(Model(Architecture(miniature(model.config)), model.kernels))
    slots = slots_for(small, 1)
    first = min(7, small.config.seq_len - 1)  # tokens of a prompt
    slots.feed([Feed(0, 0, [0] * first, 1)])
    drawn = Choice(Sampling(temperature=1.0), 0.5, 0)
    for i in range(3):  # the second is recorded on a GPU, the third repeats that
        slots.feed([Feed(0, min(i, first), [0], 1, choice=drawn)])
    if slots.can_drop and small.config.seq_len > 1:
        slots.drop(0, 1, 1)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready, and what it was made of."""

    model: Model
    tokenizer: Tokenizer
    comm: Comm
    spec: ModelSpec
    path: Path
    dtype: str

    def slots(self, wanted: int, lookup: int) -> Slots:
        """Make as many slots as are wanted and fit the memory of every rank. Collective."""
        return agreed_slots(self.model, wanted, self.comm, self.spec.cache_memory, lookup)

    def engine(self, slots: Slots) -> Engine:
        return Engine(slots, self.tokenizer)

    @property
    def files(self) -> set[Path]:
        """Return the weights file, and what is merged into it. On the rank that reads files."""
        return self._named or {self.path}

    @property
    def _named(self) -> set[Path]:
        """Return the files that the user has named, which need not be the one that the model is in."""
        return {weights_of(each) for each in (self.spec.weights, self.spec.part) if each}

    def fingerprint(self, drops: bool) -> str:
        """Tell its answers from those of other weights, in another dtype, or of another context.

        `drops`: past the context its slots drop their older half, which earlier versions computed anew.
        """
        known = [fingerprint(self.path), self.dtype, self.model.config.seq_len]
        known += sorted(fingerprint(each) for each in self._named - {self.path})
        known += ["drops"] if drops else []
        return sha256(json.dumps(known).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Names a model, how it computes, and the memory for its keys and values (None: the usual).

    Without weights: the bundled sample. `context`: its context length; None: that of training. `part`: what
    is merged into the weights.
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
            raise shared(DataError(f"{path} has no tokenizer: use it from Python, with tokens"))
        if comm.rank == 0:
            stage.notes.report_to(partial(print, file=sys.stderr))
        rehearse(model)
        return LoadedModel(model, tokenizer, comm, self, path, dtype)
