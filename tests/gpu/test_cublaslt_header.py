"""The names and numbers of the binding of cuBLASLt, against its header and the library itself."""

import ctypes
import shutil
import subprocess

import pytest
from cublaslt_header import HEADER, needs_header

from distgpt.gpu import cublaslt, libraries
from distgpt.gpu.cublaslt import CublasLt, Desc, LtError, Pref

CXX = shutil.which("g++")
needs_compiler = pytest.mark.skipif(CXX is None, reason="needs g++")


@needs_compiler
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
    checked = subprocess.run([CXX, "-fsyntax-only", *HEADER, program], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


class _WithoutDevice(CublasLt):
    """Descriptors need no GPU, a handle does."""

    def _create(self, function, *arguments):
        return 0 if function == "cublasLtCreate" else super()._create(function, *arguments)


def test_the_real_library_takes_all_attributes_that_are_set():
    library = libraries.find(cublaslt.NAMES)
    if library is None:
        pytest.skip("needs libcublasLt (nvidia-cublas)")
    lt = _WithoutDevice(library)
    for compute_type, scale in ((68, 0), (77, 0), (70, 1)):
        lt.destroy_descriptor(lt.descriptor(compute_type, scale, dict.fromkeys(Desc, 1)))
    layouts = [lt.layout(data_type, 3, 5) for data_type in cublaslt.DataType]
    descriptor = lt.descriptor(68, 0, {})
    with pytest.raises(LtError, match="cublasLtMatmulAlgoGetHeuristic gave CUBLAS_STATUS_"):
        lt.algorithms(descriptor, *layouts, dict.fromkeys(Pref, 2), 8)  # so the attributes were taken
    lt.destroy_descriptor(descriptor)
    for layout in layouts:
        lt.destroy_layout(layout)


def test_without_a_device_the_real_library_is_refused_with_the_reason():
    library = libraries.find(cublaslt.NAMES)
    if library is None:
        pytest.skip("needs libcublasLt (nvidia-cublas)")
    devices = ctypes.c_int()
    driver = libraries.find(("libcuda.so.1",))
    if driver and driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(devices)) == 0 and devices:
        pytest.skip("needs a machine without a GPU")
    with pytest.raises(LtError, match=r"NOT_INITIALIZED: is there a GPU"):
        CublasLt(library)
