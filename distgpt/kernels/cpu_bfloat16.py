"""The vocabulary on CPU cores in bfloat16: float32 sums and weights, everything between layers in 16 bits.

Arrays of `dtype` are of type uint16 and hold bits, as NumPy has no bfloat16. Weights are packed for the
microkernels when they are first used, and again when they change.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from distgpt.kernels.api import AdamConstants, AdamState, Affine, Array
from distgpt.kernels.cpu import FEW, CpuKernels
from distgpt.kernels.fused import attention, narrow, rowwise
from distgpt.kernels.matmul import packing
from distgpt.kernels.matmul.blocked import multiply, multiply_tiles

BITS = np.dtype(np.uint16)


# How a weight (outputs, inputs) is packed, and which of its sides is k: for y = x wᵀ, and for dx = dy w.
WAYS = {"forward": (packing.pack_transposed, 1), "backward": (packing.pack_plain, 0)}


class Bfloat16Kernels(CpuKernels):
    """CpuKernels whose `dtype` is bfloat16, and whose matmuls are our own."""

    weight_copies = len(WAYS)
    loss_loop = staticmethod(rowwise.cross_entropy_narrow)

    def __init__(self, threads: int = 1) -> None:
        super().__init__("float32", threads)
        self.dtype = BITS
        self._packed: dict[tuple[int, str], tuple[Array, Array]] = {}  # the weight, and how it is read
        self._packing = threading.Lock()
        self._tiles: dict[tuple[Any, ...], tuple[Array, ...]] = {}

    # -- arrays

    def to_host(self, array: Array) -> Any:
        return to_float32(array) if array.dtype == BITS else array

    def later(self, array: Array) -> Callable[[], Any]:
        taken = array.copy()
        return lambda: self.to_host(taken)

    def put(self, array: Array, host: Any) -> None:
        if array.dtype != BITS:
            array[...] = host
            return
        array[...] = to_bits(np.asarray(host))
        self._packed.clear()

    def round(self, low: Array, wide: Array) -> None:
        self._pool.ranges(len(low), 4096, packing.round_to, low, wide)
        self._pack_again(low)

    def add(self, y: Array, a: Array, b: Array) -> None:
        self._pool.ranges(y.size, 4096, narrow.add, *(x.reshape(-1) for x in (y, a, b)))

    # -- weights

    def _pack_again(self, low: Array) -> None:
        """Those that lie in this buffer."""
        begin = low.ctypes.data
        for (address, way), (w, packed) in self._packed.items():
            if begin <= address < begin + low.nbytes:
                self._pool.ranges(len(packed), 1, WAYS[way][0], packed, w)

    def _weights(self, w: Array, way: str) -> Array:
        """The packed weight, made by the first worker that needs it."""
        key, (pack, k) = (w.ctypes.data, way), WAYS[way]
        if key not in self._packed:
            with self._packing:
                if key not in self._packed:
                    made = packing.packed(w.shape[k], w.shape[1 - k], BITS.name)
                    pack(0, len(made), made, w)
                    self._packed[key] = w, made
        return self._packed[key][1]

    # -- linear layers

    def linear(self, y: Array, x: Array, wb: Affine) -> None:
        w, b = wb
        if len(x) <= FEW:
            super().linear(y, x, wb)
            return
        packed, bias = self._weights(w, "forward"), None if b is None else to_float32(b)
        self._pool.ranges(len(x), packing.ROWS, multiply, y, x, packed, len(w), bias, 0)

    def linear_backward(self, dx: Array, dy: Array, w: Array) -> None:
        packed = self._weights(w, "backward")
        self._pool.ranges(len(dx), packing.ROWS, multiply, dx, dy, packed, w.shape[1], None, 0)

    def linear_backward_weights(self, dwb: Affine, dy: Array, x: Array, accumulate: bool) -> None:
        dw, db = dwb

        def outputs(first: int, last: int) -> None:
            a, b = self._packed_rows(dy, x)
            begin, end = first // packing.ROWS, -(-last // packing.ROWS)
            packing.pack_plain(0, len(b), b, x)
            packing.pack_rows_transposed(begin, end, a, dy)
            multiply_tiles(begin, end, dw, a, len(x), b, x.shape[1], None, int(accumulate))
            if db is not None:
                narrow.sum_rows(first, last, db, dy, accumulate)

        self._pool.ranges(dy.shape[1], packing.ROWS, outputs)

    def _packed_rows(self, dy: Array, x: Array) -> tuple[Array, ...]:
        """This worker's memory for dyᵀ and x as microkernels read them."""
        key = (self._pool.member, len(x), dy.shape[1], x.shape[1])
        if key not in self._tiles:
            a = packing.packed_rows(dy.shape[1], len(x), BITS.name)
            self._tiles[key] = a, packing.packed(len(x), x.shape[1], BITS.name)
        return self._tiles[key]

    # -- attention

    def attention(self, y: Array, lse: Array, qkv: Array, seq_len: int) -> None:
        size = y.shape[1] // lse.shape[1]

        def heads(first: int, last: int) -> None:
            wide, out, _, sums = self._head(seq_len, size)
            for unit in range(first, last):
                row, head = unit // lse.shape[1] * seq_len, unit % lse.shape[1]
                narrow.widen_heads(wide, qkv, row, head * size, y.shape[1])
                attention.attention(0, 1, out, sums, wide, seq_len, self._blocks(seq_len))
                narrow.narrow(y, out, row, head * size)
                lse[row : row + seq_len, head] = sums[:, 0]

        self._pool.ranges(len(y) // seq_len * lse.shape[1], 1, heads)

    def attention_backward(
        self, dqkv: Array, dy: Array, y: Array, lse: Array, qkv: Array, seq_len: int
    ) -> None:
        width, n_head = y.shape[1], lse.shape[1]
        size = width // n_head

        def heads(first: int, last: int) -> None:
            wide, out, dout, sums = self._head(seq_len, size)
            dwide = self._head_gradient(seq_len, size)
            for unit in range(first, last):
                row, head = unit // n_head * seq_len, unit % n_head
                narrow.widen_heads(wide, qkv, row, head * size, width)
                narrow.widen(out, y, row, head * size)
                narrow.widen(dout, dy, row, head * size)
                sums[:, 0] = lse[row : row + seq_len, head]
                attention.attention_backward(
                    0, 1, dwide, dout, out, sums, wide, seq_len, self._blocks(seq_len)
                )
                narrow.narrow_heads(dqkv, dwide, row, head * size, width)

        self._pool.ranges(len(y) // seq_len * n_head, 1, heads)

    def attention_cached(self, y: Array, cache: Array, qkv: Array, start: Array) -> None:
        n_seq, n_head, _, size = cache.shape[1:]
        first, new, width = int(start[0]), len(y) // cache.shape[1], y.shape[1]
        stop = first + new

        def heads(begin: int, end: int) -> None:
            q, out = (np.empty((new, size), self.wide) for _ in range(2))
            keys, values = (np.empty((stop, size), self.wide) for _ in range(2))
            for unit in range(begin, end):
                seq, head = unit // n_head, unit % n_head
                rows, column = slice(seq * new, (seq + 1) * new), head * size
                for part, wide in ((1, keys), (2, values)):
                    to = cache[part - 1, seq, head]
                    to[first:stop] = qkv[rows, part * width + column : part * width + column + size]
                    narrow.widen(wide, to, 0, 0)
                narrow.widen(q, qkv, seq * new, column)
                narrow.attend_new(out, q, keys, values, first, self._blocks(cache.shape[3])[0])
                narrow.narrow(y, out, seq * new, column)

        self._pool.ranges(n_seq * n_head, 1, heads)

    def _blocks(self, seq_len: int) -> Array:
        return self._of_worker((seq_len,), ((2, attention.BLOCK, seq_len),))[0]

    def _head(self, seq_len: int, size: int) -> tuple[Array, ...]:
        """This worker's memory for qkv, y, dy and lse of one head."""
        shapes = ((seq_len, 3 * size), (seq_len, size), (seq_len, size), (seq_len, 1))
        return self._of_worker((seq_len, size), shapes)

    def _head_gradient(self, seq_len: int, size: int) -> Array:
        return self._of_worker((seq_len, size, "gradient"), ((seq_len, 3 * size),))[0]

    def _of_worker(self, key: tuple[Any, ...], shapes: tuple[tuple[int, ...], ...]) -> tuple[Array, ...]:
        mine = (self._pool.member, *key)
        if mine not in self._tiles:
            self._tiles[mine] = tuple(self.wide_zeros(*shape) for shape in shapes)
        return self._tiles[mine]

    # -- the optimizer

    def adamw(self, state: AdamState, norm: Array, knobs: Array, constants: AdamConstants) -> None:
        super().adamw(state, norm, knobs, constants)
        if state.low is not None:
            self.round(state.low, state.p)


def to_float32(bits: Array) -> Array:
    wide: Array = (bits.astype(np.uint32) << 16).view(np.float32)
    return wide


def to_bits(x: Array) -> Array:
    """The nearest bfloat16, ties to even."""
    flat = np.ascontiguousarray(x, np.float32).reshape(-1)
    out = np.empty(len(flat), np.uint16)
    packing.round_to(0, len(flat), out, flat)
    return out.reshape(np.shape(x))
