"""Matmuls through cuBLASLt, against NumPy, on an implementation of cuBLASLt for the host."""

import ctypes
import itertools
import os
import subprocess
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from hostbuild import COMPILER, build_cublaslt
from matmul_cases import (
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
from distgpt.gpu import cublaslt, probe
from distgpt.gpu.api import Matmul
from distgpt.gpu.cublaslt import CublasLt, Desc, Epilogue, LtError, Pref
from distgpt.gpu.matmul import LtMatmul, workspace_for


def _find():
    """Folders to include for the real cublasLt.h and what it includes itself, or None."""
    nvidia = find_spec("nvidia")
    wheels = [Path(place) for place in (nvidia.submodule_search_locations if nvidia else None) or ()]
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [folder for wheel in wheels for folder in sorted(wheel.glob("*/include"))]
    folders += [Path(root, "include") for root in roots if root]
    needed = ("cublasLt.h", "library_types.h")
    places = [next((f for f in folders if (f / name).is_file()), None) for name in needed]
    return None if None in places else [f"-I{place}" for place in places]


HEADER = _find()
needs_header = pytest.mark.skipif(
    HEADER is None, reason="needs cublasLt.h (nvidia-cublas) and CUDA's headers"
)

STREAM = 0x5EA
# Algorithms of the host's implementation, see `algorithms` there.
IN_PLACE, TOO_MUCH_WORKSPACE, UNFIT, WIDEST, IN_PARTS, BREAKING, ANY, ROUNDED_PARTS = range(8)


@pytest.fixture(
    scope="module",
    params=[pytest.param(False, id="declared"), pytest.param(True, id="header", marks=needs_header)],
)
def shim(request):
    if COMPILER is None:
        pytest.skip("needs g++")
    library = build_cublaslt(*(["-DREAL_HEADER", *HEADER] if request.param else []))
    loaded = ctypes.CDLL(str(library))
    loaded.shim_stream.restype = ctypes.c_void_p
    return loaded


def destroy(lt, kind, *addresses):
    """Free objects of the library, which the program itself keeps to its end."""
    for address in addresses:
        assert getattr(lt._library, f"cublasLt{kind}Destroy")(ctypes.c_void_p(address)) == 0


class Bench:
    """`LtMatmul` on numpy's arrays: the time of an algorithm is what the test says it is."""

    def __init__(self, shim, seconds=None, capability=8, **options):
        self.shim = shim
        self.seconds = seconds or {}
        self.timed, self.kept = [], 0
        self.lt = CublasLt(shim)
        self.workspace = np.zeros(workspace_for(capability), np.uint8)
        settings = {"deterministic": False, "timer": self._timer, "tf32": False} | options
        self.matmuls = LtMatmul(
            self.lt,
            stream=STREAM,
            workspace=self.workspace,
            pointer=lambda array: array.ctypes.data,
            keep=self._keep,
            **settings,
        )

    def close(self):
        """Free all that the plans hold."""
        for plan in self.matmuls._plans.values():
            destroy(self.lt, "MatmulDesc", plan.descriptor)
            destroy(self.lt, "MatrixLayout", plan.a, plan.b, plan.out)
        assert self.shim.cublasLtDestroy(ctypes.c_void_p(self.lt.handle)) == 0

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
        one.close()
    shim.shim_refuse(0)
    assert (shim.shim_invalid(), shim.shim_live()) == before


@pytest.mark.parametrize("what", EPILOGUES)
@pytest.mark.parametrize("types", TYPES, ids="→".join)
def test_products_are_those_of_numpy_for_all_transposes_and_odd_shapes(bench, types, what):
    matmuls = bench().matmuls
    columns = (8, 40) if "gelu" in what else (1, 8, 13)
    for ta, tb, m, n, k in itertools.product((False, True), (False, True), (1, 7), columns, (1, 9)):
        kind = Matmul(m, n, k, ta, tb, *types, **EPILOGUES[what])
        assert matmuls.can(kind)
        compute(matmuls, kind)


def test_a_weight_gradient_brings_the_column_sums_of_dy_along(bench):
    rows, outputs, inputs = 11, 3, 5
    dy, x = random((rows, outputs), "bfloat16", 1), random((rows, inputs), "bfloat16", 2)
    dw, db = empty((outputs, inputs), "float32"), empty((outputs,), "float32")
    kind = Matmul(outputs, inputs, rows, True, False, "bfloat16", "float32", "column_sums")
    bench().matmuls.run(kind, dw, dy, x, bias=db)
    np.testing.assert_allclose(dw, numbers(dy).T @ numbers(x), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(db, numbers(dy).sum(axis=0), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("fastest", [IN_PLACE, WIDEST, IN_PARTS, ANY, ROUNDED_PARTS])
def test_the_fastest_algorithm_runs_and_is_looked_for_only_once(bench, shim, fastest):
    one = bench(seconds={fastest: 0.5, BREAKING: 0.1, UNFIT: 0.1, TOO_MUCH_WORKSPACE: 0.1})
    kind = replace(PLAIN, n=64, k=64, m=64)
    compute(one.matmuls, kind)
    assert shim.shim_algorithm() == fastest
    assert one.timed == [IN_PLACE, WIDEST, IN_PARTS, ANY, ROUNDED_PARTS]
    searches, started = shim.shim_searches(), shim.shim_started()
    for _ in range(3):
        compute(one.matmuls, replace(kind))
    assert shim.shim_algorithm() == fastest
    assert (shim.shim_searches(), shim.shim_started()) == (searches, started + 3)


def test_products_that_sum_in_bfloat16_are_never_taken(bench):
    one = bench(seconds={IN_PLACE: 0.1, ROUNDED_PARTS: 0.1})
    compute(one.matmuls, Matmul(64, 128, 128, False, False, "bfloat16", "bfloat16"))
    assert one.timed == [WIDEST, IN_PARTS, ANY]


def test_determinism_takes_the_first_algorithm_without_timing_and_none_in_place(bench, shim):
    one = bench(deterministic=True, seconds={ANY: 0.1, IN_PLACE: 0.1})
    compute(one.matmuls, replace(PLAIN, m=64, n=64, k=64))
    assert shim.shim_algorithm() == WIDEST and one.timed == []


def test_without_a_timer_the_first_algorithm_runs(bench, shim):
    compute(bench(timer=None).matmuls, replace(PLAIN, m=64, n=64, k=64))
    assert shim.shim_algorithm() == IN_PLACE


def test_timing_an_accumulating_product_adds_only_once_and_others_are_not_saved(bench):
    one = bench()
    compute(one.matmuls, replace(PLAIN, accumulate=True))
    assert one.kept == 1 and len(one.timed) > 1
    compute(one.matmuls, replace(PLAIN, epilogue="column_sums"))
    assert one.kept == 1


def test_pointers_and_rows_decide_which_algorithms_are_fit(bench, shim):
    one = bench(seconds={WIDEST: 0.1, IN_PARTS: 0.2})
    kind = replace(PLAIN, m=64, n=64, k=64)
    compute(one.matmuls, kind, offset=1)
    assert one.timed == [ANY, ROUNDED_PARTS]
    compute(one.matmuls, kind, offset=4)
    assert shim.shim_algorithm() == IN_PARTS
    compute(one.matmuls, kind)
    assert shim.shim_algorithm() == WIDEST
    compute(one.matmuls, kind, offset=1)
    assert shim.shim_algorithm() in (ANY, ROUNDED_PARTS)
    compute(one.matmuls, replace(kind, k=63))  # the rows of a are odd, at good addresses
    assert shim.shim_algorithm() in (ANY, ROUNDED_PARTS)
    assert [shim.shim_alignment(of_b) for of_b in (False, True)] == [256, 4]  # the library's A is our b


@pytest.mark.parametrize(("name", "epilogue"), [("bias", "bias"), ("bias", "column_sums"), ("aux", "dgelu")])
def test_a_badly_aligned_extra_counts_too(bench, shim, name, epilogue):
    one = bench(seconds={WIDEST: 0.1, ROUNDED_PARTS: 0.2})
    kind = replace(PLAIN, m=64, n=64, k=64, epilogue=epilogue)
    compute(one.matmuls, kind)
    assert shim.shim_algorithm() == WIDEST
    arrays = operands(kind)
    arrays[name] = put(numbers(arrays[name]), "float32", 1)
    right = expected(kind, arrays)
    one.matmuls.run(kind, **arrays)
    agree(kind, arrays, right)
    assert shim.shim_algorithm() == ANY


def test_bias_and_aux_follow_the_call_and_are_set_only_when_they_change(bench, shim):
    one = bench()
    kind = replace(PLAIN, epilogue="gelu", has_bias=True)
    first, second = operands(kind), operands(kind)
    for arrays in (first, second, first):
        before = shim.shim_pointed()
        for _ in range(3):
            arrays["bias"] += 1
            right = expected(kind, arrays)
            one.matmuls.run(kind, **arrays)
            agree(kind, arrays, right)
        assert shim.shim_pointed() - before in (2, 4)  # both pointers once more, and once for the plan


@pytest.mark.parametrize(
    "kind",
    [
        replace(PLAIN, epilogue="bias"),
        replace(PLAIN, epilogue="gelu"),
        replace(PLAIN, epilogue="gelu", has_bias=True),
        replace(PLAIN, epilogue="column_sums"),
    ],
)
def test_a_forgotten_bias_or_aux_is_never_read_from_where_the_last_one_was(bench, kind):
    matmuls = bench().matmuls
    arrays = operands(kind)
    bare = {name: arrays[name] for name in ("out", "a", "b")}
    for _ in range(2):
        with pytest.raises(ValueError, match="do not fit"):
            matmuls.run(kind, **bare)
        matmuls.run(kind, **arrays)


def test_an_epilogue_that_the_library_does_not_know_is_known_beforehand(bench, shim):
    shim.shim_refuse(Epilogue.DGELU)
    matmuls = bench().matmuls
    kind = replace(PLAIN, epilogue="dgelu")
    assert not matmuls.can(kind)
    assert matmuls.can(replace(PLAIN, epilogue="gelu"))
    with pytest.raises(LtError, match=r"m=6, n=16, k=5.*float32.*dgelu.*NOT_SUPPORTED"):
        matmuls.run(kind, **operands(kind))


def test_a_product_that_is_impossible_names_its_shape_and_types(bench):
    kind = Matmul(6, 16, 5, False, False, "float64", "float32")
    with pytest.raises(DistgptError, match=r"m=6, n=16, k=5.*float64.*float32.*NOT_SUPPORTED"):
        bench().matmuls.run(kind, **operands(kind))


@pytest.mark.parametrize("change", [{"n": 12}, {"accumulate": True}])
def test_aux_needs_rows_of_eights_and_no_accumulation(bench, change):
    matmuls = bench().matmuls
    for epilogue in ("gelu", "dgelu"):
        assert not matmuls.can(replace(PLAIN, epilogue=epilogue, **change))


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


def test_all_work_goes_to_the_one_stream(bench, shim):
    compute(bench().matmuls, PLAIN)
    assert shim.shim_stream() == STREAM


def test_hopper_gets_more_workspace():
    assert [workspace_for(capability) >> 20 for capability in (8, 9, 10)] == [32, 64, 32]


# -- the binding against NVIDIA's header and the library itself


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@needs_header
def test_numbers_and_sizes_are_those_of_the_header(tmp_path):
    prefixes = {
        cublaslt.Status: "CUBLAS_STATUS_",
        cublaslt.DataType: "CUDA_",
        cublaslt.Compute: "CUBLAS_",
        cublaslt.Operation: "CUBLAS_",
        cublaslt.Epilogue: "CUBLASLT_EPILOGUE_",
        cublaslt.Reduction: "CUBLASLT_REDUCTION_SCHEME_",
        cublaslt.Desc: "CUBLASLT_MATMUL_DESC_",
        cublaslt.Pref: "CUBLASLT_MATMUL_PREF_",
    }
    facts = [f"{prefix}{one.name} == {one.value}" for kind, prefix in prefixes.items() for one in kind]
    result, real = cublaslt.HeuristicResult, "cublasLtMatmulHeuristicResult_t"
    facts += [f"offsetof({real}, {name}) == {getattr(result, name).offset}" for name, _ in result._fields_]
    facts.append(f"sizeof({real}) == {ctypes.sizeof(result)}")
    facts.append(f"sizeof(cublasLtMatmulAlgo_t) == {ctypes.sizeof(cublaslt.Algorithm)}")
    program = tmp_path / "facts.cpp"
    program.write_text("#include <cublasLt.h>\n" + "".join(f'static_assert({fact}, "");\n' for fact in facts))
    checked = subprocess.run([COMPILER, "-fsyntax-only", *HEADER, program], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


class _WithoutDevice(CublasLt):
    """Descriptors need no GPU, a handle does."""

    def _create(self, function, *arguments):
        return 0 if function == "cublasLtCreate" else super()._create(function, *arguments)


def test_the_real_library_takes_all_attributes_that_are_set():
    library = probe.load_library(cublaslt.NAMES)
    if library is None:
        pytest.skip("needs libcublasLt (nvidia-cublas)")
    lt = _WithoutDevice(library)
    for compute_type, scale in ((68, 0), (77, 0), (70, 1)):
        destroy(lt, "MatmulDesc", lt.descriptor(compute_type, scale, dict.fromkeys(Desc, 1)))
    layouts = [lt.layout(data_type, 3, 5) for data_type in cublaslt.DataType]
    descriptor = lt.descriptor(68, 0, {})
    with pytest.raises(LtError, match="cublasLtMatmulAlgoGetHeuristic gave CUBLAS_STATUS_"):
        lt.algorithms(descriptor, *layouts, dict.fromkeys(Pref, 2), 8)  # so the attributes were taken
    destroy(lt, "MatmulDesc", descriptor)
    destroy(lt, "MatrixLayout", *layouts)


def test_without_a_device_the_real_library_is_refused_with_the_reason():
    library = probe.load_library(cublaslt.NAMES)
    if library is None:
        pytest.skip("needs libcublasLt (nvidia-cublas)")
    devices = ctypes.c_int()
    driver = probe.load_library(("libcuda.so.1",))
    if driver and driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(devices)) == 0 and devices:
        pytest.skip("needs a machine without a GPU")
    with pytest.raises(LtError, match=r"NOT_INITIALIZED: is there a GPU"):
        CublasLt(library)
