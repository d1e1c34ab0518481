"""Matrix products through cuBLASLt, against NumPy, on an implementation of cuBLASLt for the host."""

import ctypes
import itertools
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cublaslt_header import HEADER, needs_header
from product_cases import (
    EPILOGUES,
    PLAIN,
    TYPES,
    agree,
    compute,
    empty,
    expected,
    numbers,
    operands,
    put,
    random,
)

from distgpt.errors import DistgptError
from distgpt.gpu.api import Product
from distgpt.gpu.cublaslt import CublasLt, Epilogue, LtError
from distgpt.gpu.matmul import LtProducts, workspace_for

SHIM = Path(__file__).parent / "shim" / "cublaslt.cpp"
STREAM = 0x5EA
# Algorithms of the host's implementation, see `algorithms` there.
IN_PLACE, TOO_MUCH_WORKSPACE, UNFIT, WIDEST, IN_PARTS, BREAKING, ANY, ROUNDED_PARTS = range(8)

CXX = shutil.which("g++")


@pytest.fixture(
    scope="module",
    params=[pytest.param(False, id="declared"), pytest.param(True, id="header", marks=needs_header)],
)
def shim(request, tmp_path_factory):
    if CXX is None:
        pytest.skip("needs g++")
    library = tmp_path_factory.mktemp("shim") / "cublaslt.so"
    flags = ["-DREAL_HEADER", *HEADER] if request.param else []
    subprocess.run(
        [CXX, "-std=c++17", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", *flags, SHIM, "-o", library],
        check=True,
    )
    loaded = ctypes.CDLL(str(library))
    loaded.shim_stream.restype = ctypes.c_void_p
    return loaded


class Bench:
    """`LtProducts` on numpy's arrays: the time of an algorithm is what the test says it is."""

    def __init__(self, shim, seconds=None, capability=8, **options):
        self.shim = shim
        self.seconds = seconds or {}
        self.timed, self.kept = [], 0
        self.lt = CublasLt(shim)
        self.workspace = np.zeros(workspace_for(capability), np.uint8)
        settings = {"deterministic": False, "timer": self._timer, "tf32": False} | options
        self.products = LtProducts(
            self.lt,
            stream=STREAM,
            workspace=self.workspace,
            pointer=lambda array: array.ctypes.data,
            keep=self._keep,
            **settings,
        )

    def _timer(self, work):
        for _ in range(3):
            work()
        self.timed.append(self.shim.shim_algorithm())
        return self.seconds.get(self.timed[-1], 1.0)

    def _keep(self, array, work):
        self.kept += 1
        saved = array.copy()
        work()
        array[...] = saved


@pytest.fixture
def bench(shim):
    """Makes benches; afterwards nothing may have been refused as invalid, and nothing may be left over."""
    made = []

    def make(**options):
        made.append(Bench(shim, **options))
        return made[-1]

    before = shim.shim_invalid(), shim.shim_live()
    yield make
    for one in made:
        one.products.close()
        one.lt.close()
    shim.shim_refuse(0)
    assert (shim.shim_invalid(), shim.shim_live()) == before


@pytest.mark.parametrize("what", EPILOGUES)
@pytest.mark.parametrize("types", TYPES, ids="→".join)
def test_products_are_those_of_numpy_for_all_transposes_and_odd_shapes(bench, types, what):
    products = bench().products
    columns = (8, 40) if "gelu" in what else (1, 8, 13)
    for ta, tb, m, n, k in itertools.product((False, True), (False, True), (1, 7), columns, (1, 9)):
        product = Product(m, n, k, ta, tb, *types, **EPILOGUES[what])
        assert products.can(product)
        compute(products, product)


def test_a_weight_gradient_brings_the_column_sums_of_dy_along(bench):
    rows, outputs, inputs = 11, 3, 5
    dy, x = random((rows, outputs), "bfloat16", 1), random((rows, inputs), "bfloat16", 2)
    dw, db = empty((outputs, inputs), "float32"), empty((outputs,), "float32")
    product = Product(outputs, inputs, rows, True, False, "bfloat16", "float32", "column_sums")
    bench().products.run(product, dw, dy, x, bias=db)
    np.testing.assert_allclose(dw, numbers(dy).T @ numbers(x), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(db, numbers(dy).sum(axis=0), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("fastest", [IN_PLACE, WIDEST, IN_PARTS, ANY, ROUNDED_PARTS])
def test_the_fastest_algorithm_runs_and_is_looked_for_only_once(bench, shim, fastest):
    one = bench(seconds={fastest: 0.5, BREAKING: 0.1, UNFIT: 0.1, TOO_MUCH_WORKSPACE: 0.1})
    product = replace(PLAIN, n=64, k=64, m=64)
    compute(one.products, product)
    assert shim.shim_algorithm() == fastest
    assert one.timed == [IN_PLACE, WIDEST, IN_PARTS, ANY, ROUNDED_PARTS]
    searches, started = shim.shim_searches(), shim.shim_started()
    for _ in range(3):
        compute(one.products, replace(product))
    assert shim.shim_algorithm() == fastest
    assert (shim.shim_searches(), shim.shim_started()) == (searches, started + 3)


def test_products_that_sum_in_bfloat16_are_never_taken(bench):
    one = bench(seconds={IN_PLACE: 0.1, ROUNDED_PARTS: 0.1})
    compute(one.products, Product(64, 128, 128, False, False, "bfloat16", "bfloat16"))
    assert one.timed == [WIDEST, IN_PARTS, ANY]


def test_determinism_takes_the_first_algorithm_without_timing_and_none_in_place(bench, shim):
    one = bench(deterministic=True, seconds={ANY: 0.1, IN_PLACE: 0.1})
    compute(one.products, replace(PLAIN, m=64, n=64, k=64))
    assert shim.shim_algorithm() == WIDEST and one.timed == []


def test_without_a_timer_the_first_algorithm_runs(bench, shim):
    compute(bench(timer=None).products, replace(PLAIN, m=64, n=64, k=64))
    assert shim.shim_algorithm() == IN_PLACE


def test_timing_an_accumulating_product_adds_only_once_and_others_are_not_saved(bench):
    one = bench()
    compute(one.products, replace(PLAIN, accumulate=True))
    assert one.kept == 1 and len(one.timed) > 1
    compute(one.products, replace(PLAIN, epilogue="column_sums"))
    assert one.kept == 1


def test_pointers_and_rows_decide_which_algorithms_are_fit(bench, shim):
    one = bench(seconds={WIDEST: 0.1, IN_PARTS: 0.2})
    product = replace(PLAIN, m=64, n=64, k=64)
    compute(one.products, product, offset=1)
    assert one.timed == [ANY, ROUNDED_PARTS]
    compute(one.products, product, offset=4)
    assert shim.shim_algorithm() == IN_PARTS
    compute(one.products, product)
    assert shim.shim_algorithm() == WIDEST
    compute(one.products, product, offset=1)
    assert shim.shim_algorithm() in (ANY, ROUNDED_PARTS)
    compute(one.products, replace(product, k=63))  # the rows of a are odd, at good addresses
    assert shim.shim_algorithm() in (ANY, ROUNDED_PARTS)
    assert [shim.shim_alignment(of_b) for of_b in (False, True)] == [256, 4]  # the library's A is our b


@pytest.mark.parametrize(("name", "epilogue"), [("bias", "bias"), ("bias", "column_sums"), ("aux", "dgelu")])
def test_a_badly_aligned_extra_counts_too(bench, shim, name, epilogue):
    one = bench(seconds={WIDEST: 0.1, ROUNDED_PARTS: 0.2})
    product = replace(PLAIN, m=64, n=64, k=64, epilogue=epilogue)
    compute(one.products, product)
    assert shim.shim_algorithm() == WIDEST
    arrays = operands(product)
    arrays[name] = put(numbers(arrays[name]), "float32", 1)
    right = expected(product, arrays)
    one.products.run(product, **arrays)
    agree(product, arrays, right)
    assert shim.shim_algorithm() == ANY


def test_bias_and_aux_follow_the_call_and_are_set_only_when_they_change(bench, shim):
    one = bench()
    product = replace(PLAIN, epilogue="gelu", has_bias=True)
    first, second = operands(product), operands(product)
    for arrays in (first, second, first):
        before = shim.shim_pointed()
        for _ in range(3):
            arrays["bias"] += 1
            right = expected(product, arrays)
            one.products.run(product, **arrays)
            agree(product, arrays, right)
        assert shim.shim_pointed() - before in (2, 4)  # both pointers once more, and once for the plan


@pytest.mark.parametrize(
    "product",
    [
        replace(PLAIN, epilogue="bias"),
        replace(PLAIN, epilogue="gelu"),
        replace(PLAIN, epilogue="gelu", has_bias=True),
        replace(PLAIN, epilogue="column_sums"),
    ],
)
def test_a_forgotten_bias_or_aux_is_never_read_from_where_the_last_one_was(bench, product):
    products = bench().products
    arrays = operands(product)
    bare = {name: arrays[name] for name in ("out", "a", "b")}
    for _ in range(2):
        with pytest.raises(ValueError, match="do not fit"):
            products.run(product, **bare)
        products.run(product, **arrays)


def test_an_epilogue_that_the_library_does_not_know_is_told_beforehand(bench, shim):
    shim.shim_refuse(Epilogue.DGELU)
    products = bench().products
    product = replace(PLAIN, epilogue="dgelu")
    assert not products.can(product)
    assert products.can(replace(PLAIN, epilogue="gelu"))
    with pytest.raises(LtError, match=r"m=6, n=16, k=5.*float32.*dgelu.*NOT_SUPPORTED"):
        products.run(product, **operands(product))


def test_a_product_that_is_impossible_names_its_shape_and_types(bench):
    product = Product(6, 16, 5, False, False, "float64", "float32")
    with pytest.raises(DistgptError, match=r"m=6, n=16, k=5.*float64.*float32.*NOT_SUPPORTED"):
        bench().products.run(product, **operands(product))


@pytest.mark.parametrize("change", [{"n": 12}, {"accumulate": True}])
def test_aux_needs_rows_of_eights_and_no_accumulation(bench, change):
    products = bench().products
    for epilogue in ("gelu", "dgelu"):
        assert not products.can(replace(PLAIN, epilogue=epilogue, **change))


def test_tf32_is_used_only_where_it_was_asked_for(bench):
    third, one = np.full((1, 1), np.float32(1 / 3)), np.ones((1, 1))
    results = []
    for tf32 in (False, True):
        out = empty((1, 1), "float32")
        products = bench(tf32=tf32).products
        products.run(replace(PLAIN, m=1, n=1, k=1), out, put(third, "float32"), put(one, "float32"))
        results.append(out[0, 0])
    assert results == [third[0, 0], np.float32(1365 / 4096)]  # eleven bits
    compute(bench(tf32=True).products, Product(3, 5, 4, False, True, "bfloat16", "float32"))
    compute(bench(tf32=True).products, Product(3, 5, 4, False, True, "float64", "float64"))


def test_all_work_goes_to_the_one_stream(bench, shim):
    compute(bench().products, PLAIN)
    assert shim.shim_stream() == STREAM


def test_hopper_gets_more_workspace():
    assert [workspace_for(capability) >> 20 for capability in (8, 9, 10)] == [32, 64, 32]
