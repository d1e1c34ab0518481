"""Which matmul float32 uses: the one requested, or the faster one by a table of processors."""

import numpy as np
import pytest

from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.cpu.matmul import layers
from distgpt.core.cpu.matmul.layers import BlasMatmuls, OwnMatmuls
from distgpt.core.ops.api import Affine


def results(kernels, rows, inputs, outputs):
    random = np.random.default_rng(0)
    x, w, b, dy = (
        random.standard_normal(shape).astype(kernels.dtype)
        for shape in ((rows, inputs), (outputs, inputs), outputs, (rows, outputs))
    )
    y, dx, dw, db = (np.full_like(array, np.nan) for array in (dy, x, w, b))
    kernels.linear(y, x, Affine(w, b))
    kernels.linear_backward(dx, dy, w)
    kernels.linear_backward_weights(Affine(dw, db), dy, x, False)
    kernels.linear_backward_weights(Affine(dw, db), dy, x, True)
    expected = x @ w.T + b, dy @ w, 2 * dy.T @ x, 2 * dy.sum(0)
    return (y, dx, dw, db), expected


@pytest.mark.parametrize("matmul", ["auto", "own", "blas"])
def test_each_computes_the_same(matmul):
    for shape in ((5, 3, 70), (100, 64, 2048), (70, 2048, 65), (9, 512, 512)):
        for found, expected in zip(*results(CpuKernels("float32", 2, matmul), *shape), strict=True):
            assert np.abs(found - expected).max() <= 2e-6 * np.abs(expected).max(), shape


def test_what_is_requested_is_used():
    assert isinstance(CpuKernels("float32", 2, "own").matmuls, OwnMatmuls)
    assert isinstance(CpuKernels("float32", 2, "blas").matmuls, BlasMatmuls)
    for matmul in ("own", "auto"):
        assert isinstance(CpuKernels("float64", 2, matmul).matmuls, BlasMatmuls)


@pytest.mark.parametrize(
    ("name", "chosen"),
    [("znver4", OwnMatmuls), ("znver3", BlasMatmuls), ("znver5", BlasMatmuls), ("unheard-of", BlasMatmuls)],
)
def test_the_processor_decides_unless_it_is_requested(name, chosen, monkeypatch):
    monkeypatch.setattr(layers, "processor", lambda: (name, ""))
    assert isinstance(CpuKernels("float32", 1).matmuls, chosen)
    assert isinstance(CpuKernels("float32", 1, "blas").matmuls, BlasMatmuls)
