"""Microkernels of every kind of registers that this processor can run, beside NumPy.

AMX is in test_amx.py, which emulates it.
"""

import ctypes
import mmap

import llvmlite.binding as llvm
import numpy as np
import pytest
from distgpt.core.cpu.compiling.processor import ARM64, AVX512, BFLOAT16, FLOAT32, features
from distgpt.core.cpu.matmul import assembled
from distgpt.core.cpu.matmul.microkernel import ACCUMULATE, BIAS
from distgpt.core.cpu.matmul.packing import aligned
from distgpt.core.ops.low_precision import to_bfloat16
from test_matmul import GUARD, wide

OUT = {"float32": "float32", "bfloat16": "uint16"}
# Nothing in the tiles for arm64 is of one kind of processor alone. AVX-512 widens bfloat16 in a buffer.
WAYS = {
    "arm64 in float32": (ARM64, FLOAT32, FLOAT32),
    "arm64": (ARM64, BFLOAT16, FLOAT32),
    "arm64, rounded": (ARM64, BFLOAT16, BFLOAT16),
    "widening": (AVX512, BFLOAT16, FLOAT32),
    "widening, rounded": (AVX512, BFLOAT16, BFLOAT16),
}


@pytest.fixture(scope="module", params=WAYS.values(), ids=WAYS)
def tile(request):
    """`tile` of a kind, its registers and types."""
    shape, _, out = request.param
    if shape == AVX512 and "avx512f" not in features():
        pytest.skip("needs AVX-512")
    found, alive = compiled({out: assembled.tile_text(*request.param)})
    yield found[out], *request.param
    assert alive


def compiled(texts, machine=assembled._machine):
    """`tile` of each of some IR, and what keeps them alive."""
    found, engines = {}, []
    for name, text in texts.items():
        engine = loaded(text, machine)
        engines.append(engine)
        types = [ctypes.c_int64 if kind == "n" else ctypes.c_void_p for kind in "nnpnnppnnpn"]
        found[name] = ctypes.CFUNCTYPE(None, *types)(engine.get_function_address("tile"))
    return found, engines


def loaded(text, machine):
    engine = llvm.create_mcjit_compiler(assembled._verified(text), machine())
    engine.finalize_object()
    return engine


def before_a_guard(values):
    """A copy that ends where the memory does."""
    size = -(-values.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    whole = np.frombuffer(mmap.mmap(-1, size + mmap.PAGESIZE), np.uint8)
    behind = ctypes.c_void_p(whole.ctypes.data + size)
    assert not ctypes.CDLL(None).mprotect(behind, ctypes.c_size_t(mmap.PAGESIZE), 0)  # PROT_NONE
    kept = whole[size - values.nbytes : size].view(values.dtype)
    kept[:] = values
    return kept


def computed(tile, width, a, b, c, bias=None, accumulate=False, by_pairs=False, kept=np.copy):
    """c ← [c +] a b [+ bias] for a (rows, k), b (k, columns); NaN follows what must not be read.

    `width`: columns of a panel. `kept` gives the memory for what may be read of a.
    """
    kind, two = a.dtype.name, 2 if a.dtype == np.uint16 else 1
    (rows, k), columns, pairs = a.shape, b.shape[1], -(-a.shape[1] // two)
    panel = aligned((pairs, width, two), kind)
    panel[...] = GUARD[kind]
    panel[:, :columns] = 0
    for i in range(k):
        panel[i // two, :columns, i % two] = b[i]
    if by_pairs:
        packed = np.full((pairs, rows + 3, two), GUARD[kind])  # an odd k is followed by something else
        for i in range(k):
            packed[i // two, :rows, i % two] = a[:, i]
        row, step, needed = 4, 4 * (rows + 3), two * ((pairs - 1) * (rows + 3) + rows) - k % two
    else:
        packed = np.full((rows, k + 3), GUARD[kind])
        packed[:, :k] = a
        row, step, needed = a.itemsize * (k + 3), 4, (rows - 1) * (k + 3) + k
    packed = kept(packed.reshape(-1)[: max(0, needed)])
    flags = BIAS * (bias is not None) | ACCUMULATE * accumulate
    added = panel if bias is None else bias
    at_a, at_b, at_c, at_bias = (array.ctypes.data for array in (packed, panel, c, added))
    tile(rows, k, at_a, row, step, at_b, at_c, c.strides[0], columns, at_bias, flags)


def check_sums(tile, shape, operand, out, ks):
    """Of small integers, which are exact: rows and k around what is computed at once; C narrow and wide."""
    random = np.random.default_rng(1)
    stored = to_bfloat16 if operand == BFLOAT16 else np.ascontiguousarray
    for rows in range(1, shape.rows + 1):
        for case, k in enumerate(ks):
            columns = int(random.choice([1, shape.lanes - 1, shape.lanes, shape.lanes + 1, shape.columns]))
            a, b = (random.integers(-1, 2, sides).astype(np.float32) for sides in ((rows, k), (k, columns)))
            bias = random.integers(-9, 10, columns).astype(np.float32) if k % 3 else None
            accumulate = out == FLOAT32 and rows % 2 == 1
            whole = np.full((rows + 1, columns + 2), GUARD[OUT[out]])
            c = whole[:rows, :columns]
            if accumulate:
                c[...] = 7
            how = bias, accumulate, (rows + case) % 2 == 1
            computed(tile, shape.columns, stored(a), stored(b), c, *how, kept=before_a_guard)
            expected = a @ b + 7 * accumulate + (0 if bias is None else bias)
            np.testing.assert_array_equal(wide(c), expected, str((rows, k, columns)))
            assert np.isnan(wide(np.concatenate([whole[rows], whole[:, columns:].ravel()]))).all()


def check_not_finite(tile, shape, rows):
    """Of float32 sums: they stay in their row."""
    for k in (1, 2, 31, 33, 64):
        for value, by_pairs in ((np.nan, False), (np.inf, True), (np.nan, True)):
            a = np.ones((rows, k), np.float32)
            a[5, k // 2] = value
            c = np.empty((rows, shape.lanes - 1), np.float32)
            b = to_bfloat16(np.ones((k, shape.lanes - 1)))
            computed(tile, shape.columns, to_bfloat16(a), b, c, by_pairs=by_pairs)
            assert np.array_equal(np.delete(c, 5, 0), np.full((rows - 1, shape.lanes - 1), float(k)))
            assert np.array_equal(c[5], np.full(shape.lanes - 1, value), equal_nan=True), (k, value)


def test_sums_of_small_integers_are_exact(tile):
    check_sums(*tile, (0, 1, 2, 31, 32, 33, 63, 64, 95, 130))


def test_nan_and_infinity_stay_in_their_row(tile):
    routine, shape, operand, out = tile
    if (operand, out) == (BFLOAT16, FLOAT32):
        check_not_finite(routine, shape, shape.rows)
