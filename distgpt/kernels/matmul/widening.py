"""The bfloat16 microkernel for AVX-512 without fast instructions for pairs, as LLVM IR.

The contract is that of microkernel.py, where A lies by rows (step 4) or by pairs of k (row 4). Products are
of float32. A is widened 16 pairs of k at a time, into a buffer on the stack: a line has the first halves of
16 words, then their second ones. A line is of one row, or of one pair of k, as A lies. From there a load
alone brings an element into all lanes; widened in each lane, as B is, it would take arithmetic units too.
"""

from __future__ import annotations

from collections.abc import Callable

from distgpt.kernels.matmul import microkernel
from distgpt.kernels.matmul.microkernel import ARGUMENTS, Sums, Tile
from distgpt.kernels.matmul.vectors import BFLOAT16, Shape

LANES = 16
HALVES = 4 * LANES  # bytes of first halves, and of second ones
LINE = 2 * HALVES
LOAD = f"<{LANES} x i32> @llvm.masked.load.v{LANES}i32.p0"
FETCH = "void @llvm.prefetch.p0"
DECLARATIONS = f"""declare {LOAD}(ptr, i32, <{LANES} x i1>, <{LANES} x i32>)
declare {FETCH}(ptr, i32, i32, i32)"""
AHEAD = 3  # buffers: A is fetched this early
LEAST = 4  # rows from which on the buffer pays


def module(shape: Shape, out: str) -> str:
    """Return the IR of `tile`, for a C of this type."""
    return f"{DECLARATIONS}\n{microkernel.module(shape, BFLOAT16, out, WideningTile)}"


class WideningTile(Tile):
    """Writes the function for one number of rows, and those that it chooses from."""

    def text(self) -> str:
        if self.rows < LEAST:
            return super().text()
        ways = [Way(self.shape, self.out, self.rows, self.name, by_rows).text() for by_rows in (True, False)]
        self.begin(ARGUMENTS)
        self.add("  %lies = icmp eq i64 %step, 4\n  br i1 %lies, label %lines, label %pairs")
        for label, name in (("lines", "rows"), ("pairs", "pairs")):
            called = f"@{self.name}_by_{name}{self.rows}({ARGUMENTS})"
            self.add(f"{label}:\n  tail call void {called}\n  ret void")
        return "\n".join([*ways, *self.lines, "}"])


class Way(Tile):
    """Writes the function for one number of rows where A lies by rows, or by pairs."""

    def __init__(self, shape: Shape, out: str, rows: int, name: str, by_rows: bool) -> None:
        super().__init__(shape, BFLOAT16, out, rows, f"{name}_by_{'rows' if by_rows else 'pairs'}")
        # Bytes of A from a line to the next; the number of lines, and of words in each.
        self._apart, self._lines, self._words = (
            ("%row", str(rows), "%now") if by_rows else ("%step", "%now", str(rows))
        )
        self._next_pair, self._next_row = (4, LINE) if by_rows else (LINE, 4)

    def _starts(self) -> None:
        self.add(f"  %buffer = alloca [{LANES * LINE} x i8], align {HALVES}")
        # Hidden from the compiler: it would take elements from the registers that are stored.
        self.add('  %wide = call ptr asm "", "=r,0"(ptr %buffer)')
        self.add(f"  %ahead = mul i64 %step, {AHEAD * LANES}")
        super()._starts()

    def _loop(self) -> None:
        zeros = dict.fromkeys(self.cells(), "zeroinitializer")
        self.add(f"loop:\n  %left = phi i64 [{self.steps}, %entry], [%left1, %added]")
        self.add("  %here = phi ptr [%a, %entry], [%here1, %added]")
        self.add("  %pb = phi ptr [%b, %entry], [%pb1, %added]")
        sums = self._phis("s", entry=zeros, added=self._named("n"))
        self.add(f"  %less = icmp ult i64 %left, {LANES}\n  %now = select i1 %less, i64 %left, i64 {LANES}")
        self._widen()
        self._add_products(sums)
        self.add(f"added:\n  %far = mul i64 %step, {LANES}\n  %here1 = getelementptr i8, ptr %here, i64 %far")
        self.add("  %left1 = sub i64 %left, %now\n  %again = icmp ne i64 %left1, 0")
        self.add("  br i1 %again, label %loop, label %summed\nnever:\n  ret void\nsummed:")
        self.totals = self._phis("t", entry=zeros, added=self._named("n"))

    def _named(self, name: str) -> Sums:
        return {(r, v): f"%{name}{r}_{v}" for r, v in self.cells()}

    def _phis(self, name: str, **before: Sums) -> Sums:
        """Name the sums with which a block begins, given those of each block before it."""
        for r, v in self.cells():
            values = ", ".join(f"[{sums[r, v]}, %{block}]" for block, sums in before.items())
            self.add(f"  %{name}{r}_{v} = phi {self.vector} {values}")
        return self._named(name)

    def _widen(self) -> None:
        """Put the next pairs of A into the buffer as float32, with zeros where there are no words."""
        lanes = ", ".join(f"i64 {lane}" for lane in range(LANES))
        self.add(f"  %there = icmp ult <{LANES} x i64> <{lanes}>, {self.everywhere('i64', self._words)}")
        self.add("  br label %widen\nwiden:\n  %j = phi i64 [0, %loop], [%j1, %widen]")
        self.add("  %at = phi ptr [%here, %loop], [%at1, %widen]")
        self.add("  %to = phi ptr [%wide, %loop], [%to1, %widen]")
        given = f"ptr %at, i32 2, <{LANES} x i1> %there, <{LANES} x i32> zeroinitializer"
        words = self.new(f"call {LOAD}({given})")
        self.add("  %later = getelementptr i8, ptr %at, i64 %ahead")
        self.add(f"  call {FETCH}(ptr %later, i32 0, i32 3, i32 1)")  # to read, into all caches, data
        self.add(f"  %behind = getelementptr i8, ptr %to, i64 {HALVES}")
        for to, half in (("%to", self._first(words)), ("%behind", self._second(words))):
            self.add(f"  store {self.vector} {half}, ptr {to}, align {HALVES}")
        self.add(f"  %at1 = getelementptr i8, ptr %at, i64 {self._apart}")
        self.add(f"  %to1 = getelementptr i8, ptr %to, i64 {LINE}")
        self.add(f"  %j1 = add i64 %j, 1\n  %further = icmp ult i64 %j1, {self._lines}")
        self.add("  br i1 %further, label %widen, label %widened\nwidened:")

    def _add_products(self, sums: Sums) -> None:
        """Add the products of all pairs in the buffer. Why a branch is between: see `_step_in_halves`."""
        self.add("  br label %firsts\nfirsts:\n  %i = phi i64 [0, %widened], [%i1, %seconds]")
        self.add("  %p = phi ptr [%pb, %widened], [%pb1, %seconds]")
        self.add("  %q = phi ptr [%wide, %widened], [%q1, %seconds]")
        sums = self._phis("h", widened=sums, seconds=self._named("n"))
        sums = self._half(sums, 0, self._first)
        self.add("  %always = icmp ne i64 %i, -1\n  br i1 %always, label %seconds, label %never\nseconds:")
        for (r, v), total in self._half(sums, HALVES, self._second).items():
            self.add(f"  %n{r}_{v} = bitcast {self.vector} {total} to {self.vector}")
        self.add(f"  %pb1 = getelementptr i8, ptr %p, i64 {4 * self.shape.columns}")
        self.add(f"  %q1 = getelementptr i8, ptr %q, i64 {self._next_pair}")
        self.add("  %i1 = add i64 %i, 1\n  %more = icmp ult i64 %i1, %now")
        self.add("  br i1 %more, label %firsts, label %added")

    def _half(self, sums: Sums, offset: int, widened: Callable[[str], str]) -> Sums:
        b = [widened(self._b("%p", v)) for v in range(self.shape.vectors)]
        added = {}
        for r in range(self.rows):
            place = self.new(f"getelementptr i8, ptr %q, i64 {offset + r * self._next_row}")
            a = self.everywhere("float", self.new(f"load float, ptr {place}, align 4"))
            for v in range(self.shape.vectors):
                added[r, v] = self.fma(a, b[v], sums[r, v])
        return added
