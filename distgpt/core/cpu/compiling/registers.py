"""How microkernels use the vector registers of a processor."""

from __future__ import annotations

from dataclasses import dataclass, replace

FLOAT32, BFLOAT16 = "float32", "bfloat16"


@dataclass(frozen=True, slots=True)
class Shape:
    """The use of a processor's registers.

    `lanes` float32 a register, `vectors` registers of B by at most `rows` rows of A: rows · vectors sums,
    the B of one step, and one element of A must fit the register file.
    """

    lanes: int
    vectors: int
    rows: int
    dot: bool  # pairs of bfloat16 are multiplied by an instruction for them (AVX512_BF16, BFMMLA)
    amx: bool = False  # bfloat16 has tile registers (amx.py), which hold more rows than the others
    neon: bool = False  # of arm64: operands are taken from a lane, and memory has no masks
    panel: int = 0  # columns of a panel of B, where they are more than the registers'

    @property
    def columns(self) -> int:
        return self.panel or self.lanes * self.vectors

    def narrow(self) -> Shape:
        """Return the shape that takes the first register's columns of a panel."""
        return replace(self, vectors=1, panel=self.columns)

    @property
    def at_once(self) -> int:
        """Return the rows whose sums fit the vector registers; a tile of more is computed in parts."""
        return AVX512_BF16.rows if self.amx else self.rows

    def widens(self, operand: str) -> bool:
        """Return whether operands become float32 before they are multiplied."""
        return operand == BFLOAT16 and not self.dot

    def tiles(self, factor: str) -> str:
        """Return by which name a table may have a writer of tiles that beats microkernel.py; "" for none."""
        low = factor == BFLOAT16
        if self.neon:
            return "bfmmla" if low and self.dot else "neon"
        if self.amx:
            return "amx" if low else ""
        return "widened" if self.widens(factor) and self.lanes == 16 else ""


AVX512 = Shape(lanes=16, vectors=2, rows=14, dot=False)
AVX512_BF16 = Shape(lanes=16, vectors=2, rows=14, dot=True)
AVX2 = Shape(lanes=8, vectors=2, rows=6, dot=False)
