"""The vocabulary as plain NumPy: short, and correct by definition."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import DTypeLike

from distgpt.core.ops.activations import ACTIVATIONS
from distgpt.core.ops.api import (
    ALL_ROWS,
    IGNORED,
    PIECE,
    POLAR,
    QK_SCALE,
    TINY,
    AdamConstants,
    AdamState,
    Affine,
    Angles,
    Array,
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


class Allocating:
    """Base of what makes arrays in the types of kernels, all of them by `_new`."""

    dtype: np.dtype
    wide: np.dtype

    def _new(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        return np.zeros(shape, dtype)

    def zeros(self, *shape: int) -> Array:
        return self._new(shape, self.dtype)

    def wide_zeros(self, *shape: int) -> Array:
        return self._new(shape, self.wide)

    def scalars(self, count: int) -> Array:
        return self._new((count,), np.float64)


class OnHost(Allocating):
    """Base of kernels whose arrays are NumPy's and whose calls return when their work is done."""

    wire: Wire | None = None

    def integers(self, host: HostArray | Sequence[int], dtype: str = "int32") -> Array:
        return np.array(host, dtype)

    def to_host(self, array: Array) -> HostArray:
        return array

    def later(self, array: Array) -> Callable[[], HostArray]:
        now = array.copy()
        return lambda: self.to_host(now)

    def put(self, array: Array, host: HostArray) -> None:
        if host is not array:
            array[...] = host

    def cast_down(self, low: Array, wide: Array) -> None:
        low[...] = wide

    def zero(self, x: Array) -> None:
        x[...] = 0

    def add(self, y: Array, a: Array, b: Array) -> None:
        np.add(a, b, out=y)

    def free_memory(self) -> int | None:
        return None

    def record(self, work: Work) -> Work:
        return work

    def between(self, act: Work) -> None:
        act()

    def agree(self, gather: Callable[[bytes], list[bytes]]) -> None:
        pass

    def move_cached(
        self, caches: Array, target: int, source: int, count: int, kept: int, angles: Angles | None
    ) -> None:
        found = np.array(self.to_host(caches[:, :, source, :, count : count + kept]))
        if angles is not None:
            (left, right), (c, s) = np.split(found[:, 0], 2, axis=-1), (table[count] for table in angles)
            found[:, 0] = np.concatenate((left * c + right * s, right * c - left * s), axis=-1)
        self.put(caches[:, :, target, :, :kept], found)

    def likeliest(self, tokens: Ints2d, found: Wide2d, logits: Floats2d, vocab: int) -> None:
        rows, k = self.to_host(logits)[:, :vocab], tokens.shape[1]
        tokens[...] = np.argsort(-rows, axis=1, kind="stable")[:, :k]
        found[:, :k] = np.take_along_axis(rows, tokens, axis=1)
        top = found[:, 0]
        with np.errstate(invalid="ignore"):  # of rows that are not finite
            found[:, k] = top + np.log(np.exp(rows - top[:, None]).sum(1))
        found[~np.isfinite(rows).all(1), k] = np.nan

    def drawn(self, tokens: Ints1d, found: Doubles2d, logits: Floats2d, vocab: int, draws: Doubles2d) -> None:
        rows = self.to_host(logits)[:, :vocab]
        with np.errstate(invalid="ignore"):  # of rows that are not finite
            for i, (row, (temperature, uniform)) in enumerate(zip(rows, draws.tolist(), strict=True)):
                sums = np.exp((row - row.max()) / temperature).cumsum(dtype=np.float64)
                token = int(sums.searchsorted(uniform * sums[-1], side="right"))
                tokens[i] = min(token, vocab - 1)
                found[i] = row[tokens[i]], sums[-1]


class ReferenceKernels(OnHost):
    """Runs in float64 for checks, and in float32."""

    threads = 1
    logits_bytes = 1 << 20
    slice_rows = ALL_ROWS
    capabilities = Capabilities(sums_bias_gradients=True)

    def __init__(self, dtype: str = "float64") -> None:
        self.dtype = self.wide = np.dtype(dtype)

    # -- workers

    def each(self, work: Callable[[int], None], count: int) -> None:
        for i in range(count):
            work(i)

    def run_together(self, work: Work) -> None:
        work()

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
        x[...] = wte[tokens]
        if wpe is not None and positions is not None:
            x += wpe[positions]
        elif wpe is not None:
            x.reshape(-1, seq_len, x.shape[1])[...] += wpe[_positions(seq_len, start)]

    def sort_tokens(self, tokens: Ints1d, vocab: int) -> SortedTokens:
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
        np.add.at(dwte, tokens.tokens, dx[:, -dwte.shape[1] :])
        if dwpe is not None and positions is not None:
            np.add.at(dwpe, positions, dx)
        elif dwpe is not None:
            dwpe[:seq_len] += dx.reshape(-1, seq_len, dx.shape[1]).sum(0)

    def add_embedding(self, x: Floats2d, tokens: Ints1d, w: Floats2d) -> None:
        x[:, -w.shape[1] :] += w[tokens]

    # -- norms

    def add_norm(
        self, y: Floats2d, s: Floats2d, stats: Stats, x: Floats2d, r: Floats2d | None, wb: Gain, eps: float
    ) -> None:
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
        _put(dwb.w, (dy * _normalised(s, stats)).sum(0), accumulate)
        if dwb.b is not None:
            _put(dwb.b, dy.sum(0), accumulate)

    # -- linear layers

    def linear(self, y: Floats2d, x: Floats2d, wb: Affine, onto: Floats2d | None = None) -> None:
        y[...] = _plus(_plus(x @ wb.w.T, wb.b), onto)

    def linear_backward(self, dx: Floats2d, dy: Floats2d, w: Floats2d) -> None:
        dx[...] = dy @ w

    def linear_backward_weights(
        self, dwb: Affine, dy: Floats2d, x: Floats2d, accumulate: bool, sums: Wide2d | None = None
    ) -> None:
        _put(dwb.w, dy.T @ x, accumulate)
        if dwb.b is not None:
            _put(dwb.b, dy.sum(0), accumulate)

    def add_low_rank(
        self, y: Floats2d, w: Floats2d, b: Floats2d | None, a: Floats2d | None, scale: float
    ) -> None:
        y[...] = w if b is None else w + scale * (b @ a)

    def linear_act(self, y: Floats2d, pre: Floats2d, x: Floats2d, wb: Affine, act: str) -> None:
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
        value, *gradients = _activated(act, pre)
        dact = dy @ w
        dpre[...] = np.concatenate([dact * gradient for gradient in gradients], axis=1)
        if again:
            y[...] = value
        if db is not None:
            _put(db.db, dpre.sum(0), db.accumulate)

    # -- attention

    def rope(
        self, qkv: Floats2d, angles: Angles, heads: int, seq_len: int, start: Ints1d | None, inverse: bool
    ) -> None:
        half = angles.cos.shape[1]
        pairs = qkv.reshape(-1, seq_len, qkv.shape[1] // (2 * half), 2, half)[:, :, :heads]
        c, s = (table[_positions(seq_len, start)][..., None, :] for table in angles)
        s = -s if inverse else s
        left, right = pairs[..., 0, :].copy(), pairs[..., 1, :].copy()
        pairs[..., 0, :] = left * c - right * s
        pairs[..., 1, :] = left * s + right * c

    def qk_norm(self, qkv: Floats2d, rstd: Wide2d, head: int, eps: float) -> None:
        x = _queries_and_keys(qkv, rstd, head)
        rstd[...] = 1 / np.sqrt((x**2).mean(2) + eps)
        x *= QK_SCALE * rstd[..., None]

    def qk_norm_backward(self, dqkv: Floats2d, qkv: Floats2d, rstd: Wide2d, head: int) -> None:
        dx, xhat = _queries_and_keys(dqkv, rstd, head), _queries_and_keys(qkv, rstd, head) / QK_SCALE
        dx[...] = QK_SCALE * rstd[..., None] * (dx - xhat * (dx * xhat).mean(2, keepdims=True))

    def qk_norm_gain(self, qkv: Floats2d, xhat: Floats2d, rstd: Wide2d, gain: Floats1d, eps: float) -> None:
        x, gains = _queries_and_keys(qkv, rstd, len(gain) // 2), _gains(gain, qkv, rstd)
        rstd[...] = 1 / np.sqrt((x**2).mean(2) + eps)
        x *= rstd[..., None]
        xhat[...] = x.reshape(xhat.shape)
        x *= gains

    def qk_norm_gain_backward(
        self, dqkv: Floats2d, dgain: Wide2d, xhat: Floats2d, rstd: Wide2d, gain: Floats1d
    ) -> None:
        dx, gains = _queries_and_keys(dqkv, rstd, len(gain) // 2), _gains(gain, dqkv, rstd)
        xhat = xhat.reshape(dx.shape)
        n_head = 2 * rstd.shape[1] - dqkv.shape[1] // dx.shape[2]  # 2 (H + K) - (H + 2K) = H
        products = dx * xhat
        dgain[...] = np.concatenate([products[:, :n_head].sum(1), products[:, n_head:].sum(1)], axis=1)
        g = dx * gains
        dx[...] = rstd[..., None] * (g - xhat * (g * xhat).mean(2, keepdims=True))

    def sum_rows(self, total: Wide1d, x: Wide2d, accumulate: bool) -> None:
        _put(total, x.sum(0), accumulate)

    def attention(
        self,
        y: Floats2d,
        lse: Wide2d,
        qkv: Floats2d,
        seq_len: int,
        positions: Ints1d | None = None,
        window: int = 0,
    ) -> None:
        out = _heads_of(y, seq_len, lse.shape[1])
        q, k, v = _heads(qkv, out)
        scores = self._causal_scores(q, _for_each(q, k), 0, window, positions)
        log_sum = self._log_sum_exp(scores)
        out[...] = np.exp(scores - log_sum) @ _for_each(q, v)
        lse.reshape(-1, seq_len, lse.shape[1])[...] = log_sum[..., 0].swapaxes(1, 2)

    def attention_backward(
        self,
        dqkv: Floats2d,
        dy: Floats2d,
        y: Floats2d,
        lse: Wide2d,
        qkv: Floats2d,
        seq_len: int,
        db: Bias = None,
        positions: Ints1d | None = None,
        window: int = 0,
    ) -> None:
        n_head = lse.shape[1]
        out, dout = _heads_of(y, seq_len, n_head), _heads_of(dy, seq_len, n_head)
        (q, k, v), (dq, dk, dv) = _heads(qkv, out), _heads(dqkv, out)
        k, v = _for_each(q, k), _for_each(q, v)
        log_sum = lse.reshape(-1, seq_len, n_head).swapaxes(1, 2)[..., None]
        p = np.exp(self._causal_scores(q, k, 0, window, positions) - log_sum)
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
            scores = self._causal_scores(q, _for_each(q, keys), first, window)
            out[...] = np.exp(scores - self._log_sum_exp(scores)) @ _for_each(q, values)

    def _causal_scores(
        self, q: Array, k: Array, start: int, window: int, positions: Ints1d | None = None
    ) -> Array:
        scores = q @ k.swapaxes(2, 3) / math.sqrt(q.shape[3])
        rows, keys = np.arange(q.shape[2])[:, None] + start, np.arange(k.shape[2])
        hidden = keys > rows
        if window:
            hidden = hidden | (keys <= rows - window)
        if positions is not None:
            hidden = hidden | (keys < rows - positions.reshape(len(q), 1, -1, 1))
        return np.where(hidden, -np.inf, scores)

    def _log_sum_exp(self, scores: Array) -> Array:
        top = scores.max(-1, keepdims=True)
        log_sum: Array = top + np.log(np.exp(scores - top).sum(-1, keepdims=True))
        return log_sum

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
        w, chunk_rows = head.w, len(head.logits)
        for start in range(0, len(x), chunk_rows):
            rows = slice(start, min(start + chunk_rows, len(x)))
            index = np.arange(rows.stop - start)
            chunk = x[rows] @ w.T
            chunk[:, head.vocab :] = -np.inf
            log_sum = self._log_sum_exp(chunk)
            learned = targets[rows] != IGNORED
            # IGNORED, -1, picks the last column of a row: `where` and `learned` drop what comes of it.
            losses[rows] = np.where(learned, log_sum[:, 0] - chunk[index, targets[rows]], 0)
            if dx is not None:
                grad = np.exp(chunk - log_sum)
                grad[index, targets[rows]] -= 1
                grad *= scale * learned[:, None]
                dx[rows] = grad @ w
                if dw is not None:
                    _put(dw, grad.T @ x[rows], accumulate or start > 0)

    def sum(self, total: Wide1d, x: Wide1d, scale: float, accumulate: bool) -> None:
        _put(total, scale * x.sum(dtype=np.float64), accumulate)

    # -- optimizer

    def sum_squares(self, total: Doubles1d, g: Floats1d) -> None:
        pieces = np.empty(-(-len(g) // PIECE))
        self.squares(pieces, g)
        self.add_up(total, pieces)

    def squares(self, pieces: Doubles1d, g: Floats1d) -> None:
        for i in range(len(pieces)):
            piece = g[i * PIECE : (i + 1) * PIECE].astype(np.float64)
            pieces[i] = (piece**2).sum()

    def add_up(self, total: Doubles1d, pieces: Doubles1d) -> None:
        total[...] = pieces.sum()

    def adamw(self, state: AdamState, norm: Doubles1d, scalars: Doubles1d, constants: AdamConstants) -> None:
        p, low, m, v, g, ranges = state
        beta1, beta2, eps = constants
        scale = clipped(norm, scalars)
        if scale is None:
            return
        inv_sqrt_bias_correction = scalars[2]  # of StepScalars
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
        scale = clipped(norm, scalars)
        momentum = scalars[2]  # of MuonScalars
        if scale is None:
            return
        for mi, gi in zip(m, g, strict=True):
            mi[...] = momentum * mi + (1 - momentum) * scale * gi
            gi[...] = (1 - momentum) * scale * gi + momentum * mi

    def orthogonalise(self, updates: Sequence[Wide2d]) -> None:
        for u in updates:
            x = u if len(u) <= u.shape[1] else u.T
            x = x / (1.02 * math.sqrt((x.astype(np.float64) ** 2).sum()) + TINY)
            for a, b, c in POLAR:
                square = x @ x.T
                x = a * x + (b * square + c * square @ square) @ x
            u[...] = x if len(u) <= u.shape[1] else x.T

    def orthogonalise_bytes(self, shapes: Sequence[tuple[int, ...]]) -> int:
        return 0

    def muon(self, matrices: Sequence[MuonMatrix], norm: Doubles1d, scalars: Doubles1d, beta2: float) -> None:
        if clipped(norm, scalars) is None:
            return
        learning_rate, weight_decay = scalars[3:5]  # of MuonScalars
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
        y[...] = a - b

    def nesterov(self, state: NesterovState, scale: float, lr: float, momentum: float) -> None:
        p, low, round_start, velocity, change = state
        velocity[...] = momentum * velocity + scale * change
        round_start += lr * (momentum * velocity + scale * change)
        p[...] = round_start
        if low is not None:
            self.cast_down(low, p)


def clipped(norm: Doubles1d, scalars: Doubles1d) -> float | None:
    """Return grad_scale, less where the norm is clipped; None where gradients are not finite."""
    scale, clip = map(float, scalars[:2])
    length = scale * math.sqrt(norm[0])
    if not math.isfinite(length):
        return None
    return scale * (clip / length) if clip and length > clip else scale


def _positions(seq_len: int, start: Array | None) -> Array:
    """Return those of the tokens of each sequence, (T,) where they begin alike, else (B, T)."""
    positions: Array = np.arange(seq_len)
    if start is not None:
        positions = positions + (start if len(start) == 1 else start[:, None])
    return positions


def _normalised(s: Array, stats: Stats) -> Array:
    """Return x̂."""
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
    """Return act(pre) and its gradient with respect to pre; of a gated one the gradients of both halves."""
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


def _heads_of(x: Array, seq_len: int, n_head: int) -> Array:
    """View (N, H·head) as (B, H, T, head)."""
    return x.reshape(-1, seq_len, n_head, x.shape[1] // n_head).swapaxes(1, 2)


def _heads(qkv: Array, out: Array) -> list[Array]:
    """View (N, (H + 2K)·head) as q (B, H, T, head), which is `out`'s shape, and k, v (B, K, T, head)."""
    _, n_head, seq_len, size = out.shape
    together = qkv.reshape(-1, seq_len, qkv.shape[1] // size, size).swapaxes(1, 2)
    return np.split(together, [n_head, (n_head + together.shape[1]) // 2], axis=1)


def _for_each(q: Array, x: Array) -> Array:
    """Repeat the heads of x, k or v, for each head of q that meets them."""
    return np.repeat(x, q.shape[1] // x.shape[1], axis=1)


def _summed(x: Array, dx: Array) -> Array:
    """Sum over the heads of q that meet a head of k or v; dx has the shape of these."""
    n_seq, heads, seq_len, size = dx.shape
    total: Array = x.reshape(n_seq, heads, -1, seq_len, size).sum(2)
    return total
