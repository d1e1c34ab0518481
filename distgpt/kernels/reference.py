"""The vocabulary as plain array code: short, obvious, any array module, and by definition correct."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy

from distgpt.kernels.api import Array, Runs


class ReferenceKernels:
    """Runs in float64 for checks and in float32; `xp` is numpy or any module that looks like it."""

    threads = 1

    def __init__(self, dtype: str = "float64", xp: Any = numpy) -> None:
        self.xp = xp
        self.dtype = xp.dtype(dtype)

    # -- arrays and workers

    def zeros(self, *shape: int) -> Array:
        return self.xp.zeros(shape, self.dtype)

    def tokens(self, host: Any) -> Array:
        return self.xp.asarray(host, self.xp.int32)

    def to_host(self, array: Array) -> Any:
        return numpy.asarray(array)

    def put(self, array: Array, host: Any) -> None:
        array[...] = self.xp.asarray(host)

    def each(self, work: Callable[[int], None], count: int) -> None:
        for i in range(count):
            work(i)

    def share(self, work: Callable[[], None]) -> None:
        work()

    def zero(self, x: Array) -> None:
        x[...] = 0

    def add(self, y: Array, a: Array, b: Array) -> None:
        y[...] = a + b

    # -- embedding

    def embed(self, x: Array, tokens: Array, wte: Array, wpe: Array | None) -> None:
        x[...] = wte[tokens]
        if wpe is not None:
            x.reshape(-1, *wpe.shape)[...] += wpe

    def embed_backward(self, dwte: Array, dwpe: Array | None, dx: Array, tokens: Array, seq_len: int) -> None:
        self.xp.add.at(dwte, tokens, dx)
        if dwpe is not None:
            dwpe[:seq_len] += dx.reshape(-1, seq_len, dx.shape[1]).sum(0)

    # -- norms

    def add_norm(
        self,
        y: Array,
        s: Array,
        mean: Array | None,
        rstd: Array,
        x: Array,
        r: Array | None,
        w: Array | None,
        b: Array | None,
        eps: float,
    ) -> None:
        if r is not None:
            s[...] = x + r
        if mean is not None:
            mean[...] = s.mean(1)
        centred = s if mean is None else s - mean[:, None]
        rstd[...] = 1 / self.xp.sqrt((centred**2).mean(1) + eps)
        y[...] = _affine(_normalised(s, mean, rstd), w, b)

    def norm_backward(
        self,
        dx: Array,
        y: Array,
        dy: Array,
        dres: Array | None,
        s: Array,
        mean: Array | None,
        rstd: Array,
        w: Array | None,
        b: Array | None,
    ) -> None:
        xhat = _normalised(s, mean, rstd)
        g = dy if w is None else dy * w
        inner = g - xhat * (g * xhat).mean(1, keepdims=True)
        if mean is not None:
            inner = inner - g.mean(1, keepdims=True)
        inner = rstd[:, None] * inner
        dx[...] = inner if dres is None else dres + inner
        y[...] = _affine(xhat, w, b)

    def norm_backward_weights(
        self,
        dw: Array,
        db: Array | None,
        dy: Array,
        s: Array,
        mean: Array | None,
        rstd: Array,
        accumulate: bool,
    ) -> None:
        _put(dw, (dy * _normalised(s, mean, rstd)).sum(0), accumulate)
        if db is not None:
            _put(db, dy.sum(0), accumulate)

    # -- linear layers

    def linear(self, y: Array, x: Array, w: Array, b: Array | None) -> None:
        y[...] = x @ w.T if b is None else x @ w.T + b

    def linear_backward(self, dx: Array, dy: Array, w: Array) -> None:
        dx[...] = dy @ w

    def linear_backward_weights(
        self, dw: Array, db: Array | None, dy: Array, x: Array, accumulate: bool
    ) -> None:
        _put(dw, dy.T @ x, accumulate)
        if db is not None:
            _put(db, dy.sum(0), accumulate)

    def linear_act(self, y: Array, pre: Array, x: Array, w: Array, b: Array | None, act: str) -> None:
        self.linear(pre, x, w, b)
        y[...] = self._activation(act, pre)[0]

    def linear_backward_act(self, pre: Array, y: Array, dy: Array, w: Array, act: str) -> None:
        value, *slopes = self._activation(act, pre)
        dact = dy @ w
        pre[...] = self.xp.concatenate([dact * slope for slope in slopes], axis=1)
        y[...] = value

    def _activation(self, act: str, pre: Array) -> tuple[Array, ...]:
        """(act(pre), its slope with respect to pre); two slopes, left and right, for swiglu."""
        xp = self.xp
        if act == "relu":
            return xp.maximum(pre, 0), (pre > 0).astype(self.dtype)
        if act == "gelu":
            a = math.sqrt(2 / math.pi)
            t = xp.tanh(a * (pre + 0.044715 * pre**3))
            slope = 0.5 * (1 + t) + 0.5 * pre * (1 - t**2) * a * (1 + 3 * 0.044715 * pre**2)
            return 0.5 * pre * (1 + t), slope
        left, right = xp.split(pre, 2, axis=1)
        sigmoid = 1 / (1 + xp.exp(-left))
        silu = left * sigmoid
        return silu * right, right * (sigmoid + silu * (1 - sigmoid)), silu

    # -- attention

    def rope(self, qkv: Array, cos: Array, sin: Array, n_head: int, inverse: bool) -> None:
        seq_len, half = cos.shape
        pairs = qkv.reshape(-1, seq_len, 3 * n_head, 2, half)[:, :, : 2 * n_head]
        c, s = cos[:, None], (-sin if inverse else sin)[:, None]
        left, right = pairs[..., 0, :].copy(), pairs[..., 1, :].copy()
        pairs[..., 0, :] = left * c - right * s
        pairs[..., 1, :] = left * s + right * c

    def attention(self, y: Array, lse: Array, qkv: Array, seq_len: int) -> None:
        q, k, v = _heads(qkv, seq_len, lse.shape[1])
        scores = self._causal_scores(q, k, 0)
        log_sum = self._log_sum_exp(scores)
        _heads_of(y, seq_len, lse.shape[1])[...] = self.xp.exp(scores - log_sum) @ v
        lse.reshape(-1, seq_len, lse.shape[1])[...] = log_sum[..., 0].swapaxes(1, 2)

    def attention_backward(
        self, dqkv: Array, dy: Array, y: Array, lse: Array, qkv: Array, seq_len: int
    ) -> None:
        n_head = lse.shape[1]
        q, k, v = _heads(qkv, seq_len, n_head)
        dq, dk, dv = _heads(dqkv, seq_len, n_head)
        out, dout = _heads_of(y, seq_len, n_head), _heads_of(dy, seq_len, n_head)
        log_sum = lse.reshape(-1, seq_len, n_head).swapaxes(1, 2)[..., None]
        p = self.xp.exp(self._causal_scores(q, k, 0) - log_sum)
        dp = dout @ v.swapaxes(2, 3)
        ds = p * (dp - (dout * out).sum(3, keepdims=True)) / math.sqrt(q.shape[3])
        dq[...] = ds @ k
        dk[...] = ds.swapaxes(2, 3) @ q
        dv[...] = p.swapaxes(2, 3) @ dout

    def attention_cached(self, y: Array, cache: Array, qkv: Array, start: int) -> None:
        _, n_seq, n_head, _, _ = cache.shape
        new = qkv.shape[0] // n_seq
        q, k, v = _heads(qkv, new, n_head)
        cache[0, :, :, start : start + new] = k
        cache[1, :, :, start : start + new] = v
        keys, values = cache[:, :, :, : start + new]
        scores = self._causal_scores(q, keys, start)
        p = self.xp.exp(scores - self._log_sum_exp(scores))
        _heads_of(y, new, n_head)[...] = p @ values

    def _causal_scores(self, q: Array, k: Array, start: int) -> Array:
        scores = q @ k.swapaxes(2, 3) / math.sqrt(q.shape[3])
        rows = self.xp.arange(q.shape[2])[:, None] + start
        return self.xp.where(self.xp.arange(k.shape[2]) > rows, -self.xp.inf, scores)

    def _log_sum_exp(self, scores: Array) -> Array:
        top = scores.max(-1, keepdims=True)
        return top + self.xp.log(self.xp.exp(scores - top).sum(-1, keepdims=True))

    # -- head and loss

    def linear_cross_entropy(
        self,
        losses: Array,
        dx: Array | None,
        dw: Array | None,
        x: Array,
        w: Array,
        targets: Array,
        logits: Array,
        scale: float,
        accumulate: bool,
    ) -> None:
        for start in range(0, len(x), len(logits)):
            rows = slice(start, min(start + len(logits), len(x)))
            index = self.xp.arange(rows.stop - start)
            chunk = x[rows] @ w.T
            log_sum = self._log_sum_exp(chunk)
            losses[rows] = log_sum[:, 0] - chunk[index, targets[rows]]
            if dx is not None:
                grad = self.xp.exp(chunk - log_sum)
                grad[index, targets[rows]] -= 1
                grad *= scale
                dx[rows] = grad @ w
                _put(dw, grad.T @ x[rows], accumulate or start > 0)

    # -- optimizer

    def sum_squares(self, g: Array) -> float:
        return float((g.astype(self.xp.float64) ** 2).sum())

    def adamw(
        self,
        p: Array,
        m: Array,
        v: Array,
        g: Array,
        runs: Runs,
        grad_scale: float,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        decay: float,
        step: int,
    ) -> None:
        scaled = g * grad_scale
        m[...] = beta1 * m + (1 - beta1) * scaled
        v[...] = beta2 * v + (1 - beta2) * scaled**2
        for start, stop, decays in runs:
            if decays:
                p[start:stop] *= 1 - lr * decay
        p -= lr * (m / (1 - beta1**step)) / (self.xp.sqrt(v / (1 - beta2**step)) + eps)


def _normalised(s: Array, mean: Array | None, rstd: Array) -> Array:
    return (s if mean is None else s - mean[:, None]) * rstd[:, None]


def _affine(xhat: Array, w: Array | None, b: Array | None) -> Array:
    scaled = xhat if w is None else xhat * w
    return scaled if b is None else scaled + b


def _put(out: Array, value: Array, accumulate: bool) -> None:
    if accumulate:
        out += value
    else:
        out[...] = value


def _heads_of(x: Array, seq_len: int, n_head: int) -> Array:
    """(N, C) seen as (B, H, T, head)."""
    return x.reshape(-1, seq_len, n_head, x.shape[1] // n_head).swapaxes(1, 2)


def _heads(qkv: Array, seq_len: int, n_head: int) -> tuple[Array, Array, Array]:
    """(N, 3C) seen as q, k, v, each (B, H, T, head)."""
    together = qkv.reshape(-1, seq_len, 3, n_head, qkv.shape[1] // (3 * n_head))
    q, k, v = (together[:, :, i].swapaxes(1, 2) for i in range(3))
    return q, k, v
