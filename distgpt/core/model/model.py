"""The model: its parameters in one flat buffer, their initial values, and its parts in order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING
from zlib import crc32

import numpy as np

from distgpt.core.base.errors import UsageError
from distgpt.core.config import ModelConfig
from distgpt.core.model.layers import (
    NORMS,
    POSITIONS,
    Block,
    LayerNorm,
    LearnedPositions,
    Linear,
    Part,
    Tensors,
    initial_std,
)
from distgpt.core.model.memory import EMBEDDING, HEAD, LEARNED, VALUES, FlatBuffer, FlatPart, Layout, Spec
from distgpt.core.ops.api import Array, Kernels

if TYPE_CHECKING:
    from distgpt.core.cpu.decoding.weights import Weights

FLAG_COUNT = 8  # values appended to the gradient buffer: the loss, and seven flags of a training step


def flag_count(ranks: int) -> int:
    """Return FLAG_COUNT, and one more for each rank where there are several."""
    return FLAG_COUNT + (ranks if ranks > 1 else 0)


class Architecture:
    """The parts that a configuration asks for and the layout of their parameters. Holds no arrays.

    `block` makes a layer from the configuration, its index and the positions.
    """

    def __init__(
        self, config: ModelConfig, block: Callable[[ModelConfig, int, LearnedPositions], Block] = Block
    ) -> None:
        if config.vocab_size < 1:
            raise UsageError("vocab_size is not set: a model needs to know its vocabulary")
        self.config = config
        self.positions = POSITIONS[config.positions](config)
        self.blocks = [block(config, i, self.positions) for i in range(config.n_layer)]
        self.embed_norm = _norm("embed_norm", config, config.embed_norm)
        self.final_norm = _norm("final_norm", config, config.final_norm)
        self._head = None if config.tied else Linear("head", config.n_embd, config.padded_vocab, False, HEAD)
        embedding = Spec("wte", (config.padded_vocab, config.n_embd), EMBEDDING)
        specs = [spec for part in self.parts() for spec in part.specs()]
        self.layout = Layout([*specs, *self.positions.specs(), embedding])

    def parts(self) -> list[Part]:
        """Return the parts with parameters, but for embeddings, in the order in which gradients are finished.

        Value embeddings come after the layers, though they are finished with theirs.
        """
        ends = [self._head, self.final_norm]
        inner = [part for block in reversed(self.blocks) for part in block.parts]
        values = [block.values for block in reversed(self.blocks)]  # behind the matrices, which ranks share
        return [part for part in (*ends, *inner, *values, self.embed_norm) if part is not None]


class Model:
    """An architecture with parameters, and gradients once training asks for them; passes.py has the passes.

    `params` are what is trained, of this `layout`, as the passes read it. `weights` are the same in full
    precision: the optimizer's own copy in the wide type where the kernels compute in another and `train` was
    called, else `params` themselves. Where a rank keeps only a part in full precision, that is `part`, and
    `weights` are the rounded ones. `tensors` are all that the passes read, by name, trained or not.
    """

    gradient_scale = 1.0  # a factor that the gradients of all parameters share
    # Weights as decoding reads them (packing.py): with their checksums where a model may change.
    packing: Weights | tuple[Array, Weights] | None = None
    part: FlatPart | None = None
    _flags = FLAG_COUNT
    _grads: FlatBuffer | None = None

    def __init__(
        self,
        architecture: Architecture,
        kernels: Kernels,
        trained: Layout | None = None,
        given: Tensors = MappingProxyType({}),
    ) -> None:
        """`trained`: the layout of what is trained, if that is not all of it; `given`: the other tensors.

        The architecture becomes this model's own: its parts are bound to the arrays made here.
        """
        self.architecture, self.kernels = architecture, kernels
        self.config, self.blocks = architecture.config, architecture.blocks
        self.positions = architecture.positions
        self.embed_norm, self.final_norm = architecture.embed_norm, architecture.final_norm
        self.layout = architecture.layout if trained is None else trained
        # A pass takes the layers of a group without a pause; `prepare` makes their weights ready before.
        self.groups: Sequence[range] = [range(self.config.n_layer)]
        self.params = self.weights = FlatBuffer(self.layout, kernels.zeros)
        self.tensors: Tensors = {**given, **self.params}
        self._bind()

    def prepare(self, layers: range) -> None:
        """Make the weights of one of `groups` ready: here all weights always are."""

    def finished_with(self, block: Block) -> int:
        """Return how many elements of the gradient buffer are final once this layer's gradients are.

        A value embedding is not a part of it: that lies behind the matrices, which ranks share.
        """
        names = (spec.name for part in block.parts for spec in part.specs())
        return self.layout.end_of(name for name in names if name in self.layout.offsets)

    def train(self, ranks: int = 1, own: slice | None = None) -> None:
        """Keep weights in full precision, or only `own`: write them again, then call `refresh`.

        The gradients get a flag for each of several ranks.
        """
        self._flags, wide = flag_count(ranks), self.kernels.wide_zeros
        if self.kernels.wide != self.kernels.dtype:
            if own is None:
                self.weights = FlatBuffer(self.layout, wide)
            else:
                self.part = FlatPart(self.layout, own, wide)

    @property
    def has_low_precision_copy(self) -> bool:
        """True if `params` are a rounded copy."""
        return self.part is not None or self.weights is not self.params

    def precise(self, own: slice) -> Array:
        """Return these elements of the weights in full precision."""
        if self.part is None:
            return self.weights.flat[own]
        assert self.part.own == own
        return self.part.flat

    def put(self, name: str, host: Array) -> None:
        """A weight ← the host's, in every copy that is kept; call `refresh` afterwards."""
        self.kernels.put(self.weights[name], host)
        if self.part is None:
            return
        begin, own, flat = self.layout.offsets[name], self.part.own, host.reshape(-1)
        start, stop = max(own.start, begin), min(own.stop, begin + flat.size)
        if start < stop:
            here = self.part.flat[start - own.start : stop - own.start]
            self.kernels.put(here, flat[start - begin : stop - begin])

    @property
    def is_trained(self) -> bool:
        """True once there are gradients: weights change."""
        return self._grads is not None

    def refresh(self) -> None:
        """params ← weights, after anything but the optimizer changed them."""
        if self.weights is not self.params:
            self.kernels.cast_down(self.params.flat, self.weights.flat)

    @property
    def grads(self) -> FlatBuffer:
        """One gradient per parameter, by the same name, in a flat buffer, with the loss and a step's flags
        appended, so that one call sums everything over the ranks."""
        if self._grads is None:
            self.packing = None  # while it is trained it generates without
            self._grads = FlatBuffer(self.layout, self.kernels.wide_zeros, flags=self._flags)
            self._bind()
        return self._grads

    @property
    def head(self) -> Array:
        """The output layer, with its rows for padding."""
        return self.tensors[self._head_name]

    @property
    def head_grad(self) -> Array | None:
        """Return the gradient of the output layer; None where it is not trained."""
        return self.grads.get(self._head_name)

    @property
    def _head_name(self) -> str:
        return "wte" if self.config.tied else "head.w"

    def initialise(self, seed: int) -> None:
        for name, values in self.initial(seed):
            self.put(name, values)
        self.refresh()

    def streams(self, seed: int) -> Iterator[tuple[Spec, np.random.Generator]]:
        """Give each tensor a random stream of its own, which depends on the seed and its name alone."""
        for spec in self.layout.specs:
            key = np.array([seed, crc32(spec.name.encode())], np.uint64)
            yield spec, np.random.Generator(np.random.Philox(key=key))

    def initial(self, seed: int) -> Iterable[tuple[str, Array]]:
        """Draw the first weights."""
        for spec, stream in self.streams(seed):
            if spec.decay:
                std = np.float32(initial_std(spec, self.config))
                values = stream.standard_normal(spec.shape, np.float32) * std
                if spec.group in (EMBEDDING, VALUES, HEAD) and spec.name != LEARNED:
                    values[self.config.vocab_size :] = 0
            else:
                values = np.full(spec.shape, spec.name.endswith(".w"), np.float32)
            yield spec.name, values

    def alike(self, other: Model) -> Model:
        """Return another model of the same kernels, its weights in the form of this one's."""
        return other

    def is_finite(self) -> bool:
        """Return whether every weight is finite. Waits for the result."""
        total = self.kernels.scalars(1)
        self.kernels.sum_squares(total, self.weights.flat)
        return math.isfinite(self.kernels.to_host(total)[0])

    def _bind(self) -> None:
        grads = MappingProxyType({}) if self._grads is None else self._grads
        self.positions.bind(self.kernels, self.tensors, grads)
        for part in self.architecture.parts():
            part.bind(self.kernels, self.tensors, grads)
        for block in self.blocks:
            block.bind(self.kernels)


def small(config: ModelConfig) -> ModelConfig:
    """Return a very small model of the same kind, which compiles the same loops."""
    short = replace(config, vocab_size=8, seq_len=8, n_layer=1)
    return replace(short, n_head=1, n_kv_head=0, n_embd=16, head_dim=0, mlp_width=0)


def miniature(config: ModelConfig, kernels: Kernels) -> Model:
    return Model(Architecture(small(config)), kernels)


def _norm(name: str, config: ModelConfig, present: bool) -> LayerNorm | None:
    return NORMS[config.norm](name, config) if present else None
