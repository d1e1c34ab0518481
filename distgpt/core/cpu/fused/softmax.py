"""Softmax of a row of scores in whole vectors, as LLVM IR.

A loop vectorized by LLVM processes multiple vectors at a time and the rest of the row one element at a time.
In a row of a few dozen scores the rest dominates.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numba import types

from distgpt.core.cpu.compiling.jit import (
    LEAST,
    LN2_HIGH,
    LN2_LOW,
    LOG2_E,
    TAYLOR,
    by_types,
    exp,
    largest,
    number,
)
from distgpt.core.cpu.compiling.processor import BFLOAT16, FLOAT32, shape
from distgpt.core.cpu.matmul.assembled import NAMES, external
from distgpt.core.cpu.matmul.vectors import BYTES, LLVM, Vectors

UNSEEN = -1e30  # masked score: -inf minus -inf, in a fully masked row, would be NaN
EDGE = 16  # rows are padded to a multiple of this, the widest vector, so that loops use whole vectors


@by_types()
def softmax(row, probs, seen, stop, scale, found):
    """probs ← exp(scale · (row - top)) for `seen` scores, 0 up to `stop`; found ← top and the sum.

    For use in compiled loops. The rest of the row is ignored. In float64 the row is overwritten.
    """

    def one_by_one(row, probs, seen, stop, scale, found):
        row[seen:stop] = UNSEEN
        top = largest(row[:stop])
        total = number(row, 0)
        for j in range(stop):
            probs[j] = exp((row[j] - top) * scale)
            total += probs[j]
        found[0], found[1] = top, total

    if row.dtype == types.float64:
        return one_by_one
    routine = _ROUTINES[NAMES[probs.dtype]]

    def in_vectors(row, probs, seen, stop, scale, found):
        end = (stop + EDGE - 1) // EDGE * EDGE
        routine(row.ctypes, probs.ctypes, seen, end, scale, found.ctypes)

    return in_vectors


def constant(x: float) -> str:
    """Return a float32 constant in all lanes. LLVM writes it as the bits of a float64."""
    return f"splat (float 0x{int(np.float64(np.float32(x)).view(np.uint64)):016X})"


class Softmax(Vectors):
    """Writer of the function for one type of probabilities."""

    def exp(self, x: str) -> str:
        """Return eˣ for x ≤ 0 or NaN, as in jit.exp."""
        n = self.shape.lanes
        v = self.vector
        ints = f"<{self.shape.lanes} x i32>"
        below = self.new(f"fcmp olt {v} {x}, {constant(LEAST)}")
        bounded = self.new(f"select <{n} x i1> {below}, {v} {constant(LEAST)}, {v} {x}")
        of_two = self.multiply_add(bounded, constant(LOG2_E), constant(0.5))
        power = self.new(f"call {v} @llvm.floor.v{n}f32({v} {of_two})")
        rest = self.multiply_add(power, constant(-LN2_HIGH), bounded)
        rest = self.multiply_add(power, constant(-LN2_LOW), rest)
        e = constant(TAYLOR[0])  # polynomial coefficients, highest power first
        for coefficient in (*TAYLOR[1:], 1.0, 1.0):
            e = self.multiply_add(e, rest, constant(coefficient))
        exponent = self.new(f"add {ints} {self.new(f'fptosi {v} {power} to {ints}')}, splat (i32 127)")
        two = self.new(f"bitcast {ints} {self.new(f'shl {ints} {exponent}, splat (i32 23)')} to {v}")
        return self.new(f"fmul {v} {e}, {two}")

    def multiply_add(self, a: str, b: str, c: str) -> str:
        """Return a · b + c, as one instruction if the processor has it."""
        product = self.new(f"fmul contract {self.vector} {a}, {b}")
        return self.new(f"fadd contract {self.vector} {product}, {c}")

    def text(self, out: str) -> str:
        n = self.shape.lanes
        v = self.vector
        self.add(
            f"declare {v} @llvm.floor.v{n}f32({v})\n"
            f"declare float @llvm.vector.reduce.fmax.v{n}f32({v})\n"
            f"declare float @llvm.vector.reduce.fadd.v{n}f32(float, {v})\n"
            "define void @softmax(ptr noalias %row, ptr noalias %probs, i64 %seen, i64 %end, float %scale, "
            "ptr noalias %found) {\nentry:"
        )
        seen, scale = self.everywhere("i64", "%seen"), self.everywhere("float", "%scale")
        self.add("  br label %first\nfirst:")
        self.add("  %i = phi i64 [0, %entry], [%i1, %first]")
        self.add(f"  %top = phi {v} [{constant(UNSEEN)}, %entry], [%larger, %first]")
        counts, score = self._scores("%i", seen)
        known = self.new(f"select <{n} x i1> {counts}, {v} {score}, {v} {constant(UNSEEN)}")
        larger = self.new(f"fcmp ogt {v} {known}, %top")  # false for NaN
        self.add(f"  %larger = select <{n} x i1> {larger}, {v} {known}, {v} %top")
        self._again("i", "first", "between")
        top = self.new(f"call nnan nsz float @llvm.vector.reduce.fmax.v{n}f32({v} %larger)")
        tops = self.everywhere("float", top)
        self.add("  br label %second\nsecond:")
        self.add("  %j = phi i64 [0, %between], [%j1, %second]")
        self.add(f"  %total = phi {v} [zeroinitializer, %between], [%more, %second]")
        counts, score = self._scores("%j", seen)
        e = self.exp(self.new(f"fmul {v} {self.new(f'fsub {v} {score}, {tops}')}, {scale}"))
        e = self.new(f"select <{n} x i1> {counts}, {v} {e}, {v} zeroinitializer")
        address = self.new(f"getelementptr {LLVM[out]}, ptr %probs, i64 %j")
        value = self.rounded(e) if out == BFLOAT16 else e
        self.add(f"  store <{n} x {LLVM[out]}> {value}, ptr {address}, align {BYTES[out]}")
        self.add(f"  %more = fadd {v} %total, {e}")
        self._again("j", "second", "done")
        total = self.new(f"call reassoc float @llvm.vector.reduce.fadd.v{n}f32(float 0.0, {v} %more)")
        self.add(f"  store float {top}, ptr %found, align 4")
        second = self.new("getelementptr float, ptr %found, i64 1")
        return "\n".join([*self.lines, f"  store float {total}, ptr {second}, align 4", "  ret void\n}"])

    def _scores(self, at: str, seen: str) -> tuple[str, str]:
        """Return the mask of the scores to count, from an index on, and the scores."""
        n = self.shape.lanes
        lanes = ", ".join(f"i64 {lane}" for lane in range(n))
        places = self.new(f"add <{n} x i64> {self.everywhere('i64', at)}, <{lanes}>")
        counts = self.new(f"icmp ult <{n} x i64> {places}, {seen}")
        address = self.new(f"getelementptr float, ptr %row, i64 {at}")
        return counts, self.new(f"load {self.vector}, ptr {address}, align 4")

    def _again(self, i: str, loop: str, after: str) -> None:
        self.add(f"  %{i}1 = add i64 %{i}, {self.shape.lanes}")
        more = self.new(f"icmp ult i64 %{i}1, %end")
        self.add(f"  br i1 {more}, label %{loop}, label %{after}\n{after}:")


def _text(out: str) -> str:
    return Softmax(shape()).text(out)  # only written if the machine code is not cached


_ARGUMENTS = (types.voidptr, types.voidptr, types.int64, types.int64, types.float32, types.voidptr)
# Registered when this file is imported, as microkernels are
_ROUTINES = {
    out: external(f"softmax-{out}", partial(_text, out), softmax=_ARGUMENTS)["softmax"]
    for out in (FLOAT32, BFLOAT16)
}
