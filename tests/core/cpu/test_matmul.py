"""distgpt's matmul against NumPy in float64: odd shapes, guarded outputs, NaN and infinity."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from distgpt.core.cpu.fused import rowwise
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.cpu.matmul import assembled, blocked, layers, packing
from distgpt.core.cpu.matmul.blocked import backward, forward, product_scratch, products, scratch
from distgpt.core.cpu.matmul.layers import BlasMatmuls, OwnMatmuls, bands
from distgpt.core.cpu.pool import pool_of
from distgpt.core.ops.api import Affine
from distgpt.core.ops.low_precision import to_bfloat16
from hypothesis import given, settings
from hypothesis import strategies as st
from microkernels import BITS, FLOAT, GUARD, stored, wide

TOLERANCE = {FLOAT: 2e-6, BITS: 2.0**-8}  # relative to the largest product of absolute values


def sides():
    tile = assembled.shape()
    around = [n + d for n in (2 * tile.rows, 4 * tile.columns, 256) for d in (-1, 0, 1)]
    return [*range(1, 71), *around]


def guarded(rows, columns, kind):
    whole = np.full((rows + 1) * columns + 40, GUARD[kind])
    return whole[: rows * columns].reshape(rows, columns), whole[rows * columns :]


def untouched(x):
    return bool(np.isnan(x).all() if x.dtype == np.float32 else (x == GUARD[BITS]).all())


def dirty(packed):
    for array in packed:
        array[...] = GUARD[array.dtype.name]
    return packed


SMALL_CACHES = {
    "PANEL_BYTES": 16 << 10, "GROUP_BYTES": 48 << 10, "CUT_GROUP_BYTES": 32 << 10, "ROWS_BYTES": 12 << 10,
    "COPIED_ROWS_BYTES": 12 << 10, "COPIED_GROUP_BYTES": 64 << 10, "THIN": 32,
}  # fmt: skip


@contextlib.contextmanager
def small_caches(are_small):
    with pytest.MonkeyPatch.context() as patched:
        for name, size in SMALL_CACHES.items() if are_small else ():
            patched.setattr(blocked, name, size)
        yield


def check(found, expected, reach, kind):
    error = np.abs(wide(found) - expected) / np.maximum(reach, 1e-30)
    assert error.max() <= TOLERANCE[kind]


SHAPES = st.tuples(*[st.sampled_from(sides())] * 3)
BOTH = st.booleans()


@pytest.mark.parametrize("kind", [FLOAT, BITS])
@given(SHAPES, BOTH, BOTH, st.sampled_from(["forward", "forward with bias", "backward"]), st.floats(0, 1))
@settings(max_examples=150)
def test_matmul_for_odd_shapes(kind, shape, small, transposed, way, part):
    (m, n, k), random = shape, np.random.default_rng(1)
    x, w = (stored(random.standard_normal((side, k)), kind) for side in (m, n))
    bias = random.standard_normal(n).astype(np.float32) if way == "forward with bias" else None
    c, behind = guarded(m, n, kind)
    first, last = sorted((int(part * m), m if part < 0.7 else m // 2))
    cut = n // 2 // packing.COLUMNS * packing.COLUMNS
    with small_caches(small):
        own = dirty(scratch(kind, m, k, transposed))
        for begin, end in ((0, cut), (cut, n)):
            if way == "backward":
                backward(first, last, begin, end, c, x, np.ascontiguousarray(w.T), own)
            else:
                forward(first, last, begin, end, c, x, w, bias, own)
    added = 0 if bias is None else bias
    if first < last:
        reach = np.abs(wide(x)) @ np.abs(wide(w)).T + np.abs(added)
        check(c[first:last], (wide(x) @ wide(w).T + added)[first:last], reach[first:last], kind)
    assert untouched(behind) and untouched(np.delete(c, np.s_[first:last], axis=0))


@pytest.mark.parametrize("kind", [FLOAT, BITS])
@given(SHAPES, BOTH, BOTH, BOTH, BOTH, st.floats(0, 1))
@settings(max_examples=100)
def test_weight_gradients_add_to_earlier_ones(kind, shape, small, transposed, accumulate, by_rows, part):
    (m, n, k), random = shape, np.random.default_rng(2)  # outputs, inputs, tokens
    dy, x = (stored(random.standard_normal((k, side)), kind) for side in (m, n))
    dw, behind = guarded(m, n, FLOAT)
    before = random.standard_normal((m, n)).astype(np.float32)
    if accumulate:
        dw[...] = before
    whole, unit = (m, packing.ROWS) if by_rows else (n, packing.COLUMNS)
    cut = int(part * whole) // unit * unit
    with small_caches(small):
        own = dirty(product_scratch(kind, k, n, transposed))
        for stretch in ((0, cut), (cut, whole)):
            rows, columns = (stretch, (0, n)) if by_rows else ((0, m), stretch)
            products(*rows, *columns, dw, dy, x, own, accumulate)
    reach = np.abs(wide(dy)).T @ np.abs(wide(x)) + np.abs(before)
    check(dw, wide(dy).T @ wide(x) + accumulate * before, reach, FLOAT)
    assert untouched(behind)


@pytest.mark.parametrize("kind", [FLOAT, BITS])
@pytest.mark.parametrize("tokens, outputs, inputs", [
    (300, 70, 16), (300, 16, 70), (261, 33, 32), (40, 8, 8), (5, 300, 96), (9, 4500, 64),
])  # fmt: skip
def test_matmul_is_identical_for_any_threads(kind, tokens, outputs, inputs):
    """Adapters have thin sides; 5 rows of 300 outputs share panels."""
    random, found = np.random.default_rng(5), []
    shapes = ((tokens, outputs), (tokens, inputs), (outputs, inputs))
    dy, x, w = (stored(random.standard_normal(shape), kind) for shape in shapes)
    for threads in (1, 2, 3, 16, 64):
        matmuls = OwnMatmuls(pool_of(threads), kind)
        of = (*dy.shape, kind), (*x.shape, kind), (outputs, inputs, FLOAT)
        (y, dx, again), behind = zip(*(guarded(*shape) for shape in of), strict=True)
        dw = np.ones((outputs, inputs), FLOAT)
        matmuls.forward(y, x, w, None)
        matmuls.backward_weights(dw, dy, x, True)
        matmuls.backward(dx, dy, w)
        matmuls.backward_weights(again, dy, x, False)
        assert all(map(untouched, behind))
        found.append((dw, dx, again, y))
        for ours, theirs in zip(found[0], found[-1], strict=True):
            assert np.array_equal(ours, theirs), threads
    dw, dx, again, y = found[0]
    expected, reach = wide(dy).T @ wide(x), np.abs(wide(dy)).T @ np.abs(wide(x))
    check(dw, 1 + expected, 1 + reach, FLOAT)
    check(again, expected, reach, FLOAT)
    check(dx, wide(dy) @ wide(w), np.abs(wide(dy)) @ np.abs(wide(w)), kind)
    check(y, wide(x) @ wide(w).T, np.abs(wide(x)) @ np.abs(wide(w)).T, kind)


@pytest.mark.parametrize("threads", [1, 2, 7, 16, 64, 96])
@pytest.mark.parametrize("packs_rows", [False, True])
def test_cells_cover_a_matrix_once(threads, packs_rows):
    rows_of, columns_of = packing.ROWS, packing.COLUMNS
    for rows, columns in ((1, 1), (640, 768), (640, 50257), (3072, 768), (15, 33), (100, 16), (0, 70)):
        cut = bands(rows, columns, threads, packs_rows)
        assert 1 <= cut.cells <= threads
        seen = np.zeros((rows, columns), np.int8)
        for cell in range(cut.cells):
            (top, bottom), (left, right) = cut.cell(cell, cell + 1, rows, columns)
            seen[top:bottom, left:right] += 1
            assert (bottom > top or not rows) and right > left
            assert top % rows_of == 0 and left % columns_of == 0
        assert (seen == 1).all() and cut.cell(0, cut.cells, rows, columns) == ((0, rows), (0, columns))


def test_threads_do_not_pack_whole_matrices():
    """In the backward pass GPT-2's head has only 24 panels for 64 threads."""
    panels = -(-768 // packing.COLUMNS)
    for threads in (16, 64):
        cut = bands(640, 768, threads)
        assert -(-panels // cut.columns) <= panels // 8, cut
        of_weights = bands(3072, 768, threads, packs_rows=True)
        assert of_weights.columns > 1
        rows, columns = 3072 // of_weights.rows, 768 // of_weights.columns
        assert rows + columns < 3072 / threads + 768, "less is packed than by bands of rows alone"
    assert bands(640, 50257, 64).rows == 1  # every thread has separate panels


@pytest.mark.parametrize("kind", [FLOAT, BITS])
def test_matmul_keeps_nan_in_its_row(kind):
    """With an odd k the last element has no partner in its row."""
    for k in (1, 2, 7, 32, 33):
        for value in (np.nan, np.inf, -np.inf):
            for at in {0, k // 2, k - 1}:
                x = np.ones((5, k))
                x[2, at] = value
                c, _ = guarded(5, 40, kind)
                own = dirty(scratch(kind, 5, k, False))
                forward(0, 5, 0, 40, c, stored(x, kind), stored(np.ones((40, k)), kind), None, own)
                found = wide(c)
                assert np.array_equal(np.delete(found, 2, 0), np.full((4, 40), float(k))), (k, value, at)
                assert np.array_equal(found[2], np.full(40, value), equal_nan=True), (k, value, at)


def test_bfloat16_rounds_to_nearest_even():
    patterns = np.random.default_rng(3).integers(0, 1 << 32, 100_000, dtype=np.uint64).astype(np.uint32)
    patterns[:4] = 0x3F808000, 0x3F818000, 0x7F800001, 0xFFC00000  # ties, NaN
    x = patterns.view(np.float32)
    found = np.empty(len(x), np.uint16)
    rowwise.rounded(0, len(x), found, x)
    assert ((found == to_bfloat16(x)) | (np.isnan(x) & np.isnan(wide(found)))).all()


def test_pack_transposed():
    lanes, random = assembled.shape().lanes, np.random.default_rng(4)
    for rows, k in ((1, 1), (lanes, lanes), (lanes + 1, 3 * lanes + 5), (70, 70), (2 * lanes, 2 * lanes)):
        for kind, pair in ((FLOAT, 1), (BITS, 2)):
            w = stored(random.standard_normal((rows, k)), kind)
            b = packing.packed(k, rows, kind)
            packing.pack_transposed(0, rows, b, w, 0, k)
            steps = b.reshape(len(b), -1, packing.COLUMNS, pair).transpose(0, 2, 1, 3)
            found = steps.reshape(len(b) * packing.COLUMNS, -1)
            assert np.array_equal(found[:rows, :k], w) and not found[rows:].any() and not found[:, k:].any()


@pytest.mark.parametrize("matmul", ["auto", "own", "blas"])
@pytest.mark.parametrize("rows, inputs, outputs", [(5, 3, 70), (100, 64, 2048), (70, 2048, 65), (9, 512, 512)])
def test_matmul_choices_agree(matmul, rows, inputs, outputs):
    random, kernels = np.random.default_rng(0), CpuKernels("float32", 2, matmul)
    shapes = ((rows, inputs), (outputs, inputs), outputs, (rows, outputs))
    x, w, b, dy = (random.standard_normal(shape).astype("float32") for shape in shapes)
    y, dx, dw, db = (np.full_like(array, np.nan) for array in (dy, x, w, b))
    kernels.linear(y, x, Affine(w, b))
    kernels.linear_backward(dx, dy, w)
    for accumulate in (False, True):
        kernels.linear_backward_weights(Affine(dw, db), dy, x, accumulate)
    for found, expected in ((y, x @ w.T + b), (dx, dy @ w), (dw, 2 * dy.T @ x), (db, 2 * dy.sum(0))):
        assert np.abs(found - expected).max() <= 2e-6 * np.abs(expected).max()


@pytest.mark.parametrize("name, dtype, matmul, chosen", [
    *((name, "float32", "own", OwnMatmuls) for name in ("znver3", "znver4")),
    *((name, "float32", "blas", BlasMatmuls) for name in ("znver3", "znver4")),
    *(("znver4", "float64", matmul, BlasMatmuls) for matmul in ("own", "auto")),
    ("znver4", "float32", "auto", OwnMatmuls),
    *((name, "float32", "auto", BlasMatmuls) for name in ("znver3", "znver5", "unheard-of")),
])  # fmt: skip
def test_matmul_follows_processor_or_setting(name, dtype, matmul, chosen, monkeypatch):
    monkeypatch.setattr(layers, "processor", lambda: (name, ""))
    assert isinstance(CpuKernels(dtype, 1, matmul).matmuls, chosen)


# A selection, because each loop is recompiled for the processor.
CASES = "(odd_shapes and float32) or (lengths and bfloat16)"
AVX2 = "+avx,+avx2,+fma,+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,+bmi,+bmi2,+f16c"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name, features, tests, those", [
    ("haswell", AVX2, "test_matmul test_cpu_attention", CASES),
    ("x86-64", "+sse,+sse2", "test_matmul", "odd_shapes and not uint16"),
])  # fmt: skip
def test_older_processors_agree(name, features, tests, those, tmp_path):
    environ = {**os.environ, "NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features}
    environ["NUMBA_CACHE_DIR"] = str(tmp_path)
    files = [str(Path(__file__).with_name(f"{test}.py")) for test in tests.split()]
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", "-k", those, *files]
    done = subprocess.run(words, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
