"""A trace of one forward pass: what every layer reads, and where its attention looks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distgpt.core.model.model import Model
from distgpt.core.model.passes import Pass
from distgpt.core.ops.api import Array


@dataclass(frozen=True, slots=True)
class Trace:
    """Hidden states and attention weights of one forward pass over tokens (…, T), as arrays on the host.

    `hidden[i]` (…, T, C) is what layer i reads; the last one is what the output layer reads.
    `attention[i]` (…, H, T, T) says how much each position looks at each other one; rows sum to 1.
    `logits` (…, T, V) are the scores of the next token.
    """

    hidden: tuple[NDArray[Any], ...]
    attention: tuple[NDArray[Any], ...]
    logits: NDArray[Any]

    def of_one(self) -> Trace:
        """Return the trace of the first sequence, without the axis of sequences."""
        hidden, attention = (tuple(x[0] for x in parts) for parts in (self.hidden, self.attention))
        return Trace(hidden, attention, self.logits[0])

    def __repr__(self) -> str:
        layers = len(self.attention)
        return (
            f"<Trace of {layers} layers: hidden {self.hidden[0].shape}, attention {self.attention[0].shape}>"
        )


def trace(model: Model, tokens: Array, n_seq: int, seq_len: int) -> Trace:
    """Run the model over tokens (n_seq · seq_len,), keeping every layer's activations."""
    config, k = model.config, model.kernels
    work = Pass(model, n_seq, seq_len, training=True, recompute="none")
    last = work.forward(tokens)
    scores = k.zeros(n_seq * seq_len, config.padded_vocab)
    work.logits(scores, last)

    def host(array: Array, *inner: int) -> NDArray[Any]:
        return np.array(k.to_host(array)).reshape(n_seq, seq_len, *inner)

    read = [layer.all.s1 for layer in work.layers]
    return Trace(
        tuple(host(x, config.n_embd) for x in (*read, last)),
        tuple(
            _attention(host(layer.all.qkv, -1, config.head_size), config.n_head, block.window)
            for layer, block in zip(work.layers, model.blocks, strict=True)
        ),
        host(scores, config.padded_vocab)[..., : config.vocab_size],
    )


def _attention(qkv: NDArray[Any], n_head: int, window: int) -> NDArray[Any]:
    """softmax(q kᵀ / √head, causal) (B, H, T, T) of qkv (B, T, H + 2K, head), positions included."""
    wide = np.moveaxis(qkv.astype(np.promote_types(qkv.dtype, np.float32)), 1, 2)
    q, k, _ = np.split(wide, [n_head, (n_head + wide.shape[1]) // 2], axis=1)
    k = np.repeat(k, n_head // k.shape[1], axis=1)
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1], dtype=wide.dtype)
    seen = np.tri(scores.shape[-1], dtype=bool)
    scores[..., ~(np.triu(seen, 1 - window) if window else seen)] = -np.inf
    p = np.exp(scores - scores.max(-1, keepdims=True))
    weights: NDArray[Any] = p / p.sum(-1, keepdims=True)
    return weights
