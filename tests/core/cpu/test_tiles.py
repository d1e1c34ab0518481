"""Microkernels for all registers: results, machine code and its cache. AMX may be emulated (tests/amx)."""

import ctypes
import platform
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import emulatedamx
import llvmlite.binding as llvm
import numba
import numpy as np
import pytest
from distgpt.core.cpu.compiling import disk_cache, processor
from distgpt.core.cpu.compiling.processor import AMX, ARM64, AVX2, AVX512, AVX512_BF16, BFLOAT16, FLOAT32, features
from distgpt.core.cpu.matmul import amx, assembled, packing, widening
from distgpt.core.cpu.matmul.microkernel import Tile, declarations, module
from distgpt.core.cpu.matmul.packing import aligned
from distgpt.core.cpu.matmul.vectors import moves
from distgpt.core.ops.low_precision import to_bfloat16
from distgpt.inference.quantized import int4, int8
from distgpt.inference.quantized.int4 import Int4Tile
from distgpt.inference.quantized.int8 import Int8Tile, dot_of
from distgpt.measure.verification import kept
from microkernels import GUARD, multiply, routine, stored, wide

OUT = {"float32": "float32", "bfloat16": "uint16"}
TYPES = ((FLOAT32, FLOAT32), (BFLOAT16, FLOAT32), (BFLOAT16, BFLOAT16))
# The arm64 tiles run on every processor. AVX-512 widens bfloat16 in a buffer.
WAYS = [*((ARM64, *types) for types in TYPES), *((shape, *types) for shape in (AVX512, AMX) for types in TYPES[1:])]
NAMES = {ARM64: "arm64", AVX512: "widening", AMX: "AMX"}
IS_THERE = processor.has_amx()
CAN_EMULATE = emulatedamx.COMPILER and platform.machine() == "x86_64" and sys.platform == "linux"
needs_amx = pytest.mark.skipif(not (IS_THERE or CAN_EMULATE), reason="needs AMX, or Linux, x86 and g++ to emulate it")


@pytest.fixture(scope="module")
def emulation(tmp_path_factory):
    """Return the library that emulates AMX, or None if the processor has it."""
    return None if IS_THERE else emulatedamx.library(tmp_path_factory.mktemp("amx"))


@pytest.fixture(scope="module")
def amx_machine(emulation):
    """Return a maker of machine code for this processor and AMX, and enable AMX."""
    if emulation is None:
        assert processor.amx_granted()
    else:
        ctypes.CDLL(str(emulation))
    name, target = processor.processor()[0], llvm.Target.from_default_triple()
    return lambda: target.create_target_machine(cpu=name, features=emulatedamx.features(), opt=3)


def tile_of(shape, operand, out, request):
    arguments = "nnpnnppnnpn"
    if shape != AMX:
        return routine(assembled.tile_text(shape, operand, out), "tile", arguments)
    # LLVM rounds to bfloat16 only on processors with the instruction.
    text = amx.module(replace(AMX, dot="avx512bf16" in features()), operand, out)
    return routine(text, "tile", arguments, request.getfixturevalue("amx_machine"))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(way, id=f"{NAMES[way[0]]}-{way[1]}-{way[2]}", marks=[pytest.mark.ci, needs_amx][: 2 * way[0].amx])
        for way in WAYS
    ],
)
def tile(request):
    if request.param[0] == AVX512 and "avx512f" not in features():
        pytest.skip("needs AVX-512")
    return tile_of(*request.param, request), *request.param


def test_tile_sums_of_small_integers_are_exact(tile):
    multiplied, shape, operand, out = tile
    random = np.random.default_rng(1)
    for rows in range(1, shape.rows + 1):
        for case, k in enumerate((0, 1, 2, 31, 32, 33, 63, 64, 65, 95, 97, 130)):
            columns = int(random.choice([1, shape.lanes - 1, shape.lanes, shape.lanes + 1, shape.columns]))
            a, b = (random.integers(-1, 2, sides).astype(np.float32) for sides in ((rows, k), (k, columns)))
            bias = random.integers(-9, 10, columns).astype(np.float32) if k % 3 else None
            accumulate = out == FLOAT32 and rows % 2 == 1
            whole = np.full((rows + 1, columns + 2), GUARD[OUT[out]])
            c = whole[:rows, :columns]
            if accumulate:
                c[...] = 7
            how = bias, accumulate, (rows + case) % 2 == 1
            multiply(multiplied, shape.columns, stored(a, operand), stored(b, operand), c, *how)
            expected = a @ b + 7 * accumulate + (0 if bias is None else bias)
            np.testing.assert_array_equal(wide(c), expected, str((rows, k, columns)))
            assert np.isnan(wide(np.concatenate([whole[rows], whole[:, columns:].ravel()]))).all()


def test_tile_keeps_nan_in_its_row(tile):
    multiplied, shape, operand, out = tile
    rows, columns = min(20, shape.rows), shape.lanes - 1
    for k in (1, 2, 31, 33, 64):
        for value, by_pairs in ((np.nan, False), (np.inf, True), (np.nan, True)):
            a = np.ones((rows, k), np.float32)
            a[5, k // 2] = value
            c, b = np.empty((rows, columns), OUT[out]), np.ones((k, columns))
            multiply(multiplied, shape.columns, stored(a, operand), stored(b, operand), c, by_pairs=by_pairs)
            expected = np.full(c.shape, float(k))
            expected[5] = value
            np.testing.assert_array_equal(wide(c), expected, str((k, value)))


@pytest.mark.ci
@needs_amx
def test_amx_rows_and_pairs_agree(request, amx_machine):
    multiplied = tile_of(AMX, BFLOAT16, FLOAT32, request)
    rearrange = routine(amx.packed_by_rows(), "rows", "pn", amx_machine)
    random, columns = np.random.default_rng(3), AMX.columns
    for rows, k in ((32, 64), (32, 70), (7, 33), (16, 32), (17, 1), (31, 95)):
        pairs, whole = -(-k // 2), -(-k // amx.DEPTH)
        panel, packed = aligned((pairs, columns, 2), "uint16"), aligned((whole * 16, AMX.rows, 2), "uint16")
        panel[...] = to_bfloat16(random.standard_normal(panel.shape))
        packed[...] = GUARD["uint16"]
        packed[:pairs, :rows] = to_bfloat16(random.standard_normal((pairs, rows, 2)))
        if k % 2:
            panel[-1, :, 1] = packed[pairs - 1, :rows, 1] = 0
        made = []
        for row in (4, 64):
            if row == 64:
                rearrange(packed, whole)
            made.append(np.full((rows, columns), np.nan, np.float32))
            multiplied(rows, k, packed, row, 4 * AMX.rows, panel, made[-1], 4 * columns, columns, panel, 0)
        assert np.array_equal(*made) and np.isfinite(made[0]).all(), (rows, k)


@needs_amx
@pytest.mark.skipif(IS_THERE or not {"avx512bf16", "avx512bw"} <= features(), reason="AMX itself, or no AVX512_BF16")
@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_amx_loops_pass_their_tests():
    """Run tests of matmul and attention; `make test-amx` runs more."""
    files = [str(Path(__file__).with_name(f"test_{name}.py")) for name in ("matmul", "cpu_attention")]
    chosen = "uint16 and odd or lengths and bfloat16"
    words = ["-m", "pytest", "-p", "no:cacheprovider", "--timeout", "1400", "-m", "not slow", "-k", chosen, *files]
    done = subprocess.run([sys.executable, emulatedamx.__file__, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


def assembly(text, triple, cpu, features=""):
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    parsed = assembled.verified(text)
    parsed.triple = triple
    target = llvm.Target.from_triple(triple)
    return target.create_target_machine(cpu=cpu, features=features, opt=3).emit_assembly(parsed)


@pytest.mark.ci
def test_arm64_kernels_assemble_anywhere():
    arm64 = "aarch64-linux-gnu", "generic", "+neon"
    plain = dot_of(ARM64, {"neon", "dotprod", "i8mm"})
    assert plain.kind == "plain"
    for types in TYPES:
        assert "\tfmla\t" in assembly(assembled.tile_text(ARM64, *types), *arm64)
    for of in (int8, int4):
        assert "\ntile:" in assembly(of.module(ARM64, plain), *arm64)
    assert "\ntranspose:" in assembly(moves(ARM64.lanes), *arm64)


@pytest.mark.parametrize("registers", [AVX2, AVX512, AVX512_BF16, AMX])
def test_all_registers_have_tiles(registers):
    for operand, out in TYPES:
        text = assembled.tile_text(registers, operand, out)
        assert assembled.verified(text) and ("dpbf16ps" in text) == (registers.dot and operand == BFLOAT16)


def products(loop):
    return sum("vfmadd" in line or "vpmaddwd" in line for line in loop)


PROCESSORS = {"haswell": (AVX2, {"avx2"}), "skylake-avx512": (AVX512, {"avx512bw"})}


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "bfloat16 by pairs", "int8", "int4"])
def test_tile_sums_stay_in_registers(name, kind):
    shape, given = PROCESSORS[name]
    if kind.startswith("int"):
        dot = dot_of(shape, given)
        rows = min(dot.rows, int4.MOST) if kind == "int4" else dot.rows
        made = (Int8Tile if kind == "int8" else Int4Tile)(shape, dot, rows)
        declared = [*declarations(shape, "float32", "float32"), dot.declaration(f"<{shape.lanes} x i32>")]
        declared += [made.declaration()] if kind == "int4" else []
    else:
        operand, _, by_pairs = kind.partition(" ")
        declared = declarations(shape, operand, "float32")
        if operand == "bfloat16" and shape == AVX512:
            declared.append(widening.DECLARATIONS)
            made = widening.BufferedTile(shape, "float32", shape.rows, "tile", not by_pairs)
        else:
            made = Tile(shape, operand, "float32", shape.rows)
    text = "\n".join([*declared, made.text().replace("define internal", "define")])
    lines, begins, loops = assembly(text, "x86_64-linux-gnu", name).splitlines(), {}, []
    for number, line in enumerate(lines):
        if label := re.match(r"(\.L\w+):", line):
            begins[label[1]] = number
        jump = re.match(r"\s+j\w+\s+(\.L\w+)", line)
        if jump and jump[1] in begins:
            loops.append(lines[begins[jump[1]] : number])
    loop = min(filter(products, loops), key=len)
    a_row = shape.vectors * {"float32": 1, "int8": 2 * int8.UNROLLED, "int4": 2 * int8.UNROLLED}.get(kind, 2)
    assert products(loop) == made.rows * a_row
    on_the_stack = [line for line in loop if re.search(r"\(%r[sb]p\)", line) and re.search(r"%[yz]mm", line)]
    assert len(on_the_stack) <= (10 if kind == "int4" else 4), on_the_stack  # AVX2 spills a table and masks


def test_packed_rows_may_overlap_vectors(monkeypatch):
    """With 6 columns and vectors of 4, a row's second vector reaches into the next row."""

    def strip(x, row, to, step, rows):
        for k in range(rows):
            to[k * step // 4 : k * step // 4 + 4] = x[k, :4].view(np.uint32)

    monkeypatch.setattr(packing, "strip", strip)
    monkeypatch.setattr(packing, "LANES", 4)
    w = np.arange(70, dtype=np.float32).reshape(7, 10)
    to = np.zeros(7 * 6 + 4, np.float32)
    packing.copy_columns.py_func(to, w, 0, 7, 1, 6, 6)
    np.testing.assert_array_equal(to[:42].reshape(7, 6), w[:, 1:7])


@pytest.fixture
def code(tmp_path, monkeypatch):
    monkeypatch.setattr(assembled.disk_cache, "folder", lambda: tmp_path)

    def code(name="tile"):
        return assembled.machine_code(name, lambda: code.made.append(name) or module(AVX2, "float32", "float32"))

    code.made = []
    return code


def test_machine_code_is_keyed_by_processor_and_version(code, monkeypatch):
    own, (name, given) = code(), assembled.processor()
    assert code() == own and code.made == ["tile"]
    others = [shape for shape in (AVX2, AVX512, AVX512_BF16, AMX) if shape != assembled.shape()]
    for what, other in (
        ("processor", ("sandybridge", "+avx,+sse2")),
        ("processor", (name, f"{given},-avx512bf16")),
        *(("shape", shape) for shape in others),
    ):
        with monkeypatch.context() as changed:
            changed.setattr(assembled, what, lambda other=other: other)
            before = len(code.made)
            assert code() == code() and len(code.made) == before + 1, other
            assert code() != own or what == "shape" or other[0] == name
    monkeypatch.setattr(assembled.llvmlite, "__version__", "0.1")
    before = len(code.made)
    code()
    code("moves")
    assert len(code.made) == before + 2


PRESENT = {"avx512f", "avx512bw", "avx512bf16", "amx-bf16", "amx-tile"}
WITHOUT = PRESENT - {"amx-tile"}


@pytest.mark.parametrize("name, features, wanted, granted, expected", [
    ("sapphirerapids", PRESENT, None, True, AMX),
    ("sapphirerapids", PRESENT, "1", True, AMX),
    ("sapphirerapids", PRESENT, None, False, AVX512),
    ("sapphirerapids", PRESENT, "0", True, AVX512),
    ("sapphirerapids", WITHOUT, None, True, AVX512),
    ("znver4", WITHOUT, None, True, AVX512_BF16),  # fast at multiplying pairs
    ("znver4", {"avx512f"}, None, True, AVX512),
    ("generic", {"neon", "dotprod", "bf16"}, None, False, ARM64),
])  # fmt: skip
def test_registers_follow_from_processor_and_variable(name, features, wanted, granted, expected, monkeypatch):
    monkeypatch.setattr(processor, "processor", lambda: (name, ""))
    monkeypatch.setattr(processor, "features", lambda: features)
    monkeypatch.setattr(processor, "amx_granted", lambda: granted)
    monkeypatch.delenv(processor.AMX_VARIABLE, raising=False)
    if wanted is not None:
        monkeypatch.setenv(processor.AMX_VARIABLE, wanted)
    for machine in ("aarch64", "arm64"):
        monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
        assert processor.shape.__wrapped__() == expected
    assert ("does not grant it" in processor.hint()) == (features == PRESENT and not granted)
    assert (processor.hint() == "") == (expected == AMX or features != PRESENT)


@pytest.mark.parametrize("system, machine, answer, asks", [
    ("linux", "x86_64", 0, True),
    ("linux", "x86_64", -1, True),
    ("linux", "aarch64", 0, False),
    ("darwin", "x86_64", 0, False),
])  # fmt: skip
def test_tile_registers_are_requested_from_linux(system, machine, answer, asks, monkeypatch):
    asked = []
    syscall = SimpleNamespace(syscall=lambda *numbers: asked.append(numbers) or answer)
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: syscall)
    assert processor.amx_granted.__wrapped__() == (asks and answer == 0)
    assert asked == [(158, 0x1023, 18)] * asks  # arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA


def test_run_records_use_of_amx(monkeypatch):
    found = []
    for shape in (AVX512_BF16, AMX):
        monkeypatch.setattr(processor, "shape", lambda shape=shape: shape)
        found.append(kept.processor_kind())
    assert found[1] == f"{found[0]}-amx"


def test_loops_with_other_tiles_have_separate_caches(tmp_path, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(disk_cache, "folder_name", disk_cache.folder_name.__wrapped__)
    folders = []
    for shape in (AVX512_BF16, AMX):
        monkeypatch.setattr(disk_cache, "shape", lambda shape=shape: shape)
        folders.append(disk_cache.folder.__wrapped__())
    assert len(set(folders)) == 2 and all(folder.is_dir() for folder in folders)
