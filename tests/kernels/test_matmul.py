"""Matmul of our own against NumPy in float64: odd shapes, strides, guarded outputs, NaN and infinity."""

import os
import subprocess
import sys

import numpy as np
import pytest

from distgpt.kernels.fused import rowwise
from distgpt.kernels.matmul import assembled, blocked, packing
from distgpt.kernels.matmul.blocked import backward, forward, product_scratch, products, scratch
from distgpt.kernels.matmul.microkernel import module
from distgpt.kernels.matmul.vectors import AMX, AVX2, AVX512, AVX512_BF16

FLOAT, BITS = "float32", "uint16"
KINDS = [(FLOAT, FLOAT), (BITS, FLOAT), (BITS, BITS)]  # of the factors, of C
GUARD = {FLOAT: np.float32(np.nan), BITS: np.uint16(0x7FC1)}
TOLERANCE = {FLOAT: 2e-6, BITS: 2.0**-8}  # of the largest product of a row and a column of absolute values


def bits(x):
    """float32 → bfloat16 by rounding to the nearest, as bits."""
    wide = np.ascontiguousarray(x, np.float32).view(np.uint32)
    nearest = ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), nearest)


def wide(x):
    """What an array means, in float64."""
    return (
        x.astype(np.float64)
        if x.dtype != np.uint16
        else (x.astype(np.uint32) << 16).view(np.float32).astype(float)
    )


def stored(x, kind):
    return x.astype(np.float32) if kind == FLOAT else bits(x)


def sides():
    """1 to 70, and around multiples of the tile."""
    tile = assembled.shape()
    around = [n + d for n in (2 * tile.rows, 4 * tile.columns, 256) for d in (-1, 0, 1)]
    return [*range(1, 71), *around]


def guarded(rows, columns, kind, more):
    """C with `more` columns beyond it that nobody may write to, and C full of NaN."""
    whole = np.full((rows + 1, columns + more), GUARD[kind])
    return whole, whole[:rows, :columns]


def intact(whole, rows, columns):
    beyond = np.concatenate([whole[rows:].ravel(), whole[:, columns:].ravel()])
    return bool(np.isnan(beyond).all() if beyond.dtype == np.float32 else (beyond == GUARD[BITS]).all())


def dirty(packed):
    """Scratch memory as it is used again: full of NaN."""
    for array in packed if isinstance(packed, tuple) else (packed,):
        array[...] = GUARD[array.dtype.name]
    return packed


@pytest.fixture
def small_caches(monkeypatch):
    """Sizes at which a short k is cut into stretches, and a few rows into blocks, in half of the cases."""
    keep = {name: getattr(blocked, name) for name in SIZES}

    def set_for(case):
        for name, size in keep.items():
            monkeypatch.setattr(blocked, name, SIZES[name] if case % 2 else size)

    return set_for


SIZES = {
    "PANEL_BYTES": 16 << 10,
    "GROUP_BYTES": 48 << 10,
    "CUT_GROUP_BYTES": 32 << 10,
    "ROWS_BYTES": 12 << 10,
}
SIZES["COPIED_GROUP_BYTES"] = 64 << 10


def check(found, expected, reach, kind, what):
    """Within rounding of sums in float32, relative to the sum of absolute values."""
    error = np.abs(wide(found) - expected) / np.maximum(reach, 1e-30)
    assert error.max() <= TOLERANCE[kind], (what, error.max())


@pytest.mark.parametrize("factor, out", KINDS)
def test_odd_shapes_with_bias_and_without(factor, out, small_caches):
    random = np.random.default_rng(1)
    for case in range(300):
        m, n, k = (int(side) for side in random.choice(sides(), 3))
        what = (m, n, k, case)
        unaligned = np.zeros(m * (k + 3) + 1, factor)[1:].reshape(m, k + 3)  # rows longer than k
        x = unaligned[:, :k]
        x[...] = stored(random.standard_normal((m, k)), factor)
        w = stored(random.standard_normal((n, k)), factor)
        small_caches(case // 2)
        own = dirty(scratch(factor, m, k, bool(random.integers(2))))
        bias = random.standard_normal(n).astype(np.float32) if case % 3 else None
        whole, c = guarded(m, n, out, case % 5)
        first, last = (0, m) if case % 4 else sorted(int(i) for i in random.integers(0, m + 1, 2))
        if case % 2:
            cut = n // 2 // packing.COLUMNS * packing.COLUMNS
            for begin, end in ((0, cut), (cut, n)):
                forward(first, last, begin, end, c, x, w, bias, own)
        else:
            bias = None
            backward(first, last, c, x, np.ascontiguousarray(w.T), own)
        added = 0 if bias is None else bias
        reach = np.abs(wide(x)) @ np.abs(wide(w)).T + np.abs(added)
        expected = wide(x) @ wide(w).T + added
        if first < last:
            check(c[first:last], expected[first:last], reach[first:last], out, what)
        assert intact(whole, m, n), what
        others = np.delete(c, np.s_[first:last], axis=0)
        assert (np.isnan(others) if out == FLOAT else others == GUARD[BITS]).all(), what


@pytest.mark.parametrize("factor", [FLOAT, BITS])
def test_transposed_rows_from_tiles_add_to_what_is_there(factor, small_caches):
    """dw ← [dw +] dyᵀ x"""
    random = np.random.default_rng(2)
    for case in range(200):
        m, n, k = (int(side) for side in random.choice(sides(), 3))  # outputs, inputs, tokens
        dy, x = (stored(random.standard_normal((k, side)), factor) for side in (m, n))
        small_caches(case)
        own = dirty(product_scratch(factor, k, n))
        whole, dw = guarded(m, n, FLOAT, case % 3)
        accumulate = case % 2
        before = random.standard_normal((m, n)).astype(np.float32)
        if accumulate:
            dw[...] = before
        if case % 4 < 2:
            cut = case % 7 * m // 7 // packing.ROWS * packing.ROWS
            for first, last in ((0, cut), (cut, m)):
                products(first, last, 0, n, dw, dy, x, own, accumulate)
        else:
            cut = case % 3 * n // 3 // packing.COLUMNS * packing.COLUMNS
            for begin, end in ((0, cut), (cut, n)):
                products(0, m, begin, end, dw, dy, x, own, accumulate)
        reach = np.abs(wide(dy)).T @ np.abs(wide(x)) + np.abs(before)
        check(dw, wide(dy).T @ wide(x) + accumulate * before, reach, FLOAT, (m, n, k, case))
        assert intact(whole, m, n)


@pytest.mark.parametrize("factor, out", KINDS)
def test_nan_and_infinity_pass_through_and_nothing_else_becomes_one(factor, out):
    for k in (1, 2, 7, 32, 33):
        for value in (np.nan, np.inf, -np.inf):
            for at in {0, k // 2, k - 1}:
                x, w = np.ones((5, k)), np.ones((40, k))
                x[2, at] = value
                own = dirty(scratch(factor, 5, k, False))
                _, c = guarded(5, 40, out, 0)
                forward(0, 5, 0, 40, c, stored(x, factor), stored(w, factor), None, own)
                found = wide(c)
                assert np.array_equal(np.delete(found, 2, 0), np.full((4, 40), float(k))), (k, value, at)
                assert np.isnan(found[2]).all() if np.isnan(value) else (found[2] == value).all(), (
                    k,
                    value,
                    at,
                )


def test_what_lies_behind_an_odd_row_is_not_read_as_its_pair():
    """The row after it begins with NaN; so does the memory after the last row."""
    x = np.full((3, 7), 0x7FC0, np.uint16)
    x[:, :5] = bits(np.ones((3, 5)))
    c = np.empty((3, 20), np.float32)
    own = dirty(scratch(BITS, 3, 5, False))
    forward(0, 3, 0, 20, c, x[:, :5], bits(np.ones((20, 5))), None, own)
    assert (c == 5).all()


def test_bfloat16_is_rounded_to_the_nearest_and_ties_to_even():
    random = np.random.default_rng(3)
    patterns = random.integers(0, 1 << 32, 100_000, dtype=np.uint64).astype(np.uint32)
    patterns[:4] = 0x3F808000, 0x3F818000, 0x7F800001, 0xFFC00000  # ties, NaN
    x = patterns.view(np.float32)
    found = np.empty(len(x), np.uint16)
    rowwise.rounded(0, len(x), found, x)
    expected = bits(x)
    same = (found == expected) | (np.isnan(x) & np.isnan(wide(found)))
    assert same.all()


def test_every_shape_of_registers_assembles():
    for registers in (AVX2, AVX512, AVX512_BF16, AMX):
        for factor, out in (("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")):
            text = module(registers, factor, out)
            assert assembled._verified(text)
            assert ("dpbf16ps" in text) == (registers.dot and factor == "bfloat16")


def test_words_are_transposed():
    lanes = assembled.shape().lanes
    random = np.random.default_rng(4)
    for rows, k in ((1, 1), (lanes, lanes), (lanes + 1, 3 * lanes + 5), (70, 70), (2 * lanes, 2 * lanes)):
        for kind in (FLOAT, BITS):
            w = stored(random.standard_normal((rows, k)), kind)
            b = packing.packed(k, rows, kind)
            packing.pack_transposed(0, rows, b, w, 0, k)
            pair = 1 if kind == FLOAT else 2
            laid = (
                b.reshape(len(b), -1, packing.COLUMNS, pair)
                .transpose(0, 2, 1, 3)
                .reshape(-1, b.shape[1] // packing.COLUMNS)
            )
            assert np.array_equal(laid[:rows, :k], w) and not laid[rows:].any() and not laid[:, k:].any()


@pytest.mark.slow
@pytest.mark.parametrize("name, those, features", [
    ("haswell", "not processor", "+avx,+avx2,+fma,+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,+bmi,+bmi2,+f16c"),
    ("x86-64", "odd_shapes and not uint16", "+sse,+sse2"),
])  # fmt: skip
def test_another_processor_computes_the_same(name, those, features, tmp_path):
    """These very tests, with LLVM told of an older processor."""
    environ = {**os.environ, "NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features}
    environ["NUMBA_CACHE_DIR"] = str(tmp_path)
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", those, __file__]
    done = subprocess.run(words, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
