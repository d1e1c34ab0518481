"""Parts that microkernels need on arm64, whose NEON registers hold four float32.

NEON has no masked loads and stores. A tile with fewer columns than registers hold is computed in memory of
its own, to which C and bias are copied, and from there the columns that exist are copied to C.
"""

from __future__ import annotations

from distgpt.kernels.compiling.registers import Shape
from distgpt.kernels.matmul.vectors import BYTES

FLAG_BIAS = 2
# Instructions come in the order that suits this processor, on all: that of others takes more registers.
SCHEDULED = '"tune-cpu"="neoverse-v2" '
MEMCPY = "declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)"
MMLA = "declare <4 x float> @llvm.aarch64.neon.bfmmla(<4 x float>, <8 x bfloat>, <8 x bfloat>)"


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
  %asked = and i64 %flags, {FLAG_BIAS}
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
