"""The microkernel that widens bfloat16 of A once, on any processor with AVX-512, beside NumPy."""

import numpy as np
import pytest
from test_amx import OUT, before_a_guard, compiled, computed
from test_matmul import GUARD, wide

from distgpt.core.cpu.compiling.processor import AVX512, BFLOAT16, features
from distgpt.core.cpu.matmul import widening
from distgpt.core.ops.low_precision import to_bfloat16

pytestmark = pytest.mark.skipif("avx512f" not in features(), reason="needs AVX-512")


@pytest.fixture(scope="module")
def tiles():
    """`tile` for each type of C, and what keeps it alive."""
    return compiled({out: widening.module(AVX512, BFLOAT16, out) for out in OUT})


@pytest.mark.parametrize("by_pairs", [False, True], ids=["rows", "pairs"])
@pytest.mark.parametrize("out", OUT)
def test_sums_of_small_integers_are_exact(tiles, out, by_pairs):
    """Rows above and below where the buffer pays; k around whole buffers; C narrow and wide."""
    random = np.random.default_rng(1)
    for rows in range(1, AVX512.rows + 1):
        for k in (0, 1, 2, 31, 32, 33, 63, 64, 95, 130):
            columns = int(random.choice([1, 15, 16, 17, 31, 32]))
            a, b = (random.integers(-1, 2, shape).astype(np.float32) for shape in ((rows, k), (k, columns)))
            bias = random.integers(-9, 10, columns).astype(np.float32) if k % 3 else None
            accumulate = out == "float32" and rows % 2 == 1
            whole = np.full((rows + 1, columns + 2), GUARD[OUT[out]])
            c = whole[:rows, :columns]
            if accumulate:
                c[...] = 7
            given = to_bfloat16(a), to_bfloat16(b), c, bias, accumulate, by_pairs
            computed(tiles[0][out], *given, kept=before_a_guard)
            expected = a @ b + 7 * accumulate + (0 if bias is None else bias)
            np.testing.assert_array_equal(wide(c), expected, str((rows, k, columns)))
            assert np.isnan(wide(np.concatenate([whole[rows], whole[:, columns:].ravel()]))).all()


@pytest.mark.parametrize("by_pairs", [False, True], ids=["rows", "pairs"])
def test_nan_stays_in_its_row(tiles, by_pairs):
    for k in (1, 2, 31, 33, 64):
        a = np.ones((14, k))
        a[5, k // 2] = np.nan
        c = np.empty((14, 20), np.float32)
        computed(tiles[0]["float32"], to_bfloat16(a), to_bfloat16(np.ones((k, 20))), c, by_pairs=by_pairs)
        assert np.array_equal(np.delete(c, 5, 0), np.full((13, 20), float(k))) and np.isnan(c[5]).all()
