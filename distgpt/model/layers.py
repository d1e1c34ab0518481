"""The parts of a GPT: what parameters each has, and its forward and backward pass in terms of kernels.

A part computes three things: `forward`; `backward`, the gradient of its input, row by row or sequence by
sequence, so that slabs of a batch can run side by side; and `weights`, the gradients of its parameters, over
all rows at once. The variant of each part is chosen here, once, when the model is built.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from distgpt.config import ModelConfig
from distgpt.kernels.api import Affine, Angles, Array, Bias, BiasGradient, Kernels, Stats
from distgpt.model.memory import LEARNED, Spec

Tensors = Mapping[str, Array]


class Part:
    """Parameters by name; an absent one (a bias, a gain) is None, as kernels expect it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def specs(self) -> list[Spec]:
        raise NotImplementedError

    def bind(self, kernels: Kernels, params: Tensors, grads: Tensors) -> None:
        self.k = kernels
        self.wb, self.dwb = (
            Affine(*(of.get(f"{self.name}.{kind}") for kind in "wb")) for of in (params, grads)
        )


class Linear(Part):
    """y = x wᵀ + b"""

    def __init__(self, name: str, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__(name)
        self.shape, self.bias = (outputs, inputs), bias
        self.sums_along = False  # whether what computes dy adds up the gradient of the bias

    def specs(self) -> list[Spec]:
        weight = Spec(f"{self.name}.w", self.shape, decay=True)
        return [weight, Spec(f"{self.name}.b", self.shape[:1])] if self.bias else [weight]

    def forward(self, y: Array, x: Array, onto: Array | None = None) -> None:
        self.k.linear(y, x, self.wb, onto)

    def backward(self, dx: Array, dy: Array) -> None:
        self.k.linear_backward(dx, dy, self.wb.w)

    def bias_along(self, accumulate: bool) -> Bias:
        return BiasGradient(self.dwb.b, accumulate) if self.sums_along and self.bias else None

    def weights(self, dy: Array, x: Array, accumulate: bool, sums: Array | None = None) -> None:
        dwb = Affine(self.dwb.w, None) if self.sums_along else self.dwb
        self.k.linear_backward_weights(dwb, dy, x, accumulate, sums)


class LayerNorm(Part):
    """y = (s - mean) / std · w + b, with the residual sum s = x + r in front."""

    centred = True

    def __init__(self, name: str, config: ModelConfig) -> None:
        super().__init__(name)
        self.width, self.eps = config.n_embd, config.norm_eps
        self.gain, self.bias = config.norm_gain, config.bias and self.centred

    def specs(self) -> list[Spec]:
        present = {"w": self.gain, "b": self.bias}
        return [Spec(f"{self.name}.{kind}", (self.width,)) for kind, there in present.items() if there]

    @classmethod
    def stats(cls, kernels: Kernels, n: int) -> Stats:
        """Memory for the statistics of n rows."""
        return Stats(kernels.wide_zeros(n) if cls.centred else None, kernels.wide_zeros(n))

    def forward(self, y: Array, s: Array, stats: Stats, x: Array, r: Array | None) -> None:
        self.k.add_norm(y, s, stats, x, r, self.wb, self.eps)

    def backward(
        self,
        dx: Array,
        y: Array | None,
        sums: Array | None,
        dy: Array,
        dres: Array | None,
        s: Array,
        stats: Stats,
    ) -> None:
        self.k.norm_backward(dx, y, sums, dy, dres, s, stats, self.wb)

    def weights(self, sums: Array | None, dy: Array, s: Array, stats: Stats, accumulate: bool) -> None:
        if self.dwb.w is not None:
            self.k.norm_backward_weights(self.dwb, sums, dy, s, stats, accumulate)


class RMSNorm(LayerNorm):
    """y = s / rms(s) · w: no mean is taken off, and there is no bias."""

    centred = False


class LearnedPositions:
    """One trained vector per position, added to the token's."""

    rotates = False

    def __init__(self, config: ModelConfig) -> None:
        self.shape = (config.seq_len, config.n_embd)
        self.wpe: Array | None = None
        self.dwpe: Array | None = None

    def specs(self) -> list[Spec]:
        return [Spec(LEARNED, self.shape, decay=True)]

    def bind(self, kernels: Kernels, params: Tensors, grads: Tensors) -> None:
        self.wpe, self.dwpe = params.get(LEARNED), grads.get(LEARNED)

    def rotate(self, qkv: Array, seq_len: int, start: Array | None, inverse: bool) -> None:
        """Rotary positions rotate q and k here."""


class NoPositions(LearnedPositions):
    """No positions: the causal mask alone tells the order of tokens."""

    def specs(self) -> list[Spec]:
        return []


class Rope(NoPositions):
    """Rotary positions: q and k rotate by angles that grow with the position, so attention sees distances."""

    base, rotates = 10_000.0, True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.n_head, self.half = config.n_head, config.head_size // 2

    def bind(self, kernels: Kernels, params: Tensors, grads: Tensors) -> None:
        self.k = kernels
        places = np.arange(self.shape[0])[:, None]
        angles = places * self.base ** (-np.arange(self.half) / self.half)
        self.angles = Angles(*(kernels.wide_zeros(*angles.shape) for _ in range(2)))
        kernels.put(self.angles.cos, np.cos(angles))
        kernels.put(self.angles.sin, np.sin(angles))

    def rotate(self, qkv: Array, seq_len: int, start: Array | None, inverse: bool) -> None:
        self.k.rope(qkv, self.angles, self.n_head, seq_len, start, inverse)


NORMS = {"layernorm": LayerNorm, "rmsnorm": RMSNorm}
POSITIONS = {"learned": LearnedPositions, "rope": Rope, "none": NoPositions}
SIDES = {"gelu": 1, "relu": 1, "swiglu": 2}  # how many times the hidden width an activation reads


class Block:
    """One layer: s1 = x + r; s2 = s1 + attention(norm1(s1)); what follows gets s2 and mlp(norm2(s2)).

    `a` holds the layer's activations, `t` the scratch memory, both as named arrays over the same rows.
    """

    def __init__(self, config: ModelConfig, index: int, positions: LearnedPositions) -> None:
        name, width, bias = f"blocks.{index}", config.n_embd, config.bias
        self.act, self.positions = config.mlp, positions
        self.norm1 = NORMS[config.norm](f"{name}.norm1", config)
        self.qkv = Linear(f"{name}.attn.qkv", width, 3 * width, bias)
        self.out = Linear(f"{name}.attn.proj", width, width, bias)
        self.norm2 = NORMS[config.norm](f"{name}.norm2", config)
        self.fc = Linear(f"{name}.mlp.fc", width, SIDES[config.mlp] * config.hidden, bias)
        self.proj = Linear(f"{name}.mlp.proj", config.hidden, width, bias)
        # In the order in which the backward pass finishes their gradients.
        self.parts: list[Part] = [self.proj, self.fc, self.norm2, self.out, self.qkv, self.norm1]

    @staticmethod
    def activations(config: ModelConfig) -> dict[str, int]:
        """Widths of what the forward pass computes and the backward pass reads."""
        c, pre = config.n_embd, SIDES[config.mlp] * config.hidden
        return {"s1": c, "h1": c, "qkv": 3 * c, "att": c, "s2": c, "h2": c, "pre": pre, "act": config.hidden}

    @staticmethod
    def statistics(config: ModelConfig, kernels: Kernels, n: int) -> dict[str, Any]:
        """Memory for what is kept in the wide type of n rows."""
        stats = NORMS[config.norm].stats
        lse = kernels.wide_zeros(n, config.n_head)
        return {"stats1": stats(kernels, n), "stats2": stats(kernels, n), "lse": lse}

    @staticmethod
    def scratch(config: ModelConfig) -> dict[str, int]:
        """Widths of what one layer leaves to the next, in either direction."""
        widths = dict.fromkeys(("dh1", "dh2", "din", "dmid", "dout"), config.n_embd)
        pre = SIDES[config.mlp] * config.hidden
        return widths | {"dact": config.hidden, "dpre": pre, "dqkv": 3 * config.n_embd}

    def bind(self, kernels: Kernels) -> None:
        self.k = kernels
        self.fc.sums_along = kernels.sums_biases
        self.qkv.sums_along = kernels.sums_biases and not self.positions.rotates  # which comes in between

    def attend(self, a: Any, seq_len: int) -> None:
        self.positions.rotate(a.qkv, seq_len, None, inverse=False)
        self.k.attention(a.att, a.lse, a.qkv, seq_len)

    def attend_cached(self, a: Any, cache: Array, start: Array) -> None:
        self.positions.rotate(a.qkv, len(a.qkv) // cache.shape[1], start, inverse=False)
        self.k.attention_cached(a.att, cache, a.qkv, start)

    def before_attention(self, a: Any, x: Array, r: Array | None) -> None:
        """x + r is this layer's input; r is None where x is that already."""
        self.norm1.forward(a.h1, a.s1, a.stats1, x, r)
        self.qkv.forward(a.qkv, a.h1)

    def after_attention(self, a: Any, t: Any) -> None:
        """Everything up to the activation; `project` is what is left of the forward pass."""
        if self.k.adds:
            self.out.forward(a.s2, a.att, a.s1)
            self.norm2.forward(a.h2, a.s2, a.stats2, a.s2, None)
        else:
            self.out.forward(t.dh1, a.att)
            self.norm2.forward(a.h2, a.s2, a.stats2, a.s1, t.dh1)
        self.k.linear_act(a.act, a.pre, a.h2, self.fc.wb, self.act)

    def project(self, a: Any, t: Any, into: Array) -> tuple[Array, Array | None]:
        """What follows gets the sum of the two results: s2 and mlp(…), or that sum itself, in `into`."""
        if self.k.adds:
            self.proj.forward(into, a.act, a.s2)
            return into, None
        self.proj.forward(t.dh1, a.act)
        return a.s2, t.dh1

    def backward(
        self, a: Any, t: Any, din: Array, dout: Array, seq_len: int, again: bool, accumulate: bool
    ) -> None:
        """din ← the gradient of x (and of r); dout is that of s2 + mlp. Leaves in t what `weights` needs.

        With `again` the norms' outputs and the activation are computed anew, as other layers share them.
        Gradients of biases that come along are complete: `accumulate` is for them.
        """
        h1, h2 = (a.h1, a.h2) if again else (None, None)
        dact = a.act if again else t.dact
        through = (_dpre(a, t), dact, dout, self.proj.wb.w, a.pre)
        self.k.linear_backward_act(*through, self.act, again, self.fc.bias_along(accumulate))
        self.fc.backward(t.dh2, _dpre(a, t))
        self.norm2.backward(t.dmid, h2, t.mid_sums, t.dh2, dout, a.s2, a.stats2)
        self.out.backward(t.dh1, t.dmid)
        db = self.qkv.bias_along(accumulate)
        self.k.attention_backward(t.dqkv, t.dh1, a.att, a.lse, a.qkv, seq_len, db)
        self.positions.rotate(t.dqkv, seq_len, None, inverse=True)
        self.qkv.backward(t.dh1, t.dqkv)
        self.norm1.backward(din, h1, t.in_sums, t.dh1, t.dmid, a.s1, a.stats1)

    def weights(self, a: Any, t: Any, dout: Array, out_sums: Array | None, accumulate: bool) -> None:
        """out_sums: what the norm left that computed dout."""
        self.proj.weights(dout, a.act, accumulate, out_sums)
        self.fc.weights(_dpre(a, t), a.h2, accumulate)
        self.norm2.weights(t.mid_sums, t.dh2, a.s2, a.stats2, accumulate)
        self.out.weights(t.dmid, a.att, accumulate, t.mid_sums)
        self.qkv.weights(t.dqkv, a.h1, accumulate)
        self.norm1.weights(t.in_sums, t.dh1, a.s1, a.stats1, accumulate)


def _dpre(a: Any, t: Any) -> Array:
    """Where the gradient of a.pre lies: in its place, or in scratch memory."""
    return a.pre if t.dpre is None else t.dpre


def initial_std(name: str, config: ModelConfig) -> float:
    """GPT-2's: projections into the residual stream are smaller, as there are two of them per layer."""
    into_residual = name.endswith(("attn.proj.w", "mlp.proj.w")) and config.init_residual
    return config.init_std / math.sqrt(2 * config.n_layer) if into_residual else config.init_std
