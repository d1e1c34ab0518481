"""What the GPU stages and these stand-ins take for granted, against the CuPy and cuBLASLt installed."""

import ctypes
import gc
import importlib
import inspect
import os
import re
import shutil
import subprocess
import warnings
import weakref
from importlib.util import find_spec
from pathlib import Path

import fakecupy
import fakenccl
import numpy as np
import pytest
from distgpt.gpu import cublaslt, probe
from distgpt.gpu.cublaslt import CublasLt, Desc, LtError, Pref
from fakenccl import FakeNccl
from hostlt import PROTOTYPES

FLOAT = np.dtype(np.float32)

STAND_INS = {
    "cuda": (fakecupy.Device, fakecupy.Stream, fakecupy.Event, fakecupy.Graph, fakecupy.MemoryPointer),
    "cuda.function": (fakecupy.Module,),
    "cuda.nccl": (fakenccl.NcclCommunicator,),
}
OWN = {"refuse_captured", "enqueue", "run"}  # of the stand-in alone
# What is called: the names of its arguments, or the same in a stand-in.
USED = {
    "cuda.Device": ["device"],
    "cuda.Stream": ["null", "non_blocking"],
    "cuda.Event": ["block", "disable_timing"],
    "cuda.alloc_pinned_memory": ["size"],
    "cuda.get_elapsed_time": ["start_event", "end_event"],
    "zeros": ["shape", "dtype"],
    "get_default_memory_pool": [],
    **{f"cuda.runtime.{name}": ["device"] for name in ("getDeviceProperties", "deviceGetPCIBusId")},
    **{f"cuda.runtime.{name}": [] for name in ("getDeviceCount", "memGetInfo")},
    **{f"cuda.nccl.{name}": [] for name in ("get_unique_id", "groupStart", "groupEnd")},
    **{
        f"{module}.{kind.__name__}.{name}": function
        for module, kinds in STAND_INS.items()
        for kind in kinds
        for name, function in vars(kind).items()
        if inspect.isfunction(function) and name[0] != "_" and name not in OWN
    },
}
PROPERTIES = {
    "cuda.MemoryPointer": ["ptr"],
    "cuda.PinnedMemoryPointer": ["ptr"],
    "cuda.Event": ["done"],
    "cuda.MemoryPool": ["free_bytes", "total_bytes"],
    "cuda.function.Function": ["module"],
    "ndarray": ["data", "dtype", "shape", "size", "nbytes", "itemsize", "flags", "reshape", "copy"],
}


def real(path):
    """Something of CuPy's."""
    if find_spec("cupy") is None:
        pytest.skip("CuPy is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = importlib.import_module("cupy")
        for name in path.split("."):
            found = importlib.import_module("cupy.cuda.nccl") if name == "nccl" else getattr(found, name, None)
            if name == "nccl" and not found.available:
                pytest.skip("CuPy does not find NCCL")
            assert found is not None, f"{path}: CuPy has no {name}"
    return found


def parameters(function):
    """The names of what a function takes; for C code from the first line of its text."""
    try:
        names = list(inspect.signature(function).parameters)
    except ValueError:
        inside = re.match(r"[\w.]+\((.*)\)", function.__doc__)[1]
        names = [part.split("=")[0].split()[-1] for part in inside.split(",") if part.strip()]
    return [name for name in names if name != "self"]


@pytest.mark.parametrize("path", USED)
def test_what_is_called_takes_these_arguments_in_this_order(path):
    here, function = USED[path], real(path)
    wanted = here if isinstance(here, list) else parameters(here)
    if inspect.isclass(function) and function.__init__.__doc__.startswith(f"{function.__name__}.__init__("):
        function = function.__init__
    assert parameters(function)[: len(wanted)] == wanted


def test_what_is_looked_at_is_there():
    for path, names in PROPERTIES.items():
        assert [name for name in names if not hasattr(real(path), name)] == [], path


def test_a_kernel_is_called_with_grid_block_arguments_shared_memory_and_stream():
    kind = real("cuda.function.Function")
    function = kind.__new__(kind)
    for args, error, says in (
        (([1], (1,), ()), TypeError, "'grid'"),
        (((1,), [1], ()), TypeError, "'block'"),
        (((1,), (1,), (), "shared"), TypeError, "int"),
        (((1,), (1,), (), 0, object()), AttributeError, "ptr"),
    ):
        with pytest.raises(error, match=says):
            function(*args)


def test_ncclcommunicator_takes_a_tuple_or_bytes_and_says_so_before_it_does_anything():
    kind = real("cuda.nccl.NcclCommunicator")
    with pytest.raises(TypeError, match="commId"):
        kind(1, [0] * 128, 0)
    for name in dir(FakeNccl):
        if name.startswith("NCCL_"):
            assert int(getattr(real("cuda.nccl"), name)) == getattr(FakeNccl, name), name


def test_a_view_of_page_locked_memory_keeps_it():
    """With memory that is page-locked by name only; the classes are CuPy's."""

    class Memory:
        numbers = np.zeros(64, np.uint8)
        ptr, size = numbers.ctypes.data, numbers.nbytes

    memory = Memory()
    alive = weakref.ref(memory)
    pointer = real("cuda.PinnedMemoryPointer")(memory, 0)
    view = np.frombuffer(pointer, FLOAT, 5)
    view[:] = 1
    assert type(pointer.ptr) is int and pointer.ptr == Memory.ptr
    assert Memory.numbers[:20].tobytes() == np.ones(5, FLOAT).tobytes()
    del memory, pointer
    gc.collect()
    assert alive() is not None
    del view
    gc.collect()
    assert alive() is None


# cuBLASLt: the binding, and the stand-in, against NVIDIA's header and the library itself


def _headers():
    """Folders to include for the real cublasLt.h and what it includes itself, or None."""
    nvidia = find_spec("nvidia")
    wheels = [Path(place) for place in (nvidia.submodule_search_locations if nvidia else None) or ()]
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [folder for wheel in wheels for folder in sorted(wheel.glob("*/include"))]
    folders += [Path(root, "include") for root in roots if root]
    needed = ("cublasLt.h", "library_types.h")
    places = [next((f for f in folders if (f / name).is_file()), None) for name in needed]
    return None if None in places else [f"-I{place}" for place in places]


HEADER = _headers()
COMPILER = shutil.which("g++")


@pytest.mark.skipif(COMPILER is None or HEADER is None, reason="needs g++, cublasLt.h (nvidia-cublas), CUDA's headers")
def test_numbers_sizes_and_functions_are_those_of_the_header(tmp_path):
    prefixes = {
        cublaslt.Status: "CUBLAS_STATUS_",
        cublaslt.DataType: "CUDA_",
        cublaslt.Compute: "CUBLAS_",
        cublaslt.Epilogue: "CUBLASLT_EPILOGUE_",
        cublaslt.Reduction: "CUBLASLT_REDUCTION_SCHEME_",
        cublaslt.Desc: "CUBLASLT_MATMUL_DESC_",
        cublaslt.Pref: "CUBLASLT_MATMUL_PREF_",
    }
    facts = [f"{prefix}{one.name} == {one.value}" for kind, prefix in prefixes.items() for one in kind]
    result, real = cublaslt.HeuristicResult, "cublasLtMatmulHeuristicResult_t"
    offsets = {name: field.offset for name, field in vars(result).items() if hasattr(field, "offset")}
    assert len(offsets) == 5
    facts += [f"offsetof({real}, {name}) == {offset}" for name, offset in offsets.items()]
    facts.append(f"sizeof({real}) == {ctypes.sizeof(result)}")
    facts.append(f"sizeof(cublasLtMatmulAlgo_t) == {ctypes.sizeof(cublaslt.Algorithm)}")
    for name, types in PROTOTYPES.items():
        facts.append(f"std::is_same_v<decltype(&cublasLt{name}), cublasStatus_t (*)({types})>")
    text = "#include <cublasLt.h>\n#include <type_traits>\n"
    program = tmp_path / "facts.cpp"
    program.write_text(text + "".join(f'static_assert({fact}, "");\n' for fact in facts))
    checked = subprocess.run(
        [COMPILER, "-std=c++17", "-fsyntax-only", *HEADER, program], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stderr


class WithoutDevice(CublasLt):
    """Descriptors need no GPU, a handle does."""

    def _create(self, function, *arguments):
        return 0 if function == "cublasLtCreate" else super()._create(function, *arguments)


@pytest.fixture
def library():
    """The installed one."""
    return probe.load_library(cublaslt.NAMES) or pytest.skip("needs libcublasLt (nvidia-cublas)")


def test_the_real_library_takes_all_attributes_that_are_set(library):
    lt = WithoutDevice(library)
    descriptors = [
        lt.descriptor(compute, scale, dict.fromkeys(Desc, 1)) for compute, scale in ((68, 0), (77, 0), (70, 1))
    ]
    layouts = [lt.layout(data_type, 3, 5) for data_type in cublaslt.DataType]
    layouts.append(lt.layout(cublaslt.DataType.R_16BF, 3, 5, batch=7))
    descriptors.append(lt.descriptor(68, 0, {}))
    with pytest.raises(LtError, match="cublasLtMatmulAlgoGetHeuristic returned CUBLAS_STATUS_"):
        lt.algorithms(descriptors[-1], *layouts[:3], dict.fromkeys(Pref, 2), 8)  # so the attributes were taken
    for kind, made in (("MatmulDesc", descriptors), ("MatrixLayout", layouts)):
        for at in made:  # which the program itself keeps to its end
            assert getattr(library, f"cublasLt{kind}Destroy")(ctypes.c_void_p(at)) == 0


def test_without_a_device_the_real_library_is_refused_with_the_reason(library):
    devices = ctypes.c_int()
    driver = probe.load_library(("libcuda.so.1",))
    if driver and driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(devices)) == 0 and devices:
        pytest.skip("needs a machine without a GPU")
    with pytest.raises(LtError, match=r"NOT_INITIALIZED; check the GPU"):
        CublasLt(library)
