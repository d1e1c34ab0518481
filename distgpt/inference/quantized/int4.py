"""Microkernels of int4: like int8's, but weights are indices into a table of 16 integers.

A block of a panel of B holds 32-bit words, each with eight k of a column: the lower halves of its bytes are
the first four, the upper halves the next four, in int8's order. Each half byte is the index of the weight's
integer in `LEVELS`. Everything else is as in int8.py.
"""

from __future__ import annotations

from distgpt.core.cpu.compiling.processor import Shape
from distgpt.inference.quantized.int8 import OFFSET, Dot, Int8Tile, module_of
from distgpt.inference.quantized.integers import BLOCKS, LEVELS

BLOCK = BLOCKS[4]
MOST = 10  # rows whose sums fit in 32 registers together with the table
LOOKUPS = {16: "llvm.x86.avx512.pshuf.b.512", 8: "llvm.x86.avx2.pshuf.b"}  # intrinsic by number of lanes
HALF = 0x0F0F0F0F  # the lower halves of four bytes


def module(shape: Shape, dot: Dot) -> str:
    """Return the IR of `tile`, which computes up to `dot.rows` rows; %k is the number of blocks."""
    tiles = [Int4Tile(shape, dot, rows) for rows in range(1, min(MOST, dot.rows) + 1)]
    return module_of(tiles, *([] if dot.kind == "plain" else [tiles[0].declaration()]))


class Int4Tile(Int8Tile):
    """Generator of the function for one number of rows."""

    block = BLOCK

    def __init__(self, shape: Shape, dot: Dot, rows: int) -> None:
        super().__init__(shape, dot, rows)
        self.bytes = f"<{4 * shape.lanes} x i8>"

    def declaration(self) -> str:
        return f"declare {self.bytes} @{LOOKUPS[self.shape.lanes]}({self.bytes}, {self.bytes})"

    @property
    def integers(self) -> int:
        return super().integers // 2

    def four(self, panel: str, step: int, v: int, load: str = "load") -> str:
        if step % 2 and self.dot.kind == "pairs":  # There are too few registers to keep the word.
            load = "load volatile"
        word = self.word(panel, step // 2, v, load)
        if step % 2:
            word = self.new(f"lshr {self.ints} {word}, splat (i32 4)")
        return self._looked_up(word)

    def _looked_up(self, word: str) -> str:
        """Return the integers whose table indices are in the lower halves of the bytes."""
        halves = self.new(f"and {self.ints} {word}, splat (i32 {HALF})")
        places = self.new(f"bitcast {self.ints} {halves} to {self.bytes}")
        result = self._chosen(places, 0, LEVELS) if self.dot.kind == "plain" else self._shuffled(places)
        return self.new(f"bitcast {self.bytes} {result} to {self.ints}")

    def _shuffled(self, places: str) -> str:
        table = ", ".join(f"i8 {OFFSET + level}" for level in LEVELS * (self.shape.lanes // 4))
        lookup = LOOKUPS[self.shape.lanes]
        return self.new(f"call {self.bytes} @{lookup}({self.bytes} <{table}>, {self.bytes} {places})")

    def _chosen(self, places: str, bit: int, levels: tuple[int, ...]) -> str:
        """Look up levels by selecting halves of the table, on processors without a shuffle."""
        if len(levels) == 1:
            return f"splat (i8 {OFFSET + levels[0]})"
        even, odd = (self._chosen(places, bit + 1, levels[first::2]) for first in (0, 1))
        kept = self.new(f"and {self.bytes} {places}, splat (i8 {1 << bit})")
        is_odd = self.new(f"icmp ne {self.bytes} {kept}, zeroinitializer")
        mask = f"<{4 * self.shape.lanes} x i1>"
        return self.new(f"select {mask} {is_odd}, {self.bytes} {odd}, {self.bytes} {even}")
