import functools
import importlib
import re
import sys
from pathlib import Path

import hostlt
import numpy as np
import pytest
from distgpt.core.base.errors import UsageError
from distgpt.core.config.presets import preset
from distgpt.core.generate.plain_slots import PlainSlots
from distgpt.core.generate.slots import Feed
from distgpt.core.model.model import Architecture, Model
from distgpt.core.model.muon import OPTIMIZERS
from distgpt.core.model.passes import Pass
from distgpt.gpu import compiling, probe
from distgpt.gpu.attention import LARGEST_HEAD, SIDE, mma_defines
from distgpt.gpu.device import LARGEST_BLOCK, WIDE
from distgpt.gpu.kernels import norm_shape
from hostgpu import HostGpu, host_kernels
from sass import count, disassembled, disassembler

needs_nvrtc = pytest.mark.skipif(not compiling.available(), reason="require NVRTC")

# The most important variant is compiled in the ordinary test run, the others in the slow one.
TYPES = {"sm_90": ("bfloat16", "float32", "float64"), "sm_80": ("bfloat16",), "sm_75": ("bfloat16",)}
CASES = [("sm_90", "bfloat16", 1)]
CASES += [
    pytest.param(arch, type, 99 if arch == "sm_90" else 1, marks=pytest.mark.slow)
    for arch, types in TYPES.items()
    for type in types
]

# Bytes of stack that a kernel may use, by kernel, type and architecture.
MAY_SPILL = {
    ("attention_backward_keys", "bfloat16", "sm_75"): 32,  # one or two registers too many on older GPUs
    ("attention_backward_keys", "bfloat16", "sm_80"): 32,
    # NVRTC 13.0, used on a real device. The values are stored once per block and loaded at most once per tile. 3 blocks
    # per multiprocessor, not 4, or 2, not 1, would cost more.
    ("attention_forward", "bfloat16", "sm_90"): 8,  # packed, heads of 64
    ("attention_backward_keys", "bfloat16", "sm_90"): 24,  # heads of 128; 16 with NVRTC 13.0, 24 with 13.5
    ("cross_entropy_single", "float64", "sm_90"): 40,  # float64 is for checks
    ("norm_backward_packed", "float64", "sm_90"): 256,  # rows of 5120
    ("norm_backward_single", "float64", "sm_90"): 256,
}
REGISTERS = 1 << 16  # per block
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
kernel_resources = importlib.import_module("kernel_resources")


@functools.cache  # tests share one in six
def compiled(source, defines, arch):
    return compiling.compile_source(source, defines, arch)


def resources(source, defines, arch="sm_90"):
    return kernel_resources.resources(compiled(source, defines, arch).report)


@needs_nvrtc
@pytest.mark.parametrize(("arch", "type", "count"), CASES)
@pytest.mark.parametrize("source", compiling.source_names())
def test_sources_compile_without_spills(source, arch, type, count):
    for defines in list(kernel_resources.variants(source, type))[:count]:
        check(source, defines, type, arch)


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "type"),
    [*((each, "bfloat16") for each in ("attention_mma", "attention_cached", "norm")), ("norm", "float32")],
)
def test_preset_variants_compile_without_spills(source, type):
    found = list(kernel_resources.variants(source, type, *kernel_resources.of_presets()))
    assert len(found) >= 10
    for defines in found:
        check(source, defines, type, "sm_90")


def check(source, defines, type, arch):
    result = compiled(source, defines, arch)
    assert result.cubin[:4] == b"\x7fELF" and "warning" not in result.report, result.report
    used = kernel_resources.resources(result.report)
    assert used.keys() == {name.decode() for name in re.findall(rb"\.text\.(\w+)", result.cubin)}
    for kernel, takes in used.items():
        most = MAY_SPILL.get((kernel, type, arch), 0)
        assert takes.stack <= most and takes.spill_stores + takes.spill_loads <= 4 * most, (kernel, defines, takes)
        assert 0 < takes.registers <= 255 and takes.shared <= 48 << 10, (kernel, defines, takes)


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("channels", [64, 4104, 12_288])
@pytest.mark.parametrize("type", TYPES["sm_90"])
def test_norm_of_any_width_can_start(type, channels):
    _, threads, defines = norm_shape(channels, WIDE[type].itemsize)
    for kernel, takes in resources("norm", (compiling.storage_define(type), *defines)).items():
        given = -(-takes.registers // 8) * 8  # allocated in units of eight
        assert given * threads <= REGISTERS and takes.shared <= 48 << 10, (kernel, takes)


@needs_nvrtc
def test_two_rows_of_scores_fit_a_multiprocessor():
    registers = resources("loss", ("STORAGE_BFLOAT16",))["cross_entropy_packed"].registers
    assert 2 * LARGEST_BLOCK * registers <= REGISTERS


HEADS = [*range(SIDE, LARGEST_HEAD + 1, SIDE)]


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize(("arch", "head", "window"), [
    *(("sm_80", head, ()) for head in (64, 128)), *(("sm_90", head, ()) for head in HEADS),
    *(("sm_90", head, ("WINDOW=128",)) for head in (64, 128)),
])  # fmt: skip
def test_tensor_core_attention_fits_registers(arch, head, window):
    used = resources("attention_mma", ("STORAGE_BFLOAT16", *mma_defines(head, 1), *window), arch)
    assert set(used) == {"attention_forward", "attention_backward_queries", "attention_backward_keys"}
    for kernel, takes in used.items():
        most = MAY_SPILL.get((kernel, "bfloat16", arch), 0) if head in (64, 128) else 0
        assert takes.stack <= most and takes.spill_stores + takes.spill_loads <= 2 * most, (kernel, takes)
        least = {"attention_forward": 4 if head <= 64 else 3}.get(kernel, 3 if head <= 64 else 2)
        assert takes.registers * 128 * least <= REGISTERS and takes.shared * least <= 164 << 10, (kernel, takes)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(compiling, "FOLDER", tmp_path)
    compiling.source_text.cache_clear()
    yield tmp_path
    compiling.source_text.cache_clear()


def test_includes_are_inlined_with_line_numbers(folder):
    (folder / "wrong.cuh").write_text("#pragma once\n\ninline int wrong = nonsense;\n")
    (folder / "good.cuh").write_text('#pragma once\n#include "deep.cuh"\n')
    (folder / "deep.cuh").write_text("#pragma once\n")
    (folder / "main.cu").write_text('#include "good.cuh"\n#include "deep.cuh"\n#include "wrong.cuh"\n\nrubbish\n')
    assert compiling.source_names() == ["main"]
    assert compiling.source_text("main").count('#line 1 "deep.cuh"') == 1
    if compiling.available():
        with pytest.raises(compiling.CompileError, match=r"(?s)wrong\.cuh\(3\).*main\.cu\(5\)"):
            compiling.compile_source("main", ("SOME",), "sm_90")


def test_missing_nvrtc_names_the_package(monkeypatch):
    monkeypatch.setattr(probe, "load_library", lambda names: None)
    monkeypatch.setattr(compiling, "load_nvrtc", compiling.load_nvrtc.__wrapped__)  # without its cache
    assert not compiling.available()
    with pytest.raises(UsageError, match="pip install nvidia-cuda-nvrtc"):
        compiling.compile_text("", "empty.cu", (), "sm_90")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Return the cache directory and the list of requests to a fake compiler."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(compiling, "nvrtc_version", lambda: "13.0")
    requests = []

    def compile_source(source, defines, arch):
        requests.append((source, defines, arch))
        return compiling.Compiled(f"code {len(requests)}".encode(), "")

    monkeypatch.setattr(compiling, "compile_source", compile_source)
    return tmp_path / "distgpt" / "kernels", requests


NORM = ("norm", ("X",), "sm_90")


def test_compiled_code_is_cached_by_all_its_inputs(cache, monkeypatch):
    _, requests = cache
    assert [compiling.cubin(*NORM) for _ in range(3)] == [b"code 1"] * 3 and requests == [NORM]
    others = (("loss", *NORM[1:]), (NORM[0], ("X", "Y"), NORM[2]), (*NORM[:2], "sm_80"))
    assert [compiling.cubin(*other) for other in others] == [b"code 2", b"code 3", b"code 4"]
    for name, value in (("nvrtc_version", lambda: "13.1"), ("source_text", lambda source: "another")):
        before = len(requests)
        monkeypatch.setattr(compiling, name, value)
        assert compiling.cubin(*NORM) == f"code {before + 1}".encode(), name


def test_cache_is_filled_for_all_presets(cache):
    folder, requests = cache
    assert kernel_resources.fill_cache("sm_90") == len(requests) == len(list(folder.iterdir())) > 100


@pytest.mark.ci
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_cache_has_everything_that_models_request(dtype, monkeypatch):
    """One layer of each preset trains a step, packed and unpacked, updates, and generates, without computing."""
    requests = set()
    monkeypatch.setattr(hostlt, "multiply", lambda *about: None)
    monkeypatch.setattr(HostGpu, "started", lambda *about: lambda: None)
    monkeypatch.setattr(HostGpu, "cubin", lambda xp, source, defines, arch: requests.add((source, defines)) or b"")
    for name in ("tiny", "fast", "gpt-mini", "gpt2", "gpt2-fast", "smollm2-135m", "qwen3-0.6b", "S"):
        run = preset(name, {"n_layer": 1, "vocab_size": 40, "seq_len": 512})
        k = host_kernels(dtype, multiprocessors=132)
        model = Model(Architecture(run.model), k)
        model.allocate_master_weights()
        ids = k.integers(np.zeros(8, np.int64))
        for positions in (None, k.integers(np.arange(8))):
            work = Pass(model, 1, 8, training=True, recompute="none", positions=positions)
            work.loss_and_gradients(ids, ids, 1.0, accumulate=False)
        OPTIMIZERS[run.train.optimizer](model, run.train).step(0, 1.0)
        PlainSlots(model, 1).feed([Feed(0, 0, [1, 2, 3], 1)])
    assert {"muon", "norm", "attention_cached"} < {source for source, _ in requests}
    assert requests <= kernel_resources.of_users(), requests - kernel_resources.of_users()


needs_nvdisasm = pytest.mark.skipif(
    not compiling.available() or disassembler() is None, reason="pip install nvidia-cuda-nvrtc nvidia-cuda-nvdisasm"
)
FAST = ("sm_90", "bfloat16")
KINDS = [
    pytest.param(*kind, marks=[] if kind == FAST else pytest.mark.slow)
    for kind in (FAST, ("sm_90", "float32"), ("sm_80", "bfloat16"))
]
# Sums in one block, intentionally in float64.
IN_DOUBLE = {"sum_all", "add_up", "shrinking", "drawn"}
# Threads pass float32 sums of squares on in float64; a single thread computes the clip factor.
ENDS_IN_DOUBLE = {"squares", "squares_of_stored", "update_squares", "adamw_common", "muon_scalars"} | IN_DOUBLE
# Packed kernels with single values as results: sums of rows or columns.
SUMS_OF_TILES = {"attention_backward_queries": 1, "attention_backward_keys": 2}
NARROW_RESULTS = {"linear_few_rows_packed", "sum_slices_packed"}


@functools.cache
def kernels(source, arch, type):
    """Return every kernel's name, description and code; in the ordinary run, of the smallest shape."""
    variants = list(kernel_resources.variants(source, type))
    return [
        (name, f"{name} of {source} {defines} for {arch}", code)
        for defines in (variants[:1] if (arch, type) == FAST else variants)
        for name, code in disassembled(compiled(source, defines, arch).cubin).items()
    ]


@needs_nvdisasm
@pytest.mark.ci
@pytest.mark.parametrize(("arch", "type"), KINDS)
@pytest.mark.parametrize("source", compiling.source_names())
def test_kernels_avoid_spills_and_float64(source, arch, type):
    for name, where, code in kernels(source, arch, type):
        if (name, type, arch) not in MAY_SPILL:
            assert not count(code, "LDL") and not count(code, "STL"), where
        elif arch == "sm_90" and type == "bfloat16":  # loops store nothing and load at most one value
            spilled = [each.op.split(".")[0] for each in code if each.in_loop and each.op[:3] in ("LDL", "STL")]
            assert spilled in ([], ["LDL"]), where
        doubles = [each for each in code if each.is_double]
        assert name in IN_DOUBLE or not any(each.in_loop for each in doubles), where
        if name not in ENDS_IN_DOUBLE:  # others only round float64 arguments
            assert {each.op for each in doubles} <= {"F2F.F32.F64"}, where
        if name.endswith("_packed"):
            assert count(code, "LDG 128"), where
        if name.endswith("_packed") and name not in NARROW_RESULTS:
            scores = {"cross_entropy_packed": 1}.get(name, 0)  # the target's
            assert count(code, "STG 128") and not count(code, "STG U16"), where
            assert count(code, "LDG U16") <= scores, where


@needs_nvdisasm
@pytest.mark.parametrize(("arch", "type"), KINDS)
def test_optimizer_loads_before_it_stores(arch, type):
    loads = {"adamw": 4, "nesterov": 3, "subtract": 2, "round_to_stored": 1}
    stores = {"adamw": 3, "nesterov": 3, "subtract": 1, "round_to_stored": 0}
    found = {name: code for name, _, code in kernels("optimizer", arch, type)}
    for name, wide in loads.items():
        ops = [each.op for each in found[name]]
        first_store = next(i for i, op in enumerate(ops) if op.startswith("STG"))
        assert count(found[name], "LDG 128") == wide == count(found[name][:first_store], "LDG 128"), name
        rounded = int(type == "float32" and name != "subtract")  # low is as wide as the rest
        assert count(found[name], "STG 128") == stores[name] + rounded, name
        assert count(found[name], "STG 128 EF") == {"adamw": 2, "nesterov": 2}.get(name, 0), name


@needs_nvdisasm
@pytest.mark.parametrize("arch", ["sm_90", pytest.param("sm_80", marks=pytest.mark.slow)])
def test_bfloat16_attention_uses_tensor_cores(arch):
    products = {"attention_forward": 64, "attention_backward_queries": 48, "attention_backward_keys": 32}
    for name, where, code in kernels("attention_mma", arch, "bfloat16"):
        assert count(code, "HMMA") == count(code, "HMMA 16816 F32 BF16") >= products[name], where
        assert count(code, "LDGSTS 128") >= 8 and count(code, "LDSM") >= 16, where
        statistics = {"attention_forward": 2, **SUMS_OF_TILES}.get(name, 0)
        assert count(code, "STG 128") and count(code, "STG") == count(code, "STG 128") + statistics, where
        assert not any(each.in_loop for each in code if each.op.startswith("STG.") and "128" not in each.op)


@needs_nvdisasm
@pytest.mark.parametrize(("arch", "type"), KINDS)
def test_plain_attention_moves_16_bytes(arch, type):
    for _, where, code in kernels("attention_delta", arch, type):
        assert count(code, "LDG 128"), where
    for name, where, code in kernels("attention", arch, type):
        assert count(code, "STG 128") >= 5 and count(code, "LDG 128") >= 9, where
        statistics = count(code, "STG") - count(code, "STG 128")
        # Compilers unroll the loop over column sums once or twice.
        few = {"attention_forward": 4, "attention_backward_queries": 2, "attention_backward_keys": 4}
        assert statistics <= few[name], where


@pytest.mark.ci
@needs_nvdisasm
def test_spills_float64_and_narrow_stores_are_detected():
    made = compiling.compile_text("""
    extern "C" __global__ void __launch_bounds__(1024, 2) hungry(double* p, int n) {
        double x[48];
        for (int i = 0; i < 48; i++) x[i] = p[i * 1024 + threadIdx.x];
        for (int round = 0; round < n; round++)
            for (int i = 0; i < 48; i++) x[i] += x[(i * 7 + 1) % 48] * x[(i + 5) % 48];
        for (int i = 0; i < 48; i++) p[i * 1024 + threadIdx.x] = x[i];
    }
    extern "C" __global__ void once(float* p, const double* q) {
        __shared__ float row[64];
        row[threadIdx.x] = float(q[0] * q[1]);
        __syncthreads();
        p[threadIdx.x] = row[63 - threadIdx.x];
    }
    extern "C" __global__ void narrow(unsigned short* p, const uint4* q) { p[threadIdx.x] = q[threadIdx.x].w; }
    """, "wrong.cu", (), "sm_90")  # fmt: skip
    used, code = kernel_resources.resources(made.report), disassembled(made.cubin)
    assert used["hungry"].stack > 0 and used["hungry"].spill_stores > 0 and used["hungry"].spill_loads > 0
    once = used["once"]
    assert (once.stack, once.spill_stores, once.spill_loads, once.shared) == (0, 0, 0, 256)
    assert count(code["hungry"], "STL") and count(code["hungry"], "LDL") and not count(code["once"], "STL")
    in_loops = {name: [each.in_loop for each in kernel if each.is_double] for name, kernel in code.items()}
    assert any(in_loops["hungry"]) and in_loops["once"] and not any(in_loops["once"]) and not in_loops["narrow"]
    assert count(code["narrow"], "STG U16") == 1 and count(code["narrow"], "STG 128") == 0
