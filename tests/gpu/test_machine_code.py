"""What the compiler made of the kernels: wide loads and stores, tensor cores, no spills, no float64."""

from functools import cache

import pytest
from distgpt.gpu import compiling
from sass import count, disassembled, disassembler
from test_compiling import MAY_SPILL, compiled, kernel_resources

pytestmark = [
    pytest.mark.skipif(
        not compiling.available() or disassembler() is None,
        reason="needs NVRTC and nvdisasm: pip install nvidia-cuda-nvrtc nvidia-cuda-nvdisasm",
    ),
    pytest.mark.xdist_group("test_compiling"),  # which has compiled most of them
]

SOURCES = compiling.source_names()
FAST = ("sm_90", "bfloat16")
KINDS = [
    pytest.param(*kind, marks=[] if kind == FAST else pytest.mark.slow)
    for kind in (FAST, ("sm_90", "float32"), ("sm_80", "bfloat16"))
]
# Sums in one block, in float64 on purpose.
IN_DOUBLE = {"sum_all", "add_up", "shrinking", "drawn"}
# A thread that adds up its squares in float32 hands them over in float64; a single one finds the clip factor.
ENDS_IN_DOUBLE = {"squares", "squares_of_stored", "update_squares", "adamw_common", "muon_scalars"} | IN_DOUBLE
# Packed kernels whose results are single values: a sum for a row, or a column.
SUMS_OF_TILES = {"attention_backward_queries": 1, "attention_backward_keys": 2}
NARROW_RESULTS = {"linear_few_rows_packed", "sum_slices_packed"}


@cache
def kernels(source, arch, type):
    """Every kernel of a source: name, macros, instructions. In the ordinary run of the smallest shape."""
    variants = list(kernel_resources.variants(source, type))
    return [
        (name, f"{name} of {source} {defines} for {arch}", code)
        for defines in (variants[:1] if (arch, type) == FAST else variants)
        for name, code in disassembled(compiled(source, defines, arch).cubin).items()
    ]


@pytest.mark.ci
@pytest.mark.parametrize(("arch", "type"), KINDS)
@pytest.mark.parametrize("source", SOURCES)
def test_kernels_stay_in_registers_and_out_of_float64_and_packed_ones_move_16_bytes(source, arch, type):
    for name, where, code in kernels(source, arch, type):
        if (name, type, arch) not in MAY_SPILL:
            assert not count(code, "LDL") and not count(code, "STL"), where
        elif arch == "sm_90" and type == "bfloat16":  # nothing goes out in a loop, and a value at most comes in
            spilled = [each.op.split(".")[0] for each in code if each.in_loop and each.op[:3] in ("LDL", "STL")]
            assert spilled in ([], ["LDL"]), where
        doubles = [each for each in code if each.is_double]
        assert name in IN_DOUBLE or not any(each.in_loop for each in doubles), where
        if name not in ENDS_IN_DOUBLE:  # else arguments, which come as float64, are rounded once
            assert {each.op for each in doubles} <= {"F2F.F32.F64"}, where
        if name.endswith("_packed"):
            assert count(code, "LDG 128"), where
        if name.endswith("_packed") and name not in NARROW_RESULTS:
            scores = {"cross_entropy_packed": 1}.get(name, 0)  # the target's
            assert count(code, "STG 128") and not count(code, "STG U16"), where
            assert count(code, "LDG U16") <= scores, where


@pytest.mark.parametrize(("arch", "type"), KINDS)
def test_the_optimizer_moves_16_bytes_and_starts_all_loads_before_a_store(arch, type):
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


@pytest.mark.parametrize("arch", ["sm_90", pytest.param("sm_80", marks=pytest.mark.slow)])
def test_attention_in_bfloat16_is_on_tensor_cores_and_copies_past_the_registers(arch):
    products = {"attention_forward": 64, "attention_backward_queries": 48, "attention_backward_keys": 32}
    for name, where, code in kernels("attention_mma", arch, "bfloat16"):
        assert count(code, "HMMA") == count(code, "HMMA 16816 F32 BF16") >= products[name], where
        assert count(code, "LDGSTS 128") >= 8 and count(code, "LDSM") >= 16, where
        statistics = {"attention_forward": 2, **SUMS_OF_TILES}.get(name, 0)
        assert count(code, "STG 128") and count(code, "STG") == count(code, "STG 128") + statistics, where
        assert not any(each.in_loop for each in code if each.op.startswith("STG.") and "128" not in each.op)


@pytest.mark.parametrize(("arch", "type"), KINDS)
def test_plain_attention_reads_and_writes_rows_in_pieces_of_16_bytes(arch, type):
    for _, where, code in kernels("attention_delta", arch, type):
        assert count(code, "LDG 128"), where
    for name, where, code in kernels("attention", arch, type):
        assert count(code, "STG 128") >= 5 and count(code, "LDG 128") >= 9, where
        statistics = count(code, "STG") - count(code, "STG 128")
        # Sums of columns are a loop of single values, which compilers write out once or twice.
        few = {"attention_forward": 4, "attention_backward_queries": 2, "attention_backward_keys": 4}
        assert statistics <= few[name], where


@pytest.mark.ci
def test_mistakes_are_seen():
    text = """
    extern "C" __global__ void local(float* p, int i) {
        float x[64] = {};
        for (int k = 0; k < i; k++) x[int(p[k])] += p[k * 32 + threadIdx.x];
        p[threadIdx.x] = x[i];
    }
    extern "C" __global__ void doubles(double* p, int n) {
        double sum = 0;
        for (int i = threadIdx.x; i < n; i += blockDim.x) sum += p[i] * p[i];
        p[threadIdx.x] = sum;
    }
    extern "C" __global__ void once(float* p, const double* q) { p[threadIdx.x] = float(q[0] * q[1]); }
    extern "C" __global__ void narrow(unsigned short* p, const uint4* q) {
        p[threadIdx.x] = (unsigned short)(q[threadIdx.x].x + q[threadIdx.x].w);
    }"""
    code = disassembled(compiling.compile_text(text, "wrong.cu", (), "sm_90").cubin)
    assert count(code["local"], "STL") and count(code["local"], "LDL") and not count(code["once"], "STL")
    assert any(each.is_double and each.in_loop for each in code["doubles"])
    assert any(each.is_double for each in code["once"])
    assert not any(each.is_double and each.in_loop for each in code["once"])
    assert count(code["narrow"], "STG U16") == 1 and count(code["narrow"], "STG 128") == 0
    assert not any(each.is_double for each in code["narrow"])
