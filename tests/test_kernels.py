"""Every fused kernel against the reference: odd shapes, both dtypes, any crew, poisoned outputs."""

import inspect

import numpy as np
import pytest

from distgpt.kernels.api import Kernels
from distgpt.kernels.cpu import CpuKernels
from distgpt.kernels.reference import ReferenceKernels

TOLERANCE = {"float32": 2e-5, "float64": 1e-12}
SHAPES = [(3, 7, 24, 3, 13), (1, 1, 8, 2, 5), (2, 33, 40, 5, 31), (5, 130, 16, 4, 70)]  # B, T, C, H, V


def public(cls):
    return {n: f for n, f in inspect.getmembers(cls, inspect.isfunction) if not n.startswith("_")}


@pytest.mark.parametrize("backend", [ReferenceKernels, CpuKernels])
def test_signatures_are_identical(backend):
    wanted, found = public(Kernels), public(backend)
    assert wanted.keys() == found.keys()
    for name, function in wanted.items():
        assert inspect.signature(function) == inspect.signature(found[name]), name


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    return request.param


@pytest.fixture(params=[1, 3], ids=["1 thread", "3 threads"])
def both(request, dtype):
    return ReferenceKernels("float64"), CpuKernels(dtype, request.param)


class Case:
    """Runs one operation on both backends from the same inputs and compares every output."""

    def __init__(self, both, shape, seed=0):
        self.reference, self.fused = both
        self.rng = np.random.default_rng(seed)
        self.b, self.t, self.c, self.h, self.v = shape
        self.n = self.b * self.t

    def random(self, *shape):
        return self.rng.standard_normal(shape)

    def ints(self, high, n):
        return self.rng.integers(0, high, n).astype(np.int32)

    def check(self, op, outputs, *inputs, start=None):
        """outputs: shapes (poisoned with nan), or arrays to start from where the operation reads them."""
        dtype = self.fused.dtype
        results = []
        for kernels in (self.reference, self.fused):

            def cast(value, kernels=kernels):
                floating = isinstance(value, np.ndarray) and value.dtype.kind == "f"
                return value.astype(kernels.dtype) if floating else value

            outs = [
                None
                if out is None
                else cast(out)
                if isinstance(out, np.ndarray)
                else np.full(out, np.nan, kernels.dtype)
                for out in outputs
            ]
            # Both see the inputs as rounded to the fused backend's dtype.
            rounded = [
                value.astype(dtype) if isinstance(value, np.ndarray) and value.dtype.kind == "f" else value
                for value in inputs
            ]
            getattr(kernels, op)(*outs, *(cast(value) for value in rounded))
            results.append(outs)
        for expected, got in zip(*results, strict=True):
            if expected is not None:
                assert np.isfinite(got).all()
                scale = max(1.0, float(np.abs(expected).max()))
                np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE[dtype.name] * scale)
        return results[0]


@pytest.fixture(params=SHAPES, ids=str)
def case(both, request):
    return Case(both, request.param)


@pytest.mark.parametrize("positions", [True, False])
def test_embed(case, positions):
    wpe = case.random(case.t + 3, case.c) if positions else None
    inputs = [case.ints(case.v, case.n), case.random(case.v, case.c), wpe, case.t]
    case.check("embed", [(case.n, case.c)], *inputs, None)
    case.check("embed", [(case.n, case.c)], *inputs, np.array([3], np.int32))


@pytest.mark.parametrize("positions", [True, False])
def test_embed_backward(case, positions):
    dwpe = case.random(case.t + 2, case.c) if positions else None
    case.check(
        "embed_backward",
        [case.random(case.v, case.c), dwpe],
        case.random(case.n, case.c),
        case.ints(case.v, case.n),
        case.t,
    )


def norm_parts(case, mean, gain, bias):
    return (
        case.random(case.n) if mean else None,
        np.abs(case.random(case.n)) + 0.1,
        case.random(case.c) if gain else None,
        case.random(case.c) if bias else None,
    )


NORM_KINDS = [(True, True, True), (True, True, False), (False, True, False), (False, False, False)]


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("kind", NORM_KINDS)
def test_add_norm(case, kind, residual):
    mean, rstd, w, b = norm_parts(case, *kind)
    x, rows = case.random(case.n, case.c), (case.n, case.c)
    stats = [(case.n,) if mean is not None else None, rstd.shape]
    r = case.random(*rows) if residual else None
    case.check("add_norm", [rows, rows if residual else x, *stats], x, r, w, b, 1e-5)


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("kind", NORM_KINDS)
def test_norm_backward(case, kind, residual):
    mean, rstd, w, b = norm_parts(case, *kind)
    rows = (case.n, case.c)
    dres = case.random(*rows) if residual else None
    for again in (rows, None):
        outs, dy, s = [rows, again, None], case.random(*rows), case.random(*rows)
        case.check("norm_backward", outs, dy, dres, s, mean, rstd, w, b)


@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize("kind", NORM_KINDS[:3])
def test_norm_backward_weights(case, kind, accumulate):
    mean, rstd, w, b = norm_parts(case, *kind)
    outs = [w if accumulate else w.shape, b if accumulate or b is None else b.shape]
    rows = (case.n, case.c)
    inputs = [None, case.random(*rows), case.random(*rows), mean, rstd]
    case.check("norm_backward_weights", outs, *inputs, accumulate)


@pytest.mark.parametrize("bias", [True, False])
def test_linear(case, bias):
    w = case.random(case.v, case.c)
    b = case.random(case.v) if bias else None
    case.check("linear", [(case.n, case.v)], case.random(case.n, case.c), w, b)
    case.check("linear_backward", [(case.n, case.c)], case.random(case.n, case.v), w)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("accumulate", [True, False])
def test_linear_backward_weights(case, accumulate, bias):
    dw, db = case.random(case.v, case.c), case.random(case.v) if bias else None
    outs = [dw, db] if accumulate else [dw.shape, None if db is None else db.shape]
    dy, x = case.random(case.n, case.v), case.random(case.n, case.c)
    case.check("linear_backward_weights", outs, dy, x, accumulate)


@pytest.mark.parametrize("act", ["gelu", "relu", "swiglu"])
def test_linear_act(case, act):
    hidden, wide = 11, 22 if act == "swiglu" else 11
    x, w, b = case.random(case.n, case.c), case.random(wide, case.c), case.random(wide)
    _, pre = case.check("linear_act", [(case.n, hidden), (case.n, wide)], x, w, b, act)
    dy, w2 = case.random(case.n, case.c), case.random(case.c, hidden)
    case.check("linear_backward_act", [pre, (case.n, hidden)], dy, w2, pre, act, True)


@pytest.mark.parametrize("inverse", [True, False])
def test_rope(case, inverse):
    half = case.c // case.h // 2
    angle = case.random(case.t + 2, half)
    qkv = case.random(case.n, 3 * case.h * 2 * half)
    for start in (None, np.array([2], np.int32)):
        case.check("rope", [qkv], np.cos(angle), np.sin(angle), case.h, case.t, start, inverse)


def test_attention(case):
    rows, heads = (case.n, case.c), (case.n, case.h)
    qkv = case.random(case.n, 3 * case.c)
    y, lse = case.check("attention", [rows, heads], qkv, case.t)
    case.check("attention_backward", [qkv.shape], case.random(*rows), y, lse, qkv, case.t)


@pytest.mark.parametrize("new", [1, 4])
def test_attention_cached(case, new):
    start = np.array([5], np.int32)
    cache = case.random(2, case.b, case.h, 5 + new + 3, case.c // case.h)
    case.check(
        "attention_cached", [(case.b * new, case.c), cache], case.random(case.b * new, 3 * case.c), start
    )


@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize("chunk", [1000, 9])
def test_linear_cross_entropy(case, chunk, accumulate):
    padded = case.v + 3
    dw = case.random(padded, case.c)
    dw[case.v :] = 0
    inputs = [
        case.random(case.n, case.c),
        case.random(padded, case.c),
        case.ints(case.v, case.n),
        np.zeros((min(chunk, case.n), padded)),
        case.v,
        0.37,
    ]
    outs = [(case.n,), (case.n, case.c), dw if accumulate else np.zeros_like(dw)]
    case.check("linear_cross_entropy", outs, *inputs, accumulate)
    case.check("linear_cross_entropy", [(case.n,), None, None], *inputs, accumulate)


def test_adamw_and_sum_squares(both):
    case = Case(both, SHAPES[0])
    n = 30_011
    runs = np.array([(0, 10_000, True), (10_000, 10_003, False), (10_003, n, True)])
    p, m, v, g = case.random(n), case.random(n), case.random(n) ** 2, case.random(n)
    for clip in (0, 1.0, 1e6):
        knobs = np.array([0.5, clip, 1e-2, 0.99, 1.7])
        case.check("adamw", [p, None, m, v], g, runs, np.array([(g**2).sum()]), knobs, 0.9, 0.95, 1e-8)
    kept = case.check("adamw", [p, None, m, v], g, runs, np.array([np.inf]), knobs, 0.9, 0.95, 1e-8)
    np.testing.assert_array_equal(kept[0], p)
    case.check("sum_squares", [(1,)], g)
    case.check("sum", [(1,)], g, 0.3, False)
    case.check("sum", [np.ones(1)], g, 0.3, True)


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
    k = case.fused
    dy, x = dy.astype(k.dtype), x.astype(k.dtype)
    outs = [(dw.astype(k.dtype), db.astype(k.dtype)) for dw, db in outs]
    k.share(lambda: [k.linear_backward_weights(dw, db, dy, x, False) for dw, db in outs] and None)
    for dw, db in outs:
        np.testing.assert_allclose(dw, dy.T @ x, atol=TOLERANCE[k.dtype.name] * 30)
        np.testing.assert_allclose(db, dy.sum(0), atol=TOLERANCE[k.dtype.name] * 30)
