"""Microkernels as LLVM IR: a tile of C that stays in registers while it is summed over k.

    C (rows, columns) ← [C +] A (rows, k) B (k, columns) [+ bias]

Element (r, k) of A is at `a + r · row + k · step` bytes. B is packed in panels of `Shape.columns` columns,
one k after another. In bfloat16 both store k and k + 1 as adjacent pairs, and a step is a pair. A is then
stored by rows (step is 4) or by pairs (row is 4). C is float32 or bfloat16; sums are float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

from distgpt.core.cpu.compiling.processor import BFLOAT16, FLOAT32, Shape
from distgpt.core.cpu.matmul.vectors import BYTES, LLVM, SUFFIX, Vectors

ACCUMULATE, BIAS = 1, 2  # flags
Sums = dict[tuple[int, int], str]  # keyed by row and vector of columns
PAIRS = "llvm.x86.avx512bf16.dpbf16ps.512"


ARGUMENTS = (
    "i64 %rows, i64 %k, ptr %a, i64 %row, i64 %step, ptr %b, ptr %c, i64 %ldc, i64 %columns, ptr %bias, "
    "i64 %flags"
)


def module(shape: Shape, operand: str, out: str, tile: type[Tile] | None = None) -> str:
    """Return the IR of `tile` for up to `shape.rows` rows, with A, B and C of these types."""
    at_once = shape.at_once
    # Use fewer registers if C has few columns.
    shapes = {"tile": shape, "narrow": shape.narrow()}
    tiles = [
        (tile or Tile)(each, operand, out, rows, name).text()
        for name, each in shapes.items()
        for rows in range(1, at_once + 1)
    ]
    chosen = choice(shape, shape.rows, at_once, ARGUMENTS, tuple(shapes))
    return "\n".join([*declarations(shape, operand, out), *tiles, chosen])


def declarations(shape: Shape, operand: str, out: str) -> list[str]:
    n = shape.lanes
    v = f"<{n} x float>"
    stored = LLVM[out]
    pairs = shape.dot and operand == BFLOAT16
    declared = [
        f"declare {v} @llvm.fma.v{n}f32({v}, {v}, {v})",
        f"declare <{n} x float> @llvm.masked.load.v{n}f32.p0(ptr, i32, <{n} x i1>, <{n} x float>)",
        f"declare void @llvm.masked.store.v{n}{SUFFIX[out]}.p0(<{n} x {stored}>, ptr, i32, <{n} x i1>)",
    ]
    if pairs:
        declared.append(f"declare <16 x float> @{PAIRS}(<16 x float>, <32 x bfloat>, <32 x bfloat>)")
    return declared


def choice(shape: Shape, most: int, at_once: int, arguments: str, names: tuple[str, ...] = ("tile",)) -> str:
    """Return the IR of `tile`, which calls the function for its number of rows, or functions for even parts.

    If `names` has two names, the second names the functions for columns that fit one register.
    """
    lines = [f"define void @tile({arguments}) {{"]
    if len(names) > 1:
        lines.append(f"  %few = icmp ule i64 %columns, {shape.lanes}")
        lines.append(f"  br i1 %few, label %{names[1]}, label %{names[0]}")
    for name in names:
        lines.append(f"{name}:\n  switch i64 %rows, label %none [")
        lines += [f"    i64 {rows}, label %{name}_{rows}" for rows in range(1, most + 1)]
        lines.append("  ]")
        for rows in range(1, most + 1):
            parts = -(-rows // at_once)
            cuts = [rows * part // parts for part in range(parts + 1)]
            lines.append(f"{name}_{rows}:")
            for first, last in pairwise(cuts):
                lines += _part(name, f"{name}{rows}_{first}", first, last - first, arguments)
            lines.append("  ret void")
    lines.append("none:\n  ret void\n}")
    return "\n".join(lines)


def _part(called: str, name: str, first: int, rows: int, arguments: str) -> list[str]:
    """Return a call for `rows` rows from `first` on. `name` makes the names of its values unique."""
    lines = []
    for pointer, stride in (("a", "row"), ("c", "ldc")):
        lines.append(f"  %offset_{pointer}{name} = mul i64 %{stride}, {first}")
        lines.append(f"  %{pointer}{name} = getelementptr i8, ptr %{pointer}, i64 %offset_{pointer}{name}")
        arguments = arguments.replace(f"%{pointer},", f"%{pointer}{name},")
    return [*lines, f"  tail call void @{called}{rows}({arguments})"]


class Tile(Vectors):
    """Writer of the function for one number of rows."""

    def __init__(self, shape: Shape, operand: str, out: str, rows: int, name: str = "tile") -> None:
        super().__init__(shape)
        self.operand = operand
        self.out = out
        self.rows = rows
        self.name = name
        self._widens = shape.widens(operand)
        self.totals: Sums = {}

    def text(self) -> str:
        self.begin(ARGUMENTS)
        self._starts()
        self._loop()
        if self.operand == BFLOAT16:
            self._last_of_an_odd_number()
        self._write()
        return "\n".join([*self.lines, "  ret void\n}"])

    def begin(self, arguments: str) -> None:
        self.add(f"define internal void @{self.name}{self.rows}({arguments}) {{\nentry:")

    def cells(self) -> list[tuple[int, int]]:
        return [(r, v) for r in range(self.rows) for v in range(self.shape.vectors)]

    def _starts(self) -> None:
        """Compute the address of each row of A and the number of whole steps."""
        self._row_starts()
        self.steps = "%k" if self.operand == FLOAT32 else self.new("lshr i64 %k, 1")
        some = self.new(f"icmp ne i64 {self.steps}, 0")
        self.add(f"  br i1 {some}, label %loop, label %summed")

    def _row_starts(self) -> None:
        self.starts = ["%a"]
        for r in range(1, self.rows):
            offset = self.new(f"mul i64 %row, {r}")
            self.starts.append(self.new(f"getelementptr i8, ptr %a, i64 {offset}"))

    def _loop(self) -> None:
        last = "seconds" if self._widens else "loop"  # last block of a step
        ways = {"entry": dict.fromkeys(self.cells(), "zeroinitializer"), last: self.named("n")}
        self.add("loop:")
        self.add(f"  %i = phi i64 [0, %entry], [%i1, %{last}]")
        self.add(f"  %at = phi i64 [0, %entry], [%at1, %{last}]")
        self.add(f"  %pb = phi ptr [%b, %entry], [%pb1, %{last}]")
        self.phis("s", ways)
        self.name_sums("n", self._step())
        self.add(f"  %pb1 = getelementptr i8, ptr %pb, i64 {4 * self.shape.columns}")
        self.add("  %at1 = add i64 %at, %step\n  %i1 = add i64 %i, 1")
        self.add(f"  %more = icmp ult i64 %i1, {self.steps}")
        self.add("  br i1 %more, label %loop, label %summed")
        self.add("summed:")
        self.totals = self.phis("t", ways)

    def named(self, name: str) -> Sums:
        return {(r, v): f"%{name}{r}_{v}" for r, v in self.cells()}

    def phis(self, name: str, ways: dict[str, Sums]) -> Sums:
        """Name the sums at the start of a block, given the sums of each preceding block."""
        for r, v in self.cells():
            values = ", ".join(f"[{sums[r, v]}, %{block}]" for block, sums in ways.items())
            self.add(f"  %{name}{r}_{v} = phi {self.vector} {values}")
        return self.named(name)

    def name_sums(self, name: str, sums: Sums) -> None:
        for (r, v), total in sums.items():
            self.add(f"  %{name}{r}_{v} = bitcast {self.vector} {total} to {self.vector}")

    def _step(self) -> Sums:
        """Return the sums plus the products of one step."""
        if self._widens:
            return self._step_in_halves()
        sums = {(r, v): f"%s{r}_{v}" for r, v in self.cells()}
        b = [self._b("%pb", v) for v in range(self.shape.vectors)]
        for r in range(self.rows):
            a = self._a(self.new(f"getelementptr i8, ptr {self.starts[r]}, i64 %at"))
            for v in range(self.shape.vectors):
                sums[r, v] = self._multiplied(sums[r, v], a, b[v])
        return sums

    def _step_in_halves(self) -> Sums:
        """Add the products of one step of widened bfloat16: the first elements of all pairs, then the second.

        Both halves load the pairs. Keeping the second half in a register would spill a sum, which took three
        times as long.
        """
        firsts = self.products(self.named("s"), second=False)
        self.between_halves()
        return self.products(firsts, second=True)

    def between_halves(self) -> None:
        """Branch, always to the same side, so that the compiler does not merge the two loads."""
        always = self.new("icmp ne i64 %i, -1")
        self.add(f"  br i1 {always}, label %seconds, label %never\nnever:\n  ret void\nseconds:")

    def products(self, sums: Sums, second: bool) -> Sums:
        """Return the sums plus the products of one half of the pairs."""
        b = [self.half(self._b("%pb", v), second) for v in range(self.shape.vectors)]
        added = {}
        for r in range(self.rows):
            a = self.element(r, second)
            for v in range(self.shape.vectors):
                added[r, v] = self.fma(a, b[v], sums[r, v])
        return added

    def element(self, r: int, second: bool) -> str:
        """Return one half of the pair of row r in all lanes, widened."""
        address = self.new(f"getelementptr i8, ptr {self.starts[r]}, i64 %at")
        return self._a(address, partial(self.half, second=second))

    def _a(self, address: str, widened: Callable[[str], str] = str, half: bool = False) -> str:
        """Return one element of A, or a pair, in all lanes. A `half` pair has only its first element."""
        if self.operand == FLOAT32:
            return widened(self.everywhere("float", self.new(f"load float, ptr {address}, align 4")))
        if not half:
            return widened(self.everywhere("i32", self.new(f"load i32, ptr {address}, align 2")))
        single = self.new(f"load i16, ptr {address}, align 2")
        return widened(self.everywhere("i32", self.new(f"zext i16 {single} to i32")))

    def _b(self, panel: str, v: int) -> str:
        address = self.new(f"getelementptr i8, ptr {panel}, i64 {4 * self.shape.lanes * v}")
        type = "float" if self.operand == FLOAT32 else "i32"
        align = 4 * self.shape.lanes
        return self.new(f"load <{self.shape.lanes} x {type}>, ptr {address}, align {align}")

    def _multiplied(self, total: str, a: str, b: str) -> str:
        """Return the sum plus a product of float32 or of pairs."""
        n = self.shape.lanes
        if self.operand == FLOAT32 or self._widens:
            return self.fma(a, b, total)
        pairs = [self.new(f"bitcast <{n} x i32> {x} to <{2 * n} x bfloat>") for x in (a, b)]
        given = ", ".join(f"<{2 * n} x bfloat> {pair}" for pair in pairs)
        return self.new(f"call {self.vector} @{PAIRS}({self.vector} {total}, {given})")

    def half(self, pairs: str, second: bool) -> str:
        """Return one bfloat16 of each pair as float32: it is the upper half of its bits."""
        n = self.shape.lanes
        does, by = ("and", -65536) if second else ("shl", 16)
        upper = self.new(f"{does} <{n} x i32> {pairs}, splat (i32 {by})")
        return self.new(f"bitcast <{n} x i32> {upper} to {self.vector}")

    def _last_of_an_odd_number(self) -> None:
        """Add the last k of an odd number. Its partner in A is unrelated memory, in B it is zero."""
        odd = self.new("and i64 %k, 1")
        alone = self.new(f"icmp ne i64 {odd}, 0")
        self.add(f"  br i1 {alone}, label %single, label %finished\nsingle:")
        at = self.new(f"mul i64 {self.steps}, %step")
        panel_at = self.new(f"mul i64 {self.steps}, {4 * self.shape.columns}")
        panel = self.new(f"getelementptr i8, ptr %b, i64 {panel_at}")
        widened: Callable[[str], str] = partial(self.half, second=False) if self._widens else str
        b = [widened(self._b(panel, v)) for v in range(self.shape.vectors)]
        added = {}
        for r in range(self.rows):
            a = self._a(self.new(f"getelementptr i8, ptr {self.starts[r]}, i64 {at}"), widened, half=True)
            for v in range(self.shape.vectors):
                added[r, v] = self._multiplied(self.totals[r, v], a, b[v])
        self.add("  br label %finished\nfinished:")
        for r, v in self.cells():
            before, after = self.totals[r, v], added[r, v]
            self.add(f"  %f{r}_{v} = phi {self.vector} [{before}, %summed], [{after}, %single]")
            self.totals[r, v] = f"%f{r}_{v}"

    def _write(self) -> None:
        """Add bias and C if requested, and store the valid columns."""
        masks = [self._mask(v) for v in range(self.shape.vectors)]
        self._add_where("bias", self.asked(BIAS), lambda r, v: self._loaded("%bias", v, masks))
        if self.out == FLOAT32:
            self._add_where("old", self.asked(ACCUMULATE), lambda r, v: self._loaded(self._row(r), v, masks))
        for r in range(self.rows):
            row = self._row(r)
            for v in range(self.shape.vectors):
                self._store(self.totals[r, v], row, v, masks)

    def _store(self, value: str, row: str, v: int, masks: list[str]) -> None:
        n = self.shape.lanes
        size = BYTES[self.out]
        if self.out == BFLOAT16:
            value = self.rounded(value)
        address = self.new(f"getelementptr i8, ptr {row}, i64 {size * n * v}")
        self.add(
            f"  call void @llvm.masked.store.v{n}{SUFFIX[self.out]}.p0(<{n} x {LLVM[self.out]}> {value}, "
            f"ptr {address}, i32 {size}, <{n} x i1> {masks[v]})"
        )

    def asked(self, flag: int) -> str:
        return self.new(f"icmp ne i64 {self.new(f'and i64 %flags, {flag}')}, 0")

    def _mask(self, v: int) -> str:
        """Return a mask of the lanes of a vector that are columns of C."""
        return self.lanes_below("%columns", self.shape.lanes * v)

    def lanes_below(self, limit: str, first: int = 0) -> str:
        """Return a mask of the lanes whose numbers, from `first` on, are below a limit."""
        n = self.shape.lanes
        numbers = ", ".join(f"i64 {first + lane}" for lane in range(n))
        every = self.everywhere("i64", limit)
        return self.new(f"icmp ult <{n} x i64> <{numbers}>, {every}")

    def _row(self, r: int) -> str:
        offset = self.new(f"mul i64 %ldc, {r}")
        return self.new(f"getelementptr i8, ptr %c, i64 {offset}")

    def _loaded(self, row: str, v: int, masks: list[str]) -> str:
        n = self.shape.lanes
        address = self.new(f"getelementptr i8, ptr {row}, i64 {4 * n * v}")
        return self.new(
            f"call {self.vector} @llvm.masked.load.v{n}f32.p0"
            f"(ptr {address}, i32 4, <{n} x i1> {masks[v]}, {self.vector} zeroinitializer)"
        )

    def _add_where(self, name: str, condition: str, loaded: Callable[[int, int], str]) -> None:
        """Add `loaded(r, v)` to every total if the condition holds."""
        before = f"before_{name}"
        self.add(f"  br label %{before}\n{before}:")
        self.add(f"  br i1 {condition}, label %with_{name}, label %after_{name}\nwith_{name}:")
        added = {}
        for r, v in self.cells():
            more = loaded(r, v)
            added[r, v] = self.new(f"fadd {self.vector} {self.totals[r, v]}, {more}")
        self.add(f"  br label %after_{name}\nafter_{name}:")
        for r, v in self.cells():
            value = f"%{name}{r}_{v}"
            without = self.totals[r, v]
            self.add(f"  {value} = phi {self.vector} [{without}, %{before}], [{added[r, v]}, %with_{name}]")
            self.totals[r, v] = value
