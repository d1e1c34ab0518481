"""int8 and int4 matmul against NumPy for all kinds of processors, exact for integers."""

import numpy as np
import pytest
from decoding import quantise4
from distgpt.core.cpu.compiling.jit import jit
from distgpt.core.cpu.compiling.processor import ARM64, AVX2, AVX512, features
from distgpt.core.cpu.matmul.packing import aligned
from distgpt.core.ops.low_precision import from_bfloat16
from distgpt.inference.decoding.loops.operands import element
from distgpt.inference.quantized import int4, int8, operands
from distgpt.inference.quantized.integers import BLOCKS, LEVELS, quantise, restored
from distgpt.inference.quantized.operands import DOT, Integers, blocks_tile, quantise_row, record_of
from microkernels import routine

# Registers, features, and the resulting way.
WAYS = {
    "avx512vnni": (AVX512, {"avx512vnni"}, "vnni"),
    "avx512bw": (AVX512, {"avx512bw"}, "pairs"),
    "avx512f": (AVX512, set(), "plain"),
    "avxvnni": (AVX2, {"avxvnni"}, "vnni"),
    "avx2": (AVX2, {"avx2"}, "pairs"),
    "none": (AVX2, set(), "plain"),
    "arm64": (ARM64, set(), "plain"),  # also on other processors
}


def rows_of(q, scales, dot, block):
    n, blocks = len(q), q.shape[1] // block
    a, end = aligned((n, blocks, dot.a_record(block)), "uint8"), dot.integers(block)
    a[:, :, :end] = q.astype(dot.integer).reshape(n, blocks, block).view(np.uint8)
    a[:, :, end : end + 4] = scales.astype(np.float32)[..., None].view(np.uint8)
    sums = -int8.OFFSET * q.reshape(n, blocks, block).sum(2, dtype=np.int32)
    a[:, :, end + 4 :] = np.ascontiguousarray(sums)[..., None].view(np.uint8)
    return a


def panel_of(q, scales, columns, dot, of):
    blocks = q.shape[1] // of.BLOCK
    values = (q.astype(np.int16) + int8.OFFSET) if of is int8 else np.searchsorted(LEVELS, q)
    step = len(dot.order)
    words = values.astype(np.uint8).reshape(columns, blocks, -1, step)[..., np.argsort(dot.order)]
    if of is int4:
        words = words[:, :, ::2] | words[:, :, 1::2] << 4
    bits = np.ascontiguousarray(scales.T).view(np.uint8).reshape(blocks, -1)
    flat = np.concatenate([words.transpose(1, 2, 0, 3).reshape(blocks, -1), bits], axis=1)
    out = aligned(flat.shape, "uint8")
    out[:] = flat
    return out


@pytest.mark.parametrize("of", [int8, int4], ids=["int8", "int4"])
@pytest.mark.parametrize("way", WAYS)
def test_integers_are_exact_in_every_way(way, of):
    """With powers of two as scales, all sums are exact in float32."""
    registers, given, kind = WAYS[way]
    needed = given | {AVX512: {"avx512f"}}.get(registers, set())
    dot = int8.dot_of(registers, given)
    assert dot.kind == kind
    if not needed <= features():
        pytest.skip(f"needs {needed}")
    tile = routine(of.module(registers, dot), "tile", "nnpnppnnpn")
    random, n = np.random.default_rng(5), registers.columns
    for rows in range(1, dot.rows + 1):
        for blocks, columns, extremes in ((1, n, True), (3, n - 5, False), (2, 1, True)):
            choice = [-127, 127] if extremes else np.arange(-127, 128)
            a = random.choice(choice, (rows, blocks * of.BLOCK)).astype(np.int8)
            b = random.choice(choice if of is int8 else LEVELS, (n, blocks * of.BLOCK)).astype(np.int8)
            row_scales = 2.0 ** random.integers(-1, 2, (rows, blocks))
            scales = 2.0 ** random.integers(-1, 2, (n, blocks)).astype(np.float32)
            bits = (scales.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
            left, right = rows_of(a, row_scales, dot, of.BLOCK), panel_of(b, bits, n, dot, of)
            each = (x.reshape(-1, blocks, of.BLOCK).astype(np.int64) for x in (a, b))
            exact = (np.einsum("rbk,cbk->rcb", *each) * row_scales[:, None] * scales).sum(2)
            c, bias = np.full((rows, n + 3), np.nan, np.float32), np.arange(n, dtype=np.float32)
            for flags, expected in ((0, exact), (2, exact + bias), (1, 2 * exact + bias)):
                tile(rows, blocks, left, left.strides[0], right, c, c.strides[0], columns, bias, flags)
                np.testing.assert_array_equal(c[:, :columns], expected[:, :columns])
                assert np.isnan(c[:, columns:]).all()


def panels_of(w, columns):
    panels = Integers(w).panels(1, columns)[0]
    Integers(w).pack(panels, 0, len(w.q))
    return panels


@jit
def multiplied(c, a, x, w, panels):
    for i in range(x.shape[0]):
        quantise_row(a[i], x[i], 0, x.shape[1])
    block = record_of(w)[0]
    blocks, wide = (x.shape[1] + block - 1) // block, operands.COLUMNS
    for i in range(x.shape[0]):
        for panel in range(panels):
            to, b = c[i:, panel * wide :], w[panel]
            blocks_tile(1, blocks, a[i:], a.strides[0], b, to, c.strides[0], wide, b, 0)


@jit
def elements(out, w):
    for i in range(out.shape[0]):
        for k in range(out.shape[1]):
            out[i, k] = element(w, i, k)


@pytest.mark.parametrize("rounding", [quantise, pytest.param(quantise4, marks=pytest.mark.ci)])  # compiled for each
@pytest.mark.parametrize("n, k", [(1, 1), (70, 64), (33, 130), (128, 200)])
def test_matrix_is_quantized_packed_and_multiplied(n, k, rounding):
    random = np.random.default_rng(n + k)
    w = (random.standard_normal((n, k)) * np.exp(random.standard_normal((n, 1)))).astype(np.float32)
    x = random.standard_normal((5, k)).astype(np.float32)
    rounded = rounding(w)
    assert rounded.q.min() >= -127
    near = restored(rounded)
    if rounding is quantise:
        step = np.repeat(from_bfloat16(rounded.scales), int8.BLOCK, axis=1)[:, :k]
        assert (np.abs(near - w) <= step / 2 * (1 + 1e-6)).all()
    packed = panels_of(rounded, -(-n // 64) * 64)
    found = np.zeros((n, k), np.float32)
    elements(found, packed)
    np.testing.assert_array_equal(found, near)
    block = BLOCKS[rounded.bits]
    a = aligned((5, -(-k // block) * DOT.a_record(block)), packed.dtype.name)
    c = np.zeros((5, len(packed) * operands.COLUMNS), np.float32)
    multiplied(c, a, x, packed, len(packed))
    blocks = a.reshape(5, -1, DOT.a_record(block))
    end = DOT.integers(block)
    q = blocks[:, :, :end].view(DOT.integer).reshape(5, -1)[:, :k]
    scales = np.ascontiguousarray(blocks[:, :, end : end + 4]).view(np.float32)[..., 0]
    assert (np.abs(q.astype(int)).max() == 127) and np.abs(x).max() == pytest.approx(127 * scales.max())
    expected = (q * np.repeat(scales, block, axis=1)[:, :k].astype(np.float64)) @ near.T.astype(np.float64)
    np.testing.assert_allclose(c[:, :n], expected, rtol=0, atol=3e-6 * np.abs(expected).max())
    assert not c[:, n:].any()


def test_quantized_zeros_stay_and_nan_shows():
    nothing = quantise(np.zeros((3, 70), np.float32))
    assert not nothing.q.any() and not restored(nothing).any()
    w = panels_of(quantise(np.ones((64, 70), np.float32)), 64)
    a = aligned((4, 2 * DOT.a_record(int8.BLOCK)), "uint8")
    x = np.zeros((4, 70), np.float32)
    x[1, 3], x[2, 69], x[3] = np.nan, np.inf, 1
    c = np.zeros((4, 64), np.float32)
    multiplied(c, a, x, w, len(w))
    assert not c[0].any() and np.isnan(c[1:3]).all()
    np.testing.assert_allclose(c[3], 70, rtol=5e-3)
