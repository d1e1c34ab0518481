"""The operations on CPU cores: compiled loops and matmuls, split over the threads of one pool.

Float32 and float64 (CpuKernels), and bfloat16 between layers (Bfloat16Kernels).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import numpy as np

from distgpt.core.cpu.compiling.barrier import Member
from distgpt.core.cpu.compiling.jit import Loop
from distgpt.core.cpu.fused import activations, attention, flat, muon, rowwise
from distgpt.core.cpu.matmul import blas
from distgpt.core.cpu.matmul.layers import Matmuls, OwnMatmuls, matmuls_for
from distgpt.core.cpu.pool import COLUMNS, ROWS, Pool, WorkerMemory, pool_of
from distgpt.core.cpu.teams import Shape, Team, by_job, run_in_teams, share_out
from distgpt.core.ops.api import (
    IGNORED,
    PIECE,
    POLAR,
    AdamConstants,
    AdamState,
    Affine,
    Angles,
    Array,
    AttentionMask,
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
from distgpt.core.ops.kernels import Kernels
from distgpt.core.ops.low_precision import BITS, from_bfloat16

W = TypeVar("W")
WORTHWHILE = 1 << 17  # elements to read: below that, waking a worker takes longer than the work


class Operand(Generic[W]):
    """Computes with one type of matrix, w (rows, k)."""

    def __init__(self, kernels: CpuKernels, pool: Pool, memory: WorkerMemory) -> None:
        self._kernels = kernels
        self._pool = pool
        self._memory = memory

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
        if len(x) <= self._kernels.unpacked_rows:
            grain = max(COLUMNS, WORTHWHILE // w.shape[1])
            self._pool.split_range(len(w), grain, blas.linear_few_rows, y, x, w, b)
        else:
            self._kernels.matmuls.forward(y, x, w, b)

    def lookup(self, w: Array, tokens: Array) -> tuple[Array, Array]:
        return w, tokens

    def unpadded(self, w: Array, vocab: int) -> Array:
        return w[:vocab]

    def to_host(self, w: Array) -> HostArray:
        return w


Operands = Mapping[type, type[Operand[Any]]]  # by type of matrix
Recorder = Callable[["CpuKernels", Work], Work]  # graphs/capture.py, which imports this file
FLOATS: Operands = MappingProxyType({np.ndarray: Floats})


class CpuKernels(Kernels):
    """`threads` workers, the caller included; the BLAS runs inside each at one thread.

    `matmul` names what computes float32 matmuls: "own" kernels, "blas", or "auto", the one in a table.
    `operands` has what multiplies by each type of matrix. `record` returns a faster version of some work.
    """

    # 667 rows of GPT-2's vocabulary: sgemm is 1.8 times as fast with 512 rows as with 64 (performance.md).
    logits_bytes = 128 << 20
    slice_rows = 1024
    capabilities = Capabilities(overwrites_pre=True)  # no sums: each worker passes over rows of its own
    unpacked_rows = 3  # up to which a linear layer is bound by reading w, so that no packing pays
    loss_loop = staticmethod(rowwise.cross_entropy)
    polar: tuple[Loop, Callable[[int, int, str, int, int], muon.Memory]] = muon.orthogonalise, muon.scratch

    def __init__(
        self,
        dtype: str = "float32",
        threads: int = 1,
        matmul: str = "auto",
        operands: Operands = FLOATS,
        record: Recorder | None = None,
    ) -> None:
        # Between layers, and of weights, statistics and sums: the same but in bfloat16.
        self.dtype = self.wide = np.dtype(dtype)
        self.threads = threads
        self._record = record
        self._pool = pool_of(threads)
        self._memory = WorkerMemory(self._pool)
        self._operands = {kind: of(self, self._pool, self._memory) for kind, of in operands.items()}
        blas.single_threaded_blas()  # two pools of threads would fight for the same cores
        self.matmuls = self._matmuls(matmul)
        self._polar_cost = muon.blas_cost if dtype == "float32" else muon.whole_cost
        self._polar_steps = np.array(POLAR)

    def _matmuls(self, matmul: str) -> Matmuls:
        return matmuls_for(self._pool, self.dtype, matmul)

    # -- workers

    def each(self, work: Callable[[int], None], count: int) -> None:
        self._pool.run_parts(work, count)

    def run_together(self, work: Work) -> None:
        self._pool.run_together(work)

    def record(self, work: Work) -> Work:
        return self._record(self, work) if self._record else work

    # -- arrays

    def zero(self, x: Array) -> None:
        self._pool.split_range(x.size, PIECE, flat.zero, flattened(x))

    def add(self, y: Array, a: Array, b: Array) -> None:
        self._pool.split_range(y.size, PIECE, rowwise.add, flattened(y), a.reshape(-1), b.reshape(-1))

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
            self._pool.split_range(len(x), ROWS, rowwise.embed_at_positions, x, tokens, wte, wpe, positions)
            return
        added = None if wpe is None else wpe[following(seq_len, start)]
        self._pool.split_range(len(x), ROWS, rowwise.embed, x, tokens, wte, added)

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
        self._pool.split_range(columns, COLUMNS, rowwise.embed_backward, *of)

    def add_embedding(self, x: Array, tokens: Array, w: Array) -> None:
        w, tokens = self._operands[type(w)].lookup(w, tokens)
        self._pool.split_range(len(x), ROWS, rowwise.add_embedding, x, tokens, w)

    # -- norms

    def add_norm(
        self, y: Array, s: Array, stats: Stats, x: Array, r: Array | None, wb: Gain, eps: float
    ) -> None:
        self._pool.split_range(len(y), ROWS, rowwise.add_norm, y, s, *stats, x, r, *wb, eps)

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
        self._pool.split_range(len(dx), ROWS, rowwise.norm_backward, dx, y, dy, dres, s, *stats, *wb)

    def norm_backward_weights(
        self, dwb: Affine, sums: Array | None, dy: Array, s: Array, stats: Stats, accumulate: bool
    ) -> None:
        self._pool.split_range(
            s.shape[1], COLUMNS, rowwise.norm_backward_weights, *dwb, dy, s, *stats, accumulate
        )

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
            self._pool.split_range(dy.shape[1], COLUMNS, rowwise.sum_rows, db, dy, accumulate)

    def add_low_rank(self, y: Array, w: Array, b: Array | None, a: Array | None, scale: float) -> None:
        from distgpt.core.cpu.fused import low_rank  # no plain model asks for it

        if b is None or a is None:
            self._pool.split_range(len(y), ROWS, low_rank.copy, y, w)
            return
        columns = y.shape[1]
        most = max(low_rank.LEAST_ROWS, low_rank.SUMS_BYTES // (columns * self.wide.itemsize))

        def some(first: int, last: int) -> None:
            memory = self._memory.scratch(np.empty, (most, columns), self.wide.name)
            for top in range(first, last, most):
                bottom = min(top + most, last)
                sums = memory[: bottom - top]
                self.matmuls.backward(sums, b[top:bottom], a)
                self._pool.call(low_rank.add, top, bottom, y, w, sums, scale)

        self._pool.split_range(len(y), ROWS, some)

    def linear_act(self, y: Array, pre: Array, x: Array, wb: Affine, act: str) -> None:
        self.linear(pre, x, wb)
        forward, _ = activations.loops(act)
        self._pool.split_range(len(y), ROWS, forward, y, pre)

    def linear_backward_act(
        self, dpre: Array, y: Array, dy: Array, w: Array, pre: Array, act: str, again: bool, db: Bias = None
    ) -> None:
        """Work in place, as a loop over dpre and pre would not vectorize where they are one. y is free."""
        assert db is None
        self.linear_backward(y, dy, w)
        _, backward = activations.loops(act)
        self._pool.split_range(len(y), ROWS, backward, y, dpre)

    # -- attention

    def rope(
        self, qkv: Array, angles: Angles, heads: int, seq_len: int, start: Array | None, inverse: bool
    ) -> None:
        cos, sin = (table[following(seq_len, start)] for table in angles)
        self._pool.split_range(len(qkv), ROWS, attention.rope, qkv, cos, sin, heads, inverse)

    def qk_norm(self, qkv: Array, rstd: Array, head: int, eps: float) -> None:
        self._pool.split_range(len(qkv), ROWS, attention.qk_norm, qkv, rstd, head, eps)

    def qk_norm_backward(self, dqkv: Array, qkv: Array, rstd: Array, head: int) -> None:
        self._pool.split_range(len(qkv), ROWS, attention.qk_norm_backward, dqkv, qkv, rstd, head)

    def qk_norm_gain(self, qkv: Array, xhat: Array, rstd: Array, gain: Array, eps: float) -> None:
        self._pool.split_range(len(qkv), ROWS, attention.qk_norm_gain, qkv, xhat, rstd, gain, eps)

    def qk_norm_gain_backward(self, dqkv: Array, dgain: Array, xhat: Array, rstd: Array, gain: Array) -> None:
        self._pool.split_range(
            len(dqkv), ROWS, attention.qk_norm_gain_backward, dqkv, dgain, xhat, rstd, gain
        )

    def sum_rows(self, total: Array, x: Array, accumulate: bool) -> None:
        self._pool.split_range(x.shape[1], COLUMNS, rowwise.sum_rows, total, x, accumulate)

    def attention(self, y: Array, lse: Array, qkv: Array, mask: AttentionMask) -> None:
        seq_len, positions, window = mask
        n_head = lse.shape[1]
        n_seq = len(y) // seq_len
        size = y.shape[1] // n_head
        seen = window or seq_len

        def some(i: int, j: int) -> None:
            scratch = self._memory.scratch(
                attention.forward_scratch, seq_len, size, self.dtype.name, self.wide.name
            )
            self._pool.call(attention.attention, i, j, y, lse, qkv, seq_len, scratch, positions, seen)

        self._pool.split_range(n_seq * n_head, 1, some)

    def attention_backward(
        self, dqkv: Array, dy: Array, y: Array, lse: Array, qkv: Array, mask: AttentionMask, db: Bias = None
    ) -> None:
        assert db is None
        seq_len, positions, window = mask
        size = y.shape[1] // lse.shape[1]
        seen = window or seq_len
        kv_heads = (qkv.shape[1] - y.shape[1]) // (2 * size)

        def some(i: int, j: int) -> None:
            scratch = self._memory.scratch(
                attention.backward_scratch, seq_len, size, self.dtype.name, self.wide.name
            )
            self._pool.call(
                attention.attention_backward, i, j, dqkv, dy, y, lse, qkv, seq_len, scratch, positions, seen
            )

        self._pool.split_range(len(y) // seq_len * kv_heads, 1, some)

    def attention_cached(
        self, y: Array, cache: Array, qkv: Array, start: Array, window: int = 0, slots: Array | None = None
    ) -> None:
        _, count, kv_heads, length, size = cache.shape
        n_seq = count if slots is None else len(slots)
        starts_and_slots = np.empty((2, n_seq), np.int64)
        starts_and_slots[0] = start
        starts_and_slots[1] = np.arange(n_seq) if slots is None else slots
        seen = window or length

        def some(i: int, j: int) -> None:
            scratch = self._memory.scratch(
                attention.forward_scratch, length, size, self.dtype.name, self.wide.name
            )
            self._pool.call(attention.attention_cached, i, j, y, cache, qkv, starts_and_slots, scratch, seen)

        read = 2 * (int(starts_and_slots[0].max()) + len(y) // n_seq) * size
        self._pool.split_range(n_seq * kv_heads, max(1, WORTHWHILE // read), some)

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
        """Leave out rows that are not learned: they need no logits, and the head is the largest matmul."""
        learned = np.flatnonzero(targets != IGNORED)
        n = len(learned)
        if n == len(x):
            every_cross_entropy(self, losses, dx, dw, x, head, targets, scale, accumulate)
            return
        every_cross_entropy(self, losses, dx, dw, x[learned], head, targets[learned], scale, accumulate)
        for out in (losses, dx):
            if out is not None:
                found = out[:n].copy()  # learned rows lie in front, and go where they belong
                out[...] = 0
                out[learned] = found

    def sum(self, total: Array, x: Array, scale: float, accumulate: bool) -> None:
        total[0] = scale * x.sum(dtype=np.float64) + (total[0] if accumulate else 0.0)

    # -- optimizer

    def sum_squares(self, total: Array, g: Array) -> None:
        pieces = np.empty(-(-len(g) // PIECE))  # the same for any number of threads
        # Not self.squares: a profile counts calls of that, and would count this work twice.
        self._pool.split_range(len(pieces), 1, flat.squares, pieces, g)
        total[0] = pieces.sum()

    def squares(self, pieces: Array, g: Array) -> None:
        self._pool.split_range(len(pieces), 1, flat.squares, pieces, g)

    def adamw(self, state: AdamState, norm: Array, scalars: Array, constants: AdamConstants) -> None:
        groups = scalars[3:].reshape(-1, 2)
        how = norm, scalars, groups, tuple(constants)
        self._pool.split_range(len(state.p), PIECE, flat.adamw, *state, *how)

    def muon_momentum(self, m: Sequence[Array], g: Sequence[Array], norm: Array, scalars: Array) -> None:
        pieces = [0, *accumulate(-(-len(mi) // PIECE) for mi in m)]  # where each array's begin

        def some(first: int, last: int) -> None:
            i = bisect_right(pieces, first) - 1
            while i < len(m) and pieces[i] < last:
                begin, end = PIECE * (max(first, pieces[i]) - pieces[i]), PIECE * (last - pieces[i])
                some_of_it = begin, min(end, len(m[i])), m[i], g[i]
                self._pool.call(muon.momentum, *some_of_it, norm, scalars)
                i += 1

        self._pool.split_range(pieces[-1], 1, some)

    def orthogonalise(self, updates: Sequence[Array]) -> None:
        shapes = tuple(u.shape for u in updates)
        loop, make = self.polar
        teams = share_out(shapes, self._pool.free_threads, self._polar_cost)
        # Made before the threads begin, as a team shares it; pages lie where they are first written to.
        memory = [
            self._memory.scratch(make, *self._polar_sizes(shapes[i], team), after=team.first)
            for i, team in by_job(teams)
        ]

        def one(i: int, member: Member) -> None:
            self._pool.call(loop, updates[i], memory[i][member.number], self._polar_steps, member)

        run_in_teams(self._pool, teams, one)

    def orthogonalise_bytes(self, shapes: Sequence[tuple[int, ...]]) -> int:
        teams = share_out(tuple(shapes), self.threads, self._polar_cost)
        kept = {(team.first, self._polar_sizes(shapes[i], team)) for i, team in by_job(teams)}
        return sum(muon.bytes_of(self.polar[1](*sizes)) for _, sizes in kept)

    def _polar_sizes(self, shape: Shape, team: Team) -> tuple[int, int, str, int, int]:
        """Return what `polar` makes memory from."""
        return min(shape), max(shape), self.wide.name, team.members, self._polar_cost(shape).most

    def muon(self, matrices: Sequence[MuonMatrix], norm: Array, scalars: Array, beta2: float) -> None:
        shapes = tuple(matrix.p.shape for matrix in matrices)
        teams = share_out(shapes, self._pool.free_threads, muon.step_cost)
        sums = [
            self._memory.scratch(np.empty, (2, shapes[i][0]), "float64", after=team.first)
            for i, team in by_job(teams)
        ]

        def one(i: int, member: Member) -> None:
            rows, columns = shapes[i]
            of_shape = max(1.0, rows / columns) ** 0.5
            how = norm, scalars, of_shape, beta2, sums[i], member
            self._pool.call(muon.step, *matrices[i], *how)

        run_in_teams(self._pool, teams, one)

    def subtract(self, y: Array, a: Array, b: Array) -> None:
        self._pool.split_range(len(y), PIECE, flat.subtract, y, a, b)

    def nesterov(self, state: NesterovState, scale: float, lr: float, momentum: float) -> None:
        self._pool.split_range(len(state.p), PIECE, flat.nesterov, *state, (scale, lr, momentum))


def every_cross_entropy(
    k: CpuKernels,
    losses: Array,
    dx: Array | None,
    dw: Array | None,
    x: Array,
    head: Head,
    targets: Array,
    scale: float,
    accumulate: bool,
) -> None:
    """Compute the same where all rows have a target. Leave out padding, of the scratch memory too."""
    n = len(x)
    vocab = head.vocab
    w = k._operands[type(head.w)].unpadded(head.w, vocab)
    dw = None if dw is None else dw[:vocab]
    packed = head.logits.reshape(-1)[: len(head.logits) * vocab].reshape(-1, vocab)
    for start in range(0, n, len(packed)):
        rows = slice(start, min(n, start + len(packed)))
        chunk = packed[: rows.stop - start]
        k.linear(chunk, x[rows], Affine(w, None))
        of_rows = losses[rows], targets[rows], chunk, scale, dx is not None
        k._pool.split_range(len(chunk), ROWS, k.loss_loop, *of_rows)
        if dx is not None:
            k.linear_backward(dx[rows], chunk, w)
        if dw is not None:
            k.linear_backward_weights(Affine(dw, None), chunk, x[rows], accumulate or start > 0)
    if dw is not None and not n and not accumulate:
        dw[...] = 0


def flattened(x: Array) -> Array:
    """Return the same memory as one row."""
    assert x.flags.c_contiguous, "what is written to a copy is lost"
    return x.reshape(-1)


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

    logits_bytes = 64 << 20  # the same rows, at half the bytes
    unpacked_rows = 4
    loss_loop = staticmethod(rowwise.cross_entropy_bfloat16)
    polar = muon.orthogonalise_bfloat16, muon.bfloat16_scratch

    def __init__(self, threads: int = 1, record: Recorder | None = None) -> None:
        super().__init__("float32", threads, record=record)
        self.dtype = BITS
        self._polar_cost = muon.polar_cost  # by our own matmuls, in which rows are alike however they are cut

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
        self._pool.split_range(len(low), PIECE, rowwise.rounded, low, wide)
