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
OWN = {"refuse_captured", "enqueue", "run"}  # only in the emulation
# Functions used: argument names, or an emulated function that has them.
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
    """Return a function's argument names, for C code from its docstring."""
    try:
        names = list(inspect.signature(function).parameters)
    except ValueError:
        inside = re.match(r"[\w.]+\((.*)\)", function.__doc__)[1]
        names = [part.split("=")[0].split()[-1] for part in inside.split(",") if part.strip()]
    return [name for name in names if name != "self"]


@pytest.mark.parametrize("path", USED)
def test_used_functions_have_these_arguments(path):
    here, function = USED[path], real(path)
    wanted = here if isinstance(here, list) else parameters(here)
    if inspect.isclass(function) and function.__init__.__doc__.startswith(f"{function.__name__}.__init__("):
        function = function.__init__
    assert parameters(function)[: len(wanted)] == wanted


def test_used_attributes_exist():
    for path, names in PROPERTIES.items():
        assert [name for name in names if not hasattr(real(path), name)] == [], path


def test_nccl_constants_match():
    for name in dir(FakeNccl):
        if name.startswith("NCCL_"):
            assert int(getattr(real("cuda.nccl"), name)) == getattr(FakeNccl, name), name


def test_view_keeps_page_locked_memory():
    """The memory is ordinary, but the classes are CuPy's."""

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


# The cuBLASLt binding and its emulation are compared with NVIDIA's header and library.
def _headers():
    """Return include options for the real cublasLt.h, or None."""
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
def test_constants_and_functions_match_the_header(tmp_path):
    prefixes = {"Status": "CUBLAS_STATUS_", "DataType": "CUDA_", "Compute": "CUBLAS_", "Pref": "CUBLASLT_MATMUL_PREF_"}
    prefixes |= {"Epilogue": "CUBLASLT_EPILOGUE_", "Reduction": "CUBLASLT_REDUCTION_SCHEME_"}
    prefixes |= {"Desc": "CUBLASLT_MATMUL_DESC_"}
    facts = [f"{at}{one.name} == {one.value}" for kind, at in prefixes.items() for one in getattr(cublaslt, kind)]
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
    command = [COMPILER, "-std=c++17", "-fsyntax-only", *HEADER, program]
    checked = subprocess.run(command, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


class WithoutDevice(CublasLt):
    """A binding without a handle, which would need a GPU."""

    def _create(self, function, *arguments):
        return 0 if function == "cublasLtCreate" else super()._create(function, *arguments)


@pytest.fixture
def library():
    return probe.load_library(cublaslt.NAMES) or pytest.skip("needs libcublasLt (nvidia-cublas)")


def test_real_library_accepts_all_attributes(library):
    lt = WithoutDevice(library)
    numbers = ((68, 0), (77, 0), (70, 1))
    descriptors = [lt.descriptor(compute, scale, dict.fromkeys(Desc, 1)) for compute, scale in numbers]
    layouts = [lt.layout(data_type, 3, 5) for data_type in cublaslt.DataType]
    layouts.append(lt.layout(cublaslt.DataType.R_16BF, 3, 5, batch=7))
    descriptors.append(lt.descriptor(68, 0, {}))
    with pytest.raises(LtError, match="cublasLtMatmulAlgoGetHeuristic returned CUBLAS_STATUS_"):
        lt.algorithms(descriptors[-1], *layouts[:3], dict.fromkeys(Pref, 2), 8)  # after the attributes were accepted
    for kind, made in (("MatmulDesc", descriptors), ("MatrixLayout", layouts)):
        for at in made:  # the program keeps them
            assert getattr(library, f"cublasLt{kind}Destroy")(ctypes.c_void_p(at)) == 0


def test_missing_device_is_reported_by_the_real_library(library):
    devices = ctypes.c_int()
    driver = probe.load_library(("libcuda.so.1",))
    if driver and driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(devices)) == 0 and devices:
        pytest.skip("needs a machine without a GPU")
    with pytest.raises(LtError, match=r"NOT_INITIALIZED; check the GPU"):
        CublasLt(library)
