"""Causal attention of many short sequences side by side, one in each lane of a vector, as LLVM IR.

A tile of keys would be mostly empty there. q, k, v and the output of one head lie as (position, channel,
lane): sums over channels and over keys are then sums of whole vectors.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import types

from distgpt.core.cpu.compiling.jit import inline, jit
from distgpt.core.cpu.compiling.processor import Shape, shape
from distgpt.core.cpu.fused.softmax import UNSEEN, Exponentials, constant
from distgpt.core.cpu.matmul.assembled import external, transpose
from distgpt.core.cpu.matmul.packing import LANES, aligned
from distgpt.core.ops.api import Array

SHORT, SMALL = 16, 512  # positions, and elements of a head, up to which this is faster than tiles
KEYS, CHANNELS = 4, 8  # whose sums are in registers at once
# log m = 2 artanh s with s = (m - 1) / (m + 1), for m in [√½, √2): |s| < 0.172. From s⁹ down to s, without s.
ARTANH = tuple(2 / k for k in (9, 7, 5, 3, 1))


class ShortScratch(NamedTuple):
    """A worker's memory for one head of LANES sequences, all (positions, channels, lanes)."""

    q: Array
    k: Array
    v: Array
    out: Array
    scores: Array  # of one query
    lse: Array  # (positions, lanes)


def fits(n_seq: int, seq_len: int, size: int, dtype: Any) -> bool:
    """Return whether this applies: heads come in whole vectors, and every lane has a sequence."""
    short = seq_len <= SHORT and seq_len * size <= SMALL
    return dtype == np.float32 and short and n_seq >= LANES and size % LANES == 0


def scratch(size: int) -> ShortScratch:
    heads = (aligned((SHORT, size, LANES), "float32") for _ in range(4))
    return ShortScratch(*heads, *(aligned((SHORT, LANES), "float32") for _ in range(2)))


@jit
def attention(first, last, y, lse, qkv, seq_len, s):
    """Compute sequences first … last, at least LANES; the last group may compute some of them again."""
    for begin in range(first, last, LANES):
        attend_short(min(begin, last - LANES) * seq_len, y, lse, qkv, seq_len, lse.shape[1], s)


@inline
def attend_short(row, y, lse, qkv, seq_len, n_head, s):
    """Compute LANES sequences, the first of which begins at a row; `lse` may be None."""
    width = y.shape[1]
    size, kv_width = width // n_head, (qkv.shape[1] - width) // 2
    group = width // kv_width  # heads of q that share k and v
    scale = np.float32(1 / math.sqrt(size))
    apart, line = seq_len * qkv.strides[0], 4 * LANES
    for head in range(n_head):
        column = head * size
        for t in range(seq_len):
            of = qkv[row + t]
            transpose(of[column:], apart, s.q[t], line, size // LANES)
            if head % group == 0:
                key = width + head // group * size
                transpose(of[key:], apart, s.k[t], line, size // LANES)
                transpose(of[key + kv_width :], apart, s.v[t], line, size // LANES)
        q, k, v, out = s.q.ctypes, s.k.ctypes, s.v.ctypes, s.out.ctypes
        _attend(seq_len, size, q, k, v, out, s.scores.ctypes, s.lse.ctypes, scale)
        for t in range(seq_len):
            for j in range(0, size, LANES):
                transpose(s.out[t, j:], line, y[row + t, column + j :], seq_len * y.strides[0], 1)
            if lse is not None:
                for lane in range(LANES):
                    lse[row + lane * seq_len + t, head] = s.lse[t, lane]


_ARGUMENTS = (
    "i64 %length, i64 %size, ptr noalias %q, ptr noalias %k, ptr noalias %v, ptr noalias %out, "
    "ptr noalias %scores, ptr noalias %lse, float %scale"
)


class _Function(Exponentials):
    """Writes the function: of every query its scores, their softmax, and the sum of values."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.line = 4 * shape.lanes  # bytes of a vector

    def text(self) -> str:
        n, v = self.shape.lanes, self.vector
        self.add(
            f"declare {v} @llvm.floor.v{n}f32({v})\n"
            f"declare {v} @llvm.fma.v{n}f32({v}, {v}, {v})\n"
            f"define void @attend({_ARGUMENTS}) {{\nentry:"
        )
        scale = self.everywhere("float", "%scale")
        self.add(f"  %head = mul i64 %size, {self.line}\n  br label %query\nquery:")
        self.add("  %t = phi i64 [0, %entry], [%t1, %summed]\n  %t1 = add i64 %t, 1")
        self.add("  %here = mul i64 %t, %head")
        self.add("  %qt = getelementptr i8, ptr %q, i64 %here\n  %ot = getelementptr i8, ptr %out, i64 %here")
        self._scores()
        self._softmax(scale)
        self._values()
        self.add("  %more_t = icmp ult i64 %t1, %length\n  br i1 %more_t, label %query, label %done\ndone:")
        return "\n".join([*self.lines, "  ret void\n}"])

    def _at(self, base: str, index: str) -> str:
        """Return the address of a vector."""
        return self.new(f"getelementptr {self.vector}, ptr {base}, i64 {index}")

    def _loaded(self, place: str) -> str:
        return self.new(f"load {self.vector}, ptr {place}, align {self.line}")

    def _stored(self, value: str, place: str) -> None:
        self.add(f"  store {self.vector} {value}, ptr {place}, align {self.line}")

    def _sums(self, name: str, count: int, before: str) -> None:
        """Begin a loop over i with sums, after the block `before`."""
        self.add(f"  br label %{name}\n{name}:\n  %i_{name} = phi i64 [0, %{before}], [%i1_{name}, %{name}]")
        for s in range(count):
            self.add(
                f"  %{name}{s} = phi {self.vector} [zeroinitializer, %{before}], [%{name}_next{s}, %{name}]"
            )

    def _next(self, name: str, count: int, a: str, others: list[str], end: str) -> None:
        """Add a times each of the others to the sums, and go on until i is `end`."""
        for s, b in zip(range(count), others, strict=True):
            total = self.fma(a, b, f"%{name}{s}")
            self.add(f"  %{name}_next{s} = bitcast {self.vector} {total} to {self.vector}")
        self.add(f"  %i1_{name} = add i64 %i_{name}, 1")
        again = self.new(f"icmp ult i64 %i1_{name}, {end}")
        self.add(f"  br i1 {again}, label %{name}, label %{name}_ended\n{name}_ended:")

    def _scores(self) -> None:
        """scores[j] ← q[t] · k[j] for j ≤ t; some keys further on come along, and do not count."""
        self.add("  br label %keys\nkeys:\n  %j = phi i64 [0, %query], [%j1, %dot_ended]")
        places = []
        for s in range(KEYS):
            offset = self.new(f"mul i64 {self.new(f'add i64 %j, {s}')}, %head")
            places.append(self.new(f"getelementptr i8, ptr %k, i64 {offset}"))
        self._sums("dot", KEYS, "keys")
        q = self._loaded(self._at("%qt", "%i_dot"))
        keys = [self._loaded(self._at(place, "%i_dot")) for place in places]
        self._next("dot", KEYS, q, keys, "%size")
        for s in range(KEYS):
            self._stored(f"%dot_next{s}", self._at("%scores", self.new(f"add i64 %j, {s}")))
        self.add(f"  %j1 = add i64 %j, {KEYS}")
        self.add("  %more_j = icmp ule i64 %j1, %t\n  br i1 %more_j, label %keys, label %largest")

    def _softmax(self, scale: str) -> None:
        """scores ← their exponentials, whose sum is %total; lse[t] ← its logarithm."""
        n, v = self.shape.lanes, self.vector
        self.add("largest:\n  %l = phi i64 [0, %dot_ended], [%l1, %largest]")
        self.add(f"  %top = phi {v} [{constant(UNSEEN)}, %dot_ended], [%larger, %largest]")
        score = self._loaded(self._at("%scores", "%l"))
        larger = self.new(f"fcmp ogt {v} {score}, %top")  # not where there is a NaN
        self.add(f"  %larger = select <{n} x i1> {larger}, {v} {score}, {v} %top")
        self.add("  %l1 = add i64 %l, 1\n  %more_l = icmp ule i64 %l1, %t")
        self.add("  br i1 %more_l, label %largest, label %exponentials\nexponentials:")
        self.add("  %e = phi i64 [0, %largest], [%e1, %exponentials]")
        self.add(f"  %sum = phi {v} [zeroinitializer, %largest], [%total, %exponentials]")
        place = self._at("%scores", "%e")
        below = self.new(f"fsub {v} {self._loaded(place)}, %larger")
        value = self.exp(self.new(f"fmul {v} {below}, {scale}"))
        self._stored(value, place)
        self.add(f"  %total = fadd {v} %sum, {value}")
        self.add("  %e1 = add i64 %e, 1\n  %more_e = icmp ule i64 %e1, %t")
        self.add("  br i1 %more_e, label %exponentials, label %logarithm\nlogarithm:")
        log = self._log("%total")
        self._stored(self.multiply_add("%larger", scale, log), self._at("%lse", "%t"))
        self.add(f"  %share = fdiv {v} {constant(1.0)}, %total")

    def _log(self, x: str) -> str:
        """Return log x for x ≥ 1 or NaN."""
        n, v, ints = self.shape.lanes, self.vector, f"<{self.shape.lanes} x i32>"
        bits = self.new(f"bitcast {v} {x} to {ints}")
        # Counted from √½ on, so that m is near 1; 0x3F3504F3 are the bits of √½.
        over = self.new(f"sub {ints} {bits}, splat (i32 1060439283)")
        power = self.new(f"ashr {ints} {over}, splat (i32 23)")
        m = self.new(f"sub {ints} {bits}, {self.new(f'shl {ints} {power}, splat (i32 23)')}")
        m = self.new(f"bitcast {ints} {m} to {v}")
        above, below = (self.new(f"{sign} {v} {m}, {constant(1.0)}") for sign in ("fsub", "fadd"))
        s = self.new(f"fdiv {v} {above}, {below}")
        series = self.polynomial(ARTANH, self.new(f"fmul {v} {s}, {s}"))
        series = self.new(f"fmul {v} {series}, {s}")
        whole = self.new(f"sitofp {ints} {power} to {v}")
        log = self.multiply_add(whole, constant(math.log(2)), series)
        nan = self.new(f"fcmp uno {v} {x}, {x}")
        return self.new(f"select <{n} x i1> {nan}, {v} {x}, {v} {log}")

    def _values(self) -> None:
        """out[t] ← Σ scores[j] v[j] / total"""
        self.add("  br label %channels\nchannels:\n  %c = phi i64 [0, %logarithm], [%c1, %value_ended]")
        self._sums("value", CHANNELS, "channels")
        p = self._loaded(self._at("%scores", "%i_value"))
        row = self.new(f"getelementptr i8, ptr %v, i64 {self.new('mul i64 %i_value, %head')}")
        first = self._at(row, "%c")
        values = [self._loaded(self._at(first, str(s))) for s in range(CHANNELS)]
        self._next("value", CHANNELS, p, values, "%t1")
        to = self._at("%ot", "%c")
        for s in range(CHANNELS):
            value = self.new(f"fmul {self.vector} %value_next{s}, %share")
            self._stored(value, self._at(to, str(s)))
        self.add(f"  %c1 = add i64 %c, {CHANNELS}")
        self.add("  %more_c = icmp ult i64 %c1, %size\n  br i1 %more_c, label %channels, label %summed")
        self.add("summed:")


_P, _I = types.voidptr, types.int64
# Registered when this file is imported, as microkernels are.
_attend = external(
    "attention-short", _Function(shape()).text, attend=(_I, _I, _P, _P, _P, _P, _P, _P, types.float32)
)["attend"]
