"""The microkernel for AMX: what it computes with the instructions emulated, and when it is used."""

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
from test_matmul import GUARD, check, wide

from distgpt.kernels.fused import disk_cache
from distgpt.kernels.low_precision import to_bfloat16
from distgpt.kernels.matmul import amx, assembled, processor
from distgpt.kernels.matmul.microkernel import ACCUMULATE, BIAS, module
from distgpt.kernels.matmul.vectors import AMX, AVX512, AVX512_BF16

HERE = Path(__file__).parent
OUT = {"float32": "float32", "bfloat16": "uint16"}
ROWS, COLUMNS = AMX.rows, AMX.columns
NAN = GUARD["uint16"]


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
        types = [ctypes.c_int64 if kind == "n" else ctypes.c_void_p for kind in "nnpnnppnnpn"]
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
        packed = np.full((pairs, rows + 3, 2), NAN)  # an odd k is followed by something else
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


@pytest.mark.parametrize("out", OUT)
def test_odd_shapes_with_bias_and_without(tiles, out):
    random = np.random.default_rng(1)
    sides = [*range(1, 34), 63, 64, 65, 97]
    for case in range(100):
        k = int(random.choice(sides)) if case else 0
        rows, columns = (int(side) for side in random.integers(1, (ROWS + 1, COLUMNS + 1)))
        if case % 5 == 0:
            rows, columns = ROWS, COLUMNS
        a, b = (to_bfloat16(random.standard_normal(shape)) for shape in ((rows, k), (k, columns)))
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
    for k in (1, 2, 31, 33):
        for value, by_pairs in ((np.nan, False), (np.inf, True), (np.nan, True)):
            for at in {0, k // 2, k - 1}:
                a = np.ones((20, k))
                a[17, at] = value
                c = np.empty((20, 5), np.float32)
                computed(tiles["float32"], to_bfloat16(a), to_bfloat16(np.ones((k, 5))), c, by_pairs=by_pairs)
                assert np.array_equal(np.delete(c, 17, 0), np.full((19, 5), float(k)))
                assert np.array_equal(c[17], np.full(5, value), equal_nan=True), (k, value, at)


def test_float32_comes_in_parts_that_fit_the_vector_registers():
    text = module(AMX, "float32", "float32")
    assert f"@tile{AVX512_BF16.rows}(" in text and f"@tile{AVX512_BF16.rows + 1}(" not in text
    block = text.split("\nrows32:\n")[1].split("ret void")[0]
    assert re.findall(r"@tile(\d+)", block) == ["10", "11", "11"]
    assert re.findall(r"mul i64 %row, (\d+)", block) == ["0", "10", "21"]


def test_it_is_used_only_where_it_is_there_wanted_and_granted(monkeypatch):
    present = {"avx512f", "avx512bw", "avx512bf16", "amx-bf16", "amx-tile"}
    for name, features, wanted, granted, expected in (
        ("sapphirerapids", present, "1", True, AMX),
        ("sapphirerapids", present, "1", False, AVX512),
        ("sapphirerapids", present, "0", True, AVX512),
        ("sapphirerapids", present, None, True, AVX512),
        ("sapphirerapids", present - {"amx-tile"}, "1", True, AVX512),
        ("znver4", present - {"amx-tile"}, None, True, AVX512_BF16),  # fast at multiplying pairs
        ("znver5", present - {"amx-tile"}, None, True, AVX512_BF16),
        ("znver4", {"avx512f"}, None, True, AVX512),
    ):
        monkeypatch.setattr(processor, "processor", lambda name=name: (name, ""))
        monkeypatch.setattr(processor, "features", lambda features=features: features)
        monkeypatch.setattr(processor, "amx_granted", lambda granted=granted: granted)
        monkeypatch.delenv(processor.AMX_VARIABLE, raising=False)
        if wanted is not None:
            monkeypatch.setenv(processor.AMX_VARIABLE, wanted)
        assert processor.shape.__wrapped__() == expected
    monkeypatch.undo()
    assert processor.amx_granted() in (True, False)  # any processor can be asked


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
    """Run tests of matmul and attention in bfloat16 with the instructions emulated."""
    files = [str(HERE / name) for name in ("test_matmul.py", "test_cpu_attention.py")]
    those = "add_to_what_is_there and uint16 or infinity and uint16 or a_cache_of_any_length and bfloat16"
    words = ["-q", "-p", "no:cacheprovider", "-m", "not slow", "-k", those, *files]
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
