"""Which model answers: its weights, how it computes, its memory for keys and values."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from distgpt.comm.agree import on_root, shared
from distgpt.comm.api import Comm
from distgpt.data.loading import bundled
from distgpt.data.tokenizers.naming import Tokenizer
from distgpt.errors import DataError
from distgpt.inference.lanes import Lanes
from distgpt.inference.start import agreed_lanes, rehearse
from distgpt.model.model import Model
from distgpt.saved.modelfile import dtype_of, load_model
from distgpt.saved.rundir import find_weights
from distgpt.saved.tensors import fingerprint
from distgpt.stages import Stage

SAMPLE = "sample.safetensors"


class Opened(NamedTuple):
    """A model that is ready, and what it was made of."""

    model: Model
    tokenizer: Tokenizer
    path: Path
    dtype: str

    def mark(self, drops: bool) -> str:
        """What tells its answers from those of other weights, in another dtype, or of another context.

        `drops`: past the context its lanes drop their older half, which earlier versions computed anew.
        """
        known = [fingerprint(find_weights(self.path)), self.dtype, self.model.config.seq_len]
        known += ["drops"] if drops else []
        return sha256(json.dumps(known).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Source:
    """Which model, how it computes, and in how much memory for keys and values (None: what is usual).

    Without weights: the bundled sample. `context`: its context length; None: that of training.
    """

    weights: Path | None
    dtype: str
    context: int | None = None
    cache_memory: int | None = None

    def open(self, stage: Stage) -> Opened:
        """The model and its tokenizer, everything compiled. Collective."""
        comm = stage.comm
        path = self.weights or Path(on_root(comm, lambda: str(bundled("weights", SAMPLE))))
        dtype = dtype_of(path, self.dtype, comm, stage.device is not None)
        model, about = load_model(path, stage.kernels(dtype), comm, self.context)
        if about.tokenizer is None:
            raise shared(DataError(f"{path} has no tokenizer: use it from Python, with tokens"))
        if comm.rank == 0:
            stage.notes.report_to(partial(print, file=sys.stderr))
        rehearse(model)
        return Opened(model, about.tokenizer, path, dtype)

    def lanes(self, model: Model, wanted: int, comm: Comm, lookup: int) -> Lanes:
        """As many as fit the memory of every rank. Collective."""
        return agreed_lanes(model, wanted, comm, self.cache_memory, lookup)
