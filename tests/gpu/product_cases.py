"""Matrix products to compute on numpy's arrays, and what comes out of them in float64."""

import math

import numpy as np

from distgpt.gpu.api import Product
from distgpt.gpu.dtypes import STORAGE, from_bfloat16, to_bfloat16

TYPES = [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "float32"), ("float64", "float64")]
PLAIN = Product(6, 16, 5, False, False, "float32", "float32")
EPILOGUES = {
    "none": {},
    "none, accumulating": {"accumulate": True},
    "bias": {"epilogue": "bias"},
    "gelu": {"epilogue": "gelu"},
    "gelu with bias": {"epilogue": "gelu", "has_bias": True},
    "dgelu": {"epilogue": "dgelu"},
    "column sums": {"epilogue": "column_sums"},
    "column sums, accumulating": {"epilogue": "column_sums", "accumulate": True},
}


def empty(shape, stored, offset=0):
    """Full of NaN (all bits set), at an address that is a multiple of 256, plus the offset in numbers."""
    dtype = STORAGE[stored]
    room = np.full(math.prod(shape) * dtype.itemsize + 1024, 0xFF, np.uint8)
    start = -room.ctypes.data % 256 + offset * dtype.itemsize
    return room[start : start + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)


def put(numbers, stored, offset=0):
    array = empty(numbers.shape, stored, offset)
    array[...] = to_bfloat16(numbers) if stored == "bfloat16" else numbers
    return array


def numbers(array):
    return (from_bfloat16(array) if array.dtype == np.uint16 else array).astype(np.float64)


def random(shape, stored, seed, offset=0):
    return put(np.random.default_rng(seed).standard_normal(shape), stored, offset)


def operands(product, offset=0):
    """Arrays for `run`; all that is only written holds NaN."""
    m, n, k = product.m, product.n, product.k
    written = product.epilogue == "column_sums"
    arrays = {
        "out": (random if product.accumulate else empty)((m, n), product.out_type, *[1] * product.accumulate),
        "a": random((k, m) if product.transpose_a else (m, k), product.in_type, 2, offset),
        "b": random((n, k) if product.transpose_b else (k, n), product.in_type, 3),
    }
    if product.epilogue == "bias" or product.has_bias:
        arrays["bias"] = random((n,), product.out_type, 4)
    if written:
        arrays["bias"] = empty((m,), product.out_type)
    if product.epilogue in ("gelu", "dgelu"):
        arrays["aux"] = empty((m, n), product.out_type)
    if product.epilogue == "dgelu":
        arrays["aux"][...] = random((m, n), product.out_type, 5)
    return arrays


def _tanh_part(x):
    return np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


def _gelu(x):
    return 0.5 * x * (1 + _tanh_part(x))


def _gelu_slope(x, step=1e-6):
    return (_gelu(x + step) - _gelu(x - step)) / (2 * step)


def expected(product, arrays):
    """The arrays as they should be afterwards, in float64."""
    before = {name: numbers(array) for name, array in arrays.items()}
    a = before["a"].T if product.transpose_a else before["a"]
    b = before["b"].T if product.transpose_b else before["b"]
    y = a @ b
    if product.accumulate:
        y = y + before["out"]
    if product.epilogue == "bias" or product.has_bias:
        y = y + before["bias"]
    after = dict(before)
    if product.epilogue == "gelu":
        after["aux"], y = y, _gelu(y)
    if product.epilogue == "dgelu":
        y = y * _gelu_slope(before["aux"])
    if product.epilogue == "column_sums":
        after["bias"] = a.sum(axis=1)
    return after | {"out": y}


def agree(product, arrays, right, roundings=1):
    """`roundings` to the type of out, of numbers that are up to a few times as large as the last"""
    relative = roundings * {"bfloat16": 2**-8, "float32": 1e-6, "float64": 1e-8}[product.out_type]
    for name, array in arrays.items():
        np.testing.assert_allclose(numbers(array), right[name], rtol=relative, atol=relative, err_msg=name)


def compute(products, product, offset=0, roundings=1):
    """Compute it and compare. `offset`: of a from a well aligned address, in numbers."""
    arrays = operands(product, offset)
    right = expected(product, arrays)
    products.run(product, **arrays)
    agree(product, arrays, right, roundings)
