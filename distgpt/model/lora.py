"""LoRA: adapters of low rank beside a model's matrices, trained while the model stays as it is.

A matrix is w + scale · B A. A layer makes its own when its turn comes, in memory that all layers share: so
the passes cost what they did, and of the model's weights there is one copy, in the type they compute in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from distgpt.config import RunConfig, TrainConfig
from distgpt.errors import UsageError
from distgpt.kernels.api import Affine, Array, Floats2d, Kernels
from distgpt.model.layers import Block, Linear, Part, Tensors
from distgpt.model.memory import MATRIX, FlatBuffer, Layout, Spec
from distgpt.model.model import Architecture, Model


@dataclass(frozen=True, slots=True)
class Piece:
    """The rows of a matrix beside which an adapter stands: `name` is one of LORA_MATRICES."""

    name: str
    rows: slice


def pieces_of(linear: Linear) -> list[Piece]:
    """Return the matrices that a linear layer holds, one below the other."""
    kind = linear.name.split(".", 2)[2]
    many = len(linear.heights) > 1
    names = {"attn.qkv": "qkv", "attn.proj": "o", "mlp.fc": ("gate", "up") if many else ("up",)}
    found, end = [], 0
    for name, height in zip(names.get(kind, ("down",)), linear.heights or linear.shape[:1], strict=True):
        found.append(Piece(name, slice(end, end + height)))
        end += height
    return found


class Adapter(Part):
    """B (rows, rank) and A (rank, inputs) beside some rows of a matrix. Of rank 0: those rows as they are."""

    def __init__(self, linear: Linear, piece: Piece, rank: int, scale: float) -> None:
        block = linear.name.rsplit(".", 1)[0]
        super().__init__(f"{block}.{piece.name}")
        self.linear, self.piece, self.rows, self.inputs = linear, piece.name, piece.rows, linear.shape[1]
        self.rank, self.scale = rank, scale

    def specs(self) -> list[Spec]:
        height = self.rows.stop - self.rows.start
        shapes = {"b": (height, self.rank), "a": (self.rank, self.inputs)} if self.rank else {}
        return [Spec(f"{self.name}.lora_{kind}", shape, MATRIX) for kind, shape in shapes.items()]

    def bind(self, kernels: Kernels, params: Tensors, grads: Tensors) -> None:
        self.k = kernels
        self.b, self.a = (params.get(f"{self.name}.lora_{kind}") for kind in "ba")
        self.db, self.da = (grads.get(f"{self.name}.lora_{kind}") for kind in "ba")

    def place(self, whole: Floats2d, frozen: Floats2d) -> None:
        """Say where the layer's matrix is to be made, and what it is made of."""
        self._whole, self._frozen = whole[self.rows], frozen[self.rows]

    def merge(self) -> None:
        """Make these rows of the matrix that the layer computes with."""
        self.k.add_low_rank(self._whole, self._frozen, self.b, self.a, self.scale)

    def backward(self, inner: Floats2d, dinner: Floats2d, dy: Floats2d, x: Floats2d) -> None:
        """inner ← x Aᵀ, and the gradient of that: what `weights` reads. Both (N, rank)."""
        self.k.linear(inner, x, Affine(self.a, None))
        self.k.linear_backward(dinner, dy[:, self.rows], self.b)

    def weights(self, inner: Floats2d, dinner: Floats2d, dy: Floats2d, x: Floats2d, accumulate: bool) -> None:
        """Compute the gradients, but for the factor `scale`, which dy has (`Model.gradient_scale`)."""
        self.k.linear_backward_weights(Affine(self.db, None), dy[:, self.rows], inner, accumulate)
        self.k.linear_backward_weights(Affine(self.da, None), dinner, x, accumulate)


def adapters_of(block: Block, t: TrainConfig) -> list[Adapter]:
    """Return a layer's adapters, in the order in which the backward pass finishes their gradients."""
    found = []
    for linear in (block.proj, block.fc, block.out, block.qkv):
        pieces = pieces_of(linear)
        ranks = [t.lora_rank if piece.name in t.adapted else 0 for piece in pieces]
        if any(ranks):
            found += [Adapter(linear, *each, t.lora_scale) for each in zip(pieces, ranks, strict=True)]
    return found


def adapters_by_matrix(run: RunConfig) -> dict[str, list[Adapter]]:
    """Return the adapters that a run trains, by the name of the matrix beside which they stand."""
    found: dict[str, list[Adapter]] = {}
    for block in Architecture(run.model).blocks:
        for adapter in adapters_of(block, run.train):
            if adapter.rank:
                found.setdefault(f"{adapter.linear.name}.w", []).append(adapter)
    return found


def adapter_layout(run: RunConfig) -> Layout:
    """Return the layout of the adapters that a run trains."""
    blocks = Architecture(run.model).blocks
    refuse_none(run)
    return _layout(adapters_of(block, run.train) for block in reversed(blocks))


def trained_layout(run: RunConfig) -> Layout:
    """Return the layout of what a run trains."""
    return adapter_layout(run) if run.train.lora_rank else Architecture(run.model).layout


def model_for(run: RunConfig, kernels: Kernels) -> Model:
    """Return the model that a run trains."""
    return AdaptedModel(run, kernels) if run.train.lora_rank else Model(run.model, kernels)


def refuse_none(run: RunConfig) -> None:
    """Refuse adapters beside a matrix that the model does not have."""
    if run.model.mlp != "swiglu" and run.train.lora_matrices != "all" and "gate" in run.train.adapted:
        raise UsageError(
            f"--lora-matrices {run.train.lora_matrices}: {run.model.mlp} has no gate: leave it out"
        )


class AdaptedModel(Model):
    """A model whose adapters are what is trained: `params`, `weights`, `grads` and `layout` are theirs.

    `frozen` are the model's own weights, which the passes read and nobody writes once they are loaded.
    """

    def __init__(self, run: RunConfig, kernels: Kernels) -> None:
        refuse_none(run)
        Architecture.__init__(self, run.model)
        self.kernels = kernels
        self.frozen = FlatBuffer(self.layout, kernels.zeros)
        for block in self.blocks:
            block.adapters = adapters_of(block, run.train)
        self.layout = _layout(block.adapters for block in reversed(self.blocks))
        self.gradient_scale = run.train.lora_scale
        self.params = self.weights = FlatBuffer(self.layout, kernels.zeros)
        self._tensors = {**self.frozen, **self._places(), **self.params}
        self._bind()

    @property
    def tensors(self) -> Mapping[str, Array]:
        return self._tensors

    def parts(self) -> list[Part]:
        return [*super().parts(), *(each for block in self.blocks for each in block.adapters)]

    def initial(self, seed: int) -> Iterable[tuple[str, Array]]:
        """Draw A as usual, so that its rows are about 1/√3 long; B is 0, and the model what it was."""
        for spec, stream in self.streams(seed):
            bound = spec.shape[1] ** -0.5
            values = stream.uniform(-bound, bound, spec.shape).astype(np.float32)
            yield spec.name, values * spec.name.endswith("lora_a")

    def _places(self) -> dict[str, Array]:
        """Return each adapted matrix by its name: those of one layer, as all layers share the memory."""
        made: dict[str, Array] = {}
        found = {}
        for block in self.blocks:
            for adapter in block.adapters:
                name = f"{adapter.linear.name}.w"
                kind = name.split(".", 2)[2]
                if kind not in made:
                    made[kind] = self.kernels.zeros(*adapter.linear.shape)
                found[name] = made[kind]
                adapter.place(made[kind], self.frozen[name])
        return found


def _layout(adapters: Iterable[list[Adapter]]) -> Layout:
    return Layout(spec for some in adapters for adapter in some for spec in adapter.specs())
