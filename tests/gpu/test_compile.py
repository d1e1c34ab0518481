"""Every CUDA source becomes machine code for every kind of GPU, and no kernel falls back on slow memory."""

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from distgpt.errors import UsageError
from distgpt.gpu import libraries, nvrtc, sources
from distgpt.gpu.dtypes import WIDE
from distgpt.gpu.kernels import norm_shape
from distgpt.gpu.launching import LARGEST_BLOCK

NVCC = shutil.which("nvcc")
needs_a_compiler = pytest.mark.skipif(not (nvrtc.available() or NVCC), reason="needs NVRTC or nvcc")
needs_nvrtc = pytest.mark.skipif(not nvrtc.available(), reason="needs NVRTC")

TYPES = {
    "sm_75": ("bfloat16",),
    "sm_80": ("bfloat16",),
    "sm_90": ("bfloat16", "float32", "float64"),
}
MOST_IMPORTANT = "sm_90"  # compiled in all sizes, the others in one
CASES = [
    (source, type, arch) for source in sources.names() for arch, types in TYPES.items() for type in types
]

# Bytes of stack that a kernel may use nevertheless, by kernel, type and architecture.
MAY_SPILL = {
    ("attention_backward_keys", "bfloat16", "sm_75"): 32,  # a register or two too many on older GPUs only
    ("attention_backward_keys", "bfloat16", "sm_80"): 32,
    ("norm_backward_packed", "float64", "sm_90"): 256,  # rows of 5120, in a type for checks
    ("norm_backward_single", "float64", "sm_90"): 256,
}
REGISTERS = 1 << 16  # that a block may have
DAILY = ("bfloat16", MOST_IMPORTANT)  # the others are for `make test-all`

_path = Path(__file__).resolve().parents[2] / "benchmarks" / "kernel_resources.py"
_spec = importlib.util.spec_from_file_location("kernel_resources", _path)
kernel_resources = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(kernel_resources)


def compiled(source, defines, arch, folder):
    """The machine code and the report, by NVRTC or else by nvcc."""
    if nvrtc.available():
        result = nvrtc.compile_cubin(source, defines, arch)
        return result.cubin, result.report
    text, cubin = folder / f"{source}.cu", folder / f"{source}.cubin"
    text.write_text(sources.text(source))
    command = [NVCC, "-cubin", f"-arch={arch}", "-Xptxas", "-v", "-o", cubin, *sources.options(defines), text]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return cubin.read_bytes(), result.stderr


@needs_a_compiler
@pytest.mark.parametrize(
    ("source", "type", "arch"),
    [
        pytest.param(*case, id="-".join(case), marks=() if case[1:] == DAILY else pytest.mark.slow)
        for case in CASES
    ],
)
def test_a_source_compiles_without_warnings_and_its_kernels_stay_in_registers(source, type, arch, tmp_path):
    variants = list(kernel_resources.variants(source, type))
    for defines in variants if arch == MOST_IMPORTANT else variants[:1]:
        cubin, report = compiled(source, defines, arch, tmp_path)
        assert cubin[:4] == b"\x7fELF"
        assert "warning" not in report, report
        used = nvrtc.resources(report)
        kernels = set(re.findall(rb"\.text\.(\w+)", cubin))
        assert used.keys() == {name.decode() for name in kernels}
        for kernel, takes in used.items():
            most = MAY_SPILL.get((kernel, type, arch), 0)
            assert takes.stack <= most, (kernel, defines, takes)
            assert takes.spill_stores + takes.spill_loads <= 4 * most, (kernel, defines, takes)
            assert 0 < takes.registers <= 255 and takes.shared <= 48 << 10, (kernel, defines, takes)


@needs_nvrtc
@pytest.mark.parametrize("type", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("channels", [64, 768, 1024, 4096, 4104, 8192, 12_288])
def test_a_norm_of_any_width_can_be_started(channels, type):
    _, threads, defines = norm_shape(channels, WIDE[type].itemsize)
    report = nvrtc.compile_cubin("norm", (sources.storage_define(type), *defines), MOST_IMPORTANT).report
    for kernel, takes in nvrtc.resources(report).items():
        given = -(-takes.registers // 8) * 8  # registers are handed out in eights
        assert given * threads <= REGISTERS, (kernel, takes)
        assert takes.shared <= 48 << 10, (kernel, takes)


@needs_nvrtc
def test_two_rows_of_scores_fit_a_multiprocessor():
    report = nvrtc.compile_cubin("loss", ("STORAGE_BFLOAT16",), MOST_IMPORTANT).report
    assert 2 * LARGEST_BLOCK * nvrtc.resources(report)["cross_entropy_packed"].registers <= REGISTERS


@needs_nvrtc
def test_a_kernel_that_spills_is_seen():
    text = """
    extern "C" __global__ void __launch_bounds__(1024, 2) hungry(double* p) {
        double x[48];
        for (int i = 0; i < 48; i++) x[i] = p[i * 1024 + threadIdx.x];
        for (int round = 0; round < 9; round++)
            for (int i = 0; i < 48; i++) x[i] += x[(i * 7 + 1) % 48] * x[(i + 5) % 48];
        for (int i = 0; i < 48; i++) p[i * 1024 + threadIdx.x] = x[i];
    }
    extern "C" __global__ void modest(float* p) {
        __shared__ float row[64];
        row[threadIdx.x] = p[threadIdx.x];
        __syncthreads();
        p[threadIdx.x] = row[63 - threadIdx.x];
    }"""
    used = nvrtc.resources(nvrtc.compile_text(text, "hungry.cu", (), "sm_90").report)
    assert used["hungry"].stack > 0 and used["hungry"].spill_stores > 0 and used["hungry"].spill_loads > 0
    modest = used["modest"]
    assert (modest.stack, modest.spill_stores, modest.spill_loads, modest.shared) == (0, 0, 0, 256)


@needs_nvrtc
def test_a_compilers_message_names_the_file_and_line(tmp_path, monkeypatch):
    (tmp_path / "wrong.cuh").write_text("#pragma once\n\ninline int wrong = nonsense;\n")
    (tmp_path / "good.cuh").write_text('#pragma once\n#include "deep.cuh"\n')
    (tmp_path / "deep.cuh").write_text("#pragma once\n")
    (tmp_path / "main.cu").write_text(
        '#include "good.cuh"\n#include "deep.cuh"\n#include "wrong.cuh"\n\nrubbish\n'
    )
    monkeypatch.setattr(sources, "FOLDER", tmp_path)
    sources.text.cache_clear()
    try:
        assert sources.names() == ["main"]
        assert sources.text("main").count('#line 1 "deep.cuh"') == 1
        with pytest.raises(nvrtc.CompileError, match=r"(?s)wrong\.cuh\(3\).*main\.cu\(5\)"):
            nvrtc.compile_cubin("main", ("SOME",), "sm_90")
    finally:
        sources.text.cache_clear()


def test_without_nvrtc_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(libraries, "find", lambda names: None)
    nvrtc._library.cache_clear()
    try:
        assert not nvrtc.available()
        with pytest.raises(UsageError, match="pip install nvidia-cuda-nvrtc"):
            nvrtc.compile_text("", "empty.cu", (), "sm_90")
    finally:
        monkeypatch.undo()
        nvrtc._library.cache_clear()


@pytest.mark.parametrize("source", sources.names())
def test_a_sources_text_stands_alone(source):
    text = sources.text(source)
    assert not re.search(r'^\s*#\s*include\s*"', text, re.MULTILINE)
    assert text.startswith(f'#line 1 "{source}.cu"\n')
