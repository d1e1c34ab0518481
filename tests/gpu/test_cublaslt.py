"""Matmuls through cuBLASLt, against NumPy, on an implementation of cuBLASLt for the host."""

import ctypes
import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from distgpt.core.ops.low_precision import from_bfloat16, to_bfloat16
from distgpt.gpu.compiling import Kept
from distgpt.gpu.cublaslt import CublasLt, Epilogue, LtError
from distgpt.gpu.device import STORAGE
from distgpt.gpu.matmul import LtMatmul, Matmul
from hostlt import ALIGNMENTS, HostLt

TYPES = [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "float32"), ("float64", "float64")]
PLAIN = Matmul(6, 16, 5, False, False, "float32", "float32")
EPILOGUES = {
    "none": {},
    "none, accumulating": {"accumulate": True},
    "none, onto": {"onto": True},
    "bias": {"epilogue": "bias"},
    "bias, onto": {"epilogue": "bias", "onto": True},
    "gelu": {"epilogue": "gelu"},
    "gelu with bias": {"epilogue": "gelu", "has_bias": True},
    "dgelu": {"epilogue": "dgelu"},
    "column sums": {"epilogue": "column_sums"},
    "column sums, accumulating": {"epilogue": "column_sums", "accumulate": True},
}


def empty(shape, stored, offset=0):
    """Full of NaN (all bits set), at an address that is a multiple of 256, plus the offset in numbers."""
    dtype = STORAGE[stored]
    room = np.full(math.prod(shape) * dtype.itemsize + 1024, 0xFF, np.uint8)
    start = -room.ctypes.data % 256 + offset * dtype.itemsize
    return room[start : start + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)


def put(numbers, stored, offset=0):
    array = empty(numbers.shape, stored, offset)
    array[...] = to_bfloat16(numbers) if stored == "bfloat16" else numbers
    return array


def numbers(array):
    return (from_bfloat16(array) if array.dtype == np.uint16 else array).astype(np.float64)


def random(shape, stored, seed, offset=0):
    return put(np.random.default_rng(seed).standard_normal(shape), stored, offset)


def operands(kind, offset=0):
    """Arrays for `run`; all that is only written holds NaN."""
    m, n, k = kind.m, kind.n, kind.k
    written = kind.epilogue == "column_sums"
    arrays = {
        "out": (random if kind.accumulate else empty)((m, n), kind.out_type, *[1] * kind.accumulate),
        "a": random((k, m) if kind.transpose_a else (m, k), kind.in_type, 2, offset),
        "b": random((n, k) if kind.transpose_b else (k, n), kind.in_type, 3),
    }
    if kind.onto:
        arrays["onto"] = random((m, n), kind.out_type, 6)
    if kind.epilogue == "bias" or kind.has_bias:
        arrays["bias"] = random((n,), kind.out_type, 4)
    if written:
        arrays["bias"] = empty((m,), kind.out_type)
    if kind.epilogue in ("gelu", "dgelu"):
        arrays["aux"] = empty((m, n), kind.out_type)
    if kind.epilogue == "dgelu":
        arrays["aux"][...] = random((m, n), kind.out_type, 5)
    return arrays


def _tanh_part(x):
    return np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


def _gelu(x):
    return 0.5 * x * (1 + _tanh_part(x))


def _gelu_derivative(x, step=1e-6):
    return (_gelu(x + step) - _gelu(x - step)) / (2 * step)


def expected(kind, arrays):
    """The arrays as they should be afterwards, in float64."""
    before = {name: numbers(array) for name, array in arrays.items()}
    a = before["a"].T if kind.transpose_a else before["a"]
    b = before["b"].T if kind.transpose_b else before["b"]
    y = a @ b
    if kind.accumulate:
        y = y + before["out"]
    if kind.onto:
        y = y + before["onto"]
    if kind.epilogue == "bias" or kind.has_bias:
        y = y + before["bias"]
    after = dict(before)
    if kind.epilogue == "gelu":
        after["aux"], y = y, _gelu(y)
    if kind.epilogue == "dgelu":
        y = y * _gelu_derivative(before["aux"])
    if kind.epilogue == "column_sums":
        after["bias"] = a.sum(axis=1)
    return after | {"out": y}


def compute(matmuls, kind, offset=0, arrays=None):
    """Compute it and compare. `offset`: of a from a well aligned address, in numbers."""
    arrays = arrays or operands(kind, offset)
    right = expected(kind, arrays)
    matmuls.run(kind, **arrays)
    # A rounding to the type of out, of numbers that are up to a few times as large as the last.
    relative = {"bfloat16": 2**-8, "float32": 1e-6, "float64": 1e-8}[kind.out_type]
    for name, array in arrays.items():
        np.testing.assert_allclose(numbers(array), right[name], rtol=relative, atol=relative, err_msg=name)


STREAM = 0x5EA
# Algorithms of the host's implementation, see ALGORITHMS there.
IN_PLACE, TOO_MUCH_WORKSPACE, UNFIT, WIDEST, IN_PARTS, BREAKING, ANY, ROUNDED_PARTS = range(8)


def destroy(lt, kind, *addresses):
    """Free objects of the library, which the program itself keeps to its end."""
    for address in addresses:
        assert getattr(lt._library, f"cublasLt{kind}Destroy")(ctypes.c_void_p(address)) == 0


class Bench:
    """`LtMatmul` on numpy's arrays, with this as its device: an algorithm takes as long as the test says."""

    capability = (8, 0)
    stream = SimpleNamespace(ptr=STREAM)
    zeros = staticmethod(np.zeros)

    def __init__(self, takes=None, deterministic=False, tf32=False):
        self.takes, self.deterministic = takes or {}, deterministic
        self.timed, self.restored, self.kept = [], 0, Kept(None)
        self.stand_in = HostLt()
        self.lt = CublasLt(self.stand_in)
        self.matmuls = LtMatmul(self.lt, self, tf32)

    def close(self):
        """Free all that the plans hold."""
        for plan in self.matmuls._plans.values():
            destroy(self.lt, "MatmulDesc", plan.descriptor)
            destroy(self.lt, "MatrixLayout", plan.a, plan.b, plan.out)
        destroy(self.lt, "", self.lt.handle)

    def times(self, works):
        first = len(self.timed)
        for work in works:
            work()
            self.timed.append(self.stand_in.algorithm)
        return [self.takes.get(algorithm, 1.0) for algorithm in self.timed[first:]]

    def keep(self, array, work):
        self.restored += 1
        saved = array.copy()
        work()
        array[...] = saved


@pytest.fixture
def bench():
    """Makes benches; afterwards nothing may have been refused as invalid, and nothing may be left over."""
    made = []

    def make(**options):
        made.append(Bench(**options))
        return made[-1]

    yield make
    for one in made:
        one.close()
        assert one.stand_in.invalid == 0 and one.stand_in.live == {}


@pytest.mark.parametrize("what", EPILOGUES)
@pytest.mark.parametrize("types", TYPES, ids="→".join)
def test_products_are_those_of_numpy_for_all_transposes_and_odd_shapes(bench, types, what):
    matmuls = bench().matmuls
    columns = (8, 40) if "gelu" in what else (1, 8, 13)
    for ta, tb, m, n, k in itertools.product((False, True), (False, True), (1, 7), columns, (1, 9)):
        kind = Matmul(m, n, k, ta, tb, *types, **EPILOGUES[what])
        assert matmuls.can(kind)
        compute(matmuls, kind)


@pytest.mark.parametrize("types", TYPES, ids="→".join)
@pytest.mark.parametrize("factors", [None, (1.0, 8.25), (-1.5, 0.5)])
def test_batches_are_as_many_matmuls_multiplied_and_added_to(bench, types, factors):
    one, many = bench(), 3
    for ta, tb, onto in itertools.product((False, True), (False, True), (False, True)):
        kind = Matmul(7, 16, 8, ta, tb, *types, onto=onto, batch=many)
        shapes = {"a": (8, 7) if ta else (7, 8), "b": (16, 8) if tb else (8, 16)}
        a, b = (random((many, *shapes[name]), types[0], i) for i, name in enumerate("ab"))
        out, added = empty((many, 7, 16), types[1]), random((many, 7, 16), types[1], 9)
        alpha, beta = factors or (1.0, 1.0)
        by = factors and (alpha, beta if onto else 0.0)
        one.matmuls.run(kind, out, a, b, onto=added if onto else None, factors=by)
        left, right = (numbers(x) for x in (a, b))
        left, right = left.swapaxes(1, 2) if ta else left, right.swapaxes(1, 2) if tb else right
        wanted = alpha * (left @ right) + (beta * numbers(added) if onto else 0)
        relative = {"bfloat16": 2**-8, "float32": 1e-6, "float64": 1e-8}[types[1]]
        np.testing.assert_allclose(numbers(out), wanted, rtol=relative, atol=8 * relative)
    assert one.timed  # candidates were tried with these factors, too


@pytest.mark.parametrize("fastest", [IN_PLACE, WIDEST, IN_PARTS, ANY, ROUNDED_PARTS])
def test_the_fastest_algorithm_runs_and_is_looked_for_only_once(bench, fastest):
    one = bench(takes={fastest: 0.5, BREAKING: 0.1, UNFIT: 0.1, TOO_MUCH_WORKSPACE: 0.1})
    kind = replace(PLAIN, n=64, k=64, m=64)
    compute(one.matmuls, kind)
    assert one.stand_in.algorithm == fastest
    assert one.timed == [IN_PLACE, WIDEST, IN_PARTS, ANY, ROUNDED_PARTS]
    searches, started = one.stand_in.searches, one.stand_in.started
    for _ in range(3):
        compute(one.matmuls, replace(kind))
    assert one.stand_in.algorithm == fastest
    assert (one.stand_in.searches, one.stand_in.started) == (searches, started + 3)


def test_products_that_sum_in_bfloat16_are_never_taken(bench):
    one = bench(takes={IN_PLACE: 0.1, ROUNDED_PARTS: 0.1})
    compute(one.matmuls, Matmul(64, 128, 128, False, False, "bfloat16", "bfloat16"))
    assert one.timed == [WIDEST, IN_PARTS, ANY]


def test_determinism_takes_the_first_algorithm_without_timing_and_none_in_place(bench):
    one = bench(deterministic=True, takes={ANY: 0.1, IN_PLACE: 0.1})
    compute(one.matmuls, replace(PLAIN, m=64, n=64, k=64))
    assert one.stand_in.algorithm == WIDEST and one.timed == []


def test_timing_an_accumulating_product_adds_only_once_and_others_are_not_saved(bench):
    one = bench()
    compute(one.matmuls, replace(PLAIN, accumulate=True))
    assert one.restored == 1 and len(one.timed) > 1
    compute(one.matmuls, replace(PLAIN, epilogue="column_sums"))
    assert one.restored == 1


def test_pointers_and_rows_decide_which_algorithms_are_fit(bench):
    one = bench(takes={WIDEST: 0.1, IN_PARTS: 0.2})
    kind = replace(PLAIN, m=64, n=64, k=64)
    compute(one.matmuls, kind, offset=1)
    assert one.timed == [ANY, ROUNDED_PARTS]
    compute(one.matmuls, kind, offset=4)
    assert one.stand_in.algorithm == IN_PARTS
    compute(one.matmuls, kind)
    assert one.stand_in.algorithm == WIDEST
    compute(one.matmuls, kind, offset=1)
    assert one.stand_in.algorithm in (ANY, ROUNDED_PARTS)
    compute(one.matmuls, replace(kind, k=63))  # the rows of a are odd, at good addresses
    assert one.stand_in.algorithm in (ANY, ROUNDED_PARTS)
    assert [one.stand_in.preference[of] for of in ALIGNMENTS[:2]] == [256, 4]  # the library's A is our b


def test_what_the_library_cannot_do_is_known_beforehand_and_named(bench):
    one = bench()
    one.stand_in.refused, matmuls = Epilogue.DGELU, one.matmuls
    unknown, mixed = replace(PLAIN, epilogue="dgelu"), replace(PLAIN, in_type="float64")
    assert not matmuls.can(unknown) and matmuls.can(replace(PLAIN, epilogue="gelu"))
    for kind, words in ((unknown, "float32.*dgelu"), (mixed, "float64.*float32")):
        with pytest.raises(LtError, match=rf"m=6, n=16, k=5.*{words}.*NOT_SUPPORTED"):
            matmuls.run(kind, **operands(kind))


def test_tf32_is_used_only_where_it_was_asked_for(bench):
    third, one = np.full((1, 1), np.float32(1 / 3)), np.ones((1, 1))
    results = []
    for tf32 in (False, True):
        out = empty((1, 1), "float32")
        matmuls = bench(tf32=tf32).matmuls
        matmuls.run(replace(PLAIN, m=1, n=1, k=1), out, put(third, "float32"), put(one, "float32"))
        results.append(out[0, 0])
    assert results == [third[0, 0], np.float32(1365 / 4096)]  # eleven bits
    compute(bench(tf32=True).matmuls, Matmul(3, 5, 4, False, True, "bfloat16", "float32"))
    compute(bench(tf32=True).matmuls, Matmul(3, 5, 4, False, True, "float64", "float64"))
