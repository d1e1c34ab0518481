"""The vocabulary on CPU cores: compiled loops and matmuls, split over the threads of one pool.

Float32 and float64 (CpuKernels), and bfloat16 between layers (Bfloat16Kernels).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import numpy as np

from distgpt.core.cpu.compiling.jit import Loop
from distgpt.core.cpu.decoding.operands import operand_rows
from distgpt.core.cpu.fused import activations, attention, flat, low_rank, muon, rowwise
from distgpt.core.cpu.matmul import blas
from distgpt.core.cpu.matmul.layers import Matmuls, OwnMatmuls, matmuls_for
from distgpt.core.cpu.pool import COLUMNS, ROWS, Pool, WorkerMemory, pool_of
from distgpt.core.ops.api import (
    IGNORED,
    PIECE,
    POLAR,
    AdamConstants,
    AdamState,
    Affine,
    Angles,
    Array,
    Bias,
    Capabilities,
    Gain,
    Head,
    HostArray,
    MuonMatrix,
    NesterovState,
    SortedTokens,
    Stats,
    Work,
)
from distgpt.core.ops.low_precision import BITS, from_bfloat16
from distgpt.core.ops.reference import OnHost, clipped

W = TypeVar("W")
WORTHWHILE = 1 << 17  # elements to read: below that, waking a worker takes longer than the work


class Operand(Generic[W]):
    """How to compute with one type of matrix, w (rows, k)."""

    def __init__(self, kernels: CpuKernels, pool: Pool, memory: WorkerMemory) -> None:
        self._kernels, self._pool, self._memory = kernels, pool, memory

    def linear(self, y: Array, x: Array, w: W, b: Array | None) -> None:
        """y ← x wᵀ + b"""
        raise NotImplementedError

    def lookup(self, w: W, tokens: Array) -> tuple[Array, Array]:
        """Return an array, and which of its rows these tokens have."""
        raise NotImplementedError

    def unpadded(self, w: W, vocab: int) -> W:
        """Return the output layer without its padding, so that only real tokens are scored."""
        raise NotImplementedError

    def to_host(self, w: W) -> HostArray:
        """Return the matrix as float32."""
        raise NotImplementedError


class Floats(Operand[Array]):
    """A matrix that is an array."""

    def linear(self, y: Array, x: Array, w: Array, b: Array | None) -> None:
        if len(x) <= self._kernels.few:
            grain = max(COLUMNS, WORTHWHILE // w.shape[1])
            self._pool.ranges(len(w), grain, blas.linear_few_rows, y, x, w, b)
        else:
            self._kernels.matmuls.forward(y, x, w, b)

    def lookup(self, w: Array, tokens: Array) -> tuple[Array, Array]:
        return w, tokens

    def unpadded(self, w: Array, vocab: int) -> Array:
        return w[:vocab]

    def to_host(self, w: Array) -> HostArray:
        return w


Operands = Mapping[type, type[Operand[Any]]]  # by type of matrix
OperandRows = Callable[[int, int, str], Array]  # of a count, columns and the type of packed weights
FLOATS: Operands = MappingProxyType({np.ndarray: Floats})


class CpuKernels(OnHost):
    """`threads` workers, the caller included; the BLAS runs inside each at one thread.

    `matmul` names what computes float32 matmuls: "own" kernels, "blas", or "auto", the one in a table.
    `operands` has what multiplies by each type of matrix; `rows` makes the decoder's memory for what that
    multiplies.
    """

    logits_bytes = 128 << 20
    slice_rows = 1024
    capabilities = Capabilities(overwrites_pre=True)  # no sums: each worker passes over rows of its own
    few = 3  # rows up to which a linear layer is bound by reading w
    loss_loop = staticmethod(rowwise.cross_entropy)
    polar: tuple[Loop, Callable[[int, int, str], muon.Memory]] = muon.orthogonalise, muon.scratch
    cache_dtype = "float32"  # of its keys and values

    def __init__(
        self,
        dtype: str = "float32",
        threads: int = 1,
        matmul: str = "auto",
        operands: Operands = FLOATS,
        rows: OperandRows = operand_rows,
    ) -> None:
        self.dtype = self.wide = np.dtype(dtype)
        self.threads = threads
        self._pool = pool_of(threads)
        self._memory = WorkerMemory(self._pool)
        self.operand_rows = rows
        self._operands = {kind: of(self, self._pool, self._memory) for kind, of in operands.items()}
        blas.single_threaded_blas()
        self.matmuls = self._matmuls(matmul)

    def _matmuls(self, matmul: str) -> Matmuls:
        return matmuls_for(self._pool, self.dtype, matmul)

    # -- workers

    def each(self, work: Callable[[int], None], count: int) -> None:
        self._pool.run(work, count)

    def run_together(self, work: Work) -> None:
        self._pool.run_together(work)

    def precisely(self, work: Work) -> None:
        work()

    # -- arrays

    def to_host(self, array: Array) -> HostArray:
        return self._operands[type(array)].to_host(array)

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
        wte, tokens = self._operands[type(wte)].lookup(wte, tokens)
        if wpe is not None and positions is not None:
            self._pool.ranges(len(x), ROWS, rowwise.embed_at_positions, x, tokens, wte, wpe, positions)
            return
        added = None if wpe is None else wpe[following(seq_len, start)]
        self._pool.ranges(len(x), ROWS, rowwise.embed, x, tokens, wte, added)

    def sort_tokens(self, tokens: Array, vocab: int) -> SortedTokens:
        return SortedTokens(tokens, None)

    def embed_backward(
        self,
        dwte: Array,
        dwpe: Array | None,
        dx: Array,
        tokens: SortedTokens,
        seq_len: int,
        positions: Array | None = None,
    ) -> None:
        columns = dwte.shape[1]
        of = dwte, dwpe, dx, tokens.tokens, seq_len, positions
        self._pool.ranges(columns, COLUMNS, rowwise.embed_backward, *of)

    def add_embedding(self, x: Array, tokens: Array, w: Array) -> None:
        w, tokens = self._operands[type(w)].lookup(w, tokens)
        self._pool.ranges(len(x), ROWS, rowwise.add_embedding, x, tokens, w)

    # -- norms

    def add_norm(
        self, y: Array, s: Array, stats: Stats, x: Array, r: Array | None, wb: Gain, eps: float
    ) -> None:
        self._pool.ranges(len(y), ROWS, rowwise.add_norm, y, s, *stats, x, r, *wb, eps)

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
        self._pool.ranges(len(dx), ROWS, rowwise.norm_backward, dx, y, dy, dres, s, *stats, *wb)

    def norm_backward_weights(
        self, dwb: Affine, sums: Array | None, dy: Array, s: Array, stats: Stats, accumulate: bool
    ) -> None:
        self._pool.ranges(s.shape[1], COLUMNS, rowwise.norm_backward_weights, *dwb, dy, s, *stats, accumulate)

    # -- linear layers

    def linear(self, y: Array, x: Array, wb: Affine, onto: Array | None = None) -> None:
        self._operands[type(wb.w)].linear(y, x, *wb)
        if onto is not None:
            self.add(y, y, onto)

    def linear_backward(self, dx: Array, dy: Array, w: Array) -> None:
        self.matmuls.backward(dx, dy, w)

    def linear_backward_weights(
        self, dwb: Affine, dy: Array, x: Array, accumulate: bool, sums: Array | None = None
    ) -> None:
        dw, db = dwb
        self.matmuls.backward_weights(dw, dy, x, accumulate)
        if db is not None:
            self._pool.ranges(dy.shape[1], COLUMNS, rowwise.sum_rows, db, dy, accumulate)

    def add_low_rank(self, y: Array, w: Array, b: Array | None, a: Array | None, scale: float) -> None:
        if b is None or a is None:
            self._pool.ranges(len(y), ROWS, low_rank.copy, y, w)
            return
        columns = y.shape[1]
        most = max(low_rank.LEAST_ROWS, low_rank.SUMS_BYTES // (columns * self.wide.itemsize))

        def some(first: int, last: int) -> None:
            memory = self._memory.of(np.empty, (most, columns), self.wide.name)
            for top in range(first, last, most):
                bottom = min(top + most, last)
                sums = memory[: bottom - top]
                self.matmuls.backward(sums, b[top:bottom], a)
                low_rank.add(top, bottom, y, w, sums, scale)

        self._pool.ranges(len(y), ROWS, some)

    def linear_act(self, y: Array, pre: Array, x: Array, wb: Affine, act: str) -> None:
        self.linear(pre, x, wb)
        forward = activations.FORWARD[act]
        self._pool.ranges(len(y), ROWS, forward, y, pre)

    def linear_backward_act(
        self, dpre: Array, y: Array, dy: Array, w: Array, pre: Array, act: str, again: bool, db: Bias = None
    ) -> None:
        """Work in place, as a loop over dpre and pre would not vectorize where they are one. y is free."""
        assert db is None
        self.linear_backward(y, dy, w)
        backward = activations.BACKWARD[act]
        self._pool.ranges(len(y), ROWS, backward, y, dpre)

    # -- attention

    def rope(
        self, qkv: Array, angles: Angles, heads: int, seq_len: int, start: Array | None, inverse: bool
    ) -> None:
        cos, sin = (table[following(seq_len, start)] for table in angles)
        self._pool.ranges(len(qkv), ROWS, attention.rope, qkv, cos, sin, heads, inverse)

    def qk_norm(self, qkv: Array, rstd: Array, head: int, eps: float) -> None:
        self._pool.ranges(len(qkv), ROWS, attention.qk_norm, qkv, rstd, head, eps)

    def qk_norm_backward(self, dqkv: Array, qkv: Array, rstd: Array, head: int) -> None:
        self._pool.ranges(len(qkv), ROWS, attention.qk_norm_backward, dqkv, qkv, rstd, head)

    def qk_norm_gain(self, qkv: Array, xhat: Array, rstd: Array, gain: Array, eps: float) -> None:
        self._pool.ranges(len(qkv), ROWS, attention.qk_norm_gain, qkv, xhat, rstd, gain, eps)

    def qk_norm_gain_backward(self, dqkv: Array, dgain: Array, xhat: Array, rstd: Array, gain: Array) -> None:
        self._pool.ranges(len(dqkv), ROWS, attention.qk_norm_gain_backward, dqkv, dgain, xhat, rstd, gain)

    def sum_rows(self, total: Array, x: Array, accumulate: bool) -> None:
        self._pool.ranges(x.shape[1], COLUMNS, rowwise.sum_rows, total, x, accumulate)

    def attention(
        self,
        y: Array,
        lse: Array,
        qkv: Array,
        seq_len: int,
        positions: Array | None = None,
        window: int = 0,
    ) -> None:
        n_head, n_seq = lse.shape[1], len(y) // seq_len
        size, seen = y.shape[1] // n_head, window or seq_len

        def some(i: int, j: int) -> None:
            scratch = self._memory.of(
                attention.forward_scratch, seq_len, size, self.dtype.name, self.wide.name
            )
            attention.attention(i, j, y, lse, qkv, seq_len, scratch, positions, seen)

        self._pool.ranges(n_seq * n_head, 1, some)

    def attention_backward(
        self,
        dqkv: Array,
        dy: Array,
        y: Array,
        lse: Array,
        qkv: Array,
        seq_len: int,
        db: Bias = None,
        positions: Array | None = None,
        window: int = 0,
    ) -> None:
        assert db is None
        size, seen = y.shape[1] // lse.shape[1], window or seq_len
        kv_heads = (qkv.shape[1] - y.shape[1]) // (2 * size)

        def some(i: int, j: int) -> None:
            scratch = self._memory.of(
                attention.backward_scratch, seq_len, size, self.dtype.name, self.wide.name
            )
            attention.attention_backward(i, j, dqkv, dy, y, lse, qkv, seq_len, scratch, positions, seen)

        self._pool.ranges(len(y) // seq_len * kv_heads, 1, some)

    def attention_cached(
        self,
        y: Array,
        cache: Array,
        qkv: Array,
        start: Array,
        window: int = 0,
        lanes: Array | None = None,
    ) -> None:
        _, count, kv_heads, length, size = cache.shape
        n_seq = count if lanes is None else len(lanes)
        lane_starts = np.empty((2, n_seq), np.int64)
        lane_starts[0], lane_starts[1] = start, np.arange(n_seq) if lanes is None else lanes
        seen = window or length

        def some(i: int, j: int) -> None:
            scratch = self._memory.of(
                attention.forward_scratch, length, size, self.dtype.name, self.wide.name
            )
            attention.attention_cached(i, j, y, cache, qkv, lane_starts, scratch, seen)

        read = 2 * (int(lane_starts[0].max()) + len(y) // n_seq) * size
        self._pool.ranges(n_seq * kv_heads, max(1, WORTHWHILE // read), some)

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
        """Leave out rows that are not learned, and padding, of the scratch memory too."""
        # Rows without a target need no logits, and the head is the largest matmul of all.
        learned = np.flatnonzero(targets != IGNORED)
        n, few = len(learned), len(learned) < len(x)
        if few:
            x, targets = x[learned], targets[learned]
        vocab = head.vocab
        w, dw = self._operands[type(head.w)].unpadded(head.w, vocab), None if dw is None else dw[:vocab]
        packed = head.logits.reshape(-1)[: len(head.logits) * vocab].reshape(-1, vocab)
        for start in range(0, n, len(packed)):
            rows = slice(start, min(n, start + len(packed)))
            chunk = packed[: rows.stop - start]
            self.linear(chunk, x[rows], Affine(w, None))
            of_rows = losses[rows], targets[rows], chunk, scale, dx is not None
            self._pool.ranges(len(chunk), ROWS, self.loss_loop, *of_rows)
            if dx is not None:
                self.linear_backward(dx[rows], chunk, w)
            if dw is not None:
                self.linear_backward_weights(Affine(dw, None), chunk, x[rows], accumulate or start > 0)
        if dw is not None and not n and not accumulate:
            dw[...] = 0
        for out in (losses, dx) if few else ():
            if out is not None:
                found = out[:n].copy()
                out[...] = 0
                out[learned] = found

    def sum(self, total: Array, x: Array, scale: float, accumulate: bool) -> None:
        total[0] = scale * x.sum(dtype=np.float64) + (total[0] if accumulate else 0.0)

    # -- optimizer

    def sum_squares(self, total: Array, g: Array) -> None:
        pieces = np.empty(-(-len(g) // PIECE))  # the same for any number of threads
        # Not self.squares: a profile counts calls of that, and would count this work twice.
        self._pool.ranges(len(pieces), 1, flat.squares, pieces, g)
        total[0] = pieces.sum()

    def squares(self, pieces: Array, g: Array) -> None:
        self._pool.ranges(len(pieces), 1, flat.squares, pieces, g)

    def add_up(self, total: Array, pieces: Array) -> None:
        total[0] = pieces.sum()

    def adamw(self, state: AdamState, norm: Array, scalars: Array, constants: AdamConstants) -> None:
        # The norm is read here, on the host: an update that is not finite must not begin.
        scale, groups = clipped(norm, scalars), scalars[3:].reshape(-1, 2)
        if scale is not None:
            step = scale, float(scalars[2])
            self._pool.ranges(len(state.p), PIECE, flat.adamw, *state, step, groups, tuple(constants))

    def muon_momentum(self, m: Sequence[Array], g: Sequence[Array], norm: Array, scalars: Array) -> None:
        scale = clipped(norm, scalars)
        if scale is None:
            return
        for mi, gi in zip(m, g, strict=True):
            self._pool.ranges(len(mi), PIECE, muon.momentum, mi, gi, scale, float(scalars[2]))

    def orthogonalise(self, updates: Sequence[Array]) -> None:
        # A matrix is one worker's. The largest begin, so that none is left alone with one at the end.
        largest_first = sorted(updates, key=lambda u: muon.order(u.shape))
        coefficients, (loop, make) = np.array(POLAR), self.polar

        def one(i: int) -> None:
            u = largest_first[i]
            loop(u, self._memory.of(make, *sorted(u.shape), self.wide.name), coefficients)

        self._pool.run(one, len(updates))

    def orthogonalise_bytes(self, shapes: Sequence[tuple[int, ...]]) -> int:
        largest_first = sorted(shapes, key=muon.order)
        own = [largest_first[worker :: self.threads] for worker in range(self.threads)]  # as the pool shares
        sides = ((low, long) for some in own for low, long in {(min(shape), max(shape)) for shape in some})
        return sum(muon.bytes_of(self.polar[1](low, long, self.wide.name)) for low, long in sides)

    def muon(self, matrices: Sequence[MuonMatrix], norm: Array, scalars: Array, beta2: float) -> None:
        if clipped(norm, scalars) is None:
            return
        rate, decay = map(float, scalars[3:])

        def one(i: int) -> None:
            rows, columns = matrices[i].p.shape
            muon.step(*matrices[i], rate * max(1.0, rows / columns) ** 0.5, decay, beta2)

        self._pool.run(one, len(matrices))

    def subtract(self, y: Array, a: Array, b: Array) -> None:
        self._pool.ranges(len(y), PIECE, flat.subtract, y, a, b)

    def nesterov(self, state: NesterovState, scale: float, lr: float, momentum: float) -> None:
        self._pool.ranges(len(state.p), PIECE, flat.nesterov, *state, (scale, lr, momentum))


def following(seq_len: int, start: Array | None) -> slice | Array:
    """Return the rows of a table of positions for the tokens of a sequence, or of all where they differ."""
    if start is not None and len(start) > 1:
        return (start[:, None] + np.arange(seq_len)).ravel()
    first = 0 if start is None else int(start[0])
    return slice(first, first + seq_len)


class Bfloat16Kernels(CpuKernels):
    """CpuKernels whose `dtype` is bfloat16: float32 sums and weights, everything between layers in 16 bits.

    Arrays of `dtype` are of type uint16 and hold bits, as NumPy has no bfloat16. Matmuls are our own.
    """

    logits_bytes = 64 << 20
    few = 4
    loss_loop = staticmethod(rowwise.cross_entropy_narrow)
    polar = muon.orthogonalise_low, muon.low_scratch
    cache_dtype = BITS.name

    def __init__(self, threads: int = 1) -> None:
        super().__init__("float32", threads)
        self.dtype = BITS

    def _matmuls(self, matmul: str) -> Matmuls:
        return OwnMatmuls(self._pool, BITS)

    # -- arrays

    def to_host(self, array: Array) -> HostArray:
        return from_bfloat16(array) if array.dtype == BITS else array

    def put(self, array: Array, host: HostArray) -> None:
        if array.dtype != BITS:
            array[...] = host
            return
        flat = np.ascontiguousarray(host, np.float32).reshape(-1)
        low = np.empty(len(flat), BITS)
        self.cast_down(low, flat)
        array[...] = low.reshape(np.shape(host))

    def cast_down(self, low: Array, wide: Array) -> None:
        self._pool.ranges(len(low), PIECE, rowwise.rounded, low, wide)

    def add(self, y: Array, a: Array, b: Array) -> None:
        if y.dtype == BITS:
            self._pool.ranges(y.size, PIECE, rowwise.add, *(x.reshape(-1) for x in (y, a, b)))
        else:
            super().add(y, a, b)
