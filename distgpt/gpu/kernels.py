"""`Kernels` on a GPU: CUDA kernels of distgpt, and library matmuls and attention."""

from __future__ import annotations

from collections.abc import Callable
from math import gcd
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from distgpt.core.ops.api import (
    PIECE,
    AdamConstants,
    AdamState,
    Affine,
    Angles,
    Array,
    AttentionMask,
    Bias,
    BiasGradient,
    Capabilities,
    Gain,
    Head,
    NesterovState,
    SortedTokens,
    Stats,
    StepScalars,
    Wire,
    Work,
)
from distgpt.core.ops.low_precision import to_bfloat16
from distgpt.gpu.attention import OwnAttention
from distgpt.gpu.device import (
    BLOCK,
    LARGEST_BLOCK,
    STORAGE,
    WARP,
    WIDE,
    CupyDevice,
    Launcher,
    address,
    floats,
)
from distgpt.gpu.linear import sum_parts
from distgpt.gpu.matmul import LtMatmul, share_autotuning
from distgpt.gpu.muon import MuonKernels

BLOCKS_EACH = 3  # blocks of the backward norm per multiprocessor, limited by registers
CHUNK = 32  # sorted rows per block of embed_backward, as in embedding.cu
SORT_TILE = 256  # rows per block of the sort, and values of its digit, as in embedding.cu
COMMON = 7  # values shared by all threads of adamw, before two per group, as in optimizer.cu
MOVED = 32  # positions per thread of move_cached when it copies from another slot
ROWS_APART = 64  # maximum number of partial sums of rows
HELD_BYTES = 96  # maximum bytes of a row per thread of the norms; with 128 the backward norm spills

WIRE_PIECE = 1 << 24  # elements, enough to make the cost of a start small, with little memory
BEYOND = 1 << 31  # from this value on, a 32-bit number is a negative C int


class CudaKernels(MuonKernels):
    """Kernels of one device. `attention_for` chooses the attention for a head size, given the default one."""

    def __init__(
        self,
        device: CupyDevice,
        matmuls: LtMatmul,
        dtype: str,
        attention_for: Callable[[int, OwnAttention], OwnAttention] | None = None,
    ) -> None:
        self.device = device
        self.dtype, self.accum_dtype = STORAGE[dtype], WIDE[dtype]
        self.capabilities = Capabilities(
            is_async=True,
            fuses_residual=True,
            sums_bias_gradients=True,
            norm_sum_rows=BLOCKS_EACH * device.multiprocessors,
        )
        self.launcher = Launcher(device, dtype, self.dtype.itemsize)
        self.logits_bytes = min(4 << 30, max(512 << 20, device.memory()[1] // 32))
        self._own_attention = OwnAttention(self.launcher)
        self._choose_attention = attention_for or (lambda head, own: own)
        self._attention: dict[int, OwnAttention] = {}
        self.wire: Wire | None = DeviceWire(self.launcher)
        self.matmuls, self._type, self._possible, self._tables = matmuls, dtype, {}, {}

    # -- arrays and workers

    def _new(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        return self.device.zeros(shape, np.dtype(dtype))

    def integers(self, host: Any, dtype: str = "int32") -> Array:
        values = np.array(host, dtype)
        array = self.device.zeros(values.shape, values.dtype)
        self.device.upload(array, values)
        return array

    def to_host(self, array: Array) -> Any:
        return floats(self.device.download(array))

    def to_host_async(self, array: Array) -> Callable[[], Any]:
        taken = self.device.to_host_async(array)
        return lambda: floats(taken())

    def put(self, array: Array, host: Any) -> None:
        is_bits = array.dtype == STORAGE["bfloat16"]
        self.device.upload(array, to_bfloat16(host) if is_bits else np.asarray(host, array.dtype))

    def cast_down(self, low: Array, wide: Array) -> None:
        args = (low, wide, np.int64(wide.size))
        self.launcher.start("optimizer", "round_to_stored", self._fours(wide), BLOCK, *args)

    def free_memory(self) -> int | None:
        return self.device.memory()[0] // self.device.sharing

    def record(self, work: Work) -> Work:
        return self.device.record(work)

    def between(self, act: Work) -> None:
        self.device.between(act)

    def agree(self, gather: Callable[[bytes], list[bytes]]) -> None:
        share_autotuning(gather, self.device, self.matmuls)

    def zero(self, x: Array) -> None:
        self.device.zero(x)

    def add(self, y: Array, a: Array, b: Array) -> None:
        self.launcher.each("elementwise", "add", y.size, y.size, y, a, b, y.size)

    # -- embedding

    def embed(
        self,
        x: Array,
        tokens: Array,
        wte: Array,
        wpe: Array | None,
        seq_len: int,
        start: Array | None,
        positions: Array | None = None,
    ) -> None:
        n, c = x.shape
        of = x, tokens, wte, wpe, *_starts(start), positions, n, seq_len, c
        self.launcher.each("embedding", "embed", c, n * c, *of)

    def sort_tokens(self, tokens: Array, vocab: int) -> SortedTokens:
        return SortedTokens(tokens, self._sorted_rows(tokens, vocab, "order of tokens"))

    def embed_backward(
        self,
        dwte: Array,
        dwpe: Array | None,
        dx: Array,
        tokens: SortedTokens,
        seq_len: int,
        positions: Array | None = None,
    ) -> None:
        n, c = len(dx), dwte.shape[1]
        if dwpe is not None and positions is not None:
            order = self._sorted_rows(positions, len(dwpe), "order of positions")
            self._add_to_rows(dwpe, dx, positions, order)
        elif dwpe is not None:
            count = seq_len * c
            self.launcher.each("embedding", "position_gradient", c, count, dwpe, dx, n, seq_len, c)
        self._add_to_rows(dwte, dx, *tokens)

    def _add_to_rows(self, dwte: Array, dx: Array, tokens: Array, order: Array | None) -> None:
        (n, width), c = dx.shape, dwte.shape[1]
        chunks = -(-n // CHUNK)
        partial = self.launcher.scratch("tokens", (chunks, 2, c), self.accum_dtype)
        within, w = self.launcher.variant("token_gradient", gcd(c, width), dwte, partial, dx)
        across, _ = self.launcher.variant("token_gradient_across", gcd(c, width), dwte, partial, dx)
        block = min(256, -(-c // (w * WARP)) * WARP)
        self.launcher.start("embedding", within, chunks, block, dwte, partial, order, tokens, dx, n, width, c)
        self.launcher.start("embedding", across, chunks, block, dwte, partial, order, tokens, n, c)

    def add_embedding(self, x: Array, tokens: Array, w: Array) -> None:
        (n, width), c = x.shape, w.shape[1]
        of = x, tokens, w, n, width, c
        self.launcher.each("embedding", "add_embedding", gcd(c, width), n * c, *of)

    def previous_tokens(
        self,
        out: Array,
        tokens: Array,
        seq_len: int,
        before: Array | None,
        positions: Array | None = None,
    ) -> None:
        of = out, tokens, before, positions, len(out), seq_len
        self.launcher.start("embedding", "previous_tokens", -(-len(out) // BLOCK), BLOCK, *of)

    def _sorted_rows(self, tokens: Array, words: int, name: str) -> Array | None:
        """Sort rows by token, with a stable radix sort of one byte per pass.

        `name`: name of the result's scratch memory.
        """
        n, passes = len(tokens), max(1, -(-(words - 1).bit_length() // 8))
        tiles, launcher, int32 = -(-n // SORT_TILE), self.launcher, np.dtype(np.int32)
        orders, before = launcher.scratch(name, (2, n), int32), launcher.scratch("before", (n,), int32)
        counts = launcher.scratch("counts", (SORT_TILE * tiles,), int32)
        totals = launcher.scratch("totals", (SORT_TILE,), int32)
        order: Array | None = None
        for digit in range(passes):
            of = (order, tokens, n, digit)
            launcher.start("embedding", "count_values", tiles, SORT_TILE, counts, before, *of)
            launcher.start("embedding", "add_up_tiles", SORT_TILE, SORT_TILE, counts, totals, tiles)
            order = orders[digit % 2]
            launcher.start("embedding", "place_rows", tiles, SORT_TILE, order, counts, totals, before, *of)
        return order

    # -- norms

    def add_norm(
        self, y: Array, s: Array, stats: Stats, x: Array, r: Array | None, wb: Gain, eps: float
    ) -> None:
        n, c = y.shape
        rows, block, defines = norm_shape(c, self.accum_dtype.itemsize)
        kernel, _ = self.launcher.variant("add_norm", c, y, s, x, r, *wb)
        args = (y, s, *stats, x, r, *wb, eps, n)
        self.launcher.start("norm", kernel, -(-n // rows), block, *args, defines=defines)

    def norm_backward(
        self,
        dx: Array,
        y: Array | None,
        sums: Array | None,
        dy: Array,
        dres: Array | None,
        s: Array,
        stats: Stats,
        wb: Gain,
    ) -> None:
        n, c = dx.shape
        rows, block, defines = norm_shape(c, self.accum_dtype.itemsize)
        kernel, _ = self.launcher.variant("norm_backward", c, dx, y, sums, dy, dres, s, *wb)
        args = (dx, y, sums, dy, dres, s, *stats, *wb, n)
        blocks = self.capabilities.norm_sum_rows
        if sums is None:
            blocks = min(blocks, -(-n // rows))
        self.launcher.start("norm", kernel, blocks, block, *args, defines=defines)

    def norm_backward_weights(
        self, dwb: Affine, sums: Array | None, dy: Array, s: Array, stats: Stats, accumulate: bool
    ) -> None:
        """Add up the sums that norm_backward left."""
        assert sums is not None
        c = s.shape[1]
        if dwb.b is not None and address(dwb.b) == address(dwb.w) + dwb.w.nbytes:
            sum_parts(self.launcher, dwb.w, sums, slice(0, 2 * c), accumulate)  # weight and bias together
            return
        sum_parts(self.launcher, dwb.w, sums, slice(0, c), accumulate)
        if dwb.b is not None:
            sum_parts(self.launcher, dwb.b, sums, slice(c, 2 * c), accumulate)

    # -- linear layers

    def add_low_rank(self, y: Array, w: Array, b: Array | None, a: Array | None, scale: float) -> None:
        rank = 0 if a is None else len(a)
        args = (y, w, b, a, float(scale), y.size, y.shape[1], rank)
        self.launcher.start("elementwise", "add_low_rank", -(-y.size // BLOCK), BLOCK, *args)

    # -- attention

    def rope(
        self, qkv: Array, angles: Angles, heads: int, seq_len: int, start: Array | None, inverse: bool
    ) -> None:
        (n, row), half = qkv.shape, angles.cos.shape[1]
        args = (qkv, *angles, *_starts(start), n, seq_len, heads, row, half, int(inverse))
        self.launcher.each("elementwise", "rope", half, n * heads * half, *args)

    def qk_norm(self, qkv: Array, rstd: Array, head: int, eps: float) -> None:
        args = (qkv, rstd, float(eps), rstd.size, rstd.shape[1], head, qkv.shape[1])
        self.launcher.start("elementwise", "qk_norm", -(-rstd.size * WARP // BLOCK), BLOCK, *args)

    def qk_norm_backward(self, dqkv: Array, qkv: Array, rstd: Array, head: int) -> None:
        args = (dqkv, qkv, rstd, rstd.size, rstd.shape[1], head, qkv.shape[1])
        self.launcher.start("elementwise", "qk_norm_backward", -(-rstd.size * WARP // BLOCK), BLOCK, *args)

    def qk_norm_gain(self, qkv: Array, xhat: Array, rstd: Array, gain: Array, eps: float) -> None:
        sizes = _head_sizes(qkv, rstd, gain)
        args = (qkv, xhat, rstd, gain, float(eps), rstd.size, *sizes)
        self.launcher.start("elementwise", "qk_norm_gain", -(-rstd.size * WARP // BLOCK), BLOCK, *args)

    def qk_norm_gain_backward(self, dqkv: Array, dgain: Array, xhat: Array, rstd: Array, gain: Array) -> None:
        warps = 2 * len(dqkv)
        args = (dqkv, dgain, xhat, rstd, gain, warps, *_head_sizes(dqkv, rstd, gain))
        self.launcher.start("elementwise", "qk_norm_gain_backward", -(-warps * WARP // BLOCK), BLOCK, *args)

    def sum_rows(self, total: Array, x: Array, accumulate: bool) -> None:
        """First compute up to ROWS_APART partial sums, so that there is work for many blocks."""
        if x.dtype != self.accum_dtype:
            self._bias(BiasGradient(total, accumulate), x)
            return
        n, c = x.shape
        apart = gcd(n, ROWS_APART)
        if apart > 1:
            some = self.launcher.scratch("sums of rows", (apart, c), x.dtype)
            sum_parts(self.launcher, some, x.reshape(-1, apart * c), slice(0, apart * c), False)
            x = some
        sum_parts(self.launcher, total, x, slice(0, c), accumulate)

    def attention(self, y: Array, lse: Array, qkv: Array, mask: AttentionMask) -> None:
        self._attention_for(y, lse, mask).forward(y, lse, qkv, mask)

    def attention_backward(
        self, dqkv: Array, dy: Array, y: Array, lse: Array, qkv: Array, mask: AttentionMask, db: Bias = None
    ) -> None:
        attention = self._attention_for(y, lse, mask)
        parts = attention.backward(dqkv, dy, y, lse, qkv, mask, db is not None)
        if db is not None:
            self._bias(db, dqkv, parts)

    def _attention_for(self, y: Array, lse: Array, mask: AttentionMask) -> OwnAttention:
        if mask.positions is not None or mask.window:
            return self._own_attention  # libraries support neither
        head = y.shape[1] // lse.shape[1]
        if head not in self._attention:
            self._attention[head] = self._choose_attention(head, self._own_attention)
        return self._attention[head]

    def attention_cached(
        self, y: Array, cache: Array, qkv: Array, start: Array, window: int = 0, slots: Array | None = None
    ) -> None:
        self._own_attention.cached(y, cache, qkv, start, window, slots)

    # -- decoding beside the passes

    def move_cached(
        self, caches: Array, target: int, source: int, count: int, kept: int, angles: Angles | None
    ) -> None:
        layers, both, n_slots, kv_heads, t_max, head = caches.shape
        units = layers * both * kv_heads * -(-head // 2)
        part = MOVED if source != target else max(1, kept)
        cos, sin = angles or (None, None)
        sizes = layers * both, n_slots, kv_heads, t_max, head, target, source, count, kept, part
        grid = -(-units // BLOCK), max(1, -(-kept // part))
        self.launcher.start("decoding", "move_cached", grid, BLOCK, caches, cos, sin, *sizes)

    def topk_logits(self, tokens: Array, found: Array, logits: Array, vocab: int) -> None:
        (n, k), width = tokens.shape, logits.shape[1]
        block = min(LARGEST_BLOCK, -(-vocab // WARP) * WARP)
        self.launcher.start("decoding", "topk_logits", n, block, tokens, found, logits, vocab, width, k)

    def drawn(self, tokens: Array, found: Array, logits: Array, vocab: int, draws: Array) -> None:
        block, width = min(LARGEST_BLOCK, -(-vocab // WARP) * WARP), logits.shape[1]
        self.launcher.start(
            "decoding", "drawn", len(tokens), block, tokens, found, logits, draws, vocab, width
        )

    # -- head and loss

    def linear_cross_entropy(
        self,
        losses: Array,
        dx: Array | None,
        dw: Array | None,
        x: Array,
        head: Head,
        targets: Array,
        scale: float,
        accumulate: bool,
    ) -> None:
        w, logits, vocab = head
        width = len(w)
        for start in range(0, len(x), len(logits)):
            rows = slice(start, min(len(x), start + len(logits)))
            chunk = logits[: rows.stop - start]
            self._matmul(chunk, x[rows], w, transpose_b=True)
            kernel, pack = self.launcher.variant("cross_entropy", width, chunk)
            block = min(LARGEST_BLOCK, -(-width // (pack * WARP)) * WARP)
            sizes = (vocab, width, float(scale), int(dx is not None))
            self.launcher.start("loss", kernel, len(chunk), block, losses[rows], chunk, targets[rows], *sizes)
            if dx is not None:
                self._matmul(dx[rows], chunk, w)
            if dw is not None:
                self._weights(Affine(dw, None), chunk, x[rows], accumulate or start > 0)

    def sum(self, total: Array, x: Array, scale: float, accumulate: bool) -> None:
        args = (total, x, x.size, float(scale), int(accumulate))
        self.launcher.start("reduce", "sum_all", 1, LARGEST_BLOCK, *args)

    # -- optimizer: flat buffers may have more than 2³¹ elements, so their size is no C int

    def sum_squares(self, total: Array, g: Array) -> None:
        pieces = self.launcher.scratch("squares", (-(-g.size // PIECE),), np.dtype(np.float64))
        self.squares(pieces, g)
        self.add_up(total, pieces)

    def squares(self, pieces: Array, g: Array) -> None:
        """Sum in pieces that are the same on every GPU, so that different GPUs clip identically."""
        kernel = "squares" if g.dtype == self.accum_dtype else "squares_of_stored"
        if g.size:
            self.launcher.start("reduce", kernel, pieces.size, BLOCK, pieces, g, np.int64(g.size))

    def add_up(self, total: Array, pieces: Array) -> None:
        self.launcher.start("reduce", "add_up", 1, LARGEST_BLOCK, total, pieces, pieces.size)

    def adamw(self, state: AdamState, norm: Array, scalars: Array, constants: AdamConstants) -> None:
        if not state.p.size:  # a rank with an empty part
            return
        groups = (scalars.size - len(StepScalars._fields)) // 2
        common = self.launcher.scratch("common", (COMMON + 2 * groups,), self.accum_dtype)
        self.launcher.start("optimizer", "adamw_common", 1, WARP, common, norm, scalars, groups, *constants)
        args = (*state, len(state.ranges), common, np.int64(state.p.size))
        self.launcher.start("optimizer", "adamw", self._fours(state.p), BLOCK, *args)

    def subtract(self, y: Array, a: Array, b: Array) -> None:
        self.launcher.start("optimizer", "subtract", self._fours(y), BLOCK, y, a, b, np.int64(y.size))

    def nesterov(self, state: NesterovState, scale: float, lr: float, momentum: float) -> None:
        args = (*state, float(scale), float(lr), float(momentum), np.int64(state.p.size))
        self.launcher.start("optimizer", "nesterov", self._fours(state.p), BLOCK, *args)

    def _fours(self, x: Array) -> int:
        """Return the number of blocks for optimizer.cu, whose threads process four elements each."""
        size: int = x.size
        return -(-size // (4 * BLOCK))


class DeviceWire:
    """Implements `kernels.api.Wire`, bitwise identical to the host's implementation."""

    piece = WIRE_PIECE

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return self.launcher.device.zeros(shape, dtype)

    def dither(self, out: Array, x: Array, index: int, key: int) -> None:
        # Only the lower 32 bits of both count.
        lower = ((number + BEYOND) % (2 * BEYOND) - BEYOND for number in (index, key))
        self._start("dither", out.size, out, x, *lower)

    def add_parts(self, total: Array, parts: Array, by_twos: bool) -> None:
        if by_twos:
            raise ValueError("pairwise sums are for --reproducible-parts, which requires a CPU stage")
        kernel = "add_narrow_parts" if parts.dtype == STORAGE["bfloat16"] else "add_parts"
        self._start(kernel, total.size, total, parts, *parts.shape)

    def widen(self, out: Array, x: Array) -> None:
        self._start("widen", out.size, out, x)

    def _start(self, kernel: str, count: int, *args: Any) -> None:
        if count:
            self.launcher.start("wire", kernel, -(-count // BLOCK), BLOCK, *args, count)


def norm_shape(c: int, real_bytes: int) -> tuple[int, int, tuple[str, ...]]:
    """Return rows and threads per block of the norms, and the macros of norm.cu."""
    held = WARP * HELD_BYTES // real_bytes
    warps = next((warps for warps in (1, 4, 8) if c <= warps * held), 16)
    threads = max(128, warps * WARP)
    defines = (f"CHANNELS={c}", f"ROW_THREADS={warps * WARP}", f"THREADS={threads}")
    return threads // (warps * WARP), threads, defines


def _head_sizes(qkv: Array, rstd: Array, gain: Array) -> tuple[int, ...]:
    """Return the number of heads of q and k, of heads of q, and of elements per head and per row of qkv."""
    heads, head, row = rstd.shape[1], len(gain) // 2, qkv.shape[1]
    return heads, 2 * heads - row // head, head, row


def _starts(start: Array | None) -> tuple[Array | None, int]:
    """Return the kernels' arguments: the start positions, and how many there are."""
    return start, 1 if start is None else int(start.size)
