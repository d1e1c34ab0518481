"""Microkernels of int8 as LLVM IR: a tile of C from rows of activations and packed weights, both quantised.

    C (rows, columns) ← [C +] Σ over blocks of k of  scale of A · scale of B · Σ a b  [+ bias]

k comes in blocks of `BLOCK`. A row of A holds, block after block, the integers, a float32 scale, and an
int32: -128 times the sum of the block. A panel of B holds, block after block, steps of four k of each
column, and the columns' scales as bfloat16. B is int8 + 128, since processors multiply unsigned by signed
bytes (VNNI); the int32 takes the 128 off again. Sums inside a block are exact.

Processors without VNNI multiply 16 bits: there A has int16, and of B's four bytes the first and third are
k and k + 1, so that one mask widens them both. NEON multiplies signed by signed bytes: there B is int8, and
the int32 is 0. Its SMMLA multiplies two rows by two columns, eight k at once: there B's steps are of eight k.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from distgpt.core.base.tables import Table
from distgpt.core.cpu.compiling.processor import FLOAT32, Shape
from distgpt.core.cpu.matmul.microkernel import Sums, Tile
from distgpt.rounded.loops.integers import BLOCKS

BLOCK = BLOCKS[8]
UNROLLED = 2  # steps of pairs

ARGUMENTS = (
    "i64 %rows, i64 %k, ptr %a, i64 %row, ptr %b, ptr %c, i64 %ldc, i64 %columns, ptr %bias, i64 %flags"
)


@dataclass(frozen=True, slots=True)
class Dot:
    """A processor's way to add products of four bytes, and the rows that fit its registers that way."""

    # "vnni", "signed": four at once; "squares": eight, of two rows and two columns; "pairs": two of 16 bits;
    # "plain": any processor.
    kind: str
    rows: int
    function: str = ""
    takes: tuple[str, ...] = ()

    @property
    def offset(self) -> int:
        """Return the number that is added to weights."""
        return 0 if self.kind in ("signed", "squares") else 128

    @property
    def integer(self) -> str:
        """The type of A's integers."""
        return "int16" if self.kind == "pairs" else "int8"

    def integers(self, block: int) -> int:
        """Bytes of the integers in a block of A."""
        return block * (2 if self.kind == "pairs" else 1)

    def a_record(self, block: int) -> int:
        """Bytes of a block of A: a scale and a sum behind the integers."""
        return self.integers(block) + 8

    @property
    def order(self) -> tuple[int, ...]:
        """The positions in B of the k of a step."""
        return (0, 2, 1, 3) if self.kind == "pairs" else tuple(range(8 if self.kind == "squares" else 4))

    def declaration(self, gives: str) -> str:
        return f"declare {gives} @{self.function}({', '.join(self.takes)})" if self.function else ""


TILES: Table[Any] = Table("rounded tiles", "tiles of", {})  # classes, of processors that want their own


def dot_of(shape: Shape, features: set[str]) -> Dot:
    """Return the fastest exact way that these features, by LLVM's names, allow."""
    wide = shape.lanes == 16
    bits, ints, shorts = 32 * shape.lanes, f"<{shape.lanes} x i32>", f"<{2 * shape.lanes} x i16>"
    if shape.neon and "dotprod" in features:
        kind, rows, name = ("squares", 6, "smmla") if "i8mm" in features else ("signed", 3, "sdot")
        return Dot(kind, rows, f"llvm.aarch64.neon.{name}.v4i32.v16i8", (ints, "<16 x i8>", "<16 x i8>"))
    if ("avx512vnni" if wide else "avxvnni") in features:
        return Dot("vnni", 7 if wide else 3, f"llvm.x86.avx512.vpdpbusd.{bits}", (ints, ints, ints))
    if ("avx512bw" if wide else "avx2") in features:
        name = "llvm.x86.avx512.pmaddw.d.512" if wide else "llvm.x86.avx2.pmadd.wd"
        return Dot("pairs", 12 if wide else 5, name, (shorts, shorts))
    return Dot("plain", 2)


def module(shape: Shape, dot: Dot) -> str:
    """The IR of `tile`, which computes up to `dot.rows` rows; %k is the number of blocks."""
    of: type[Int8Tile] = TILES["int8 on arm64"] if shape.neon else Int8Tile
    return module_of([of(shape, dot, rows) for rows in range(1, dot.rows + 1)])


def module_of(tiles: Sequence[Int8Tile], *others: str) -> str:
    """The IR of `tile` by tiles of 1, 2, … rows, more in parts; `others` declares what else they call."""
    shape, dot = tiles[0].shape, tiles[0].dot
    declared = [
        *tiles[0].declarations(shape, FLOAT32, FLOAT32),
        dot.declaration(f"<{shape.lanes} x i32>"),
        *others,
    ]
    chosen = tiles[0].choice(shape, dot.rows, len(tiles), ARGUMENTS, FLOAT32)
    return "\n".join([*declared, *(tile.text() for tile in tiles), chosen])


class Int8Tile(Tile):
    """Writes the function for one number of rows."""

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
        ways = {"pairs": self._sums_of_pairs, "squares": self._sums_of_squares}
        last = "counted" if self.dot.kind in ways else "loop"
        self.add(f"loop:\n  %i = phi i64 [0, %entry], [%i1, %{last}]")
        self.add(f"  %at = phi i64 [0, %entry], [%at1, %{last}]")
        self.add(f"  %pb = phi ptr [%b, %entry], [%pb1, %{last}]")
        places = self.squares() if self.dot.kind == "squares" else self.cells()
        for r, v in places:
            self.add(f"  %s{r}_{v} = phi {self.vector} [zeroinitializer, %entry], [%n{r}_{v}, %{last}]")
        self.blocks = [self.new(f"getelementptr i8, ptr {start}, i64 %at") for start in self.starts]
        sums = ways.get(self.dot.kind, self._sums)()
        scales = [self._scale(v) for v in range(self.shape.vectors)]
        if self.dot.kind == "squares":
            scales = [
                self.shuffled(self.vector, x, x, order)
                for x in scales
                for order in ((0, 1, 0, 1), (2, 3, 2, 3))
            ]
        for r, v in places:
            if v == 0:
                own = self._scale_of_rows(r)
            factor = self.new(f"fmul {self.vector} {own}, {scales[v]}")
            total = self.new(f"sitofp {self.ints} {sums[r, v]} to {self.vector}")
            total = self.fma(total, factor, f"%s{r}_{v}")
            self.add(f"  %n{r}_{v} = bitcast {self.vector} {total} to {self.vector}")
        self.add(f"  %pb1 = getelementptr i8, ptr %pb, i64 {self.integers + 2 * self.shape.columns}")
        self.add(f"  %at1 = add i64 %at, {self.dot.a_record(self.block)}\n  %i1 = add i64 %i, 1")
        self.add("  %more = icmp ult i64 %i1, %k\n  br i1 %more, label %loop, label %summed\nsummed:")
        self.totals = {(r, v): f"%n{r}_{v}" for r, v in places}
        if self.dot.kind == "squares":
            self.totals = {(r, v): self.row_of_squares(self.totals, r, v) for r, v in self.cells()}

    def _scale_of_rows(self, r: int) -> str:
        """Return the scale of row r of A, or those of the two rows of square r."""
        if self.dot.kind != "squares":
            return self._scale_of_row(r)
        first, second = (self._scale_of_row(i) for i in self.two_rows(r))
        return self.shuffled(self.vector, first, second, (0, 1, 4, 5))

    def _scale_of_row(self, r: int) -> str:
        return self.everywhere("float", self._of_row(r, "float", self.dot.integers(self.block)))

    def _less(self) -> Sums:
        """Return the start of a block's sums."""
        if self.dot.kind == "signed":
            return dict.fromkeys(self.cells(), "zeroinitializer")
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
                a = self._split(self._in_all("i32", self._of_row(r, "i32", 4 * step)), "ashr")
                for v in range(self.shape.vectors):
                    sums[r, v] = self._added(sums[r, v], b[v], a)
        return sums

    def _sums_of_pairs(self) -> Sums:
        return self._counted(self._less(), self._add_steps_of_pairs, 4 * UNROLLED)

    def _sums_of_squares(self) -> Sums:
        return self._counted(dict.fromkeys(self.squares(), "zeroinitializer"), self._add_squares, 8)

    def _counted(self, starts: Sums, add: Callable[[Sums], None], width: int) -> Sums:
        """Return sums from a loop over `width` k at a time; float32 sums can leave the registers for it."""
        self.add("  br label %steps\nsteps:")
        self.add("  %j = phi i64 [0, %loop], [%j1, %steps]\n  %pj = phi ptr [%pb, %loop], [%pj1, %steps]")
        for r, start in enumerate(self.blocks):
            self.add(f"  %aj{r} = phi ptr [{start}, %loop], [%ak{r}, %steps]")
        for (r, v), start in starts.items():
            self.add(f"  %i{r}_{v} = phi {self.ints} [{start}, %loop], [%m{r}_{v}, %steps]")
        sums = {(r, v): f"%i{r}_{v}" for r, v in starts}
        add(sums)
        for r, v in starts:
            self.add(f"  %m{r}_{v} = bitcast {self.ints} {sums[r, v]} to {self.ints}")
        for r in range(self.rows):
            self.add(f"  %ak{r} = getelementptr i8, ptr %aj{r}, i64 {self.dot.integers(width)}")
        self.add(f"  %pj1 = getelementptr i8, ptr %pj, i64 {self.integers * width // self.block}")
        self.add(f"  %j1 = add i64 %j, 1\n  %further = icmp ult i64 %j1, {self.block // width}")
        self.add("  br i1 %further, label %steps, label %counted\ncounted:")
        return {(r, v): f"%m{r}_{v}" for r, v in starts}

    def _add_squares(self, sums: Sums) -> None:
        """Add the products of eight k."""
        a = []
        for p in range((self.rows + 1) // 2):
            both = "poison"
            for i, r in enumerate(self.two_rows(p)):
                eight = self.new(f"load i64, ptr %aj{r}, align 4")
                both = self.new(f"insertelement <2 x i64> {both}, i64 {eight}, i32 {i}")
            a.append(self.new(f"bitcast <2 x i64> {both} to {self.ints}"))
        for c in range(2 * self.shape.vectors):
            b = self.two_columns("%pj", c)
            for p, rows in enumerate(a):
                sums[p, c] = self._called(sums[p, c], rows, b)

    def _add_steps_of_pairs(self, sums: Sums) -> None:
        for half in range(2 * UNROLLED):
            self._add_pairs(sums, half)

    def _add_pairs(self, sums: Sums, half: int) -> None:
        """Add the products of half a step, which is two k of each column."""
        b = [self._half(half // 2, v, half % 2 == 1) for v in range(self.shape.vectors)]
        for r in range(self.rows):
            place = self.new(f"getelementptr i8, ptr %aj{r}, i64 {4 * half}")
            a = self.everywhere("i32", self.new(f"load i32, ptr {place}, align 4"))
            for v in range(self.shape.vectors):
                total = self.new(f"add {self.ints} {sums[r, v]}, {self._called(a, b[v])}")
                # Code that the compiler cannot see into: otherwise it adds products to each other first,
                # and has no registers for all of them.
                sums[r, v] = self.new(f'call {self.ints} asm "", "=v,0"({self.ints} {total})')

    def _half(self, step: int, v: int, second: bool) -> str:
        """Return two of the four bytes of each column, as 16 bits; loaded each time, as in microkernel.py."""
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

    def two_columns(self, panel: str, c: int) -> str:
        """Return eight of B's bytes of columns 2c and 2c + 1: register c of a step."""
        return self.word(panel, c // self.shape.vectors, c % self.shape.vectors, "load")

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
        """Split four bytes of each lane into the parts multiplied at once; `right` shifts them back."""
        if self.dot.kind in ("vnni", "signed"):
            return [bytes]
        upper = [self.new(f"shl {self.ints} {bytes}, splat (i32 {left})") for left in (24, 16, 8, 0)]
        return [self.new(f"{right} {self.ints} {part}, splat (i32 24)") for part in upper]

    def _added(self, total: str, b: list[str], a: list[str]) -> str:
        if self.dot.kind in ("vnni", "signed"):
            return self._called(total, b[0], a[0])
        for x, y in zip(b, a, strict=True):
            total = self.new(f"add {self.ints} {total}, {self.new(f'mul {self.ints} {x}, {y}')}")
        return total

    def _called(self, *values: str) -> str:
        pairs = zip(self.dot.takes, values, strict=True)
        cast = [v if t == self.ints else self.new(f"bitcast {self.ints} {v} to {t}") for t, v in pairs]
        given = ", ".join(f"{type} {value}" for type, value in zip(self.dot.takes, cast, strict=True))
        return self.new(f"call {self.ints} @{self.dot.function}({given})")
