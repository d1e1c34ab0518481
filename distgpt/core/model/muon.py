"""Muon: the matrices of the layers move along their momentum, made orthogonal; AdamW does the rest.

There is one second moment for each row of a matrix, or each column of a wide one (NorMuon). Weight decay
acts only where it has the direction of the update, and falls with the learning rate.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate
from math import prod

import numpy as np

from distgpt.core.config import TrainConfig
from distgpt.core.model.memory import ALIGNED, MATRIX, Layout, Spec
from distgpt.core.model.model import Model
from distgpt.core.model.optim import AdamW, clip_norm
from distgpt.core.ops.api import MuonMatrix, MuonScalars

FIRST_MOMENTUM, MOMENTUM_WARMUP = 0.85, 300  # momentum rises from this within so many steps


class Muon(AdamW):
    """Owns momenta and second moments. `own` never cuts a matrix.

    Where all ranks have all moments, each of `ranks` orthogonalises some of the matrices, in the gradients'
    memory, and they share the results before they update.
    """

    def __init__(
        self,
        model: Model,
        config: TrainConfig,
        own: slice | None = None,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        super().__init__(model, config, own, rank, ranks)
        kernels, layout = model.kernels, model.layout
        matrices = [spec.name for spec in layout.specs if _is_matrix(spec)]
        first, last = layout.offsets[matrices[0]], layout.end_of(matrices)
        self._bounds = [first, *borders(layout, ranks, _work)[1:-1], last]
        self._part = slice(self._bounds[rank], self._bounds[rank + 1])
        ranges = layout.ranges(_is_matrix, self.own)
        self._momenta = [slice(start, stop) for start, stop, is_matrix in ranges if is_matrix]
        self._muon_scalars = kernels.scalars(len(MuonScalars._fields))
        self._prepare = kernels.record(self._launch_updates)

    @staticmethod
    def second_moments(layout: Layout) -> Layout:
        return Layout(
            Spec(spec.name, (sum(map(max, spec.matrices)),), MATRIX) if _is_matrix(spec) else spec
            for spec in layout.specs
        )

    @staticmethod
    def group_number(spec: Spec) -> int:
        return -1 if _is_matrix(spec) else AdamW.group_number(spec)

    @property
    def update_bounds(self) -> Sequence[int]:
        return self._bounds if len(self._bounds) > 2 else ()

    def prepare(self, step: int, lr: float, grad_scale: float, norm_scale: float) -> None:
        super().prepare(step, lr, grad_scale, norm_scale)
        values = muon_scalars(self.config, step, lr, grad_scale, norm_scale)
        self.model.kernels.put(self._muon_scalars, np.array(values))
        self._prepare()

    def _launch_updates(self) -> None:
        """Compute all momenta, and the updates of this rank's part of the matrices."""
        k, grads = self.model.kernels, self.model.grads.flat[self.own]
        m, g = ([flat[here] for here in self._momenta] for flat in (self.m.flat, grads))
        k.muon_momentum(m, g, self.norm, self._muon_scalars)
        shared = (
            matrix
            for name, matrices in self._matrices.items()
            for matrix in matrices
            if self._part.start <= self.model.layout.offsets[name] < self._part.stop
        )
        k.orthogonalise([matrix.u for matrix in shared])

    def _launch(self) -> None:
        super()._launch()
        matrices = [matrix for some in self._matrices.values() for matrix in some]
        self.model.kernels.muon(matrices, self.norm, self._muon_scalars, self.config.beta2)

    @cached_property
    def _matrices(self) -> dict[str, list[MuonMatrix]]:
        """Return the matrices of this rank's part, by the name of the tensor that they are in."""
        model, offsets, own = self.model, self.model.layout.offsets, self.own
        low = model.params.flat[own] if model.has_low_precision_copy else None
        p, u = model.precise(own), model.grads.flat[own]
        found: dict[str, list[MuonMatrix]] = {}
        for spec in filter(_is_matrix, model.layout.specs):
            if not own.start <= offsets[spec.name] < own.stop:
                continue
            start = offsets[spec.name] - own.start
            second = self.v.layout.offsets[spec.name] - self.v_own.start
            for shape in spec.matrices:
                here = slice(start, start + prod(shape))
                matrix = MuonMatrix(
                    p[here].reshape(shape),
                    None if low is None else low[here].reshape(shape),
                    self.v.flat[second : second + max(shape)],
                    u[here].reshape(shape),
                )
                found.setdefault(spec.name, []).append(matrix)
                start, second = here.stop, second + max(shape)
        return found


OPTIMIZERS: dict[str, type[AdamW]] = {"adamw": AdamW, "muon": Muon}


def muon_scalars(
    config: TrainConfig, step: int, lr: float, grad_scale: float, norm_scale: float
) -> MuonScalars:
    """Return the hyperparameters of a step."""
    risen = min(1.0, step / MOMENTUM_WARMUP)
    first = min(FIRST_MOMENTUM, config.momentum)
    return MuonScalars(
        grad_scale,
        clip=clip_norm(config, grad_scale, norm_scale),
        momentum=first + (config.momentum - first) * risen,
        learning_rate=lr,
        weight_decay=config.weight_decay * lr / config.lr,
    )


def borders(layout: Layout, parts: int, weight: Callable[[Spec], float]) -> list[int]:
    """Return where each of `parts` of about equal weight begins, and where the last one ends.

    No matrix of a layer is cut.
    """
    starts = [*layout.offsets.values(), layout.size]
    weights = [0.0, *accumulate(map(weight, layout.specs))]
    found = [0]
    for part in range(1, parts):
        target = weights[-1] * part / parts
        i = min(bisect_right(weights, target) - 1, len(layout.specs) - 1)
        spec, inside = layout.specs[i], target - weights[i]
        inside /= weight(spec) or 1
        whole = round(inside) if _is_matrix(spec) else inside
        position = starts[i + 1] if whole == 1 else starts[i] + int(whole * spec.size) // ALIGNED * ALIGNED
        found.append(max(position, found[-1]))
    return [*found, layout.size]


def _is_matrix(spec: Spec) -> bool:
    return spec.group == MATRIX


def _work(spec: Spec) -> float:
    """Return how much there is to compute to orthogonalise a tensor's matrices."""
    return sum(prod(shape) * min(shape) for shape in spec.matrices) if _is_matrix(spec) else 0.0
