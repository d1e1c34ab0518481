"""Microkernels of int8 as LLVM IR: a tile of C from rows of activations and packed weights, both quantised.

    C (rows, columns) ← [C +] Σ over blocks of k of  scale of A · scale of B · Σ a b  [+ bias]

k comes in blocks of `BLOCK`. A row of A holds, block after block, BLOCK int8, a float32 scale, and an int32:
-128 times the sum of the block. A panel of B holds, block after block, BLOCK / 4 steps of four k of each
column, and the columns' scales as bfloat16. B is int8 + 128, since processors multiply unsigned by signed
bytes (VNNI); the int32 takes the 128 off again. Sums inside a block are exact.
"""

from __future__ import annotations

from dataclasses import dataclass

from distgpt.kernels.matmul.microkernel import Tile, declarations
from distgpt.kernels.matmul.vectors import FLOAT32, Shape

BLOCK = 64
OFFSET = 128  # added to weights
A_RECORD = BLOCK + 8  # bytes of a block of A

ARGUMENTS = (
    "i64 %rows, i64 %k, ptr %a, i64 %row, ptr %b, ptr %c, i64 %ldc, i64 %columns, ptr %bias, i64 %flags"
)


def b_record(shape: Shape) -> int:
    """Bytes of a block of a panel of B."""
    return (BLOCK + 2) * shape.columns


@dataclass(frozen=True, slots=True)
class Dot:
    """How a processor adds products of four bytes each, and how many rows fit its registers that way."""

    kind: str  # "vnni": four at once; "pairs": two of 16 bits; "plain": any processor
    rows: int
    function: str = ""
    takes: tuple[str, ...] = ()

    def declaration(self, gives: str) -> str:
        return f"declare {gives} @{self.function}({', '.join(self.takes)})" if self.function else ""


def dot_of(shape: Shape, features: set[str]) -> Dot:
    """The fastest exact way that these features, by LLVM's names, allow."""
    wide = shape.lanes == 16
    bits, ints, shorts = 32 * shape.lanes, f"<{shape.lanes} x i32>", f"<{2 * shape.lanes} x i16>"
    if ("avx512vnni" if wide else "avxvnni") in features:
        return Dot("vnni", 7 if wide else 3, f"llvm.x86.avx512.vpdpbusd.{bits}", (ints, ints, ints))
    if ("avx512bw" if wide else "avx2") in features:
        name = "llvm.x86.avx512.pmaddw.d.512" if wide else "llvm.x86.avx2.pmadd.wd"
        return Dot("pairs", 6 if wide else 2, name, (shorts, shorts))
    return Dot("plain", 2)


def module(shape: Shape, dot: Dot) -> str:
    """The IR of `tile`, which computes up to `dot.rows` rows; %k is the number of blocks."""
    tiles = [Int8Tile(shape, dot, rows).text() for rows in range(1, dot.rows + 1)]
    declared = [*declarations(shape, FLOAT32, FLOAT32), dot.declaration(f"<{shape.lanes} x i32>")]
    return "\n".join([*declared, *tiles, _choice(dot.rows)])


def _choice(most: int) -> str:
    lines = [f"define void @tile({ARGUMENTS}) {{", "  switch i64 %rows, label %none ["]
    lines += [f"    i64 {rows}, label %rows{rows}" for rows in range(1, most + 1)]
    lines.append("  ]\nnone:\n  ret void")
    for rows in range(1, most + 1):
        lines += [f"rows{rows}:\n  tail call void @tile{rows}({ARGUMENTS})\n  ret void"]
    return "\n".join([*lines, "}"])


class Int8Tile(Tile):
    """Writes the function for one number of rows."""

    def __init__(self, shape: Shape, dot: Dot, rows: int) -> None:
        super().__init__(shape, FLOAT32, FLOAT32, rows)
        self.dot, self.ints = dot, f"<{shape.lanes} x i32>"
        self.shorts = f"<{2 * shape.lanes} x i16>"

    def text(self) -> str:
        self.add(f"define internal void @tile{self.rows}({ARGUMENTS}) {{\nentry:")
        self.steps = "%k"
        self.starts = ["%a"]
        for r in range(1, self.rows):
            offset = self.new(f"mul i64 %row, {r}")
            self.starts.append(self.new(f"getelementptr i8, ptr %a, i64 {offset}"))
        self.add("  br label %loop")
        self._blocks()
        self._write()
        return "\n".join([*self.lines, "  ret void\n}"])

    def _blocks(self) -> None:
        self.add("loop:\n  %i = phi i64 [0, %entry], [%i1, %loop]")
        self.add("  %at = phi i64 [0, %entry], [%at1, %loop]")
        self.add("  %pb = phi ptr [%b, %entry], [%pb1, %loop]")
        for r, v in self.cells():
            self.add(f"  %s{r}_{v} = phi {self.vector} [zeroinitializer, %entry], [%n{r}_{v}, %loop]")
        self.blocks = [self.new(f"getelementptr i8, ptr {start}, i64 %at") for start in self.starts]
        sums = self._sums()
        scales = [self._scale(v) for v in range(self.shape.vectors)]
        for r in range(self.rows):
            own = self.everywhere("float", self._of_row(r, "float", BLOCK))
            for v in range(self.shape.vectors):
                factor = self.new(f"fmul {self.vector} {own}, {scales[v]}")
                total = self.new(f"sitofp {self.ints} {sums[r, v]} to {self.vector}")
                total = self.fma(total, factor, f"%s{r}_{v}")
                self.add(f"  %n{r}_{v} = bitcast {self.vector} {total} to {self.vector}")
        self.add(f"  %pb1 = getelementptr i8, ptr %pb, i64 {b_record(self.shape)}")
        self.add(f"  %at1 = add i64 %at, {A_RECORD}\n  %i1 = add i64 %i, 1")
        self.add("  %more = icmp ult i64 %i1, %k\n  br i1 %more, label %loop, label %summed\nsummed:")
        self.totals = {(r, v): f"%n{r}_{v}" for r, v in self.cells()}

    def _sums(self) -> dict[tuple[int, int], str]:
        """Of the products in a block, exact."""
        sums: dict[tuple[int, int], str] = {}
        for r in range(self.rows):
            less = self.everywhere("i32", self._of_row(r, "i32", BLOCK + 4))
            sums |= {(r, v): less for v in range(self.shape.vectors)}
        for step in range(BLOCK // 4):
            b = [self._split(self._of_panel(step, v)) for v in range(self.shape.vectors)]
            for r in range(self.rows):
                a = self._split(self.everywhere("i32", self._of_row(r, "i32", 4 * step)), signed=True)
                for v in range(self.shape.vectors):
                    sums[r, v] = self._added(sums[r, v], b[v], a)
        return sums

    def _of_row(self, r: int, type: str, offset: int) -> str:
        place = self.new(f"getelementptr i8, ptr {self.blocks[r]}, i64 {offset}")
        return self.new(f"load {type}, ptr {place}, align 4")

    def _of_panel(self, step: int, v: int) -> str:
        offset = 4 * (self.shape.columns * step + self.shape.lanes * v)
        place = self.new(f"getelementptr i8, ptr %pb, i64 {offset}")
        return self.new(f"load {self.ints}, ptr {place}, align {2 * self.shape.lanes}")

    def _scale(self, v: int) -> str:
        n = self.shape.lanes
        offset = BLOCK * self.shape.columns + 2 * n * v
        place = self.new(f"getelementptr i8, ptr %pb, i64 {offset}")
        bits = self.new(f"load <{n} x i16>, ptr {place}, align {2 * n}")
        upper = self.new(
            f"shl {self.ints} {self.new(f'zext <{n} x i16> {bits} to {self.ints}')}, splat (i32 16)"
        )
        return self.new(f"bitcast {self.ints} {upper} to {self.vector}")

    def _split(self, bytes: str, signed: bool = False) -> list[str]:
        """Four bytes of each lane in the parts that are multiplied at once."""
        if self.dot.kind == "vnni":
            return [bytes]
        if self.dot.kind == "pairs":  # bytes 0 and 2, bytes 1 and 3, as 16 bits
            right = "ashr" if signed else "lshr"
            shorts = self.new(f"bitcast {self.ints} {bytes} to {self.shorts}")
            low = self.new(f"shl {self.shorts} {shorts}, splat (i16 8)")
            return [self.new(f"{right} {self.shorts} {part}, splat (i16 8)") for part in (low, shorts)]
        parts = []
        for left in (24, 16, 8, 0):
            upper = self.new(f"shl {self.ints} {bytes}, splat (i32 {left})")
            parts.append(self.new(f"{'ashr' if signed else 'lshr'} {self.ints} {upper}, splat (i32 24)"))
        return parts

    def _added(self, total: str, b: list[str], a: list[str]) -> str:
        if self.dot.kind == "vnni":
            return self._called(total, b[0], a[0])
        for x, y in zip(b, a, strict=True):
            pairs = self.dot.kind == "pairs"
            product = self._called(x, y) if pairs else self.new(f"mul {self.ints} {x}, {y}")
            total = self.new(f"add {self.ints} {total}, {product}")
        return total

    def _called(self, *values: str) -> str:
        given = ", ".join(f"{type} {value}" for type, value in zip(self.dot.takes, values, strict=True))
        return self.new(f"call {self.ints} @{self.dot.function}({given})")
