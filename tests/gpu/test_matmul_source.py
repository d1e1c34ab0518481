"""The textbooks' matrix products, one pair and several, against NumPy."""

import numpy as np
import pytest
from devices import any_device  # noqa: F401

from distgpt.gpu.api import STORAGE, from_bfloat16, to_bfloat16
from distgpt.gpu.compiling import storage_define

TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 1e-2}


@pytest.mark.parametrize("storage", TOLERANCE)
@pytest.mark.parametrize("kernel", ["matmul_naive", "matmul_tiled"])
@pytest.mark.parametrize("pairs,m,n,k", [(1, 1, 1, 1), (1, 16, 16, 16), (3, 17, 33, 5), (2, 5, 40, 35)])
def test_matmul(kernel, pairs, m, n, k, storage, any_device):
    rng = np.random.default_rng(0)
    arrays, numbers = [], []
    for shape in ((pairs, m, k), (pairs, k, n)):
        host = rng.standard_normal(shape)
        stored = to_bfloat16(host) if storage == "bfloat16" else host.astype(STORAGE[storage])
        array = any_device.zeros(shape, stored.dtype)
        any_device.upload(array, stored)
        arrays.append(array)
        numbers.append(_numbers(stored).astype(np.float64))
    out = any_device.zeros((pairs, m, n), STORAGE[storage])
    grid = (-(-n // 16), -(-m // 16), pairs)
    args = (out, *arrays, m, n, k)
    any_device.launch("matmul", kernel, (storage_define(storage),), grid, (16, 16), args)
    expected = numbers[0] @ numbers[1]
    got = _numbers(any_device.download(out))
    np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE[storage] * np.abs(expected).max())


def _numbers(stored):
    return from_bfloat16(stored) if stored.dtype == np.uint16 else stored
