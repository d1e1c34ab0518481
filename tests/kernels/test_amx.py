"""The microkernel for AMX: what it is assembled to, and what it computes with the instructions emulated."""

import ctypes
import mmap
import os
import re
import subprocess
import sys
from pathlib import Path

import emulated_amx
import llvmlite.binding as llvm
import numpy as np
import pytest
from test_matmul import GUARD, bits, check, wide

from distgpt.kernels.fused import disk_cache
from distgpt.kernels.matmul import amx, assembled, processor
from distgpt.kernels.matmul.microkernel import ACCUMULATE, BIAS, module
from distgpt.kernels.matmul.vectors import AMX, AVX512, AVX512_BF16

HERE = Path(__file__).parent
OUT = {"float32": "float32", "bfloat16": "uint16"}
ROWS, COLUMNS = AMX.rows, AMX.columns
NAN = GUARD["uint16"]


# What it is assembled to


@pytest.fixture(scope="module", params=OUT)
def functions(request):
    """The instructions of each function, for a processor that has AMX."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    try:
        target = llvm.Target.from_triple("x86_64-unknown-linux-gnu")
    except RuntimeError:
        pytest.skip("this LLVM does not compile for x86")
    machine = target.create_target_machine(cpu="sapphirerapids", opt=3)
    text = machine.emit_assembly(assembled._verified(amx.module(AMX, request.param)))
    parts = re.split(r"^(\w+):\n", text, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def instructions(name, text):
    """What follows the name of an instruction, each time that it occurs."""
    return re.findall(rf"^\t{name}\b[ \t]*(.*)$", text, flags=re.M)


def test_it_has_the_instructions_and_uses_every_register(functions):
    for name, high in (("tile1", 1), ("tile2", 2)):
        text = functions[name]
        assert len(instructions("ldtilecfg", text)) == len(instructions("tilerelease", text)) == 1
        assert len(instructions("tilestored", text)) == len(instructions("tilezero", text)) == 2 * high
        used = {int(number) for number in re.findall(r"%tmm(\d)", text)}
        assert used == (set(range(8)) if high == 2 else {0, 1, 4, 6, 7})
        assert text.index("tilerelease") > text.rindex("tilestored")
    assert "tdpbf16ps" not in functions["tile"] + functions["by_rows"] + functions["by_pairs"]


PRODUCTS = ["640", "741", "652", "753"]  # the tile registers of B, A and C


def test_its_loop_multiplies_as_often_as_it_loads(functions):
    for name, products, loaded in (("tile1", PRODUCTS[:2], "467"), ("tile2", PRODUCTS, "4567")):
        blocks = re.split(r"^\.LBB\w+:.*\n", functions[name], flags=re.M)
        (loop,) = [block for block in blocks if "tdpbf16ps" in block]
        found = ["".join(re.findall(r"%tmm(\d)", line)) for line in instructions("tdpbf16ps", loop)]
        assert sorted(found) == sorted(products)
        assert sorted(line[-1] for line in instructions("tileloadd", loop)) == list(loaded)
        assert not instructions("call\\w*", loop)


# What it computes


def fenced(array):
    """A copy right before memory that must not be touched."""
    room = -(-max(array.nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    whole = mmap.mmap(-1, room + mmap.PAGESIZE)
    data = np.frombuffer(whole, np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    fence = ctypes.c_void_p(data.ctypes.data + room)
    assert libc.mprotect(fence, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    copy = data[room - array.nbytes : room].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


@pytest.fixture(scope="module")
def tiles():
    """`tile` for each type of C, with the instructions emulated."""
    found, engines = {}, []
    for out in OUT:
        text = amx.module(emulated_amx.SHAPE, out, emulated_amx.PREFIX)
        engine = llvm.create_mcjit_compiler(assembled._verified(text), assembled._machine())
        engine.finalize_object()
        engines.append(engine)
        kinds = "nnpnnppnnpn"
        types = [ctypes.c_int64 if kind == "n" else ctypes.c_void_p for kind in kinds]
        found[out] = ctypes.CFUNCTYPE(None, *types)(engine.get_function_address("tile"))
    yield found
    assert not emulated_amx.faults


def computed(tile, a, b, c, bias=None, accumulate=False, by_pairs=False):
    """c ← [c +] a b [+ bias] for bfloat16 a (rows, k), b (k, columns)."""
    (rows, k), columns, pairs = a.shape, b.shape[1], -(-a.shape[1] // 2)
    panel = np.full((pairs, COLUMNS, 2), NAN)
    panel[:, :columns] = 0
    for i in range(k):
        panel[i // 2, :columns, i % 2] = b[i]
    panel = fenced(panel)
    if by_pairs:
        packed = np.full((pairs, rows + 3, 2), NAN)  # behind an odd k lies something else
        for i in range(k):
            packed[i // 2, :rows, i % 2] = a[:, i]
        packed = fenced(packed.reshape(pairs, -1)[:, : 2 * (rows + 3)])
        row, step = 4, 4 * (rows + 3)
    else:
        packed = np.full(max(1, rows * (k + 3) - 3), NAN)
        for r in range(rows):
            packed[r * (k + 3) : r * (k + 3) + k] = a[r]
        packed = fenced(packed)
        row, step = 2 * (k + 3), 4
    added = panel if bias is None else fenced(bias)
    flags = BIAS * (bias is not None) | ACCUMULATE * accumulate
    at_a, at_b, at_c, at_bias = (array.ctypes.data for array in (packed, panel, c, added))
    tile(rows, k, at_a, row, step, at_b, at_c, c.strides[0], columns, at_bias, flags)
    assert not emulated_amx.faults


def numbers(random, *shape):
    return bits(random.standard_normal(shape))


@pytest.mark.parametrize("out", OUT)
def test_odd_shapes_with_bias_and_without(tiles, out):
    random = np.random.default_rng(1)
    sides = [*range(1, 34), 63, 64, 65, 97]
    for case in range(150):
        k = int(random.choice(sides)) if case else 0
        rows, columns = (int(side) for side in random.integers(1, (ROWS + 1, COLUMNS + 1)))
        if case % 5 == 0:
            rows, columns = ROWS, COLUMNS
        a, b = numbers(random, rows, k), numbers(random, k, columns)
        bias = random.standard_normal(columns).astype(np.float32) if case % 3 else None
        accumulate = out == "float32" and case % 2 == 1
        whole = np.full((rows + 1, columns + 2), GUARD[OUT[out]])
        c = whole[:rows, :columns]
        before = np.zeros((rows, columns), np.float32)
        if accumulate:
            before = random.standard_normal((rows, columns)).astype(np.float32)
            c[...] = before
        computed(tiles[out], a, b, c, bias, accumulate, by_pairs=case % 4 > 1)
        added = before + (0 if bias is None else bias)
        reach = np.abs(wide(a)) @ np.abs(wide(b)) + np.abs(before) + np.abs(added)
        check(c, wide(a) @ wide(b) + added, reach, OUT[out], (rows, columns, k, case))
        beyond = np.concatenate([whole[rows], whole[:, columns:].ravel()])
        assert np.isnan(wide(beyond)).all(), (rows, columns, k, case)


def test_nan_and_infinity_pass_through_and_nothing_else_becomes_one(tiles):
    for k in (1, 2, 31, 32, 33):
        for value in (np.nan, np.inf):
            for by_pairs in (False, True):
                for at in {0, k // 2, k - 1}:
                    a = np.ones((20, k))
                    a[17, at] = value
                    c = np.empty((20, 5), np.float32)
                    computed(tiles["float32"], bits(a), bits(np.ones((k, 5))), c, by_pairs=by_pairs)
                    assert np.array_equal(np.delete(c, 17, 0), np.full((19, 5), float(k)))
                    assert np.array_equal(c[17], np.full(5, value), equal_nan=True), (k, value, at)


def test_no_rows_are_no_work(tiles):
    c = np.ones((1, 1), np.float32)
    computed(tiles["float32"], np.empty((0, 3), np.uint16), np.empty((3, 1), np.uint16), c)
    assert c == 1


def test_float32_comes_in_parts_that_fit_the_vector_registers():
    text = module(AMX, "float32", "float32")
    assert f"@tile{AVX512_BF16.rows}(" in text and f"@tile{AVX512_BF16.rows + 1}(" not in text
    block = text.split("\nrows32:\n")[1].split("ret void")[0]
    assert re.findall(r"@tile(\d+)", block) == ["10", "11", "11"]
    assert re.findall(r"mul i64 %row, (\d+)", block) == ["0", "10", "21"]


# When it is used


def test_it_is_used_only_where_it_is_there_wanted_and_granted(monkeypatch):
    present = {"avx512f", "avx512bw", "avx512bf16", "amx-bf16", "amx-tile"}
    for features, wanted, granted, expected in (
        (present, "1", True, AMX),
        (present, "1", False, AVX512),
        (present, "0", True, AVX512),
        (present, None, True, AVX512),
        (present - {"amx-tile"}, "1", True, AVX512),
        (present - {"avx512bf16"}, "1", True, AVX512),
    ):
        monkeypatch.setattr(processor, "processor", lambda: ("sapphirerapids", ""))
        monkeypatch.setattr(processor, "features", lambda features=features: features)
        monkeypatch.setattr(processor, "amx_granted", lambda granted=granted: granted)
        monkeypatch.delenv(processor.AMX_VARIABLE, raising=False)
        if wanted is not None:
            monkeypatch.setenv(processor.AMX_VARIABLE, wanted)
        assert processor.shape.__wrapped__() == expected


def test_pairs_are_multiplied_by_the_instruction_for_them_where_it_is_fast(monkeypatch):
    for name, features, expected in (
        ("znver4", "+avx512f,+avx512bf16", AVX512_BF16),
        ("znver5", "+avx512f,+avx512bf16", AVX512_BF16),
        ("emeraldrapids", "+avx512f,+avx512bf16", AVX512),
        ("znver4", "+avx512f", AVX512),
    ):
        monkeypatch.setattr(processor, "processor", lambda found=(name, features): found)
        assert processor.shape.__wrapped__() == expected


def test_linux_is_asked_without_harm_on_any_processor():
    assert processor.amx_granted() in (True, False)
    if not processor.has_amx() and sys.platform == "linux":
        assert not processor.amx_granted() or "amx_tile" in Path("/proc/cpuinfo").read_text()


def test_loops_with_other_tiles_lie_in_another_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_cache.config, "CACHE_DIR", str(tmp_path))
    folders = []
    for shape in (AVX512_BF16, AMX):
        monkeypatch.setattr(disk_cache, "shape", lambda shape=shape: shape)
        folders.append(disk_cache.folder.__wrapped__())
    assert len(set(folders)) == 2 and all(folder.is_dir() for folder in folders)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_matmuls_and_attention_compute_the_same_with_it(tmp_path):
    """Those very tests in bfloat16, with the instructions emulated."""
    files = [str(HERE / name) for name in ("test_matmul.py", "test_cpu_attention.py")]
    those = "odd_shapes and uint16 or a_cache_of_any_length and bfloat16"
    words = ["-q", "-p", "no:cacheprovider", "-k", those, *files]
    program = f"""
import emulated_amx, sys
emulated_amx.install()
import pytest
code = pytest.main({words!r})
from distgpt.kernels.matmul import packing
assert packing.ROWS == 32 and not emulated_amx.faults, emulated_amx.faults[:3]
sys.exit(code)
"""
    environ = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    paths = [str(HERE.parent / "helpers"), os.environ.get("PYTHONPATH")]
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, env=environ, cwd=HERE.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
