"""Operations on CPU cores: compiled loops and matmuls, split over the threads of one pool.

CpuKernels computes in float32 or float64; Bfloat16Kernels stores values between layers in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from distgpt.core.cpu.compiling.barrier import Member
from distgpt.core.cpu.compiling.jit import Loop
from distgpt.core.cpu.fused import activations, attention, flat, muon, rowwise
from distgpt.core.cpu.matmul import blas
from distgpt.core.cpu.matmul.layers import Matmuls, OwnMatmuls, matmuls_for
from distgpt.core.cpu.pool import COLUMNS, ROWS, WorkerMemory, pool_of
from distgpt.core.cpu.teams import Shape, Team, by_job, run_in_teams, share_out
from distgpt.core.ops.api import (
    IGNORE_INDEX,
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

WORTHWHILE = 1 << 17  # elements to read; for fewer, waking a worker takes longer than the work


Recorder = Callable[["CpuKernels", Work], Work]  # a function of graphs/capture.py, which imports this file


class CpuKernels(Kernels):
    """Kernels on `threads` workers, including the caller. Each calls the BLAS with a single thread.

    `matmul` selects float32 matmuls: "own" kernels, "blas", or "auto", which looks them up in a table.
    `record` returns a faster version of some work. A subclass may have matrices of other types; its
    `_matmul`, `_lookup`, `_unpadded` and `to_host` must then accept them.
    """

    # 667 rows of GPT-2's vocabulary: sgemm is 1.8x as fast with 512 rows as with 64 (performance.md).
    logits_bytes = 128 << 20
    slice_rows = 1024
    capabilities = Capabilities(overwrites_pre=True)  # no bias sums because each worker has its own rows
    unpacked_rows = 3  # rows up to which reading w is the bottleneck, so packing does not pay
    loss_loop = staticmethod(rowwise.cross_entropy)
    polar: tuple[Loop, Callable[[int, int, str, int, int], muon.Memory]] = muon.orthogonalise, muon.scratch

    def __init__(
        self,
        dtype: str = "float32",
        threads: int = 1,
        matmul: str = "auto",
        record: Recorder | None = None,
    ) -> None:
        # In this class, the type between layers is also the type of weights, statistics and sums.
        self.dtype = self.accum_dtype = np.dtype(dtype)
        self.threads = threads
        self._record = record
        self._pool = pool_of(threads)
        self._memory = WorkerMemory(self._pool)
        blas.single_threaded_blas()  # two thread pools would compete for the same cores
        self.matmuls: Matmuls = matmuls_for(self._pool, self.accum_dtype, matmul)
        self.polar_cost = muon.blas_cost if dtype == "float32" else muon.whole_cost
        self._polar_steps = np.array(POLAR)

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

    # -- methods that depend on a matrix's type

    def _matmul(self, y: Array, x: Array, w: Any, b: Array | None) -> None:
        """y ← x wᵀ + b"""
        if len(x) <= self.unpacked_rows:
            grain = max(COLUMNS, WORTHWHILE // w.shape[1])
            self._pool.split_range(len(w), grain, blas.linear_few_rows, y, x, w, b)
        else:
            self.matmuls.forward(y, x, w, b)

    def _lookup(self, w: Any, tokens: Array) -> tuple[Array, Array]:
        """Return an array and the row indices of these tokens."""
        return w, tokens

    def _unpadded(self, w: Any, vocab: int) -> Any:
        """Return the output layer without its padding, so that only real tokens have logits."""
        return w[:vocab]

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
        wte, tokens = self._lookup(wte, tokens)
        if wpe is None:
            positions = None
        elif positions is None:
            wpe = wpe[following(seq_len, start)]
        self._pool.split_range(len(x), ROWS, rowwise.embed, x, tokens, wte, wpe, positions)

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
        w, tokens = self._lookup(w, tokens)
        self._pool.split_range(len(x), ROWS, rowwise.add_embedding, x, tokens, w)

    def previous_tokens(
        self,
        out: Array,
        tokens: Array,
        seq_len: int,
        before: Array | None,
        positions: Array | None = None,
    ) -> None:
        of = out, tokens, seq_len, before, positions
        self._pool.split_range(len(out), ROWS, rowwise.previous_tokens, *of)

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
        self._matmul(y, x, *wb)
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

    def add_low_rank(self, y: Array, w: Any, b: Array | None, a: Array | None, scale: float) -> None:
        """`w` may have another format, with its own loop as `addition`."""
        is_plain = isinstance(w, np.ndarray)
        loop, arrays = (flat.add_low_rank, (w,)) if is_plain else w.addition
        if is_plain and b is None:
            self._pool.split_range(len(y), ROWS, flat.copy_rows, y, w)
            return
        columns = y.shape[1]
        most = max(flat.LEAST_ROWS, flat.SUMS_BYTES // (columns * self.accum_dtype.itemsize))

        def some(first: int, last: int) -> None:
            memory = self._memory.scratch(np.empty, (most, columns), self.accum_dtype.name)
            for top in range(first, last, most):
                bottom = min(top + most, last)
                sums = memory[: bottom - top]
                if b is None or a is None:
                    self._pool.call(flat.zero, 0, sums.size, sums.reshape(-1))
                else:
                    self.matmuls.backward(sums, b[top:bottom], a)
                self._pool.call(loop, top, bottom, y, *arrays, sums, scale)

        self._pool.split_range(len(y), ROWS, some)

    def linear_act(self, y: Array, pre: Array, x: Array, wb: Affine, act: str) -> None:
        self.linear(pre, x, wb)
        forward, _ = activations.loops(act)
        self._pool.split_range(len(y), ROWS, forward, y, pre)

    def linear_backward_act(
        self, dpre: Array, y: Array, dy: Array, w: Array, pre: Array, act: str, again: bool, db: Bias = None
    ) -> None:
        """Compute in place: a loop over separate dpre and pre would not vectorize if equal. y is scratch."""
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
        n_head = lse.shape[1]
        of = attention.attention, attention.forward_scratch, y.shape[1] // n_head, mask
        self._by_heads(len(y) // mask.seq_len * n_head, 1, *of, y, lse, qkv)

    def attention_backward(
        self, dqkv: Array, dy: Array, y: Array, lse: Array, qkv: Array, mask: AttentionMask, db: Bias = None
    ) -> None:
        assert db is None
        size = y.shape[1] // lse.shape[1]
        kv_heads = (qkv.shape[1] - y.shape[1]) // (2 * size)
        of = attention.attention_backward, attention.backward_scratch, size, mask
        self._by_heads(len(y) // mask.seq_len * kv_heads, 1, *of, dqkv, dy, y, lse, qkv)

    def attention_cached(
        self, y: Array, cache: Array, qkv: Array, start: Array, window: int = 0, slots: Array | None = None
    ) -> None:
        _, count, kv_heads, length, size = cache.shape
        n_seq = count if slots is None else len(slots)
        starts_and_slots = np.empty((2, n_seq), np.int64)
        starts_and_slots[0] = start
        starts_and_slots[1] = np.arange(n_seq) if slots is None else slots
        read = 2 * (int(starts_and_slots[0].max()) + len(y) // n_seq) * size
        mask = AttentionMask(length, None, window)
        of = attention.attention_cached, attention.forward_scratch, size, mask
        self._by_heads(n_seq * kv_heads, max(1, WORTHWHILE // read), *of, y, cache, qkv, starts_and_slots)

    def _by_heads(
        self,
        units: int,
        grain: int,
        loop: Loop,
        make: Callable[..., object],
        size: int,
        mask: AttentionMask,
        *arrays: Array,
    ) -> None:
        """Split the heads of sequences, with `size` elements per row. Each worker has separate scratch."""
        mask = mask._replace(window=mask.window or mask.seq_len)

        def some(i: int, j: int) -> None:
            scratch = self._memory.scratch(make, mask.seq_len, size, self.dtype.name, self.accum_dtype.name)
            self._pool.call(loop, i, j, *arrays, mask, scratch)

        self._pool.split_range(units, grain, some)

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
        """Skip rows without a target, which need no logits: the head is the largest matmul."""
        learned = np.flatnonzero(targets != IGNORE_INDEX)
        n = len(learned)
        if n == len(x):
            every_cross_entropy(self, losses, dx, dw, x, head, targets, scale, accumulate)
            return
        every_cross_entropy(self, losses, dx, dw, x[learned], head, targets[learned], scale, accumulate)
        for out in (losses, dx):
            if out is not None:
                result = out[:n].copy()  # learned rows are first; move them to their places
                out[...] = 0
                out[learned] = result

    def sum(self, total: Array, x: Array, scale: float, accumulate: bool) -> None:
        total[0] = scale * x.sum(dtype=np.float64) + (total[0] if accumulate else 0.0)

    # -- optimizer

    def sum_squares(self, total: Array, g: Array) -> None:
        pieces = np.empty(-(-len(g) // PIECE))  # same pieces for any number of threads
        # Do not call self.squares: a profile would count this work twice.
        self._pool.split_range(len(pieces), 1, flat.squares, pieces, g)
        total[0] = pieces.sum()

    def squares(self, pieces: Array, g: Array) -> None:
        self._pool.split_range(len(pieces), 1, flat.squares, pieces, g)

    def adamw(self, state: AdamState, norm: Array, scalars: Array, constants: AdamConstants) -> None:
        groups = scalars[3:].reshape(-1, 2)
        how = norm, scalars, groups, tuple(constants)
        self._pool.split_range(len(state.p), PIECE, flat.adamw, *state, *how)

    def muon_momentum(self, m: Sequence[Array], g: Sequence[Array], norm: Array, scalars: Array) -> None:
        for mi, gi in zip(m, g, strict=True):
            self._pool.split_range(len(mi), PIECE, muon.momentum, mi, gi, norm, scalars)

    def orthogonalise(self, updates: Sequence[Array]) -> None:
        shapes = tuple(u.shape for u in updates)
        loop, make = self.polar
        teams = share_out(shapes, self._pool.free_threads, self.polar_cost)
        # Made before the threads start because a team shares it. Its pages are placed at the first write.
        memory = [
            self._memory.scratch(make, *self._polar_sizes(shapes[i], team), after=team.first)
            for i, team in by_job(teams)
        ]

        def one(i: int, member: Member) -> None:
            self._pool.call(loop, updates[i], memory[i][member.number], self._polar_steps, member)

        run_in_teams(self._pool, teams, one)

    def orthogonalise_bytes(self, shapes: Sequence[tuple[int, ...]]) -> int:
        teams = share_out(tuple(shapes), self.threads, self.polar_cost)
        kept = {(team.first, self._polar_sizes(shapes[i], team)) for i, team in by_job(teams)}
        return sum(muon.bytes_of(self.polar[1](*sizes)) for _, sizes in kept)

    def _polar_sizes(self, shape: Shape, team: Team) -> tuple[int, int, str, int, int]:
        """Return the arguments for `polar`'s scratch memory."""
        return min(shape), max(shape), self.accum_dtype.name, team.members, self.polar_cost(shape).most

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
    """Compute the loss if all rows have a target. Skip padding, also in the scratch memory."""
    n = len(x)
    vocab = head.vocab
    w = k._unpadded(head.w, vocab)
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
    assert x.flags.c_contiguous, "writes to a copy would be lost"
    return x.reshape(-1)


def following(seq_len: int, start: Array | None) -> slice | Array:
    """Return the rows of a position table for a sequence's tokens, or for all tokens if starts differ."""
    if start is not None and len(start) > 1:
        return (start[:, None] + np.arange(seq_len)).ravel()
    first = 0 if start is None else int(start[0])
    return slice(first, first + seq_len)


class Bfloat16Kernels(CpuKernels):
    """CpuKernels with bfloat16 as `dtype`: float32 sums and weights, 16 bits between layers.

    NumPy has no bfloat16, so arrays of `dtype` hold its bits as uint16. All matmuls are our own.
    """

    logits_bytes = 64 << 20  # the same number of rows at half the bytes
    unpacked_rows = 4
    loss_loop = staticmethod(rowwise.cross_entropy_bfloat16)
    polar = muon.orthogonalise_bfloat16, muon.bfloat16_scratch

    def __init__(self, threads: int = 1, record: Recorder | None = None) -> None:
        super().__init__("float32", threads, record=record)
        self.dtype = BITS
        self.matmuls = OwnMatmuls(self._pool, BITS)
        self.polar_cost = muon.bfloat16_cost

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
