"""How threads share a matmul C = A B: in bands of C's rows, bands of its columns, or cells of both.

Every worker packs what its cell reads. In bands of rows alone each packs all of B, and a thread of many has
few rows to use it for; in cells each packs a part. An element of C is the same sum however C is cut.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from distgpt.core.cpu.matmul.packing import COLUMNS, ROWS
from distgpt.core.cpu.pool import Pool

# Packing a panel of B takes as long as PANEL tiles that read it; packing a strip of A, which only `products`
# does, as long as STRIP tiles. By count on a Zen 4, in bfloat16.
PANEL, STRIP = 2, 1
KEPT = 256  # choices: prompts have many lengths

Range = tuple[int, int]


class Bands(NamedTuple):
    """The numbers of bands of rows and of columns; their cells count row by row."""

    rows: int
    columns: int

    @property
    def cells(self) -> int:
        return self.rows * self.columns

    def cell(self, first: int, last: int, rows: int, columns: int) -> tuple[Range, Range]:
        """Return the rows and columns of one cell of C (rows, columns), or of all of them."""
        if last - first == self.cells:
            return (0, rows), (0, columns)
        assert last - first == 1, "a thread has one cell, or computes alone"
        band, column = divmod(first, self.columns)
        return Pool.part_of(band, self.rows, rows, ROWS), Pool.part_of(column, self.columns, columns, COLUMNS)


@lru_cache(KEPT)
def bands(rows: int, columns: int, threads: int, packs_rows: bool = False) -> Bands:
    """Return the bands in which the busiest thread is through first; `packs_rows`: it packs its A as well."""
    strips, panels = max(1, -(-rows // ROWS)), max(1, -(-columns // COLUMNS))

    def time(cut: Bands) -> int:
        high, wide = -(-strips // cut.rows), -(-panels // cut.columns)
        return high * wide + PANEL * wide + (STRIP * high if packs_rows else 0)

    # Of equals the one with fewer bands of columns: A is then read by fewer threads.
    return min((Bands(min(threads // n, strips), n) for n in range(1, min(threads, panels) + 1)), key=time)
