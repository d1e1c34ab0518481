"""The model, its initialization and the layout of its parameters in a flat buffer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from types import MappingProxyType
from zlib import crc32

import numpy as np

from distgpt.core.base.errors import UsageError
from distgpt.core.comm.agree import collective_error
from distgpt.core.config import ModelConfig
from distgpt.core.model.layers import (
    POSITIONS,
    Block,
    Linear,
    Part,
    Positions,
    Tensors,
    initial_std,
    norm_of,
)
from distgpt.core.model.memory import (
    EMBEDDING,
    HEAD,
    LEARNED,
    PREVIOUS,
    VALUES,
    FlatBuffer,
    FlatPart,
    Layout,
    Spec,
)
from distgpt.core.ops.activations import ACTIVATIONS
from distgpt.core.ops.api import Array
from distgpt.core.ops.kernels import Kernels

FLAG_COUNT = 8  # values appended to the gradient buffer: the loss and the seven flags (`StepFlags`) of a step


def flag_count(ranks: int) -> int:
    """Return the number of flags: FLAG_COUNT, plus one per rank if there are multiple ranks."""
    return FLAG_COUNT + (ranks if ranks > 1 else 0)


class Architecture:
    """The parts of a configuration and the layout of their parameters, without arrays.

    `block` creates a layer from the configuration, its index and the positions.
    """

    def __init__(
        self, config: ModelConfig, block: Callable[[ModelConfig, int, Positions], Block] = Block
    ) -> None:
        if config.vocab_size < 1:
            raise UsageError("vocab_size must be set to build a model")
        self.config = config
        norm = norm_of(config)
        self.positions = POSITIONS[config.positions](config)
        self.blocks = [block(config, i, self.positions) for i in range(config.n_layer)]
        self.embed_norm = norm("embed_norm", config) if config.embed_norm else None
        self.final_norm = norm("final_norm", config) if config.final_norm else None
        # A tied model's output layer is its embedding.
        self._head = None if config.tied else Linear("head", config.n_embd, config.padded_vocab, False, HEAD)
        shape = config.padded_vocab, config.n_embd
        previous = [Spec(PREVIOUS, shape, VALUES)] if config.previous_embedding else []
        inner = (spec for part in self.parts() for spec in part.specs)
        self.layout = Layout([*inner, *previous, Spec("wte", shape, EMBEDDING)])

    def parts(self) -> list[Part]:
        """Return all parts except the embeddings, in the order in which gradients are finished.

        Value embeddings come after all layers, although each is finished with its layer. This keeps the
        layers' matrices in one contiguous range, which ranks share.
        """
        from_last = self.blocks[::-1]
        inner = [part for block in from_last for part in block.parts]
        values = [block.values for block in from_last]
        parts = [self._head, self.final_norm, *inner, *values, self.embed_norm, self.positions]
        return [part for part in parts if part is not None]


class Model:
    """An architecture with parameters, and with gradients once it is trained; passes.py has the passes.

    `params` are the trained tensors in `layout`, as the passes read them. `weights` are the master weights
    that the optimizer updates. In bfloat16 these are a float32 copy (`allocate_master_weights`); otherwise,
    they are `params`. If a rank has only a part of the masters, they are in `master_part`, and `weights` are
    the rounded ones. `tensors` are all tensors that the passes read, by name, trained or not.
    """

    # Common factor of all gradients, for layers that compute with multiples of the trained tensors. The
    # output layer applies it, so it needs no extra pass.
    gradient_scale = 1.0
    most_evaluated: int | None = None  # tokens per pass of an evaluation, if memory should stay small
    packing: object = None  # weights in the form of a faster decoder, while they are not trained
    master_part: FlatPart | None = None
    _flags = FLAG_COUNT
    _grads: FlatBuffer | None = None

    def __init__(
        self,
        architecture: Architecture,
        kernels: Kernels,
        trained: Layout | None = None,
        given: Tensors = MappingProxyType({}),
    ) -> None:
        """`trained`: the layout of the trained tensors, if not all are; `given`: the other tensors.

        The model takes over the architecture and binds its parts to the arrays created here.
        """
        if kernels.capabilities.is_async and ACTIVATIONS[architecture.config.mlp].functions:
            raise collective_error(
                UsageError(f"the activation {architecture.config.mlp} requires a CPU stage")
            )
        self.architecture = architecture
        self.kernels = kernels
        self.config = architecture.config
        self.head_name = "wte" if self.config.tied else "head.w"
        self.positions = architecture.positions
        self.blocks = architecture.blocks
        self.embed_norm = architecture.embed_norm
        self.final_norm = architecture.final_norm
        self.layout = architecture.layout if trained is None else trained
        # A pass runs the layers of a group without interruption, after `prepare` for the group. If all layers
        # share the memory of their weights, each layer is a group.
        self.groups: Sequence[range] = [range(self.config.n_layer)]
        self.params = self.weights = FlatBuffer(self.layout, kernels.zeros)
        self.tensors: Tensors = {**given, **self.params}
        self._bind()

    def logits(self, shape: tuple[int, int]) -> Array:
        """Return memory for a pass's logits."""
        return self.kernels.zeros(*shape)

    def prepare(self, layers: range) -> None:
        """Make the weights of one of `groups` ready. Here they always are."""

    def finished_with(self, block: Block) -> int:
        """Return how many elements of the gradient buffer are final once this layer's gradients are.

        Its value embedding does not count because it is stored after the matrices, which ranks share.
        """
        names = (spec.name for part in block.parts for spec in part.specs)
        return self.layout.end_of(name for name in names if name in self.layout.offsets)

    def allocate_master_weights(self, ranks: int = 1, own: slice | None = None) -> None:
        """Make memory for master weights, or only for `own`. Then write all weights and call `refresh`.

        Call this before gradients exist, because they get a flag for each of multiple ranks.
        """
        assert self._grads is None
        self._flags = flag_count(ranks)
        # Pages are placed near the thread that writes to them first, so threads write their own parts.
        self.kernels.zero(self.params.flat)
        if self.kernels.accum_dtype == self.kernels.dtype:
            return
        # Updates are smaller than bfloat16's resolution: its weights would not change (arXiv 1710.03740).
        if own is None:
            self.weights = FlatBuffer(self.layout, self.kernels.accum_zeros)
            self.kernels.zero(self.weights.flat)
        else:
            self.master_part = FlatPart(self.layout, own, self.kernels.accum_zeros)
            self.kernels.zero(self.master_part.flat)

    @property
    def has_low_precision_copy(self) -> bool:
        """Whether `params` are a rounded copy."""
        return self.master_part is not None or self.weights is not self.params

    def masters(self, own: slice) -> Array:
        """Return these elements of the master weights."""
        if self.master_part is None:
            return self.weights.flat[own]
        assert self.master_part.own == own
        return self.master_part.flat

    def put(self, name: str, host: Array) -> None:
        """Copy a weight from the host to every copy; call `refresh` afterwards."""
        self.kernels.put(self.weights[name], host)
        if self.master_part is None:
            return
        own = self.master_part.own
        flat = host.reshape(-1)
        begin = self.layout.offsets[name]
        start = max(own.start, begin)
        stop = min(own.stop, begin + flat.size)
        if start < stop:
            here = self.master_part.flat[start - own.start : stop - own.start]
            self.kernels.put(here, flat[start - begin : stop - begin])

    @property
    def is_trained(self) -> bool:
        """Whether gradients exist, so weights may change."""
        return self._grads is not None

    def refresh(self) -> None:
        """params ← weights. Call this after any change of weights outside the optimizer."""
        if self.weights is not self.params:
            self.kernels.cast_down(self.params.flat, self.weights.flat)

    def make_gradients(self, make: Callable[[Layout, int], FlatBuffer] | None = None) -> None:
        """Make the memory for gradients, as large as full-precision weights, unless it exists.

        `make(layout, flags)` allocates it elsewhere than other memory, if given.
        """
        if self._grads is None:
            self.packing = None  # a trained model generates without it
            if make:
                self._grads = make(self.layout, self._flags)
            else:
                self._grads = FlatBuffer(self.layout, self.kernels.accum_zeros, flags=self._flags)
            self._bind()

    @property
    def grads(self) -> FlatBuffer:
        """Gradients by parameter name, with the loss and a step's flags appended for a single Allreduce."""
        assert self._grads is not None, "optimizers and passes that train call make_gradients"
        return self._grads

    @property
    def head(self) -> Array:
        """Output layer, including the padding rows."""
        return self.tensors[self.head_name]

    def initialise(self, seed: int) -> None:
        for name, values in self.initial(seed):
            self.put(name, values)
        self.refresh()

    def generators(self, seed: int) -> Iterator[tuple[Spec, np.random.Generator]]:
        """Yield each tensor with a random generator that depends only on the seed and the tensor's name.

        So a change of another tensor's shape or order does not change its values.
        """
        for spec in self.layout.specs:
            key = np.array([seed, crc32(spec.name.encode())], np.uint64)
            yield spec, np.random.Generator(np.random.Philox(key=key))

    def initial(self, seed: int) -> Iterable[tuple[str, Array]]:
        """Yield each tensor's name and initial values."""
        for spec, random in self.generators(seed):
            if spec.is_matrix:
                std = np.float32(initial_std(spec, self.config))
                values = random.standard_normal(spec.shape, np.float32) * std
                if spec.group in (EMBEDDING, VALUES, HEAD) and spec.name != LEARNED:
                    values[self.config.vocab_size :] = 0  # padding rows without a token
            else:
                values = np.full(spec.shape, spec.name.endswith(".w"), np.float32)  # gains are 1, biases 0
            yield spec.name, values

    def alike(self, other: Model) -> Model:
        """Return `other`, a model of the same kernels, with its weights in the form of this one's."""
        return other

    def is_finite(self) -> bool:
        """Return whether every weight is finite. Waits for the result."""
        total = self.kernels.scalars(1)
        self.kernels.sum_squares(total, self.weights.flat)
        return math.isfinite(self.kernels.to_host(total)[0])

    def _bind(self) -> None:
        grads = MappingProxyType({}) if self._grads is None else self._grads
        for part in self.architecture.parts():
            part.bind(self.kernels, self.tensors, grads)
        for block in self.blocks:
            block.bind(self.kernels)


def miniature(config: ModelConfig) -> ModelConfig:
    """Return the config of a very small model that compiles the same loops."""
    short = replace(config, vocab_size=8, seq_len=8, n_layer=1)
    return replace(short, n_head=1, n_kv_head=0, n_embd=16, head_dim=0, mlp_width=0, norm_groups=1)
