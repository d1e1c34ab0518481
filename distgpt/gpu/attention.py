"""Attention kernels of distgpt, for all dtypes and head sizes in training, and for decoding from a cache."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace

import numpy as np

from distgpt.core.ops.api import Array, AttentionMask
from distgpt.gpu.device import TYPE_OF, WARP, WIDE, Launcher

# attention_mma.cu requires this compute capability, and head sizes that are multiples of SIDE.
TENSOR_CORES = (8, 0)
SIDE, LARGEST_HEAD = 16, 128
ROWS = 64  # per block, with one warp per SIDE rows

SHARED_LIMIT = 48 * 1024  # shared memory of a block without opt-in
CACHED_BLOCK = 256
DELTA_BLOCK, DELTA_LANES = 256, 8  # threads per block, and threads per head of a row
MOST_PARTS = 4  # partial sums for a bias per multiprocessor; with more, the rows are read again
KEYS_PER_PART = 256  # minimum keys of the cache per block; fewer are not worth one


@dataclass(frozen=True, slots=True)
class Plan:
    """The source of attention or its gradient, and the launch parameters of its kernels."""

    source: str
    defines: tuple[str, ...]
    grid: tuple[int, ...]
    block: int
    shared: int


def mma_defines(head: int, group: int) -> tuple[str, ...]:
    return f"HEAD={head}", f"GROUP={group}", f"ROWS={ROWS}"


def delta_defines(head: int) -> tuple[str, ...]:
    return f"HEAD={head}", f"DELTA_LANES={DELTA_LANES}"


class OwnAttention:
    """Causal attention on packed qkv, with the interface of `Kernels.attention`, and on a cache.

    lse has B·H·T elements in the order (B, H, T), and its array has a column per head.
    """

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self._tensor_cores = launcher.device.capability >= TENSOR_CORES

    def forward(self, y: Array, lse: Array, qkv: Array, mask: AttentionMask) -> None:
        n_head = lse.shape[1]
        plan = self._plan(y, qkv, n_head, mask, backward=False)
        self._start(plan, "attention_forward", y, lse, qkv, mask.positions, mask.seq_len, n_head)

    def backward(
        self, dqkv: Array, dy: Array, y: Array, lse: Array, qkv: Array, mask: AttentionMask, sums: bool
    ) -> Array | None:
        """Compute dqkv. With `sums`, return its sums over parts of the rows if they are cheap."""
        n_head = lse.shape[1]
        plan = self._plan(y, qkv, n_head, mask, backward=True)
        sizes = mask.seq_len, n_head
        parts = None
        if sums:
            shape = (math.prod(plan.grid) // n_head, dqkv.shape[1])
            if shape[0] <= MOST_PARTS * self.launcher.device.multiprocessors:
                parts = self.launcher.scratch("parts of dqkv", shape, lse.dtype)
        delta = self.launcher.scratch("delta", (lse.size,), lse.dtype)
        self.launcher.start(
            "attention_delta",
            "attention_delta",
            -(-len(y) * n_head * DELTA_LANES // DELTA_BLOCK),
            DELTA_BLOCK,
            *(delta, dy, y, len(y) * n_head, *sizes),
            defines=delta_defines(y.shape[1] // n_head),
        )
        args = (dqkv, parts, dy, lse, delta, qkv, mask.positions, *sizes)
        self._start(plan, "attention_backward_queries", *args)
        of_keys = replace(plan, grid=(plan.grid[0] // _group(y, qkv), *plan.grid[1:]))
        self._start(of_keys, "attention_backward_keys", *args)
        return parts

    def _plan(self, y: Array, qkv: Array, n_head: int, mask: AttentionMask, backward: bool) -> Plan:
        seq_len = mask.seq_len
        seen = _seen(mask.positions, mask.window)
        heads, head = len(y) // seq_len * n_head, y.shape[1] // n_head
        is_bfloat16 = TYPE_OF[np.dtype(y.dtype)] == "bfloat16"
        if self._tensor_cores and is_bfloat16 and head % SIDE == 0 and head <= LARGEST_HEAD:
            blocks = heads * -(-seq_len // ROWS)
            defines = mma_defines(head, _group(y, qkv)) + seen
            return Plan("attention_mma", defines, (blocks,), ROWS // SIDE * WARP, 0)
        wide = WIDE[TYPE_OF[np.dtype(y.dtype)]]
        shape = attention_shape(head, wide.itemsize, _group(y, qkv))
        tile, shared = shape.backward if backward else shape.forward
        grid = heads, -(-seq_len // tile.rows)
        return Plan("attention", shape.defines + seen, grid, max(WARP, tile.height * tile.lanes), shared)

    def _start(self, plan: Plan, kernel: str, *args: Array | int | None) -> None:
        self.launcher.start(
            plan.source, kernel, plan.grid, plan.block, *args, shared=plan.shared, defines=plan.defines
        )

    def cached(
        self, y: Array, cache: Array, qkv: Array, start: Array, window: int = 0, slots: Array | None = None
    ) -> None:
        _, n_slots, _, t_max, head = cache.shape
        n_seq = n_slots if slots is None else len(slots)
        n_head, group = y.shape[1] // head, _group(y, qkv)
        grid = n_seq * n_head, len(qkv) // n_seq
        defines = (f"HEAD={head}", f"GROUP={group}", *_seen(None, window))
        n_parts = cached_parts(grid[0] * grid[1], window or t_max, self.launcher.device.multiprocessors)
        parts = None
        if n_parts > 1:
            wide = WIDE[TYPE_OF[np.dtype(y.dtype)]]
            parts = self.launcher.scratch("parts", (*grid, n_parts, head + 2), wide)
        self.launcher.start(
            "attention_cached",
            "attention_cached",
            (*grid, n_parts),
            CACHED_BLOCK,
            *(y, cache, parts, qkv, start, int(start.size), slots, n_slots, n_head, t_max),
            defines=defines,
        )
        if parts is not None:
            args = (y, parts, n_head, n_parts)
            self.launcher.start(
                "attention_cached", "attention_cached_join", grid, WARP, *args, defines=defines
            )


def _seen(positions: Array | None, window: int) -> tuple[str, ...]:
    packed = () if positions is None else ("PACKED=1",)
    return (*packed, f"WINDOW={window}") if window else packed


def _group(y: Array, qkv: Array) -> int:
    """Return the number of query heads per key/value head."""
    width = int(y.shape[1])
    return 2 * width // (int(qkv.shape[1]) - width)


# -- how attention.cu cuts its work into tiles: macros, grids and shared memory


@dataclass(frozen=True, slots=True)
class Tile:
    """The rows of a block, the columns it processes together, and its threads as height · lanes."""

    rows: int
    columns: int
    height: int
    lanes: int

    def shared(self, head: int, real_bytes: int, backward: bool) -> int:
        """Return the bytes of factors and weights. Rows have an odd number of 16-byte chunks."""
        row_bytes = (-(-head * real_bytes // 16) | 1) * 16
        weight_bytes = (self.columns * real_bytes // 16 | 1) * 16
        if backward:
            return 2 * (self.rows + self.columns) * row_bytes + 2 * self.rows * weight_bytes
        return (self.rows + 2 * self.columns) * row_bytes + self.rows * weight_bytes


# Sorted from most elements per thread (fewest waits for shared memory) to least memory.
TILES = (
    Tile(64, 32, 16, 8),
    Tile(32, 32, 16, 8),
    Tile(32, 16, 16, 8),
    Tile(16, 16, 16, 8),
    Tile(16, 8, 16, 8),
    Tile(8, 8, 8, 8),
    Tile(8, 4, 8, 4),
    Tile(4, 4, 4, 4),
)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Tile and shared memory of each pass for one head size, and the macros for `attention.cu`."""

    forward: tuple[Tile, int]
    backward: tuple[Tile, int]
    defines: tuple[str, ...]


def attention_shape(head: int, real_bytes: int, group: int) -> AttentionShape:
    """Return the first tiles that fit, for head sizes 1 to 256, computed in 4 or 8 bytes per element."""
    forward, backward = (_first_that_fits(head, real_bytes, backward) for backward in (False, True))
    macros = (*_macros("FORWARD", *forward), *_macros("BACKWARD", *backward))
    sizes = f"HEAD={head}", f"GROUP={group}"
    return AttentionShape(forward, backward, (*sizes, *macros))


def cached_parts(rows_and_heads: int, t_max: int, multiprocessors: int) -> int:
    """Return the number of parts of the keys in decoding, so that few rows still fill the device."""
    return max(1, min(-(-t_max // KEYS_PER_PART), 2 * multiprocessors // rows_and_heads))


def _first_that_fits(head: int, real_bytes: int, backward: bool) -> tuple[Tile, int]:
    sized = ((tile, tile.shared(head, real_bytes, backward)) for tile in TILES)
    return next((tile, size) for tile, size in sized if size <= SHARED_LIMIT)


def _macros(name: str, tile: Tile, shared: int) -> tuple[str, ...]:
    return tuple(f"{name}_{size.upper()}={n}" for size, n in {**asdict(tile), "shared": shared}.items())
