"""LoRA: adapters of low rank beside a model's matrices, trained while the model stays as it is.

A matrix is w + scale · B A. A layer makes its own when its turn comes, in memory that all layers share: so
the passes cost what they did, and of the model's weights there is one copy, in the type they compute in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from functools import partial

import numpy as np

from distgpt.core.base.errors import UsageError
from distgpt.core.config import ModelConfig, RunConfig, TrainConfig
from distgpt.core.model.layers import (
    Block,
    LayerActivations,
    Linear,
    Part,
    Positions,
    Scratch,
    Tensors,
    gradient_of_pre,
)
from distgpt.core.model.memory import MATRIX, FlatBuffer, Layout, Spec
from distgpt.core.model.model import Architecture, Model
from distgpt.core.ops.api import Affine, Array, Floats2d, Ints1d, SortedTokens, Wide2d
from distgpt.core.ops.kernels import Kernels


class Adapter(Part):
    """B (rows, rank) and A (rank, inputs) beside some rows of a matrix; of rank 0 it is those rows alone."""

    def __init__(self, linear: Linear, piece: str, rows: slice, rank: int, scale: float) -> None:
        """`piece`: the matrix whose rows these are, one of LORA_MATRICES."""
        block = linear.name.rsplit(".", 1)[0]
        name = f"{block}.{piece}"
        height, inputs = rows.stop - rows.start, linear.shape[1]
        shapes = {"b": (height, rank), "a": (rank, inputs)} if rank else {}
        super().__init__(name, [Spec(f"{name}.lora_{kind}", shape, MATRIX) for kind, shape in shapes.items()])
        self.linear = linear
        self.piece = piece
        self.rows = rows
        self.rank = rank
        self.scale = scale

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
        """inner ← x Aᵀ, and the gradient of that: what `weight_gradients` reads. Both (N, rank)."""
        assert self.a is not None and self.b is not None  # it has a rank
        self.k.linear(inner, x, Affine(self.a, None))
        self.k.linear_backward(dinner, dy[:, self.rows], self.b)

    def weight_gradients(
        self, inner: Floats2d, dinner: Floats2d, dy: Floats2d, x: Floats2d, accumulate: bool
    ) -> None:
        """Compute the gradients, but for the factor `scale`, which dy has (`Model.gradient_scale`)."""
        assert self.da is not None and self.db is not None  # it has a rank
        self.k.linear_backward_weights(Affine(self.db, None), dy[:, self.rows], inner, accumulate)
        self.k.linear_backward_weights(Affine(self.da, None), dinner, x, accumulate)


def adapters_of(block: Block, t: TrainConfig) -> list[Adapter]:
    """Return a layer's adapters, in the order in which the backward pass finishes their gradients.

    Where some rows of a matrix have an adapter, the others have one of rank 0, which copies them.
    """
    up = ["gate", "up"][-len(block.fc.heights) :]
    found = []
    for linear, names in (
        (block.proj, ["down"]),
        (block.fc, up),
        (block.out, ["o"]),
        (block.qkv, ["q", "k", "v"]),
    ):
        ranks = [t.lora_rank if name in t.adapted else 0 for name in names]
        end = 0
        for name, height, rank in zip(names, linear.heights or linear.shape[:1], ranks, strict=True):
            if any(ranks):
                found.append(Adapter(linear, name, slice(end, end + height), rank, t.lora_scale))
            end += height
    return found


@dataclass(slots=True)
class AdaptedScratch(Scratch):
    inner: tuple[tuple[Floats2d, Floats2d], ...] = ()  # of each adapter: x Aᵀ and its gradient, (N, rank)


class AdaptedBlock(Block):
    """A layer whose adapters alone are trained."""

    def __init__(self, t: TrainConfig, config: ModelConfig, index: int, positions: Positions) -> None:
        super().__init__(config, index, positions)
        self.adapters = adapters_of(self, t)
        self.parts = [*self.parts, *self.adapters]

    def scratch(
        self, config: ModelConfig, kernels: Kernels, n: int, added: Floats2d | None, again: bool
    ) -> AdaptedScratch:
        plain = super().scratch(config, kernels, n, added, again)
        ranks = [adapter.rank for adapter in self.adapters if adapter.rank]
        inner = tuple((kernels.zeros(n, rank), kernels.zeros(n, rank)) for rank in ranks)
        return AdaptedScratch(**{each.name: getattr(plain, each.name) for each in fields(plain)}, inner=inner)

    def merge(self) -> None:
        """Make the matrices that this layer computes with, in memory that it shares with the others."""
        for adapter in self.adapters:
            adapter.merge()

    def backward(
        self,
        acts: LayerActivations,
        tmp: Scratch,
        seq_len: int,
        again: bool,
        accumulate: bool,
        positions: Ints1d | None,
    ) -> None:
        super().backward(acts, tmp, seq_len, again, accumulate, positions)
        for adapter, inner, dy, x in self._trained(acts, tmp):
            adapter.backward(*inner, dy, x)

    def weight_gradients(
        self,
        acts: LayerActivations,
        tmp: Scratch,
        out_sums: Wide2d | None,
        tokens: SortedTokens,
        accumulate: bool,
    ) -> None:
        super().weight_gradients(acts, tmp, out_sums, tokens, accumulate)
        for adapter, inner, dy, x in self._trained(acts, tmp):
            adapter.weight_gradients(*inner, dy, x, accumulate)

    def _trained(
        self, acts: LayerActivations, tmp: Scratch
    ) -> Iterator[tuple[Adapter, tuple[Floats2d, Floats2d], Floats2d, Floats2d]]:
        """Give each adapter that has a rank, its memory, and dy and x of its matrix."""
        assert isinstance(tmp, AdaptedScratch)
        of = {
            self.proj: (tmp.dout, acts.act),
            self.fc: (gradient_of_pre(acts, tmp), acts.h2),
            self.out: (tmp.dmid, acts.att),
            self.qkv: (tmp.dqkv, acts.h1),
        }
        trained = (adapter for adapter in self.adapters if adapter.rank)
        for adapter, inner in zip(trained, tmp.inner, strict=True):
            yield adapter, inner, *of[adapter.linear]


def adapted_architecture(run: RunConfig) -> Architecture:
    """Return the architecture of a run's model with its adapters. Each must have its matrix in the model."""
    if not run.model.gated and run.train.lora_matrices != "all" and "gate" in run.train.adapted:
        raise UsageError(
            f"--lora-matrices {run.train.lora_matrices}: {run.model.mlp} has no gate: leave it out"
        )
    return Architecture(run.model, partial(AdaptedBlock, run.train))


def adapters_in(architecture: Architecture) -> list[Adapter]:
    """Return all adapters, in the order in which the backward pass finishes their gradients."""
    return [part for part in architecture.parts() if isinstance(part, Adapter)]


def adapters_by_matrix(run: RunConfig) -> dict[str, list[Adapter]]:
    """Return the adapters that a run trains, by the name of the matrix beside which they stand."""
    found: dict[str, list[Adapter]] = {}
    for adapter in adapters_in(adapted_architecture(run)):
        if adapter.rank:
            found.setdefault(f"{adapter.linear.name}.w", []).append(adapter)
    return found


def adapter_layout(run: RunConfig) -> Layout:
    """Return the layout of the adapters that a run trains."""
    return _layout(adapted_architecture(run))


def _layout(architecture: Architecture) -> Layout:
    return Layout(spec for adapter in adapters_in(architecture) for spec in adapter.specs)


class AdaptedModel(Model):
    """A model whose adapters are what is trained: `params`, `weights`, `grads` and `layout` are theirs.

    `frozen` are the model's own weights, which the passes read and nobody writes once they are loaded.
    """

    def __init__(self, run: RunConfig, kernels: Kernels) -> None:
        architecture = adapted_architecture(run)
        trained = _layout(architecture)
        own = (spec for spec in architecture.layout.specs if spec.name not in trained.offsets)
        self.frozen = FlatBuffer(Layout(own), kernels.zeros)
        made = _placed(adapters_in(architecture), self.frozen, kernels)
        super().__init__(architecture, kernels, trained, {**self.frozen, **made})
        # One layer at a time: its matrices are made where those of the layer before were.
        self.groups = [range(i, i + 1) for i in range(self.config.n_layer)]
        self.gradient_scale = run.train.lora_scale

    def prepare(self, layers: range) -> None:
        for i in layers:
            block = self.blocks[i]
            assert isinstance(block, AdaptedBlock)
            self.kernels.run_together(block.merge)

    def initial(self, seed: int) -> Iterable[tuple[str, Array]]:
        """Draw A as usual, so that its rows are about 1/√3 long; B is 0, and the model what it was."""
        for spec, random in self.generators(seed):
            bound = spec.shape[1] ** -0.5
            values = random.uniform(-bound, bound, spec.shape).astype(np.float32)
            yield spec.name, values * spec.name.endswith("lora_a")


def _placed(adapters: Iterable[Adapter], frozen: FlatBuffer, kernels: Kernels) -> dict[str, Array]:
    """Return each adapted matrix by its name: those of one layer, as all layers share the memory."""
    made: dict[str, Array] = {}
    found = {}
    for adapter in adapters:
        name = f"{adapter.linear.name}.w"
        kind = name.split(".", 2)[2]
        if kind not in made:
            made[kind] = kernels.zeros(*adapter.linear.shape)
        found[name] = made[kind]
        adapter.place(made[kind], frozen[name])
    return found
