"""Tiles on arm64, whose NEON registers hold four float32.

NEON has no masked loads and stores. A tile with fewer columns than registers hold is computed in memory of
its own, to which C and bias are copied, and from there the columns that exist are copied to C.
"""

from __future__ import annotations

from collections.abc import Callable

from distgpt.core.cpu.compiling.processor import BFLOAT16, Shape
from distgpt.core.cpu.matmul import microkernel
from distgpt.core.cpu.matmul.microkernel import BIAS, Sums, Tile
from distgpt.core.cpu.matmul.vectors import BYTES, LLVM

# Instructions come in the order that suits this processor, on all: that of others takes more registers.
SCHEDULED = '"tune-cpu"="neoverse-v2" '
MEMCPY = "declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)"
MMLA = "declare <4 x float> @llvm.aarch64.neon.bfmmla(<4 x float>, <8 x bfloat>, <8 x bfloat>)"


def module(shape: Shape, operand: str, out: str) -> str:
    """Return the IR of `tile`, for A, B and C of these types."""
    return microkernel.module(shape, operand, out, NeonTile)


class NeonTile(Tile):
    """Writes the function for one number of rows: operands are taken from a lane, and memory has no masks."""

    attributes = SCHEDULED

    @staticmethod
    def declarations(shape: Shape, operand: str, out: str) -> list[str]:
        pairs = shape.dot and operand == BFLOAT16
        return [microkernel.fma(shape), MEMCPY, *([MMLA] if pairs else [])]

    @staticmethod
    def shapes(shape: Shape) -> dict[str, Shape]:
        return {"tile": shape}

    @staticmethod
    def choice(
        shape: Shape, most: int, at_once: int, arguments: str, out: str, names: tuple[str, ...] = ("tile",)
    ) -> str:
        whole = microkernel.choice(shape, most, at_once, arguments, names, "internal void @whole")
        return "\n".join([whole, edges(shape, most, out, arguments)])

    @property
    def last_of_step(self) -> str:
        return "loop"

    def _step_in_halves(self) -> Sums:
        """Load the second halves anew, without a branch."""
        firsts = self.products(self.named("s"), second=False)
        return self.products(firsts, second=True, load="load volatile")

    def _in_all(self, type: str, value: str, widened: Callable[[str], str] = str) -> str:
        kind = type if widened is str else "float"
        return self.by_lane(kind, widened(self.first_lane(type, value)))

    def by_lane(self, type: str, first: str) -> str:
        """Return the first lane in all lanes, so that NEON's instructions take it from there.

        Code that the compiler cannot see into is between: it would load into all lanes, which takes an
        arithmetic unit too.
        """
        hidden = self.new(f'call <4 x {type}> asm "", "=w,0"(<4 x {type}> {first})')
        return self.spread(type, hidden)

    def _store(self, value: str, row: str, v: int, masks: list[str]) -> None:
        n, size = self.shape.lanes, BYTES[self.out]
        if self.out == BFLOAT16:
            value = self.rounded(value)
        place = self.new(f"getelementptr i8, ptr {row}, i64 {size * n * v}")
        self.add(f"  store <{n} x {LLVM[self.out]}> {value}, ptr {place}, align {size}")

    def _loaded(self, row: str, v: int, masks: list[str]) -> str:
        place = self.new(f"getelementptr i8, ptr {row}, i64 {4 * self.shape.lanes * v}")
        return self.new(f"load {self.vector}, ptr {place}, align 4")


def edges(shape: Shape, rows: int, out: str, arguments: str) -> str:
    """Write `tile` by way of `whole`, which computes all columns of up to `rows` rows."""
    n, line = shape.columns, BYTES[out] * shape.columns
    own = arguments.replace("ptr %c,", "ptr %own,").replace("i64 %ldc", f"i64 {line}")
    own = own.replace("i64 %columns", f"i64 {n}").replace("ptr %bias", "ptr %added")
    return f"""define void @tile({arguments}) {{
entry:
  %own = alloca [{rows * line} x i8], align 16
  %added = alloca [{4 * n} x i8], align 16
  %full = icmp eq i64 %columns, {n}
  %none = icmp eq i64 %rows, 0
  %simple = or i1 %full, %none
  br i1 %simple, label %all, label %some
all:
  tail call void @whole({arguments})
  ret void
some:
  %bytes = mul i64 %columns, {BYTES[out]}
  %asked = and i64 %flags, {BIAS}
  %biased = icmp ne i64 %asked, 0
  br i1 %biased, label %with, label %in
with:
  %bias_bytes = shl i64 %columns, 2
  call void @llvm.memcpy.p0.p0.i64(ptr %added, ptr %bias, i64 %bias_bytes, i1 false)
  br label %in
{_copied("in", "[0, %some], [0, %with]", "compute", ("%own", str(line)), ("%c", "%ldc"))}
compute:
  call void @whole({own})
  br label %back
{_copied("back", "[0, %compute]", "done", ("%c", "%ldc"), ("%own", str(line)))}
done:
  ret void
}}"""


def _copied(name: str, begin: str, after: str, to: tuple[str, str], of: tuple[str, str]) -> str:
    """Write a loop that copies the columns of each row; `to` and `of` are a place and its bytes a row."""
    return f"""{name}:
  %{name}_r = phi i64 {begin}, [%{name}_next, %{name}]
  %{name}_to_at = mul i64 %{name}_r, {to[1]}
  %{name}_of_at = mul i64 %{name}_r, {of[1]}
  %{name}_to = getelementptr i8, ptr {to[0]}, i64 %{name}_to_at
  %{name}_of = getelementptr i8, ptr {of[0]}, i64 %{name}_of_at
  call void @llvm.memcpy.p0.p0.i64(ptr %{name}_to, ptr %{name}_of, i64 %bytes, i1 false)
  %{name}_next = add i64 %{name}_r, 1
  %{name}_more = icmp ult i64 %{name}_next, %rows
  br i1 %{name}_more, label %{name}, label %{after}"""
