"""The CPU's fused kernels against the reference, in both dtypes and with crews of one and of three."""

import inspect

import numpy as np
import pytest
from operations import *  # noqa: F403
from operations import SHAPES, Case, tolerance

from distgpt.gpu.kernels import CudaKernels
from distgpt.kernels.api import Affine, Kernels
from distgpt.kernels.cpu import CpuKernels
from distgpt.kernels.reference import ReferenceKernels


def public(cls):
    return {n: f for n, f in inspect.getmembers(cls, inspect.isfunction) if not n.startswith("_")}


@pytest.mark.parametrize("backend", [ReferenceKernels, CpuKernels, CudaKernels])
def test_signatures_are_identical(backend):
    wanted, found = public(Kernels), public(backend)
    assert wanted.keys() == found.keys()
    for name, function in wanted.items():
        # The aliases that say an array's type and rank are one type.
        mine, theirs = (inspect.signature(each, eval_str=True) for each in (function, found[name]))
        assert mine == theirs, name


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    return request.param


@pytest.fixture(params=[1, 3], ids=["1 thread", "3 threads"])
def both(request, dtype):
    return ReferenceKernels("float64"), CpuKernels(dtype, request.param)


def test_each_runs_every_part_once_and_reports_failures(both):
    fused = both[1]
    seen = []
    fused.each(seen.append, 7)
    assert sorted(seen) == list(range(7))
    with pytest.raises(ZeroDivisionError):
        fused.each(lambda i: 1 // (i - 2), 3)
    fused.each(seen.append, 1)
    assert len(seen) == 8


def test_shared_work_covers_every_part_once(both):
    """Each worker does its own stretch of each operation, and together they do all of it."""
    case = Case(both, SHAPES[2])
    dy, x = case.random(case.n, 40), case.random(case.n, case.c)
    outs = [(np.full((40, case.c), np.nan), np.full(40, np.nan)) for _ in range(4)]
    k = case.kernels
    dy, x = dy.astype(k.dtype), x.astype(k.dtype)
    outs = [(dw.astype(k.dtype), db.astype(k.dtype)) for dw, db in outs]
    k.run_together(lambda: [k.linear_backward_weights(Affine(*dwb), dy, x, False) for dwb in outs] and None)
    for dw, db in outs:
        np.testing.assert_allclose(dw, dy.T @ x, atol=tolerance(k) * 30)
        np.testing.assert_allclose(db, dy.sum(0), atol=tolerance(k) * 30)
