"""Muon: the layers' matrices move along their orthogonalized momentum; AdamW updates the rest.

There is one second moment per row of a matrix, or per column of a wide one (NorMuon, arXiv 2510.05491).
Weight decay acts only in the direction of the update (arXiv 2510.12402), and decreases with the learning
rate.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod

import numpy as np

from distgpt.core.config import TrainConfig
from distgpt.core.model.memory import ALIGNED, MATRIX, Layout, Spec
from distgpt.core.model.model import Model
from distgpt.core.model.optim import AdamW, clip_norm
from distgpt.core.ops.api import MuonMatrix, MuonScalars, Wide2d

# The momentum increases from this value over MOMENTUM_WARMUP steps, as in modded-nanogpt.
FIRST_MOMENTUM = 0.85
MOMENTUM_WARMUP = 300


class Muon(AdamW):
    """Muon with its momenta and second moments. `own` never splits a matrix.

    If all ranks have all moments, each of `ranks` orthogonalizes some of the matrices in place of their
    gradients, and they share the results before the update.
    """

    def __init__(
        self, model: Model, config: TrainConfig, own: slice | None = None, rank: int = 0, ranks: int = 1
    ) -> None:
        super().__init__(model, config, own, rank, ranks)
        layout = model.layout
        matrices = [spec.name for spec in layout.specs if _is_matrix(spec)]
        first = layout.offsets[matrices[0]]
        last = layout.end_of(matrices)
        inner = borders(layout, ranks, _work)[1:-1] if ranks > 1 else []
        self._bounds = [first, *inner, last]
        self._part = slice(self._bounds[rank], self._bounds[rank + 1])
        ranges = layout.ranges(_is_matrix, self.own)
        self._momenta = [slice(start, stop) for start, stop, is_matrix in ranges if is_matrix]
        self._muon_scalars = model.kernels.scalars(len(MuonScalars._fields))
        self._prepare = model.kernels.record(self._launch_updates)

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
        """Compute all momenta, and the updates of this rank's matrices, in place of the gradients."""
        k = self.model.kernels
        grads = self.model.grads.flat[self.own]
        m = [self.m.flat[here] for here in self._momenta]
        g = [grads[here] for here in self._momenta]
        k.muon_momentum(m, g, self.norm, self._muon_scalars)
        k.orthogonalise(self._updates)

    def _launch(self) -> None:
        super()._launch()
        matrices = [matrix for some in self._matrices.values() for matrix in some]
        self.model.kernels.muon(matrices, self.norm, self._muon_scalars, self.config.beta2)

    @cached_property
    def _updates(self) -> list[Wide2d]:
        """Matrices, or pieces of them, that this rank orthogonalizes."""
        grads = self.model.grads.flat[self.own]
        result: list[Wide2d] = []
        for spec in filter(_is_matrix, self.model.layout.specs):
            start = self.model.layout.offsets[spec.name]
            if self._part.start <= start < self._part.stop and self.own.start <= start < self.own.stop:
                ends = accumulate((rows for rows, _ in spec.orthogonal), initial=0)
                u = grads[start - self.own.start :][: spec.size].reshape(spec.shape)
                result += [u[first:last] for first, last in pairwise(ends)]
        return result

    @cached_property
    def _matrices(self) -> dict[str, list[MuonMatrix]]:
        """Matrices of this rank's part, by tensor name."""
        model = self.model
        offsets = model.layout.offsets
        own = self.own
        low = model.params.flat[own] if model.has_low_precision_copy else None
        p = model.masters(own)
        u = model.grads.flat[own]
        result: dict[str, list[MuonMatrix]] = {}
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
                result.setdefault(spec.name, []).append(matrix)
                start = here.stop
                second += max(shape)  # one per row, or per column of a wide matrix
        return result


OPTIMIZERS: dict[str, type[AdamW]] = {"adamw": AdamW, "muon": Muon}


def muon_scalars(
    config: TrainConfig, step: int, lr: float, grad_scale: float, norm_scale: float
) -> MuonScalars:
    risen = min(1.0, step / MOMENTUM_WARMUP)  # rises from 0 to 1
    first = min(FIRST_MOMENTUM, config.momentum)
    return MuonScalars(
        grad_scale,
        clip=clip_norm(config, grad_scale, norm_scale),
        momentum=first + (config.momentum - first) * risen,
        learning_rate=lr,
        weight_decay=config.weight_decay * lr / config.lr,
    )


def borders(layout: Layout, parts: int, weight: Callable[[Spec], float]) -> list[int]:
    """Return the start of each of `parts` of about equal weight, and the end of the last one.

    Matrices of layers are not split.
    """
    starts = [*layout.offsets.values(), layout.size]
    weights = [0.0, *accumulate(map(weight, layout.specs))]
    result = [0]
    for part in range(1, parts):
        target = weights[-1] * part / parts
        i = min(bisect_right(weights, target) - 1, len(layout.specs) - 1)
        spec = layout.specs[i]
        inside = (target - weights[i]) / (weight(spec) or 1)  # fraction of this tensor before the boundary
        whole = round(inside) if _is_matrix(spec) else inside
        position = starts[i] + int(whole * spec.size) // ALIGNED * ALIGNED
        if whole == 1:  # also skip the padding
            position = starts[i + 1]
        result.append(max(position, result[-1]))
    return [*result, layout.size]


def _is_matrix(spec: Spec) -> bool:
    return spec.group == MATRIX


def _work(spec: Spec) -> float:
    """Return the approximate cost of orthogonalizing a tensor's matrices."""
    if not _is_matrix(spec):
        return 0.0
    sides = map(sorted, spec.orthogonal)
    return sum(short * short * (long + 3 * short) for short, long in sides)
