"""Tiles of bfloat16 on arm64 by BFMMLA, which multiplies two rows and two columns, four k of each, at once.

A register holds a square of sums: row 2p and 2p + 1 by column 2c and 2c + 1. Four k are two steps, each a
pair. They are read from A's rows, where `step` is 4 bytes, or else from rows that lie side by side. Two steps
of B are zipped for each tile, or once for all tiles by `fours`, which the flag FOURS says.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from distgpt.core.cpu.compiling.processor import Shape
from distgpt.core.cpu.matmul import microkernel
from distgpt.core.cpu.matmul.microkernel import Sums
from distgpt.core.cpu.matmul.vectors import loop_over_rows
from distgpt.experimental.arm64.arm import NEON_BF16
from distgpt.experimental.arm64.neon import NeonTile

Read = Callable[[int, str], str]
FOURS = 4  # a flag
ZIPS = ((0, 4, 1, 5), (2, 6, 3, 7))  # the lanes of two steps that make two columns, and the next two
_INTS, _FLOATS, _LOW = "<4 x i32>", "<4 x float>", "<8 x bfloat>"


def module(shape: Shape, operand: str, out: str) -> str:
    """Return the IR of `tile`, for a C of this type."""
    return microkernel.module(shape, operand, out, MmlaTile)


def fours(vectors: int) -> str:
    """Zip two steps of `vectors` vectors each in place: from[i] and to[i] are `count` times two steps."""
    lines = []
    for i in range(2 * vectors):
        lines += [f"  %p{i} = getelementptr i8, ptr %f, i64 {16 * i}", f"  %x{i} = load {_INTS}, ptr %p{i}"]
    for i in range(2 * vectors):
        v, lanes = i // 2, ", ".join(f"i32 {lane}" for lane in ZIPS[i % 2])
        lines.append(
            f"  %y{i} = shufflevector {_INTS} %x{v}, {_INTS} %x{v + vectors}, <4 x i32> <{lanes}>\n"
            f"  %q{i} = getelementptr i8, ptr %t, i64 {16 * i}\n  store {_INTS} %y{i}, ptr %q{i}"
        )
    return loop_over_rows("fours", 1, "\n" + "\n".join(lines))


class MmlaTile(NeonTile):
    """Writes the function for one number of rows."""

    def text(self) -> str:
        self.begin(microkernel.ARGUMENTS)
        self._row_starts()
        self.fours = self.new("lshr i64 %k, 2")
        self.far = self.new("shl i64 %step, 1")
        some = self.new(f"icmp ne i64 {self.fours}, 0")
        self.add(f"  br i1 {some}, label %which, label %summed\nwhich:")
        in_rows, zipped = self.new("icmp eq i64 %step, 4"), self.asked(FOURS)
        self.add(f"  br i1 {zipped}, label %zipped, label %plain")
        loops: list[str] = []
        for way in ("plain", "zipped"):
            self.add(f"{way}:\n  br i1 {in_rows}, label %along_{way}, label %across_{way}")
            for name, read in ((f"along_{way}", self._of_rows), (f"across_{way}", self._of_rows_beside)):
                self._loop_over_fours(name, read, way)
                loops.append(name)
        self.add("summed:")
        for p, c in self.squares():
            ways = "".join(f", [%{name}_n{p}_{c}, %{name}]" for name in loops)
            self.add(f"  %t{p}_{c} = phi {_FLOATS} [zeroinitializer, %entry]{ways}")
        self._last_k()
        self._write()
        return "\n".join([*self.lines, "  ret void\n}"])

    def _loop_over_fours(self, name: str, read: Read, before: str) -> None:
        self.add(f"{name}:\n  %{name}_i = phi i64 [0, %{before}], [%{name}_i1, %{name}]")
        self.add(f"  %{name}_at = phi i64 [0, %{before}], [%{name}_at1, %{name}]")
        self.add(f"  %{name}_b = phi ptr [%b, %{before}], [%{name}_b1, %{name}]")
        sums = {(p, c): f"%{name}_s{p}_{c}" for p, c in self.squares()}
        for (p, c), total in sums.items():
            self.add(f"  {total} = phi {_FLOATS} [zeroinitializer, %{before}], [%{name}_n{p}_{c}, %{name}]")
        a = [read(p, f"%{name}_at") for p in range((self.rows + 1) // 2)]
        line = 4 * self.shape.columns
        second = self.new(f"getelementptr i8, ptr %{name}_b, i64 {line}")
        for v in range(self.shape.vectors):
            if before == "zipped":
                b = [self._b(f"%{name}_b", 2 * v), self._b(f"%{name}_b", 2 * v + 1)]
            else:
                b = self._zipped(self._b(f"%{name}_b", v), self._b(second, v))
            self._multiply(sums, a, v, b)
        for (p, c), total in sums.items():
            self.add(f"  %{name}_n{p}_{c} = bitcast {_FLOATS} {total} to {_FLOATS}")
        self.add(f"  %{name}_b1 = getelementptr i8, ptr %{name}_b, i64 {2 * line}")
        self.add(f"  %{name}_at1 = add i64 %{name}_at, {self.far}\n  %{name}_i1 = add i64 %{name}_i, 1")
        self.add(f"  %{name}_more = icmp ult i64 %{name}_i1, {self.fours}")
        self.add(f"  br i1 %{name}_more, label %{name}, label %summed")

    def _of_rows(self, p: int, at: str) -> str:
        """Return four k of two rows, each of which lies in one place; an odd last row comes twice."""
        four = [self.new(f"load <2 x i32>, ptr {self._place(r, at)}, align 2") for r in self.two_rows(p)]
        return self.new(
            f"shufflevector <2 x i32> {four[0]}, <2 x i32> {four[1]}, <4 x i32> <i32 0, i32 1, i32 2, i32 3>"
        )

    def _of_rows_beside(self, p: int, at: str) -> str:
        """Return them where the two rows' pairs lie side by side, step by step."""
        halves = []
        first, second = self.two_rows(p)
        for place in (at, self.new(f"add i64 {at}, %step")):
            if first == second:
                one = self.new(f"load i32, ptr {self._place(first, place)}, align 2")
                halves.append(self.new(f"insertelement <2 x i32> zeroinitializer, i32 {one}, i32 0"))
            else:
                halves.append(self.new(f"load <2 x i32>, ptr {self._place(first, place)}, align 2"))
        order = "<4 x i32> <i32 0, i32 2, i32 1, i32 3>"
        return self.new(f"shufflevector <2 x i32> {halves[0]}, <2 x i32> {halves[1]}, {order}")

    def _place(self, r: int, at: str) -> str:
        return self.new(f"getelementptr i8, ptr {self.starts[r]}, i64 {at}")

    def _zipped(self, first: str, second: str) -> list[str]:
        return [self.shuffled(_INTS, first, second, order) for order in ZIPS]

    def _multiply(self, sums: Sums, a: list[str], v: int, columns: list[str]) -> None:
        """Add to the squares of a vector of columns, given as two and two of them."""
        for half, b in enumerate(columns):
            for p, rows in enumerate(a):
                cell = p, 2 * v + half
                low = [self.new(f"bitcast {_INTS} {x} to {_LOW}") for x in (rows, b)]
                sums[cell] = self.new(
                    f"call {_FLOATS} @llvm.aarch64.neon.bfmmla({_FLOATS} {sums[cell]}, "
                    f"{_LOW} {low[0]}, {_LOW} {low[1]})"
                )

    def _last_k(self) -> None:
        """Add up to three last k: A goes on with other memory, B has zero beside the last of an odd number.

        Where there is no second step, its place is read as the first one's, and counts as zeros.
        """
        left = self.new("and i64 %k, 3")
        some = self.new(f"icmp ne i64 {left}, 0")
        self.add(f"  br i1 {some}, label %last, label %finished\nlast:")
        self.single, self.three = (self.new(f"icmp eq i64 {left}, {count}") for count in (1, 3))
        at = self.new(f"mul i64 {self.fours}, {self.far}")
        line = 4 * self.shape.columns
        panel = self.new(f"getelementptr i8, ptr %b, i64 {self.new(f'mul i64 {self.fours}, {2 * line}')}")
        ahead = self.new(f"select i1 {self.three}, i64 {line}, i64 0")
        second = self.new(f"getelementptr i8, ptr {panel}, i64 {ahead}")
        sums = {(p, c): f"%t{p}_{c}" for p, c in self.squares()}
        a = [self._last_of_rows(p, at) for p in range((self.rows + 1) // 2)]
        for v in range(self.shape.vectors):
            there = self._b(second, v)
            there = self.new(f"select i1 {self.three}, {_INTS} {there}, {_INTS} zeroinitializer")
            self._multiply(sums, a, v, self._zipped(self._b(panel, v), there))
        self.add("  br label %finished\nfinished:")
        for p, c in self.squares():
            self.add(f"  %f{p}_{c} = phi {_FLOATS} [%t{p}_{c}, %summed], [{sums[p, c]}, %last]")
        squares = {(p, c): f"%f{p}_{c}" for p, c in self.squares()}
        self.totals = {(r, v): self.row_of_squares(squares, r, v) for r, v in self.cells()}

    def _last_of_rows(self, p: int, at: str) -> str:
        both = "poison"
        for i, r in enumerate(self.two_rows(p)):
            start = self._place(r, at)
            beside = self.new(f"select i1 {self.single}, i64 0, i64 2")
            ahead = self.new(f"select i1 {self.three}, i64 %step, i64 0")
            words = []
            for offset, missing in (("0", None), (beside, (self.single, True)), (ahead, (self.three, False))):
                place = self.new(f"getelementptr i8, ptr {start}, i64 {offset}")
                bits = self.new(f"load i16, ptr {place}, align 2")
                if missing:
                    condition, zero = missing
                    chosen = f"i16 0, i16 {bits}" if zero else f"i16 {bits}, i16 0"
                    bits = self.new(f"select i1 {condition}, {chosen}")
                words.append(self.new(f"zext i16 {bits} to i32"))
            first = self.new(f"or i32 {words[0]}, {self.new(f'shl i32 {words[1]}, 16')}")
            for j, word in ((2 * i, first), (2 * i + 1, words[2])):
                both = self.new(f"insertelement {_INTS} {both}, i32 {word}, i32 {j}")
        return both


STEPS = partial(fours, NEON_BF16.vectors), FOURS  # a row of a table: what writes `fours`, and its flag
