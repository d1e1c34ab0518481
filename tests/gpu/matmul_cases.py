"""Matmuls to compute on NumPy's arrays, and what comes out of them in float64."""

import math

import numpy as np

from distgpt.gpu.api import STORAGE, Matmul, from_bfloat16, to_bfloat16

TYPES = [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "float32"), ("float64", "float64")]
PLAIN = Matmul(6, 16, 5, False, False, "float32", "float32")
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


def operands(kind, offset=0):
    """Arrays for `run`; all that is only written holds NaN."""
    m, n, k = kind.m, kind.n, kind.k
    written = kind.epilogue == "column_sums"
    arrays = {
        "out": (random if kind.accumulate else empty)((m, n), kind.out_type, *[1] * kind.accumulate),
        "a": random((k, m) if kind.transpose_a else (m, k), kind.in_type, 2, offset),
        "b": random((n, k) if kind.transpose_b else (k, n), kind.in_type, 3),
    }
    if kind.epilogue == "bias" or kind.has_bias:
        arrays["bias"] = random((n,), kind.out_type, 4)
    if written:
        arrays["bias"] = empty((m,), kind.out_type)
    if kind.epilogue in ("gelu", "dgelu"):
        arrays["aux"] = empty((m, n), kind.out_type)
    if kind.epilogue == "dgelu":
        arrays["aux"][...] = random((m, n), kind.out_type, 5)
    return arrays


def _tanh_part(x):
    return np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


def _gelu(x):
    return 0.5 * x * (1 + _tanh_part(x))


def _gelu_derivative(x, step=1e-6):
    return (_gelu(x + step) - _gelu(x - step)) / (2 * step)


def expected(kind, arrays):
    """The arrays as they should be afterwards, in float64."""
    before = {name: numbers(array) for name, array in arrays.items()}
    a = before["a"].T if kind.transpose_a else before["a"]
    b = before["b"].T if kind.transpose_b else before["b"]
    y = a @ b
    if kind.accumulate:
        y = y + before["out"]
    if kind.epilogue == "bias" or kind.has_bias:
        y = y + before["bias"]
    after = dict(before)
    if kind.epilogue == "gelu":
        after["aux"], y = y, _gelu(y)
    if kind.epilogue == "dgelu":
        y = y * _gelu_derivative(before["aux"])
    if kind.epilogue == "column_sums":
        after["bias"] = a.sum(axis=1)
    return after | {"out": y}


def agree(kind, arrays, right, roundings=1, where=""):
    """`roundings` to the type of out, of numbers that are up to a few times as large as the last"""
    relative = roundings * {"bfloat16": 2**-8, "float32": 1e-6, "float64": 1e-8}[kind.out_type]
    for name, array in arrays.items():
        np.testing.assert_allclose(
            numbers(array), right[name], rtol=relative, atol=relative, err_msg=f"{name} {where}"
        )


def compute(matmuls, kind, offset=0, roundings=1):
    """Compute it and compare. `offset`: of a from a well aligned address, in numbers."""
    arrays = operands(kind, offset)
    right = expected(kind, arrays)
    matmuls.run(kind, **arrays)
    agree(kind, arrays, right, roundings)
