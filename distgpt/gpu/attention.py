"""Attention by our own kernels: for all types and head sizes in training, and for decoding from a cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distgpt.gpu.api import TYPE_OF, WIDE, Array
from distgpt.gpu.attention_tiles import (
    CACHED_BLOCK,
    DELTA_BLOCK,
    AttentionShape,
    attention_shape,
    cached_parts,
    delta_blocks,
)
from distgpt.gpu.launching import WARP, Launcher

# What attention_mma.cu needs: this compute capability, heads of a multiple of SIDE elements.
TENSOR_CORES = (8, 0)
SIDE, LARGEST_HEAD = 16, 128
ROWS = 64  # of a block, a warp for each SIDE of them


@dataclass(frozen=True, slots=True)
class Cut:
    """How a kernel is started."""

    grid: tuple[int, ...]
    block: int
    shared: int


@dataclass(frozen=True, slots=True)
class Plan:
    """A source for attention and its gradient, and how its kernels are started."""

    source: str
    defines: tuple[str, ...]
    forward: Cut
    backward: Cut


def mma_defines(head: int) -> tuple[str, ...]:
    """The macros to compile attention_mma.cu with."""
    return f"HEAD={head}", f"ROWS={ROWS}"


class OwnAttention:
    """Implements `distgpt.gpu.api.Attention`, and attention to a cache beside it."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        # A device that doesn't say what it is capable of is capable.
        self._tensor_cores = getattr(launcher.device, "capability", TENSOR_CORES) >= TENSOR_CORES

    def forward(self, y: Array, lse: Array, qkv: Array, seq_len: int, n_head: int) -> None:
        plan = self._plan(y, seq_len, n_head)
        self._start(plan, "attention_forward", plan.forward, y, lse, qkv, seq_len, n_head)

    def backward(
        self, dqkv: Array, dy: Array, y: Array, lse: Array, qkv: Array, seq_len: int, n_head: int
    ) -> None:
        plan, sizes = self._plan(y, seq_len, n_head), (seq_len, n_head)
        delta = self._launcher.scratch("delta", (lse.size,), lse.dtype)
        self._launcher.start(
            "attention",
            "attention_delta",
            delta_blocks(len(y) * n_head),
            DELTA_BLOCK,
            *(delta, dy, y, len(y) * n_head, *sizes),
            defines=_shape(y, n_head).defines,
        )
        for kernel in ("attention_backward_queries", "attention_backward_keys"):
            self._start(plan, kernel, plan.backward, dqkv, dy, lse, delta, qkv, *sizes)

    def _plan(self, y: Array, seq_len: int, n_head: int) -> Plan:
        n_seq, head = len(y) // seq_len, y.shape[1] // n_head
        is_bfloat16 = TYPE_OF[np.dtype(y.dtype)] == "bfloat16"
        if self._tensor_cores and is_bfloat16 and head % SIDE == 0 and head <= LARGEST_HEAD:
            cut = Cut((n_seq * n_head * -(-seq_len // ROWS),), ROWS // SIDE * WARP, 0)
            return Plan("attention_mma", mma_defines(head), cut, cut)
        shape = _shape(y, n_head)
        forward, backward = (
            Cut(tile.grid(n_seq, seq_len, n_head), tile.block[0], shared)
            for tile, shared in (
                (shape.forward, shape.forward_shared),
                (shape.backward, shape.backward_shared),
            )
        )
        return Plan("attention", shape.defines, forward, backward)

    def _start(self, plan: Plan, kernel: str, cut: Cut, *args: Array | int) -> None:
        self._launcher.start(
            plan.source, kernel, cut.grid, cut.block, *args, shared=cut.shared, defines=plan.defines
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
