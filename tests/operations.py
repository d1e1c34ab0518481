"""What every backend's operations must do: the same as the reference, on odd shapes, with poisoned outputs.

A test module takes all of this in and gives the fixture `both`: the reference and a backend.
"""

import numpy as np
import pytest

SHAPES = [(3, 7, 24, 3, 13), (1, 1, 8, 2, 5), (2, 33, 40, 5, 31), (5, 130, 16, 4, 70)]  # B, T, C, H, V
NORM_KINDS = [(True, True, True), (True, True, False), (False, True, False), (False, False, False)]


def tolerance(kernels):
    """For results of the size of 1."""
    if kernels.wide != kernels.dtype:
        return 2e-2
    return {"float32": 2e-5, "float64": 1e-12}[kernels.dtype.name]


class Wide:
    """Marks what an operation has in the wide type: numbers, or the shape of an output."""

    def __init__(self, content):
        self.content = content


class Case:
    """Runs operations on both backends from the same inputs and compares every output."""

    def __init__(self, both, shape=SHAPES[0], seed=0):
        self.reference, self.kernels = both
        self.rng = np.random.default_rng(seed)
        self.b, self.t, self.c, self.h, self.v = shape
        self.n = self.b * self.t

    def random(self, *shape):
        return self.rng.standard_normal(shape)

    def ints(self, high, n):
        return self.rng.integers(0, high, n).astype(np.int32)

    def check(self, work, outputs, *inputs, strict=1.0):
        """`work` is an operation's name, or is called with the backend first. Outputs are shapes, which are
        poisoned, or numbers to start from. Gives what the reference found."""
        results = []
        for k in (self.reference, self.kernels):
            outs = [self._array(k, out, poisoned=True) for out in outputs]
            ins = [self._array(k, value) for value in inputs]
            getattr(k, work)(*outs, *ins) if isinstance(work, str) else work(k, *outs, *ins)
            results.append([None if out is None else np.array(k.to_host(out), np.float64) for out in outs])
        for expected, got in zip(*results, strict=True):
            if expected is not None:
                assert np.isfinite(got).all()
                scale = max(1.0, float(np.abs(expected).max()))
                limit = tolerance(self.kernels) * scale * strict
                np.testing.assert_allclose(got, expected, rtol=0, atol=limit)
        return results[0]

    def _array(self, k, value, poisoned=False):
        """A backend's array of these numbers, as the tested backend would round them."""
        wide = isinstance(value, Wide)
        value = value.content if wide else value
        if poisoned and isinstance(value, tuple):
            value = np.full(value, np.nan)
        if not isinstance(value, np.ndarray):
            return value
        if value.dtype.kind == "i":
            return k.integers(value, value.dtype.name)
        if isinstance(value, Scalars):
            array = k.scalars(len(value))
            k.put(array, np.asarray(value))
            return array
        rounded = self.kernels.wide_zeros(*value.shape) if wide else self.kernels.zeros(*value.shape)
        self.kernels.put(rounded, value)
        array = k.wide_zeros(*value.shape) if wide else k.zeros(*value.shape)
        k.put(array, self.kernels.to_host(rounded))
        return array


class Scalars(np.ndarray):
    """Numbers that are float64 everywhere."""


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
    dwpe = Wide(case.random(case.t + 2, case.c)) if positions else None
    words = case.ints(case.v, case.n)
    words[case.n // 3 :] = words[0]  # one that is very frequent
    outs, dx = [Wide(case.random(case.v, case.c)), dwpe], case.random(case.n, case.c)
    case.check("embed_backward", outs, dx, words, case.t)


def norm_parts(case, mean, gain, bias):
    return (
        Wide(case.random(case.n)) if mean else None,
        Wide(np.abs(case.random(case.n)) + 0.1),
        case.random(case.c) if gain else None,
        case.random(case.c) if bias else None,
    )


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("kind", NORM_KINDS)
def test_add_norm(case, kind, residual):
    mean, _, w, b = norm_parts(case, *kind)
    x, rows = case.random(case.n, case.c), (case.n, case.c)
    stats = [None if mean is None else Wide((case.n,)), Wide((case.n,))]
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
    rows = (case.n, case.c)

    def work(k, dw, db, dy, s, mean, rstd, w, b):
        partial = k.wide_zeros(k.norm_partials, 2 * case.c) if k.norm_partials else None
        if partial is not None:
            k.put(partial, np.full(partial.shape, np.nan))
        k.norm_backward(k.zeros(*rows), None, partial, dy, None, s, mean, rstd, w, b)
        k.norm_backward_weights(dw, db, partial, dy, s, mean, rstd, accumulate)

    outs = [Wide(part if accumulate else part.shape) if part is not None else None for part in (w, b)]
    case.check(work, outs, case.random(*rows), case.random(*rows), mean, rstd, w, b)


@pytest.mark.parametrize("bias", [True, False])
def test_linear(case, bias):
    w = case.random(case.v, case.c)
    b = case.random(case.v) if bias else None
    case.check("linear", [(case.n, case.v)], case.random(case.n, case.c), w, b)
    case.check("linear", [(3, case.v)], case.random(3, case.c), w, b)
    case.check("linear_backward", [(case.n, case.c)], case.random(case.n, case.v), w)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("accumulate", [True, False])
def test_linear_backward_weights(case, accumulate, bias):
    dw, db = case.random(case.v, case.c), case.random(case.v) if bias else None
    outs = [None if part is None else Wide(part if accumulate else part.shape) for part in (dw, db)]
    dy, x = case.random(case.n, case.v), case.random(case.n, case.c)
    case.check("linear_backward_weights", outs, dy, x, accumulate)


@pytest.mark.parametrize("hidden", [11, 16])
@pytest.mark.parametrize("act", ["gelu", "relu", "swiglu"])
def test_linear_act(case, act, hidden):
    wide = 2 * hidden if act == "swiglu" else hidden
    x, w, b = case.random(case.n, case.c), case.random(wide, case.c), case.random(wide)
    for bias in (b, None):
        _, pre = case.check("linear_act", [(case.n, hidden), (case.n, wide)], x, w, bias, act)
    dy, w2 = case.random(case.n, case.c), case.random(case.c, hidden)

    def backward(k, dpre, y, dy, w, pre, again):
        if k.in_place:
            k.put(dpre, k.to_host(pre))
            pre = dpre
        k.linear_backward_act(dpre, y, dy, w, pre, act, again)
        if not again:
            k.zero(y)

    for again in (True, False):
        case.check(backward, [(case.n, wide), (case.n, hidden)], dy, w2, pre, again)


@pytest.mark.parametrize("inverse", [True, False])
def test_rope(case, inverse):
    half = case.c // case.h // 2
    angle = case.random(case.t + 2, half)
    qkv = case.random(case.n, 3 * case.h * 2 * half)
    for start in (None, np.array([2], np.int32)):
        tables = Wide(np.cos(angle)), Wide(np.sin(angle))
        case.check("rope", [qkv], *tables, case.h, case.t, start, inverse)


def test_attention(case):
    qkv, dy = case.random(case.n, 3 * case.c), case.random(case.n, case.c)

    def work(k, y, dqkv, dy, qkv):
        lse = k.wide_zeros(case.n, case.h)
        k.attention(y, lse, qkv, case.t)
        k.attention_backward(dqkv, dy, y, lse, qkv, case.t)

    case.check(work, [dy.shape, qkv.shape], dy, qkv, strict=2.0)


@pytest.mark.parametrize("new", [1, 4])
def test_attention_cached(case, new):
    start = np.array([5], np.int32)
    cache = case.random(2, case.b, case.h, 5 + new + 3, case.c // case.h)
    outs, qkv = [(case.b * new, case.c), cache], case.random(case.b * new, 3 * case.c)
    case.check("attention_cached", outs, qkv, start)


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
    outs = [Wide((case.n,)), (case.n, case.c), Wide(dw if accumulate else np.zeros_like(dw))]
    case.check("linear_cross_entropy", outs, *inputs, accumulate, strict=2.0)
    case.check("linear_cross_entropy", [Wide((case.n,)), None, None], *inputs, accumulate, strict=2.0)


def scalars(*numbers):
    return np.array(numbers).view(Scalars)


@pytest.mark.parametrize("n", [30_011, 7])
def test_adamw(both, n):
    case = Case(both)
    cut = n // 3
    runs = np.array([(0, cut, True), (cut, cut + 3, False), (cut + 3, n, True)])
    p, m, v, g = case.random(n), case.random(n), case.random(n) ** 2, Wide(case.random(n))
    outs = [Wide(p), (n,) if both[1].dtype != both[1].wide else None, Wide(m), Wide(v)]
    length = scalars((g.content**2).sum())
    for clip in (0, 1.0, 1e6):
        case.check("adamw", outs, g, runs, length, scalars(0.5, clip, 1e-2, 0.99, 1.7), 0.9, 0.95, 1e-8)
    for broken in (np.inf, np.nan):
        knobs = scalars(0.5, 1.0, 1e-2, 0.99, 1.7)
        outs[1] = None
        kept = case.check("adamw", outs, g, runs, scalars(broken), knobs, 0.9, 0.95, 1e-8)
        np.testing.assert_allclose(kept[0], p, rtol=1e-6)


@pytest.mark.parametrize("n", [30_011, 7])
def test_sums(both, n):
    case = Case(both)
    g = Wide(case.random(n))
    case.check("sum_squares", [scalars(np.nan)], g)
    case.check("sum_squares", [scalars(np.nan)], case.random(n))
    case.check("sum", [Wide((1,))], g, 0.3, False)
    case.check("sum", [Wide(np.ones(1))], g, 0.3, True)
    case.check("round", [(n,)], g)
    case.check("add", [(n, 3)], case.random(n, 3), case.random(n, 3))


def test_what_is_read_later_is_what_was_there(both):
    k = both[1]
    array = k.wide_zeros(3)
    k.put(array, np.array([1.0, 2.0, 3.0]))
    taken = k.later(array)
    k.zero(array)
    np.testing.assert_array_equal(taken(), [1, 2, 3])
    np.testing.assert_array_equal(k.to_host(array), [0, 0, 0])


def test_recorded_work_is_repeated_on_what_the_arrays_hold_then(both):
    k = both[1]
    total, x = k.wide_zeros(1), k.wide_zeros(5)
    work = k.record(lambda: k.sum(total, x, 2.0, accumulate=False))
    for value in (1.0, 3.0, 5.0, 7.0):
        k.put(x, np.full(5, value))
        work()
        assert k.to_host(total)[0] == 10 * value
