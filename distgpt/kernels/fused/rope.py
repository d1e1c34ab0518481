"""Rotary positions, in place on the q and k parts of qkv. Rows first … last."""

from __future__ import annotations

from typing import Any

from distgpt.kernels.fused.jit import jit


@jit
def rope(first: int, last: int, qkv: Any, cos: Any, sin: Any, n_head: int, inverse: bool) -> None:
    seq_len, half = cos.shape
    real = qkv.dtype.type
    sign = real(-1) if inverse else real(1)
    for i in range(first, last):
        row = qkv[i]
        c, s = cos[i % seq_len], sin[i % seq_len]
        for head in range(2 * n_head):
            left = row[2 * half * head : 2 * half * head + half]
            right = row[2 * half * head + half : 2 * half * (head + 1)]
            for j in range(half):
                a, b, turn = left[j], right[j], sign * s[j]
                left[j] = a * c[j] - b * turn
                right[j] = a * turn + b * c[j]
