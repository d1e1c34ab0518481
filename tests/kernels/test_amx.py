"""The microkernel for AMX: what it computes with the instructions emulated, and when it is used."""

import ctypes
from dataclasses import replace

import llvmlite.binding as llvm
import numba
import numpy as np
import pytest
from test_matmul import GUARD, check, wide

from distgpt.core.cpu.compiling import disk_cache, processor
from distgpt.core.cpu.compiling.processor import AVX512, AVX512_BF16, BFLOAT16
from distgpt.core.cpu.matmul import assembled
from distgpt.core.cpu.matmul.microkernel import ACCUMULATE, BIAS
from distgpt.core.cpu.matmul.packing import aligned
from distgpt.core.ops.low_precision import to_bfloat16
from distgpt.processors import amx, permission
from distgpt.processors.permission import SHAPE as AMX

OUT = {"float32": "float32", "bfloat16": "uint16"}
ROWS, COLUMNS = AMX.rows, AMX.columns
NAN = GUARD["uint16"]
PREFIX = "distgpt_emulated_"
# Rounded as this processor can: LLVM rounds to bfloat16 by itself only for those with the instruction.
SHAPE = replace(AMX, dot="avx512bf16" in processor.features())
TYPES = {"ptr": ctypes.c_void_p, "i8": ctypes.c_uint8, "i64": ctypes.c_int64}


def memory(address, size):
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


class Registers:
    """The instructions as Intel's manual describes them; what the processor would refuse is in `faults`."""

    def __init__(self):
        self.data, self.faults = np.zeros((8, 16, 64), np.uint8), []
        self.tilerelease()
        self.callbacks = {}
        for name, types in amx.INTRINSICS.items():
            kinds = [TYPES[each] for each in types.split(", ") if each]
            self.callbacks[name] = ctypes.CFUNCTYPE(None, *kinds)(self._watched(name))
            llvm.add_symbol(PREFIX + name, ctypes.cast(self.callbacks[name], ctypes.c_void_p).value)

    def _watched(self, name):
        def run(*arguments):
            try:
                getattr(self, name)(*arguments)
            except Exception as error:  # C knows none
                self.faults.append(f"{name}{arguments}: {error!r}")

        return run

    def __getitem__(self, number):
        """Return the configured part of a register."""
        assert self.rows is not None and self.rows[number] and self.widths[number], f"tmm{number} has no size"
        return self.data[number, : self.rows[number], : self.widths[number]]

    def ldtilecfg(self, address):
        config = memory(address, 64)
        self.widths, self.rows = config[16:32].view(np.uint16).copy(), config[48:56].copy()
        assert config[0] == 1 and not config[1:16].any() and not config[32:48].any() and not config[56:].any()
        assert (self.rows <= 16).all() and (self.widths <= 64).all()

    def tilerelease(self):
        self.rows = self.widths = None

    def tilezero(self, number):
        self[number][...] = 0

    def tileloadd64(self, number, address, stride):
        for r, row in enumerate(self[number]):
            row[:] = memory(address + r * stride, len(row))

    def tilestored64(self, number, address, stride):
        for r, row in enumerate(self[number]):
            memory(address + r * stride, len(row))[:] = row

    def tdpbf16ps(self, c, a, b):
        assert len({c, a, b}) == 3
        sums, left, right = self[c].view("f4"), self[a].view("u2"), self[b].view("u2")
        rows, columns, pairs = len(left), sums.shape[1], len(right)
        assert sums.shape == (rows, columns) and left.shape[1] == 2 * pairs and right.shape[1] == 2 * columns
        x, y = (flushed((bits.astype(np.uint32) << 16).view(np.float32)) for bits in (left, right))
        with np.errstate(invalid="ignore", over="ignore"):
            terms = x.reshape(rows, pairs, 1, 2) * y.reshape(pairs, columns, 2)  # exact in float32
            sums[...] = flushed(flushed(sums) + flushed(terms.sum((1, 3))))


def flushed(x):
    """Without denormals."""
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


@pytest.fixture(scope="module")
def tiles():
    """`tile` for each type of C, with the instructions emulated."""
    registers = Registers()
    found, alive = compiled({out: amx.module(SHAPE, BFLOAT16, out, PREFIX) for out in OUT})
    yield found
    assert alive and not registers.faults


def compiled(texts):
    """`tile` of each of some IR, and what keeps them alive."""
    found, engines = {}, []
    for name, text in texts.items():
        engine = llvm.create_mcjit_compiler(assembled._verified(text), assembled._machine())
        engine.finalize_object()
        engines.append(engine)
        types = [ctypes.c_int64 if kind == "n" else ctypes.c_void_p for kind in "nnpnnppnnpn"]
        found[name] = ctypes.CFUNCTYPE(None, *types)(engine.get_function_address("tile"))
    return found, engines


def computed(tile, a, b, c, bias=None, accumulate=False, by_pairs=False, kept=np.copy):
    """c ← [c +] a b [+ bias] for bfloat16 a (rows, k), b (k, columns); NaN follows what must not be read.

    `kept` gives the memory for what may be read of a.
    """
    (rows, k), columns, pairs = a.shape, b.shape[1], -(-a.shape[1] // 2)
    panel = aligned((pairs, COLUMNS, 2), "uint16")
    panel[...] = NAN
    panel[:, :columns] = 0
    for i in range(k):
        panel[i // 2, :columns, i % 2] = b[i]
    if by_pairs:
        packed = np.full((pairs, rows + 3, 2), NAN)  # an odd k is followed by something else
        for i in range(k):
            packed[i // 2, :rows, i % 2] = a[:, i]
        row, step, needed = 4, 4 * (rows + 3), 2 * ((pairs - 1) * (rows + 3) + rows) - k % 2
    else:
        packed = np.full((rows, k + 3), NAN)
        packed[:, :k] = a
        row, step, needed = 2 * (k + 3), 4, (rows - 1) * (k + 3) + k
    packed = kept(packed.reshape(-1)[: max(0, needed)])
    flags = BIAS * (bias is not None) | ACCUMULATE * accumulate
    added = panel if bias is None else bias
    at_a, at_b, at_c, at_bias = (array.ctypes.data for array in (packed, panel, c, added))
    tile(rows, k, at_a, row, step, at_b, at_c, c.strides[0], columns, at_bias, flags)


@pytest.mark.parametrize("out", OUT)
def test_odd_shapes_with_bias_and_without(tiles, out):
    random = np.random.default_rng(1)
    sides = [*range(1, 34), 63, 64, 65, 97]
    for case in range(60):
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
            a = np.ones((20, k))
            a[17, k // 2] = value
            c = np.empty((20, 5), np.float32)
            computed(tiles["float32"], to_bfloat16(a), to_bfloat16(np.ones((k, 5))), c, by_pairs=by_pairs)
            assert np.array_equal(np.delete(c, 17, 0), np.full((19, 5), float(k)))
            assert np.array_equal(c[17], np.full(5, value), equal_nan=True), (k, value)


def test_it_is_used_only_where_it_is_there_wanted_and_granted(monkeypatch):
    present = {"avx512f", "avx512bw", "avx512bf16", "amx-bf16", "amx-tile"}
    for name, features, wanted, granted, expected in (
        ("sapphirerapids", present, "1", True, AMX),
        ("sapphirerapids", present, "1", False, AVX512),
        ("sapphirerapids", present, None, True, AVX512),
        ("sapphirerapids", present - {"amx-tile"}, "1", True, AVX512),
        ("znver4", present - {"amx-tile"}, None, True, AVX512_BF16),  # fast at multiplying pairs
        ("znver4", {"avx512f"}, None, True, AVX512),
    ):
        monkeypatch.setattr(processor, "processor", lambda name=name: (name, ""))
        monkeypatch.setattr(processor, "features", lambda features=features: features)
        monkeypatch.setattr(permission, "granted", lambda granted=granted: granted)
        monkeypatch.delenv(permission.VARIABLE, raising=False)
        if wanted is not None:
            monkeypatch.setenv(permission.VARIABLE, wanted)
        assert processor.shape.__wrapped__() == expected
    monkeypatch.undo()
    assert permission.granted() in (True, False)  # any processor can be asked


def test_loops_with_other_tiles_lie_in_another_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(disk_cache, "folder_name", disk_cache.folder_name.__wrapped__)
    folders = []
    for shape in (AVX512_BF16, AMX):
        monkeypatch.setattr(disk_cache, "shape", lambda shape=shape: shape)
        folders.append(disk_cache._first_folder.__wrapped__(()))
    assert len(set(folders)) == 2 and all(folder.is_dir() for folder in folders)
