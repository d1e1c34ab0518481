"""Attention on CPUs against the reference in float64: lengths, head sizes, NaN and threads."""

import tracemalloc
from itertools import product

import numpy as np
import pytest
from distgpt.core.cpu.fused import attention
from distgpt.core.cpu.kernels import Bfloat16Kernels, CpuKernels
from distgpt.core.cpu.matmul.packing import ROWS
from distgpt.core.ops.api import AttentionMask
from distgpt.core.ops.kernels import Kernels
from microkernels import stored, wide

# Relative to a tensor's norm. Half a unit of bfloat16's last place is 2e-3 of an element.
CLOSE = {"float64": 1e-13, "float32": 1e-6, "bfloat16": 5e-3}
LENGTHS = [1, 2, 7, ROWS, ROWS + 1, 65, 4 * ROWS, 4 * ROWS + 1, 200]
SIZES = [1, 2, 7, 16, 33, 48, 65, 128]


# Loops in float64 are rare and take long to compile.
@pytest.fixture(params=["float32", "bfloat16", pytest.param("float64", marks=pytest.mark.ci)])
def dtype(request):
    return request.param


def kernels(dtype, threads=2):
    return Bfloat16Kernels(threads) if dtype == "bfloat16" else CpuKernels(dtype, threads)


def poisoned(shape, dtype):
    return stored(np.full(shape, np.nan), dtype)


def both_passes(k, qkv, dy, n_head, seq_len, positions=None, window=0):
    y, dqkv = (x.copy() for x in (dy, qkv))
    lse = np.full((len(dy), n_head), np.nan, k.accum_dtype)
    for out in (y, dqkv):
        k.put(out, np.full(out.shape, np.nan))
    mask = AttentionMask(seq_len, positions, window)
    k.attention(y, lse, qkv, mask)
    k.attention_backward(dqkv, dy, y, lse, qkv, mask)
    return y, lse, dqkv


def check(found, expected, dtype, what):
    distance = np.linalg.norm(wide(found) - expected) / np.linalg.norm(expected)
    assert distance < CLOSE[dtype], (what, distance)


def inputs(dtype, n_seq, seq_len, n_head, size, seed=0, kv_heads=None):
    random = np.random.default_rng(seed)
    heads, rows = n_head + 2 * (kv_heads or n_head), n_seq * seq_len
    return (stored(random.standard_normal((rows, count * size)), dtype) for count in (heads, n_head))


def shapes():
    """Yield every length with a usual size, and every size with lengths around a tile."""
    yield from ((seq_len, 64, 3, 3) for seq_len in LENGTHS)
    yield from ((seq_len, size, 3, 3) for size in SIZES for seq_len in (5, 2 * ROWS + 3, 57))
    yield from ((seq_len, size, 6, kv) for seq_len, size in ((7, 33), (4 * ROWS + 1, 16)) for kv in (1, 2))


def both_exactly(y, dy, qkv, mask, n_head):
    exact, outs = Kernels("float64"), (wide(dy) * 0, np.zeros((len(dy), n_head)), wide(qkv) * 0)
    exact.attention(outs[0], outs[1], wide(qkv), mask)
    exact.attention_backward(outs[2], wide(dy), wide(y), outs[1], wide(qkv), mask)
    return outs


def test_attention_for_all_lengths_and_head_sizes(dtype):
    for seq_len, size, n_head, kv_heads in shapes():
        qkv, dy = inputs(dtype, 2, seq_len, n_head, size, seed=seq_len, kv_heads=kv_heads)
        y, lse, dqkv = both_passes(kernels(dtype), qkv, dy, n_head, seq_len)
        outs = both_exactly(y, dy, qkv, AttentionMask(seq_len), n_head)
        check(y, outs[0], dtype, ("y", seq_len, size))
        check(lse, outs[1], "float32" if dtype == "bfloat16" else dtype, ("lse", seq_len, size))
        ends = np.cumsum([0, n_head * size, kv_heads * size, kv_heads * size])
        for part, name in enumerate(("dq", "dk", "dv")):
            columns = slice(*ends[part : part + 2])
            if seq_len == 1 and part < 2:  # a softmax over one key has no gradient
                assert np.abs(wide(dqkv[:, columns])).max() < 10 * size * CLOSE[dtype]
            else:
                check(dqkv[:, columns], outs[2][:, columns], dtype, (name, seq_len, size))


@pytest.mark.parametrize("packed", [False, True])
def test_attention_respects_the_window(dtype, packed):
    n_head, size = 4, 20
    for seq_len, window in ((1, 1), (2 * ROWS, 1), (70, 5), (70, 69), (70, 70), (9 * ROWS + 1, 4 * ROWS), (200, 64)):
        qkv, dy = inputs(dtype, 2, seq_len, n_head, size, seed=seq_len, kv_heads=2)
        middle = seq_len // 3
        documents = np.concatenate([np.arange(middle), np.arange(seq_len - middle)]).astype(np.int32)
        positions = np.tile(documents, 2) if packed else None
        y, _, dqkv = both_passes(kernels(dtype), qkv, dy, n_head, seq_len, positions, window)
        outs = both_exactly(y, dy, qkv, AttentionMask(seq_len, positions, window), n_head)
        values = slice(-2 * size, None)  # gradients of scores may be 0
        check(y, outs[0], dtype, ("y", seq_len, window))
        check(dqkv[:, values], outs[2][:, values], dtype, ("dv", seq_len, window))
        np.testing.assert_allclose(wide(dqkv), outs[2], rtol=0, atol=20 * CLOSE[dtype])


def test_attention_does_not_overflow(dtype):
    seq_len, size = 2 * ROWS + 5, 16
    qkv, dy = inputs(dtype, 1, seq_len, 1, size)
    ramp = wide(qkv)
    ramp[:, :size], ramp[:, size : 2 * size] = 8, 16 * np.arange(seq_len)[:, None]
    qkv = stored(ramp, dtype)
    y, _, dqkv = both_passes(kernels(dtype), qkv, dy, 1, seq_len)
    np.testing.assert_array_equal(wide(y), wide(qkv)[:, 2 * size :])  # each attends only to itself
    np.testing.assert_array_equal(wide(dqkv)[:, 2 * size :], wide(dy))


def test_attention_unit_writes_only_its_head(dtype):
    seq_len, n_head, size = 37, 3, 20
    k = kernels(dtype, 1)
    qkv, dy = inputs(dtype, 2, seq_len, n_head, size)
    whole = both_passes(k, qkv, dy, n_head, seq_len)
    shared = k.dtype.name, k.accum_dtype.name
    forward = attention.forward_scratch(seq_len, size, *shared)
    backward = attention.backward_scratch(seq_len, size, *shared)
    for unit in range(2 * n_head):
        y, dqkv = poisoned(dy.shape, dtype), poisoned(qkv.shape, dtype)
        lse = np.full((len(dy), n_head), np.nan, k.accum_dtype)
        mask = AttentionMask(seq_len, None, seq_len)
        attention.attention(unit, unit + 1, y, lse, qkv, mask, forward)
        of = dqkv, dy, whole[0], whole[1], qkv, mask, backward
        attention.attention_backward(unit, unit + 1, *of)
        rows = slice(unit // n_head * seq_len, (unit // n_head + 1) * seq_len)
        for found, expected in zip((y, lse, dqkv), whole, strict=True):
            by_head = len(found), -1, n_head, 1 if found is lse else size
            parts, same = (wide(x).reshape(by_head)[rows, :, unit % n_head] for x in (found, expected))
            np.testing.assert_array_equal(parts, same)
            assert np.isfinite(wide(found)).sum() == same.size, unit


@pytest.mark.parametrize("part", ["q", "k", "v", "dy"])
def test_nan_stays_in_its_head(dtype, part):
    seq_len, n_head, size, at = 41, 2, 16, 20
    qkv, dy = inputs(dtype, 2, seq_len, n_head, size)
    into, first = (dy, 0) if part == "dy" else (qkv, "qkv".index(part) * n_head * size)
    into[at, first + size + 3] = stored(np.full(1, np.nan), dtype)[0]
    y, lse, dqkv = (wide(x) for x in both_passes(kernels(dtype), qkv, dy, n_head, seq_len))
    y, dqkv = y.reshape(2, seq_len, n_head, size), dqkv.reshape(2, seq_len, 3, n_head, size)
    expected = np.zeros((seq_len, size), bool)
    if part != "dy":
        expected[at if part == "q" else slice(at, None), 3 if part == "v" else slice(None)] = True
    bad = np.isnan(y[0, :, 1])
    if part == "v":
        expected[:at, 3] = bad[:at, 3]  # 0 · NaN, in the tile of the key
    np.testing.assert_array_equal(bad, expected)
    assert np.isnan(lse[at, 1]) == (part in "qk")
    gradient = np.isnan(dqkv[0, :, :, 1])
    assert gradient[at, 0].all()  # dq of the query
    assert gradient[: at + 1, 1].all() or part in "kv"  # dk of all keys that it saw
    for clear in (y[1], y[0, :, 0], dqkv[1], dqkv[0, :, :, 0]):
        assert np.isfinite(clear).all()


def test_attention_is_identical_for_any_threads(dtype):
    for kv_heads in (4, 2):
        qkv, dy = inputs(dtype, 3, 75, 4, 24, kv_heads=kv_heads)
        first = both_passes(kernels(dtype, 1), qkv, dy, 4, 75)
        for threads in (1, 2, 2, 2, 3):
            for one, other in zip(first, both_passes(kernels(dtype, threads), qkv, dy, 4, 75), strict=True):
                assert one.tobytes() == other.tobytes(), threads


def test_attention_cached_for_any_length(dtype):
    cached = [(0, 1), (0, 3), (0, 9), (0, 70), (5, 1), (63, 1), (64, 1), (100, 2), (37, 5), (130, ROWS + 1)]
    n_seq, n_head, length = 2, 6, 170
    k, exact = kernels(dtype), Kernels("float64")
    random = np.random.default_rng(4)
    for (start, new), (size, kv_heads, window) in product(cached, ((3, 6, 0), (20, 1, 67), (64, 2, 5))):
        cache = random.standard_normal((2, n_seq, kv_heads, length, size))
        cache[:, :, :, start:] = np.nan  # later keys must not be read
        cache = stored(cache, dtype)
        qkv, y = inputs(dtype, n_seq, new, n_head, size, kv_heads=kv_heads)
        k.put(y, np.full(y.shape, np.nan))
        expected, exact_cache = np.zeros(y.shape), wide(cache)
        exact.attention_cached(expected, exact_cache, wide(qkv), np.array([start]), window)
        k.attention_cached(y, cache, qkv, np.array([start]), window)
        check(y, expected, dtype, (start, new, size, window))
        np.testing.assert_array_equal(wide(cache), exact_cache)


@pytest.mark.parametrize("new", [1, 40])
def test_attention_cached_makes_no_copies(dtype, new):
    k, n_head, length, size = kernels(dtype, 1), 2, 2000, 32
    cache = stored(np.zeros((2, 1, n_head, length, size)), dtype)
    qkv, y = inputs(dtype, 1, new, n_head, size)
    start = np.array([length - new])
    k.attention_cached(y, cache, qkv, start)
    tracemalloc.start()
    k.attention_cached(y, cache, qkv, start)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < cache[0, 0, 0].nbytes / 10
