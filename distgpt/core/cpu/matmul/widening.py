"""The bfloat16 microkernel for AVX-512 without fast pair instructions, as LLVM IR.

The interface is microkernel.py's. Products are float32. A is widened 16 pairs of k at a time into a buffer on
the stack. A line of the buffer has the first halves of up to 16 pairs, then their second halves. If A is
stored by rows, a line is one row; if it is stored by pairs, one k of all rows. A load then broadcasts an
element to all lanes. Widening A in each lane, like B, would also take arithmetic units.
"""

from __future__ import annotations

from distgpt.core.cpu.compiling.processor import BFLOAT16, Shape
from distgpt.core.cpu.matmul import microkernel
from distgpt.core.cpu.matmul.microkernel import ARGUMENTS, Sums, Tile

LANES = 16
REGISTER = 4 * LANES  # bytes
BUFFER_LINE = 2 * REGISTER
LOAD = f"<{LANES} x i32> @llvm.masked.load.v{LANES}i32.p0"
FETCH = "void @llvm.prefetch.p0"
DECLARATIONS = f"""declare {LOAD}(ptr, i32, <{LANES} x i1>, <{LANES} x i32>)
declare {FETCH}(ptr, i32, i32, i32)"""
AHEAD = 3  # buffers between a prefetch of A and its use
LEAST = 4  # minimum rows for which a tile is faster with the buffer


def module(shape: Shape, operand: str, out: str) -> str:
    return f"{DECLARATIONS}\n{microkernel.module(shape, operand, out, WideningTile)}"


class WideningTile(Tile):
    """Writer of the function for one number of rows, and of the two functions that it selects from."""

    def text(self) -> str:
        if self.rows < LEAST:
            return super().text()
        ways = {
            way: BufferedTile(self.shape, self.out, self.rows, f"{self.name}_{way}", way == "by_rows")
            for way in ("by_rows", "by_pairs")
        }
        written = [tile.text() for tile in ways.values()]
        self.begin(ARGUMENTS)
        self.add("  %lies = icmp eq i64 %step, 4\n  br i1 %lies, label %by_rows, label %by_pairs")
        for way, tile in ways.items():
            self.add(f"{way}:\n  tail call void @{tile.name}{tile.rows}({ARGUMENTS})\n  ret void")
        return "\n".join([*written, *self.lines, "}"])


class BufferedTile(Tile):
    """Writer of the function for one number of rows, for A stored by rows or by pairs."""

    def __init__(self, shape: Shape, out: str, rows: int, name: str, by_rows: bool) -> None:
        super().__init__(shape, BFLOAT16, out, rows, name)
        # The stride of A between lines, in bytes; the number of lines, and of pairs per line.
        self._apart, self._buffer_lines, self._pairs = (
            ("%row", str(rows), "%now") if by_rows else ("%step", "%now", str(rows))
        )
        self._next_pair, self._next_row = (4, BUFFER_LINE) if by_rows else (BUFFER_LINE, 4)

    def _starts(self) -> None:
        self.add(f"  %buffer = alloca [{LANES * BUFFER_LINE} x i8], align {REGISTER}")
        # Hide the address from the compiler, which would otherwise extract elements from registers.
        self.add('  %wide = call ptr asm "", "=r,0"(ptr %buffer)')
        self.add(f"  %ahead = mul i64 %step, {AHEAD * LANES}")
        super()._starts()

    def _loop(self) -> None:
        ways = {"entry": dict.fromkeys(self.cells(), "zeroinitializer"), "added": self.named("n")}
        self.add(f"loop:\n  %left = phi i64 [{self.steps}, %entry], [%left1, %added]")
        self.add("  %here = phi ptr [%a, %entry], [%here1, %added]")
        self.add("  %panel = phi ptr [%b, %entry], [%pb1, %added]")
        sums = self.phis("s", ways)
        self.add(f"  %less = icmp ult i64 %left, {LANES}\n  %now = select i1 %less, i64 %left, i64 {LANES}")
        self._widen()
        self._add_products(sums)
        self.add(f"added:\n  %far = mul i64 %step, {LANES}\n  %here1 = getelementptr i8, ptr %here, i64 %far")
        self.add("  %left1 = sub i64 %left, %now\n  %again = icmp ne i64 %left1, 0")
        self.add("  br i1 %again, label %loop, label %summed\nsummed:")
        self.totals = self.phis("t", ways)

    def _widen(self) -> None:
        """Store the next pairs of A in the buffer as float32, padded with zeros."""
        there = self.lanes_below(self._pairs)
        self.add("  br label %widen\nwiden:\n  %j = phi i64 [0, %loop], [%j1, %widen]")
        self.add("  %from = phi ptr [%here, %loop], [%from1, %widen]")
        self.add("  %to = phi ptr [%wide, %loop], [%to1, %widen]")
        given = f"ptr %from, i32 2, <{LANES} x i1> {there}, <{LANES} x i32> zeroinitializer"
        pairs = self.new(f"call {LOAD}({given})")
        self.add("  %later = getelementptr i8, ptr %from, i64 %ahead")
        self.add(f"  call {FETCH}(ptr %later, i32 0, i32 3, i32 1)")  # read, all caches, data
        self.add(f"  %behind = getelementptr i8, ptr %to, i64 {REGISTER}")
        for to, second in (("%to", False), ("%behind", True)):
            self.add(f"  store {self.vector} {self.half(pairs, second)}, ptr {to}, align {REGISTER}")
        self.add(f"  %from1 = getelementptr i8, ptr %from, i64 {self._apart}")
        self.add(f"  %to1 = getelementptr i8, ptr %to, i64 {BUFFER_LINE}")
        self.add(f"  %j1 = add i64 %j, 1\n  %further = icmp ult i64 %j1, {self._buffer_lines}")
        self.add("  br i1 %further, label %widen, label %widened\nwidened:")

    def _add_products(self, sums: Sums) -> None:
        """Add the products of all pairs in the buffer."""
        self.add("  br label %firsts\nfirsts:\n  %i = phi i64 [0, %widened], [%i1, %seconds]")
        self.add("  %pb = phi ptr [%panel, %widened], [%pb1, %seconds]")
        self.add("  %q = phi ptr [%wide, %widened], [%q1, %seconds]")
        sums = self.products(self.phis("h", {"widened": sums, "seconds": self.named("n")}), second=False)
        self.between_halves()
        self.name_sums("n", self.products(sums, second=True))
        self.add(f"  %pb1 = getelementptr i8, ptr %pb, i64 {4 * self.shape.columns}")
        self.add(f"  %q1 = getelementptr i8, ptr %q, i64 {self._next_pair}")
        self.add("  %i1 = add i64 %i, 1\n  %more = icmp ult i64 %i1, %now")
        self.add("  br i1 %more, label %firsts, label %added")

    def element(self, r: int, second: bool) -> str:
        offset = r * self._next_row + (REGISTER if second else 0)
        place = self.new(f"getelementptr i8, ptr %q, i64 {offset}")
        return self.everywhere("float", self.new(f"load float, ptr {place}, align 4"))
