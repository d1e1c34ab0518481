"""Microkernels of int8 as LLVM IR: a tile of C from rows of activations and packed weights, both quantized.

    C (rows, columns) ← [C +] Σ over blocks of k of  scale of A · scale of B · Σ a b  [+ bias]

k is split into blocks of `BLOCK`. For each block, a row of A holds the integers, a float32 scale, and an
int32: -128 times the sum of the block. For each block, a panel of B holds steps of four k of each column,
then the columns' scales as bfloat16. B is int8 + 128, because VNNI multiplies unsigned by signed bytes; the
int32 subtracts the 128 again. Sums in a block are exact.

Processors without VNNI multiply 16-bit integers. There A is int16, and the first and third of B's four bytes
are k and k + 1, so that one mask widens both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distgpt.core.cpu.compiling.processor import FLOAT32, Shape
from distgpt.core.cpu.matmul.microkernel import Sums, Tile, choice, declarations
from distgpt.inference.quantized.integers import BLOCKS

BLOCK = BLOCKS[8]
OFFSET = 128  # added to weights
UNROLLED = 2  # steps of pairs

ARGUMENTS = (
    "i64 %rows, i64 %k, ptr %a, i64 %row, ptr %b, ptr %c, i64 %ldc, i64 %columns, ptr %bias, i64 %flags"
)


@dataclass(frozen=True, slots=True)
class Dot:
    """A processor's method to add products of four bytes, and the number of rows that fit its registers."""

    kind: str  # "vnni": four at a time; "pairs": two of 16 bits; "plain": any processor
    rows: int
    function: str = ""
    takes: tuple[str, ...] = ()

    @property
    def integer(self) -> str:
        """The type of A's integers."""
        return "int16" if self.kind == "pairs" else "int8"

    def integers(self, block: int) -> int:
        """Return the bytes of the integers in a block of A."""
        return block * (2 if self.kind == "pairs" else 1)

    def a_record(self, block: int) -> int:
        """Return the bytes of a block of A: the integers, a scale and a sum."""
        return self.integers(block) + 8

    @property
    def order(self) -> tuple[int, ...]:
        """The positions in B of the four k of a step."""
        return (0, 2, 1, 3) if self.kind == "pairs" else (0, 1, 2, 3)

    def declaration(self, gives: str) -> str:
        return f"declare {gives} @{self.function}({', '.join(self.takes)})" if self.function else ""


def dot_of(shape: Shape, features: set[str]) -> Dot:
    """Return the fastest exact method for these features (LLVM's names)."""
    wide = shape.lanes == 16
    bits, ints, shorts = 32 * shape.lanes, f"<{shape.lanes} x i32>", f"<{2 * shape.lanes} x i16>"
    if ("avx512vnni" if wide else "avxvnni") in features:
        return Dot("vnni", 7 if wide else 3, f"llvm.x86.avx512.vpdpbusd.{bits}", (ints, ints, ints))
    if ("avx512bw" if wide else "avx2") in features:
        name = "llvm.x86.avx512.pmaddw.d.512" if wide else "llvm.x86.avx2.pmadd.wd"
        return Dot("pairs", 12 if wide else 5, name, (shorts, shorts))
    return Dot("plain", 2)


def module(shape: Shape, dot: Dot) -> str:
    """Return the IR of `tile`, which computes up to `dot.rows` rows; %k is the number of blocks."""
    return module_of([Int8Tile(shape, dot, rows) for rows in range(1, dot.rows + 1)])


def module_of(tiles: Sequence[Int8Tile], *others: str) -> str:
    """Return the IR of `tile`, which calls tiles of 1, 2, … rows; `others` declares further functions."""
    shape, dot = tiles[0].shape, tiles[0].dot
    declared = [
        *declarations(shape, FLOAT32, FLOAT32),
        dot.declaration(f"<{shape.lanes} x i32>"),
        *others,
    ]
    chosen = choice(shape, dot.rows, len(tiles), ARGUMENTS)
    return "\n".join([*declared, *(tile.text() for tile in tiles), chosen])


class Int8Tile(Tile):
    """Generator of the function for one number of rows."""

    block = BLOCK

    def __init__(self, shape: Shape, dot: Dot, rows: int) -> None:
        super().__init__(shape, FLOAT32, FLOAT32, rows)
        self.dot, self.ints = dot, f"<{shape.lanes} x i32>"
        self.shorts = f"<{2 * shape.lanes} x i16>"

    @property
    def integers(self) -> int:
        """The bytes of B's integers in a block of a panel."""
        return self.block * self.shape.columns

    def text(self) -> str:
        self.begin(ARGUMENTS)
        self.steps = "%k"
        self._row_starts()
        self.add("  br label %loop")
        self._blocks()
        self._write()
        return "\n".join([*self.lines, "  ret void\n}"])

    def _blocks(self) -> None:
        last = "counted" if self.dot.kind == "pairs" else "loop"
        self.add(f"loop:\n  %i = phi i64 [0, %entry], [%i1, %{last}]")
        self.add(f"  %at = phi i64 [0, %entry], [%at1, %{last}]")
        self.add(f"  %pb = phi ptr [%b, %entry], [%pb1, %{last}]")
        for r, v in self.cells():
            self.add(f"  %s{r}_{v} = phi {self.vector} [zeroinitializer, %entry], [%n{r}_{v}, %{last}]")
        self.blocks = [self.new(f"getelementptr i8, ptr {start}, i64 %at") for start in self.starts]
        sums = self._sums_of_pairs() if self.dot.kind == "pairs" else self._sums()
        scales = [self._scale(v) for v in range(self.shape.vectors)]
        for r, v in self.cells():
            if v == 0:
                own = self.everywhere("float", self._of_row(r, "float", self.dot.integers(self.block)))
            factor = self.new(f"fmul {self.vector} {own}, {scales[v]}")
            total = self.new(f"sitofp {self.ints} {sums[r, v]} to {self.vector}")
            total = self.fma(total, factor, f"%s{r}_{v}")
            self.add(f"  %n{r}_{v} = bitcast {self.vector} {total} to {self.vector}")
        self.add(f"  %pb1 = getelementptr i8, ptr %pb, i64 {self.integers + 2 * self.shape.columns}")
        self.add(f"  %at1 = add i64 %at, {self.dot.a_record(self.block)}\n  %i1 = add i64 %i, 1")
        self.add("  %more = icmp ult i64 %i1, %k\n  br i1 %more, label %loop, label %summed\nsummed:")
        self.totals = self.named("n")

    def _less(self) -> Sums:
        """Load the initial sums of a block, which subtract OFFSET."""
        sums: Sums = {}
        for r in range(self.rows):
            less = self.everywhere("i32", self._of_row(r, "i32", self.dot.integers(self.block) + 4))
            sums |= {(r, v): less for v in range(self.shape.vectors)}
        return sums

    def _sums(self) -> Sums:
        """Return the exact sums of the products in a block."""
        sums = self._less()
        for step in range(self.block // 4):
            b = [self._split(self.four("%pb", step, v), "lshr") for v in range(self.shape.vectors)]
            for r in range(self.rows):
                a = self._split(self.everywhere("i32", self._of_row(r, "i32", 4 * step)), "ashr")
                for v in range(self.shape.vectors):
                    sums[r, v] = self._added(sums[r, v], b[v], a)
        return sums

    def _sums_of_pairs(self) -> Sums:
        """Return these sums from a loop over UNROLLED steps, which lets the float32 sums be spilled."""
        starts, width = self._less(), 4 * UNROLLED
        self.add("  br label %steps\nsteps:")
        self.add("  %j = phi i64 [0, %loop], [%j1, %steps]\n  %pj = phi ptr [%pb, %loop], [%pj1, %steps]")
        for r, start in enumerate(self.blocks):
            self.add(f"  %aj{r} = phi ptr [{start}, %loop], [%ak{r}, %steps]")
        for (r, v), start in starts.items():
            self.add(f"  %i{r}_{v} = phi {self.ints} [{start}, %loop], [%m{r}_{v}, %steps]")
        sums = {(r, v): f"%i{r}_{v}" for r, v in starts}
        for half in range(2 * UNROLLED):
            self._add_pairs(sums, half)
        for r, v in starts:
            self.add(f"  %m{r}_{v} = bitcast {self.ints} {sums[r, v]} to {self.ints}")
        for r in range(self.rows):
            self.add(f"  %ak{r} = getelementptr i8, ptr %aj{r}, i64 {self.dot.integers(width)}")
        self.add(f"  %pj1 = getelementptr i8, ptr %pj, i64 {self.integers * width // self.block}")
        self.add(f"  %j1 = add i64 %j, 1\n  %further = icmp ult i64 %j1, {self.block // width}")
        self.add("  br i1 %further, label %steps, label %counted\ncounted:")
        return {(r, v): f"%m{r}_{v}" for r, v in starts}

    def _add_pairs(self, sums: Sums, half: int) -> None:
        """Add the products of half a step: two k of each column."""
        b = [self._half(half // 2, v, half % 2 == 1) for v in range(self.shape.vectors)]
        for r in range(self.rows):
            place = self.new(f"getelementptr i8, ptr %aj{r}, i64 {4 * half}")
            a = self.everywhere("i32", self.new(f"load i32, ptr {place}, align 4"))
            for v in range(self.shape.vectors):
                total = self.new(f"add {self.ints} {sums[r, v]}, {self._called(a, b[v])}")
                # The empty asm is opaque to the compiler, which otherwise adds products to each other first
                # and runs out of registers.
                sums[r, v] = self.new(f'call {self.ints} asm "", "=v,0"({self.ints} {total})')

    def _half(self, step: int, v: int, second: bool) -> str:
        """Return two of each column's four bytes as 16 bits. As in microkernel.py, load them each time."""
        word = self.four("%pj", step, v, "load volatile" if second else "load")
        shorts = self.new(f"bitcast {self.ints} {word} to {self.shorts}")
        widen, by = ("lshr", 8) if second else ("and", 255)
        kept = self.new(f"{widen} {self.shorts} {shorts}, splat (i16 {by})")
        return self.new(f"bitcast {self.shorts} {kept} to {self.ints}")

    def _of_row(self, r: int, type: str, offset: int) -> str:
        place = self.new(f"getelementptr i8, ptr {self.blocks[r]}, i64 {offset}")
        return self.new(f"load {type}, ptr {place}, align 4")

    def four(self, panel: str, step: int, v: int, load: str = "load") -> str:
        """Return four of B's bytes of each column."""
        return self.word(panel, step, v, load)

    def word(self, panel: str, i: int, v: int, load: str) -> str:
        """Load word i of each column."""
        offset = 4 * (self.shape.columns * i + self.shape.lanes * v)
        place = self.new(f"getelementptr i8, ptr {panel}, i64 {offset}")
        return self.new(f"{load} {self.ints}, ptr {place}, align {2 * self.shape.lanes}")

    def _scale(self, v: int) -> str:
        n = self.shape.lanes
        offset = self.integers + 2 * n * v
        place = self.new(f"getelementptr i8, ptr %pb, i64 {offset}")
        bits = self.new(f"load <{n} x i16>, ptr {place}, align {2 * n}")
        upper = self.new(
            f"shl {self.ints} {self.new(f'zext <{n} x i16> {bits} to {self.ints}')}, splat (i32 16)"
        )
        return self.new(f"bitcast {self.ints} {upper} to {self.vector}")

    def _split(self, bytes: str, right: str) -> list[str]:
        """Split the four bytes of each lane into four integers, or one if VNNI; `right` is lshr or ashr."""
        if self.dot.kind == "vnni":
            return [bytes]
        upper = [self.new(f"shl {self.ints} {bytes}, splat (i32 {left})") for left in (24, 16, 8, 0)]
        return [self.new(f"{right} {self.ints} {part}, splat (i32 24)") for part in upper]

    def _added(self, total: str, b: list[str], a: list[str]) -> str:
        if self.dot.kind == "vnni":
            return self._called(total, b[0], a[0])
        for x, y in zip(b, a, strict=True):
            total = self.new(f"add {self.ints} {total}, {self.new(f'mul {self.ints} {x}, {y}')}")
        return total

    def _called(self, *values: str) -> str:
        pairs = zip(self.dot.takes, values, strict=True)
        cast = [v if t == self.ints else self.new(f"bitcast {self.ints} {v} to {t}") for t, v in pairs]
        given = ", ".join(f"{type} {value}" for type, value in zip(self.dot.takes, cast, strict=True))
        return self.new(f"call {self.ints} @{self.dot.function}({given})")
