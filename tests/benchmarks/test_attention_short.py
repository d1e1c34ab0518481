"""Attention of many short sequences, one a lane: against the reference, and lanes do not mix."""

import attention_short
import numpy as np
import pytest

from distgpt.core.cpu.matmul.packing import LANES
from distgpt.core.ops.api import AttentionMask
from distgpt.core.ops.kernels import Kernels

HEADS = 3
CLOSE = 2e-6  # absolute, of values near 1


def inputs(n_seq, seq_len, size, seed=0, kv_heads=HEADS):
    random = np.random.default_rng(seed)
    return random.standard_normal((n_seq * seq_len, (HEADS + 2 * kv_heads) * size)).astype(np.float32)


def attention(kernels, qkv, seq_len, size, guard=0):
    """y and lse, in poisoned memory with `guard` rows after it that must stay as they are."""
    rows = len(qkv)
    y, lse = (np.full((rows + guard, width), np.nan, kernels.wide) for width in (HEADS * size, HEADS))
    kernels.attention(y[:rows], lse[:rows], qkv, AttentionMask(seq_len))
    assert np.isnan(y[rows:]).all() and np.isnan(lse[rows:]).all()
    return y[:rows], lse[:rows]


class InLanes:
    """All sequences by the study's attention."""

    wide = np.float32

    def attention(self, y, lse, qkv, mask):
        seq_len = mask.seq_len
        n_seq, size = len(y) // seq_len, y.shape[1] // HEADS
        assert attention_short.fits(n_seq, seq_len, size, qkv.dtype)
        attention_short.attention(0, n_seq, y, lse, qkv, seq_len, attention_short.scratch(size))


def exact(qkv, seq_len, size):
    return attention(Kernels("float64"), qkv.astype(np.float64), seq_len, size)


def test_every_length_up_to_where_tiles_take_over():
    for size in (LANES, 2 * LANES):
        for seq_len in range(1, attention_short.SHORT + 1):
            n_seq = (LANES, 2 * LANES + 3, 4 * LANES + 5)[seq_len % 3]
            qkv = inputs(n_seq, seq_len, size, seed=seq_len, kv_heads=(HEADS, 1)[seq_len % 2])
            found = attention(InLanes(), qkv, seq_len, size, guard=20)
            for one, other in zip(found, exact(qkv, seq_len, size), strict=True):
                np.testing.assert_allclose(one, other, atol=CLOSE, err_msg=f"{seq_len} {size} {n_seq}")


def test_what_does_not_fit_goes_by_tiles():
    for n_seq, seq_len, size, dtype in (
        (LANES - 1, 4, LANES, "float32"),
        (LANES, attention_short.SHORT + 1, LANES, "float32"),
        (LANES, attention_short.SHORT, 4 * LANES * 16, "float32"),
        (LANES, 4, LANES - 4, "float32"),
        (LANES, 4, LANES, "float64"),
        (LANES, 4, LANES, "uint16"),
    ):
        assert not attention_short.fits(n_seq, seq_len, size, np.dtype(dtype)), (n_seq, seq_len, size, dtype)


def test_scores_far_apart_neither_overflow_nor_leave_anything_to_keys_to_come():
    """The largest score of a row is the next row's smallest, and beyond the range of eˣ."""
    seq_len, size = 11, LANES
    qkv = inputs(LANES, seq_len, size).reshape(LANES, seq_len, 3, HEADS, size)
    qkv[:, :, 0], qkv[:, :, 1] = 8, 16 * np.arange(seq_len)[:, None, None]
    y, lse = attention(InLanes(), qkv.reshape(LANES * seq_len, -1), seq_len, size)
    np.testing.assert_array_equal(y.reshape(LANES, seq_len, HEADS, size), qkv[:, :, 2])
    top = 8 * 16 * size * np.arange(seq_len) / np.sqrt(size)
    np.testing.assert_allclose(lse.reshape(LANES, seq_len, HEADS)[0, :, 0], top, rtol=1e-6)


@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_and_inf_reach_later_queries_of_their_head_and_nobody_else(part, value):
    seq_len, size, sequence, at, head, channel = 9, LANES, 5, 4, 1, 3
    kernels, clean = InLanes(), inputs(LANES + 7, seq_len, size)
    qkv = clean.copy().reshape(-1, seq_len, 3, HEADS, size)
    qkv[sequence, at, part, head, channel] = value
    found, before = (attention(kernels, x.reshape(clean.shape), seq_len, size) for x in (qkv, clean))
    reached = np.zeros((len(qkv), seq_len, HEADS, size), bool)
    rows = slice(at, at + 1) if part == 0 else slice(at, None)
    reached[sequence, rows, head, channel if part == 2 else slice(None)] = True
    y, expected = (x[0].reshape(reached.shape) for x in (found, before))
    np.testing.assert_array_equal(y[~reached], expected[~reached])
    if np.isnan(value) or part == 2:  # a score of -inf counts for nothing
        assert not np.isfinite(y[reached]).any()
    if part < 2 and np.isnan(value):
        np.testing.assert_array_equal(np.isnan(found[1]), reached.any(-1).reshape(-1, HEADS))
