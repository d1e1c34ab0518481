"""Where inference begins: lanes for a model, as many as their memory allows, and an engine on them."""

from __future__ import annotations

import numpy as np

from distgpt.comm.api import Comm
from distgpt.comm.cores import available_memory
from distgpt.data.tokenizers.naming import Tokenizer
from distgpt.inference import compiled, vocabulary
from distgpt.inference.compiled import compiled_lanes
from distgpt.inference.engine import CHUNK, Engine
from distgpt.inference.lanes import Feed, Lanes
from distgpt.inference.vocabulary import VocabularyLanes
from distgpt.kernels.cpu import CpuKernels
from distgpt.kernels.cpu_int8 import Int8Kernels
from distgpt.model.model import Model, miniature
from distgpt.model.packed import int8_of

MOST_LANES = 32  # samples side by side, unless asked for otherwise
CACHE_BYTES = 4 << 30  # the most memory for keys and values, unless asked for otherwise
CHUNK_QUEUED = 2048  # tokens of prompts at once on a GPU, which fewer would not fill


def lane_bytes(model: Model, lookup: int = 0) -> int:
    """Memory of one lane of `lanes_for`, with the scores of so many guesses."""
    own = compiled.lane_bytes if is_compiled(model) else vocabulary.lane_bytes
    return own(model) + 4 * lookup * model.config.padded_vocab


def lanes_that_fit(
    model: Model, wanted: int = MOST_LANES, memory: int | None = None, ranks: int = 1, lookup: int = 0
) -> int:
    """As many lanes as wanted, as far as they fit `memory` bytes, but one at least.

    Without `memory`: CACHE_BYTES, on a CPU half of what is available for each of its `ranks` if that is less.
    """
    if memory is None:
        memory = (
            CACHE_BYTES
            if model.kernels.capabilities.is_async
            else min(CACHE_BYTES, available_memory() // ranks // 2)
        )
    return max(1, min(wanted, memory // lane_bytes(model, lookup)))


def agreed_lanes(model: Model, wanted: int, comm: Comm, memory: int | None = None, lookup: int = 0) -> Lanes:
    """As many lanes as fit the memory of every rank, each of which has `memory`. Collective."""
    fitting = -comm.allreduce_max(-lanes_that_fit(model, wanted, memory, comm.local_size, lookup))
    return lanes_for(model, fitting)


def lanes_for(model: Model, count: int) -> Lanes:
    """The fastest lanes there are for this model, as it is now."""
    if is_compiled(model):
        return compiled_lanes(model, count)
    return VocabularyLanes(model, count)


def is_compiled(model: Model) -> bool:
    """Whether its tokens take one compiled call: on CPUs, but for float64 and while it is trained."""
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
    """How many tokens of prompts to compute at once."""
    return CHUNK_QUEUED if model.kernels.capabilities.is_async else CHUNK


def rehearse(model: Model) -> None:
    """Compile, choose and record all that decoding needs, so that its time does not count.

    On a CPU a small model compiles the same loops; a GPU's kernels are compiled for the sizes of the model.
    """
    small = model if model.kernels.capabilities.is_async else miniature(model.config, model.kernels)
    if isinstance(model.kernels, Int8Kernels):
        small = int8_of(small, model.kernels)
    lanes, first = lanes_for(small, 1), min(7, small.config.seq_len - 1)
    for feed in (Feed(0, 0, [0] * first, 1), *(Feed(0, min(i, first), [0], 1) for i in range(3))):
        lanes.feed([feed])
    if lanes.can_drop and small.config.seq_len > 1:
        lanes.drop(0, 1, 1)
