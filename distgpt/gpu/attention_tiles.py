"""How the attention kernels cut their work into tiles: the macros, grids and shared memory of each launch."""

from __future__ import annotations

from dataclasses import dataclass

SHARED_LIMIT = 48 * 1024  # what a block may have without asking
CACHED_BLOCK = (256,)
DELTA_BLOCK, DELTA_LANES = 256, 8  # threads, of which so many work on one head of one row
KEYS_PER_PART = 256  # of the cache, at the least: fewer are not worth a block


@dataclass(frozen=True, slots=True)
class Tile:
    """A block's rows, the columns it looks at together, and its threads as height · lanes."""

    rows: int
    columns: int
    height: int
    lanes: int

    @property
    def block(self) -> tuple[int]:
        return (max(32, self.height * self.lanes),)

    def grid(self, n_seq: int, seq_len: int, n_head: int) -> tuple[int, int]:
        return n_seq * n_head, -(-seq_len // self.rows)

    def shared(self, head: int, real_bytes: int, backward: bool) -> int:
        """Bytes: rows of an odd number of 16-byte chunks, for the factors and for the weights of a sum."""
        row_bytes = _odd(-(-head * real_bytes // 16)) * 16
        weight_bytes = _odd(self.columns * real_bytes // 16) * 16
        if backward:
            return 2 * (self.rows + self.columns) * row_bytes + 2 * self.rows * weight_bytes
        return (self.rows + 2 * self.columns) * row_bytes + self.rows * weight_bytes


# From the most elements per thread, which wait least for shared memory, to the least memory.
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
    """The tiles of `attention.cu` for one head size, and the macros to compile it with."""

    forward: Tile
    backward: Tile
    forward_shared: int
    backward_shared: int
    defines: tuple[str, ...]


def attention_shape(head: int, real_bytes: int) -> AttentionShape:
    """The first tiles that fit, for heads of 1 to 256 elements, computed in 4 or 8 bytes each."""
    forward, forward_shared = _first_that_fits(head, real_bytes, backward=False)
    backward, backward_shared = _first_that_fits(head, real_bytes, backward=True)
    defines = (
        f"HEAD={head}",
        f"DELTA_LANES={DELTA_LANES}",
        *_macros("FORWARD", forward, forward_shared),
        *_macros("BACKWARD", backward, backward_shared),
    )
    return AttentionShape(forward, backward, forward_shared, backward_shared, defines)


def delta_blocks(rows_and_heads: int) -> int:
    """Blocks of attention_delta."""
    return -(-rows_and_heads * DELTA_LANES // DELTA_BLOCK)


def cached_parts(rows_and_heads: int, t_max: int, multiprocessors: int) -> int:
    """Into how many parts decoding cuts the keys, so that few rows still fill the device."""
    return max(1, min(-(-t_max // KEYS_PER_PART), 2 * multiprocessors // rows_and_heads))


def _first_that_fits(head: int, real_bytes: int, backward: bool) -> tuple[Tile, int]:
    sized = ((tile, tile.shared(head, real_bytes, backward)) for tile in TILES)
    return next((tile, size) for tile, size in sized if size <= SHARED_LIMIT)


def _macros(name: str, tile: Tile, shared: int) -> tuple[str, ...]:
    return (
        f"{name}_ROWS={tile.rows}",
        f"{name}_COLUMNS={tile.columns}",
        f"{name}_HEIGHT={tile.height}",
        f"{name}_LANES={tile.lanes}",
        f"{name}_SHARED={shared}",
    )


def _odd(n: int) -> int:
    return n | 1
