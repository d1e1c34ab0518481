"""Attention by our own kernels: for all types and head sizes in training, and for decoding from a cache."""

from __future__ import annotations

import numpy as np

from distgpt.gpu.api import Array
from distgpt.gpu.storage import TYPE_OF, WIDE
from distgpt.kernels.attention_shape import CACHED_BLOCK, AttentionShape, attention_shape, cached_parts
from distgpt.kernels.launching import WARP, Launcher


class OwnAttention:
    """Implements `distgpt.gpu.api.Attention`, and attention to a cache beside it."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    def forward(self, y: Array, lse: Array, qkv: Array, seq_len: int, n_head: int) -> None:
        shape, n_seq = _shape(y, n_head), len(y) // seq_len
        tile = shape.forward
        self._launcher.start(
            "attention",
            "attention_forward",
            tile.grid(n_seq, seq_len, n_head),
            tile.block[0],
            *(y, lse, qkv, seq_len, n_head),
            shared=shape.forward_shared,
            defines=shape.defines,
        )

    def backward(
        self, dqkv: Array, dy: Array, y: Array, lse: Array, qkv: Array, seq_len: int, n_head: int
    ) -> None:
        shape, n_seq = _shape(y, n_head), len(y) // seq_len
        delta = self._launcher.scratch("delta", (lse.size,), lse.dtype)
        sizes, tile = (seq_len, n_head), shape.backward
        self._launcher.start(
            "attention",
            "attention_delta",
            (len(y), n_head),
            WARP,
            *(delta, dy, y, *sizes),
            defines=shape.defines,
        )
        for kernel in ("attention_backward_queries", "attention_backward_keys"):
            self._launcher.start(
                "attention",
                kernel,
                tile.grid(n_seq, seq_len, n_head),
                tile.block[0],
                *(dqkv, dy, lse, delta, qkv, *sizes),
                shared=shape.backward_shared,
                defines=shape.defines,
            )

    def cached(self, y: Array, cache: Array, qkv: Array, start: Array) -> None:
        _, n_seq, n_head, t_max, head = cache.shape
        grid, defines = (n_seq * n_head, len(qkv) // n_seq), (f"HEAD={head}",)
        n_parts = cached_parts(grid[0] * grid[1], t_max, self._launcher.device.multiprocessors)
        parts = None
        if n_parts > 1:
            wide = WIDE[TYPE_OF[np.dtype(y.dtype)]]
            parts = self._launcher.scratch("parts", (*grid, n_parts, head + 2), wide)
        self._launcher.start(
            "attention_cached",
            "attention_cached",
            (*grid, n_parts),
            CACHED_BLOCK[0],
            *(y, cache, parts, qkv, start, n_head, t_max),
            defines=defines,
        )
        if parts is not None:
            args = (y, parts, n_head, n_parts)
            self._launcher.start(
                "attention_cached", "attention_cached_join", grid, WARP, *args, defines=defines
            )


def _shape(y: Array, n_head: int) -> AttentionShape:
    wide = WIDE[TYPE_OF[np.dtype(y.dtype)]]
    return attention_shape(y.shape[1] // n_head, wide.itemsize)
