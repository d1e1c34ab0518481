"""Reference implementation of every operation of the model in NumPy, with shapes and formulas.

Every fast kernel, on CPUs and GPUs, is tested against this file.

Outputs come first, except `db`. They are overwritten unless `accumulate` is true or the docstring specifies
otherwise. Operations do not allocate memory or wait, so a backend can record and replay them. The methods
that create arrays or copy them to the host come first.

B sequences of T tokens are N = B·T consecutive rows; C channels, H heads, V tokens in the vocabulary. None
means that the architecture does not have this part.

`start` int32 is the context position of a pass's first token: (1,) for all sequences, (B,) for each; None: 0.
`positions` (N,) int32 is the position of each row in its document, for packed documents that do not attend to
each other. If it is None, each sequence is one document (n mod T).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import DTypeLike

from distgpt.core.ops.activations import ACTIVATIONS
from distgpt.core.ops.api import (
    ALL_ROWS,
    IGNORE_INDEX,
    PIECE,
    POLAR,
    QK_SCALE,
    TINY,
    AdamConstants,
    AdamState,
    Affine,
    Angles,
    Array,
    AttentionMask,
    Bias,
    Capabilities,
    Doubles1d,
    Doubles2d,
    Floats1d,
    Floats2d,
    Floats5d,
    Gain,
    Head,
    HostArray,
    Ints1d,
    Ints2d,
    MuonMatrix,
    NesterovState,
    SortedTokens,
    Stats,
    Wide1d,
    Wide2d,
    Wire,
    Work,
)


class Kernels:
    """A backend, with its arrays, workers and operations; this one defines them in plain NumPy.

    Fast kernels override them. This class runs in float64 for checks, and in float32.
    """

    dtype: np.dtype  # type of activations, and of parameters that a matmul reads
    accum_dtype: np.dtype  # type of sums, master weights and moments: float32, or float64 if `dtype` is
    threads = 1
    logits_bytes = 1 << 20  # maximum memory of the loss for logits, in bytes
    # minimum rows per slice if a worker has multiple slices, whose results stay in a cache
    slice_rows = ALL_ROWS
    capabilities = Capabilities(sums_bias_gradients=True)
    wire: Wire | None = None  # only if arrays are not in host memory

    def __init__(self, dtype: str = "float64") -> None:
        self.dtype = self.accum_dtype = np.dtype(dtype)

    # -- arrays and workers

    def _new(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        """Allocate a zeroed array for all other methods."""
        return np.zeros(shape, dtype)

    def zeros(self, *shape: int) -> Array:
        """Return a zeroed array of `dtype`. Only at construction time, like the next three methods."""
        return self._new(shape, self.dtype)

    def accum_zeros(self, *shape: int) -> Array:
        """Return a zeroed array of `accum_dtype`."""
        return self._new(shape, self.accum_dtype)

    def scalars(self, count: int) -> Array:
        """Return a zeroed array of float64."""
        return self._new((count,), np.float64)

    def integers(self, host: HostArray | Sequence[int], dtype: str = "int32") -> Array:
        """Return an array with integers from the host, such as token ids or offsets."""
        return np.array(host, dtype)

    def to_host(self, array: Array) -> HostArray:
        """Wait and return an array for NumPy, without a copy if it is in host memory."""
        return array

    def to_host_async(self, array: Array) -> Callable[[], HostArray]:
        """Start a copy of the array's current values to the host. Calling the result waits for the copy."""
        now = array.copy()
        return lambda: self.to_host(now)

    def put(self, array: Array, host: HostArray) -> None:
        """array ← elements from the host, of any float type if the array has one."""
        if host is not array:
            array[...] = host

    def cast_down(self, low: Floats1d, wide: Wide1d) -> None:
        """low ← wide, rounded from `wide` to `dtype`"""
        low[...] = wide

    def free_memory(self) -> int | None:
        """Return the free bytes of the device, or None if arrays are in host memory."""
        return None

    def record(self, work: Work) -> Work:
        """Return a faster `work`, for repeated calls with the same arrays."""
        return work

    def between(self, act: Work) -> None:
        """Call act() now, and again at this point of every replay of the recording."""
        act()

    def agree(self, gather: Callable[[bytes], list[bytes]]) -> None:
        """Adopt the matmul variants that were fastest on the first rank with the same device.

        So ranks with equal devices round identically. `gather` returns every rank's bytes. Call this once
        every operation has run. Collective.
        """

    def each(self, work: Callable[[int], None], count: int) -> None:
        """Call work(0) … work(count - 1), concurrently if there are workers, and wait for all."""
        for i in range(count):
            work(i)

    def run_together(self, work: Work) -> None:
        """Call work() on all workers concurrently, which share each of its operations.

        Workers do not wait between operations. So no operation may read another's output, and work() may
        change data only through operations.
        """
        work()

    def zero(self, x: Array) -> None:
        """x ← 0"""
        x[...] = 0

    def add(self, y: Floats2d, a: Floats2d, b: Floats2d) -> None:
        """y ← a + b, all (N, C)"""
        np.add(a, b, out=y)

    # -- embedding

    def embed(
        self,
        x: Floats2d,
        tokens: Ints1d,
        wte: Floats2d,
        wpe: Floats2d | None,
        seq_len: int,
        start: Ints1d | None,
        positions: Ints1d | None = None,
    ) -> None:
        """x[n] ← wte[tokens[n]] + wpe[start + n mod T]. x (N, C), tokens (N,), wte (V, C), wpe (≥ T, C)

        With `positions`, which excludes `start`, wpe[positions[n]] is added.
        """
        x[...] = wte[tokens]
        if wpe is not None and positions is not None:
            x += wpe[positions]
        elif wpe is not None:
            x.reshape(-1, seq_len, x.shape[1])[...] += wpe[_positions(seq_len, start)]

    def sort_tokens(self, tokens: Ints1d, vocab: int) -> SortedTokens:
        """Sort these tokens, below `vocab`, once for all `embed_backward`; valid until the next call."""
        return SortedTokens(tokens, None)

    def embed_backward(
        self,
        dwte: Wide2d,
        dwpe: Wide2d | None,
        dx: Floats2d,
        tokens: SortedTokens,
        seq_len: int,
        positions: Ints1d | None = None,
    ) -> None:
        """dwte[tokens[n]] += dx[n]; dwpe[n mod T] += dx[n], or dwpe[positions[n]]. Always accumulates.

        If dx has more columns than dwte, only its last dwte.shape[1] columns are used.
        """
        np.add.at(dwte, tokens.tokens, dx[:, -dwte.shape[1] :])
        if dwpe is not None and positions is not None:
            np.add.at(dwpe, positions, dx)
        elif dwpe is not None:
            dwpe[:seq_len] += dx.reshape(-1, seq_len, dx.shape[1]).sum(0)

    def add_embedding(self, x: Floats2d, tokens: Ints1d, w: Floats2d) -> None:
        """The last columns of x[n] += w[tokens[n]]. x (N, ≥ C), tokens (N,), w (V, C)"""
        x[:, -w.shape[1] :] += w[tokens]

    def previous_tokens(
        self,
        out: Ints1d,
        tokens: Ints1d,
        seq_len: int,
        before: Ints1d | None,
        positions: Ints1d | None = None,
    ) -> None:
        """out[n] ← tokens[n - 1]. The first of each of B sequences gets before[b], or 0 without `before`.

        With `positions`, which excludes `before`, tokens at position 0 get 0. All (N,) except before (B,)
        """
        out[1:] = tokens[:-1]
        if positions is not None:
            out[positions == 0] = 0
        else:
            out[::seq_len] = 0 if before is None else before

    # -- norms: layer norm, or RMS norm if stats.mean is None

    def add_norm(
        self, y: Floats2d, s: Floats2d, stats: Stats, x: Floats2d, r: Floats2d | None, wb: Gain, eps: float
    ) -> None:
        """s ← x + r; y ← (s - mean) · rstd · w + b, row by row. y, s, x, r (N, C). Without r, s is x itself.

        mean ← mean(s); rstd ← 1 / √(mean((s - mean)²) + eps)
        """
        if r is not None:
            s[...] = x + r
        centred = s
        if stats.mean is not None:
            stats.mean[...] = s.mean(1)
            centred = s - stats.mean[:, None]
        stats.rstd[...] = 1 / np.sqrt((centred**2).mean(1) + eps)
        y[...] = _affine(_normalised(s, stats), wb)

    def norm_backward(
        self,
        dx: Floats2d,
        y: Floats2d | None,
        sums: Wide2d | None,
        dy: Floats2d,
        dres: Floats2d | None,
        s: Floats2d,
        stats: Stats,
        wb: Gain,
    ) -> None:
        """dx ← dres + rstd · (g - mean(g) - x̂ · mean(g · x̂)) with g = dy · w; y ← the output, recomputed.

        dx, y, dy, dres, s (N, C). RMS norm has no mean(g) term. Each row of sums (norm_sum_rows, 3C) receives
        Σ dy · x̂, Σ dy and Σ dx over some of the rows.
        """
        xhat = _normalised(s, stats)
        g = dy if wb.w is None else dy * wb.w
        inner = g - xhat * (g * xhat).mean(1, keepdims=True)
        if stats.mean is not None:
            inner = inner - g.mean(1, keepdims=True)
        inner = stats.rstd[:, None] * inner
        dx[...] = inner if dres is None else dres + inner
        if y is not None:
            y[...] = _affine(xhat, wb)

    def norm_backward_weights(
        self, dwb: Affine, sums: Wide2d | None, dy: Floats2d, s: Floats2d, stats: Stats, accumulate: bool
    ) -> None:
        """dw ← Σ dy · x̂; db ← Σ dy, over rows. dw, db (C,). sums: from norm_backward."""
        _put(dwb.w, (dy * _normalised(s, stats)).sum(0), accumulate)
        if dwb.b is not None:
            _put(dwb.b, dy.sum(0), accumulate)

    # -- linear layers: w (outputs, inputs), x (N, inputs), y (N, outputs)

    def linear(self, y: Floats2d, x: Floats2d, wb: Affine, onto: Floats2d | None = None) -> None:
        """y ← onto + x wᵀ + b"""
        y[...] = _plus(_plus(x @ wb.w.T, wb.b), onto)

    def linear_backward(self, dx: Floats2d, dy: Floats2d, w: Floats2d) -> None:
        """dx ← dy w. dy may be columns of a wider array."""
        dx[...] = dy @ w

    def linear_backward_weights(
        self, dwb: Affine, dy: Floats2d, x: Floats2d, accumulate: bool, sums: Wide2d | None = None
    ) -> None:
        """dw ← dyᵀ x; db ← Σ dy. sums: from the norm_backward that computed dy.

        dy may be columns of a wider array.
        """
        _put(dwb.w, dy.T @ x, accumulate)
        if dwb.b is not None:
            _put(dwb.b, dy.sum(0), accumulate)

    def add_low_rank(
        self, y: Floats2d, w: Floats2d, b: Floats2d | None, a: Floats2d | None, scale: float
    ) -> None:
        """y ← w + scale · b a, or w without b. y, w (outputs, inputs), b (outputs, rank), a (rank, inputs).

        In bfloat16, elements are rounded stochastically but reproducibly: the update is small enough that
        rounding to nearest would leave w unchanged.
        """
        y[...] = w if b is None else w + scale * (b @ a)

    def linear_act(self, y: Floats2d, pre: Floats2d, x: Floats2d, wb: Affine, act: str) -> None:
        """pre ← x wᵀ + b; y ← act(pre). For swiglu, pre is (N, 2·hidden): silu(left) · right."""
        self.linear(pre, x, wb)
        y[...] = _activated(act, pre)[0]

    def linear_backward_act(
        self,
        dpre: Floats2d,
        y: Floats2d,
        dy: Floats2d,
        w: Floats2d,
        pre: Floats2d,
        act: str,
        again: bool,
        db: Bias = None,
    ) -> None:
        """dpre ← (dy w) · act'(pre); y is scratch for dy w, and receives act(pre) if `again`.

        If the backend `overwrites_pre`, dpre is pre. If it `sums_bias_gradients`, db ← Σ dpre over rows,
        rounded or not; otherwise, db is None.
        """
        value, *gradients = _activated(act, pre)
        dact = dy @ w
        dpre[...] = np.concatenate([dact * gradient for gradient in gradients], axis=1)
        if again:
            y[...] = value
        if db is not None:
            _put(db.db, dpre.sum(0), db.accumulate)

    # -- causal attention: the columns of qkv (N, (H + 2K)·head) are q, k, v with H, K and K heads. K divides
    # H, and H / K consecutive heads of q share a head of k and v.

    def rope(
        self, qkv: Floats2d, angles: Angles, heads: int, seq_len: int, start: Ints1d | None, inverse: bool
    ) -> None:
        """Rotate q and k of row n, H + K `heads`, by the angles of position start + n mod T, in place.

        Element i of a head is paired with element i + head/2. `inverse`, the gradient, rotates back. Packed
        documents need no `positions`, because q · k depends only on the distance of two rows.
        """
        half = angles.cos.shape[1]
        pairs = qkv.reshape(-1, seq_len, qkv.shape[1] // (2 * half), 2, half)[:, :, :heads]
        c, s = (table[_positions(seq_len, start)][..., None, :] for table in angles)
        s = -s if inverse else s
        left, right = pairs[..., 0, :].copy(), pairs[..., 1, :].copy()
        pairs[..., 0, :] = left * c - right * s
        pairs[..., 1, :] = left * s + right * c

    def qk_norm(self, qkv: Floats2d, rstd: Wide2d, head: int, eps: float) -> None:
        """Each head of q and k, x ← QK_SCALE · rstd · x, in place; rstd ← 1 / √(mean(x²) + eps), (N, H + K).

        `head`: elements per head.
        """
        x = _queries_and_keys(qkv, rstd, head)
        rstd[...] = 1 / np.sqrt((x**2).mean(2) + eps)
        x *= QK_SCALE * rstd[..., None]

    def qk_norm_backward(self, dqkv: Floats2d, qkv: Floats2d, rstd: Wide2d, head: int) -> None:
        """dx ← QK_SCALE · rstd · (dx - x̂ · mean(dx · x̂)) in each head of q and k; qkv has QK_SCALE · x̂."""
        dx, xhat = _queries_and_keys(dqkv, rstd, head), _queries_and_keys(qkv, rstd, head) / QK_SCALE
        dx[...] = QK_SCALE * rstd[..., None] * (dx - xhat * (dx * xhat).mean(2, keepdims=True))

    def qk_norm_gain(self, qkv: Floats2d, xhat: Floats2d, rstd: Wide2d, gain: Floats1d, eps: float) -> None:
        """For each head of q and k, x ← gain · x̂, in place; x̂ ← rstd · x; rstd ← 1 / √(mean(x²) + eps).

        rstd (N, H + K); xhat (N, (H + K)·head); gain (2·head,), first for heads of q, then for heads of k.
        """
        x, gains = _queries_and_keys(qkv, rstd, len(gain) // 2), _gains(gain, qkv, rstd)
        rstd[...] = 1 / np.sqrt((x**2).mean(2) + eps)
        x *= rstd[..., None]
        xhat[...] = x.reshape(xhat.shape)
        x *= gains

    def qk_norm_gain_backward(
        self, dqkv: Floats2d, dgain: Wide2d, xhat: Floats2d, rstd: Wide2d, gain: Floats1d
    ) -> None:
        """g ← gain · dx; dx ← rstd · (g - x̂ · mean(g · x̂)) in each head of q and k, in place.

        dgain (N, 2·head) ← Σ dx · x̂ over a row's heads of q, and over its heads of k, with the original dx.
        """
        dx, gains = _queries_and_keys(dqkv, rstd, len(gain) // 2), _gains(gain, dqkv, rstd)
        xhat = xhat.reshape(dx.shape)
        n_head = 2 * rstd.shape[1] - dqkv.shape[1] // dx.shape[2]  # 2 (H + K) - (H + 2K) = H
        products = dx * xhat
        dgain[...] = np.concatenate([products[:, :n_head].sum(1), products[:, n_head:].sum(1)], axis=1)
        g = dx * gains
        dx[...] = rstd[..., None] * (g - xhat * (g * xhat).mean(2, keepdims=True))

    def sum_rows(self, total: Wide1d, x: Wide2d | Floats2d, accumulate: bool) -> None:
        """total ← Σ x, over rows. x (N, C), total (C,)"""
        _put(total, x.sum(0), accumulate)

    def attention(self, y: Floats2d, lse: Wide2d, qkv: Floats2d, mask: AttentionMask) -> None:
        """y ← softmax(q kᵀ / √head, `mask`) v per head, (N, H·head); lse ← log of the softmax's denominator.

        lse has N·H elements, as (N, H), in any order of the backend.
        """
        out = _heads_of(y, mask.seq_len, lse.shape[1])
        q, k, v = _heads(qkv, out)
        scores = self._masked_scores(q, _for_each(q, k), mask)
        log_sum = _log_sum_exp(scores)
        out[...] = np.exp(scores - log_sum) @ _for_each(q, v)
        lse.reshape(-1, mask.seq_len, lse.shape[1])[...] = log_sum[..., 0].swapaxes(1, 2)

    def attention_backward(
        self,
        dqkv: Floats2d,
        dy: Floats2d,
        y: Floats2d,
        lse: Wide2d,
        qkv: Floats2d,
        mask: AttentionMask,
        db: Bias = None,
    ) -> None:
        """dqkv ← the gradient of qkv; db ← Σ dqkv, if the backend `sums_bias_gradients`.

        dv = Σ pᵀ dy; ds = p · (dy vᵀ - rowsum(dy · y)) / √head; dq = ds k; dk = Σ dsᵀ q.
        Σ is over the heads of q that share a head of k and v.
        """
        n_head = lse.shape[1]
        out, dout = _heads_of(y, mask.seq_len, n_head), _heads_of(dy, mask.seq_len, n_head)
        (q, k, v), (dq, dk, dv) = _heads(qkv, out), _heads(dqkv, out)
        k, v = _for_each(q, k), _for_each(q, v)
        log_sum = lse.reshape(-1, mask.seq_len, n_head).swapaxes(1, 2)[..., None]
        p = np.exp(self._masked_scores(q, k, mask) - log_sum)
        dp = dout @ v.swapaxes(2, 3)
        ds = p * (dp - (dout * out).sum(3, keepdims=True)) / math.sqrt(q.shape[3])
        dq[...] = ds @ k
        dk[...] = _summed(ds.swapaxes(2, 3) @ q, dk)
        dv[...] = _summed(p.swapaxes(2, 3) @ dout, dv)
        if db is not None:
            _put(db.db, dqkv.sum(0), db.accumulate)

    def attention_cached(
        self,
        y: Floats2d,
        cache: Floats5d,
        qkv: Floats2d,
        start: Ints1d,
        window: int = 0,
        slots: Ints1d | None = None,
    ) -> None:
        """Append k and v of the new rows to the cache at `start`, then attend to all cached rows.

        With a `window`, a row attends to only that many rows, itself included.

        cache (2, L, K, T_max, head); qkv (B·new, (H + 2K)·head); y (B·new, H·head). `slots` (B,) int32: the
        distinct cache slot of each sequence. For slot -1 nothing is stored, and y ← 0. None: L is B, and
        sequence i uses slot i.
        """
        where = range(cache.shape[1]) if slots is None else slots.tolist()
        new, size = len(qkv) // len(where), cache.shape[4]
        for i, (slot, first) in enumerate(zip(where, np.broadcast_to(start, len(where)), strict=True)):
            rows = slice(i * new, (i + 1) * new)
            if slot < 0:
                y[rows] = 0
                continue
            out = _heads_of(y[rows], new, y.shape[1] // size)
            q, k, v = _heads(qkv[rows], out)
            cache[:, slot, :, first : first + new] = np.concatenate((k, v))
            keys, values = cache[:, slot : slot + 1, :, : first + new]
            scores = self._masked_scores(q, _for_each(q, keys), AttentionMask(new, window=window), first)
            out[...] = np.exp(scores - _log_sum_exp(scores)) @ _for_each(q, values)

    def _masked_scores(self, q: Array, k: Array, mask: AttentionMask, start: int = 0) -> Array:
        """Return q kᵀ / √head, -∞ if the mask hides a key. The first row of q is at position `start`."""
        scores = q @ k.swapaxes(2, 3) / math.sqrt(q.shape[3])
        rows, keys = np.arange(q.shape[2])[:, None] + start, np.arange(k.shape[2])
        is_masked = keys > rows
        if mask.window:
            is_masked = is_masked | (keys <= rows - mask.window)
        if mask.positions is not None:
            is_masked = is_masked | (keys < rows - mask.positions.reshape(len(q), 1, -1, 1))
        return np.where(is_masked, -np.inf, scores)

    # -- decoding operations outside the passes

    def move_cached(
        self, caches: Array, target: int, source: int, count: int, kept: int, angles: Angles | None
    ) -> None:
        """Copy positions count … count + kept of slot `source` to 0 … kept of slot `target`, in all layers.

        caches (layers, 2, L, K, T_max, head). With `angles`, keys are rotated back by `count` positions. The
        slots may be equal.
        """
        result = np.array(self.to_host(caches[:, :, source, :, count : count + kept]))
        if angles is not None:
            (left, right), (c, s) = np.split(result[:, 0], 2, axis=-1), (table[count] for table in angles)
            result[:, 0] = np.concatenate((left * c + right * s, right * c - left * s), axis=-1)
        self.put(caches[:, :, target, :, :kept], result)

    def topk_logits(self, tokens: Ints2d, found: Wide2d, logits: Floats2d, vocab: int) -> None:
        """tokens (N, k) ← the k highest of logits (N, padded V), in order; ties by token.

        found (N, k + 1) ← their logits, and log Σ exp(logits), which is NaN if a logit is not finite.
        """
        rows, k = self.to_host(logits)[:, :vocab], tokens.shape[1]
        tokens[...] = np.argsort(-rows, axis=1, kind="stable")[:, :k]
        found[:, :k] = np.take_along_axis(rows, tokens, axis=1)
        top = found[:, 0]
        with np.errstate(invalid="ignore"):  # rows may not be finite
            found[:, k] = top + np.log(np.exp(rows - top[:, None]).sum(1))
        found[~np.isfinite(rows).all(1), k] = np.nan

    def drawn(self, tokens: Ints1d, found: Doubles2d, logits: Floats2d, vocab: int, draws: Doubles2d) -> None:
        """tokens (N,) ← a sample by row of logits (N, padded V); draws (N, 2): temperature, number in [0, 1).

        The sample is the first token at which the running sum of p = exp((logits - max) / temperature)
        exceeds number · Σ p. found (N, 2) ← its logit, and Σ p. Backends may differ only by rounding. If a
        row is not finite, any token may result.
        """
        rows = self.to_host(logits)[:, :vocab]
        with np.errstate(invalid="ignore"):  # rows may not be finite
            for i, (row, (temperature, uniform)) in enumerate(zip(rows, draws.tolist(), strict=True)):
                sums = np.exp((row - row.max()) / temperature).cumsum(dtype=np.float64)
                token = int(sums.searchsorted(uniform * sums[-1], side="right"))
                tokens[i] = min(token, vocab - 1)
                found[i] = row[tokens[i]], sums[-1]

    # -- head and loss

    def linear_cross_entropy(
        self,
        losses: Wide1d,
        dx: Floats2d | None,
        dw: Wide2d | None,
        x: Floats2d,
        head: Head,
        targets: Ints1d,
        scale: float,
        accumulate: bool,
    ) -> None:
        """losses[n] ← -log softmax(x wᵀ)[n, targets[n]]; dx, dw ← the gradients of scale · Σ losses.

        losses[n] and dx[n] are 0 if the target is IGNORE_INDEX.
        With the softmax p: dlogits = scale · (p - onehot(targets)); dx = dlogits w; dw = dlogitsᵀ x.
        Rows of w from `vocab` on are padding, without predictions or gradients. The rows of x pass through
        head.logits in chunks. Without dx, only the loss is computed.
        """
        w, chunk_rows = head.w, len(head.logits)
        for start in range(0, len(x), chunk_rows):
            rows = slice(start, min(start + chunk_rows, len(x)))
            index = np.arange(rows.stop - start)
            chunk = x[rows] @ w.T
            chunk[:, head.vocab :] = -np.inf
            log_sum = _log_sum_exp(chunk)
            learned = targets[rows] != IGNORE_INDEX
            # IGNORE_INDEX, -1, selects the last column of a row; `where` and `learned` discard its values.
            losses[rows] = np.where(learned, log_sum[:, 0] - chunk[index, targets[rows]], 0)
            if dx is not None:
                grad = np.exp(chunk - log_sum)
                grad[index, targets[rows]] -= 1
                grad *= scale * learned[:, None]
                dx[rows] = grad @ w
                if dw is not None:
                    _put(dw, grad.T @ x[rows], accumulate or start > 0)

    def sum(self, total: Wide1d, x: Wide1d, scale: float, accumulate: bool) -> None:
        """total[0] ← scale · Σ x"""
        _put(total, scale * x.sum(dtype=np.float64), accumulate)

    # -- optimizer, on flat buffers

    def sum_squares(self, total: Doubles1d, g: Floats1d) -> None:
        """total[0] ← Σ g²; g of either type. Bitwise identical to `squares` followed by `add_up`."""
        pieces = np.empty(-(-len(g) // PIECE))
        self.squares(pieces, g)
        self.add_up(total, pieces)

    def squares(self, pieces: Doubles1d, g: Floats1d) -> None:
        """pieces[i] ← Σ g² of elements i · PIECE … (i + 1) · PIECE of g, at most to its end.

        Ranks with a part of g each compute some of the pieces.
        """
        for i in range(len(pieces)):
            piece = g[i * PIECE : (i + 1) * PIECE].astype(np.float64)
            pieces[i] = (piece**2).sum()

    def add_up(self, total: Doubles1d, pieces: Doubles1d) -> None:
        """total[0] ← Σ pieces"""
        total[...] = pieces.sum()

    def adamw(self, state: AdamState, norm: Doubles1d, scalars: Doubles1d, constants: AdamConstants) -> None:
        """Do an AdamW step in place on p, m, v; low ← p, rounded. `scalars`: StepScalars, then the groups.

        With s = grad_scale, times clip / (grad_scale · √norm) if that is below 1 and clip is not 0:
        m ← β1 m + (1 - β1) s g; v ← β2 v + (1 - β2) s² g²;
        p ← decay_factor · p - step_size · m / (√v · inv_sqrt_bias_correction + eps).
        norm[0] is Σ g² over all ranks. If it is not finite, nothing is changed.
        """
        p, low, m, v, g, ranges = state
        beta1, beta2, eps = constants
        scale = clipped(norm, scalars)
        if scale is None:
            return
        inv_sqrt_bias_correction = scalars[2]  # field of StepScalars
        groups = scalars[3:].reshape(-1, 2)
        for start, stop, group, start_in_v in np.asarray(ranges).tolist():
            if group < 0:
                continue
            here, second = slice(start, stop), v[start_in_v : start_in_v + stop - start]
            step_size, decay_factor = groups[group]
            scaled = g[here] * scale
            m[here] = beta1 * m[here] + (1 - beta1) * scaled
            second[...] = beta2 * second + (1 - beta2) * scaled**2
            p[here] = decay_factor * p[here] - step_size * m[here] / (
                np.sqrt(second) * inv_sqrt_bias_correction + eps
            )
            if low is not None:
                self.cast_down(low[here], p[here])

    def muon_momentum(
        self, m: Sequence[Wide1d], g: Sequence[Wide1d], norm: Doubles1d, scalars: Doubles1d
    ) -> None:
        """Each m ← μ m + (1 - μ) s g; its g ← (1 - μ) s g + μ m (Nesterov). `scalars`: MuonScalars.

        `adamw` defines s. If norm[0] is not finite, nothing is changed.
        """
        scale = clipped(norm, scalars)
        momentum = scalars[2]  # field of MuonScalars
        if scale is None:
            return
        for mi, gi in zip(m, g, strict=True):
            mi[...] = momentum * mi + (1 - momentum) * scale * gi
            gi[...] = (1 - momentum) * scale * gi + momentum * mi

    def orthogonalise(self, updates: Sequence[Wide2d]) -> None:
        """Each U S Vᵀ ← approximately U Vᵀ, in place, with all singular values close to 1.

        x ← u / (1.02 ‖u‖); then x ← a x + b x xᵀ x + c (x xᵀ)² x for each (a, b, c) of POLAR.
        """
        for u in updates:
            x = u if len(u) <= u.shape[1] else u.T
            x = x / (1.02 * math.sqrt((x.astype(np.float64) ** 2).sum()) + TINY)
            for a, b, c in POLAR:
                square = x @ x.T
                x = a * x + (b * square + c * square @ square) @ x
            u[...] = x if len(u) <= u.shape[1] else x.T

    def orthogonalise_bytes(self, shapes: Sequence[tuple[int, ...]]) -> int:
        """Return the bytes of scratch memory to orthogonalize matrices of these shapes."""
        return 0

    def muon(self, matrices: Sequence[MuonMatrix], norm: Doubles1d, scalars: Doubles1d, beta2: float) -> None:
        """Do a step along orthogonalized updates, in place on p and v; low ← p, rounded. u is scratch.

        q ← the mean squares of the rows (or columns) of u; v ← β2 v + (1 - β2) q; u ← u / √v, row by row,
        then rescaled to its previous norm. With lr = learning_rate · √max(1, rows / columns):
        p ← p - lr · (u + weight_decay · p if u · p ≥ 0). If norm[0] is not finite, nothing is changed.
        """
        if clipped(norm, scalars) is None:
            return
        learning_rate, weight_decay = scalars[3:5]  # fields of MuonScalars
        for p, low, v, u in matrices:
            axis = int(len(u) >= u.shape[1])
            before = (u**2).sum()
            v[...] = beta2 * v + (1 - beta2) * (u**2).mean(axis)
            u = u / np.expand_dims(np.sqrt(v) + TINY, axis)
            u *= np.sqrt(before / ((u**2).sum() + TINY))
            rate = learning_rate * math.sqrt(max(1, len(u) / u.shape[1]))
            p -= rate * (u + weight_decay * p * (u * p >= 0))
            if low is not None:
                self.cast_down(low, p)

    def subtract(self, y: Wide1d, a: Wide1d, b: Wide1d) -> None:
        """y ← a - b"""
        np.subtract(a, b, out=y)

    def nesterov(self, state: NesterovState, scale: float, lr: float, momentum: float) -> None:
        """Do a step along the ranks' mean change, with scale = 1 / ranks. p and round_start become equal.

        velocity ← momentum · velocity + scale · change;
        p, round_start ← round_start + lr · (momentum · velocity + scale · change); low ← p, rounded.
        """
        p, low, round_start, velocity, change = state
        velocity[...] = momentum * velocity + scale * change
        round_start += lr * (momentum * velocity + scale * change)
        p[...] = round_start
        if low is not None:
            self.cast_down(low, p)


def clipped(norm: Doubles1d, scalars: Doubles1d) -> float | None:
    """Return grad_scale, reduced if the norm is clipped, or None if the norm is not finite."""
    scale, clip = map(float, scalars[:2])
    length = scale * math.sqrt(norm[0])
    if not math.isfinite(length):
        return None
    return scale * (clip / length) if clip and length > clip else scale


def _positions(seq_len: int, start: Array | None) -> Array:
    """Return the positions of each sequence's tokens: (T,) for a common start; otherwise, (B, T)."""
    positions: Array = np.arange(seq_len)
    if start is not None:
        positions = positions + (start if len(start) == 1 else start[:, None])
    return positions


def _normalised(s: Array, stats: Stats) -> Array:
    xhat: Array = (s if stats.mean is None else s - stats.mean[:, None]) * stats.rstd[:, None]
    return xhat


def _affine(xhat: Array, wb: Gain) -> Array:
    return _plus(xhat if wb.w is None else xhat * wb.w, wb.b)


def _plus(y: Array, b: Array | None) -> Array:
    return y if b is None else y + b


def _put(out: Array, value: Array, accumulate: bool) -> None:
    if accumulate:
        out += value
    else:
        out[...] = value


def _activated(act: str, pre: Array) -> list[Array]:
    """Return act(pre) and its derivative with respect to pre or, if gated, to both halves of pre."""
    kind = ACTIVATIONS[act]
    if not kind.gated:
        return [*kind.compute(pre)]
    left, right = np.split(pre, 2, axis=1)
    value, gradient = kind.compute(left)
    return [value * right, right * gradient, value]


def _queries_and_keys(qkv: Array, rstd: Array, head: int) -> Array:
    """View (N, (H + 2K)·head) as (N, H + K, head): without v."""
    return qkv.reshape(len(qkv), -1, head)[:, : rstd.shape[1]]


def _gains(gain: Array, qkv: Array, rstd: Array) -> Array:
    """Return the gain of each head of q and k, (H + K, head)."""
    heads, both = rstd.shape[1], gain.reshape(2, -1)
    n_head = 2 * heads - qkv.shape[1] // both.shape[1]  # 2 (H + K) - (H + 2K) = H
    return np.repeat(both, (n_head, heads - n_head), axis=0)


def _log_sum_exp(scores: Array) -> Array:
    top = scores.max(-1, keepdims=True)
    log_sum: Array = top + np.log(np.exp(scores - top).sum(-1, keepdims=True))
    return log_sum


def _heads_of(x: Array, seq_len: int, n_head: int) -> Array:
    """View (N, H·head) as (B, H, T, head)."""
    return x.reshape(-1, seq_len, n_head, x.shape[1] // n_head).swapaxes(1, 2)


def _heads(qkv: Array, out: Array) -> list[Array]:
    """View (N, (H + 2K)·head) as q (B, H, T, head), which is `out`'s shape, and k, v (B, K, T, head)."""
    _, n_head, seq_len, size = out.shape
    together = qkv.reshape(-1, seq_len, qkv.shape[1] // size, size).swapaxes(1, 2)
    return np.split(together, [n_head, (n_head + together.shape[1]) // 2], axis=1)


def _for_each(q: Array, x: Array) -> Array:
    """Repeat each head of x, k or v, for the heads of q that share it."""
    return np.repeat(x, q.shape[1] // x.shape[1], axis=1)


def _summed(x: Array, dx: Array) -> Array:
    """Sum over the heads of q that share a head of k or v. dx has the result's shape."""
    n_seq, heads, seq_len, size = dx.shape
    total: Array = x.reshape(n_seq, heads, -1, seq_len, size).sum(2)
    return total
