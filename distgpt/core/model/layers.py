"""The layers of a GPT: their parameters, and their forward and backward passes in terms of kernels.

`Block` is a layer. Its parts have `forward`, `backward` and `weight_gradients`. `backward` computes the
gradient of the input by rows or sequences, so that slices of a batch can run in parallel. `weight_gradients`
computes over all rows. Value embeddings have no `backward`, because tokens have no gradient. The variant of
each part is selected once, when the model is built.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from distgpt.core.config import ModelConfig
from distgpt.core.model.memory import EMBEDDING, HEAD, LEARNED, MATRIX, PREVIOUS, VALUES, Spec
from distgpt.core.ops.api import (
    Affine,
    Angles,
    Array,
    AttentionMask,
    Bias,
    BiasGradient,
    Floats2d,
    Floats5d,
    Gain,
    Ints1d,
    SortedTokens,
    Stats,
    Wide2d,
)
from distgpt.core.ops.kernels import Kernels

Tensors = Mapping[str, Array]

# Standard deviations of initial weights in the scheme `unit`; docs/explanation/learning.md lists the sources.
EMBEDDING_STD = 0.8
HEAD_STD = 0.001
FC_GAIN = 0.4  # factor of the MLP's first matrix


class Block:
    """A layer: s1 = x + r; s2 = s1 + attention(norm1(s1)); its outputs are s2 and mlp(norm2(s2))."""

    def __init__(self, config: ModelConfig, index: int, positions: Positions) -> None:
        name = f"blocks.{index}"
        width = config.n_embd
        norm = norm_of(config)
        self.config = config
        self.positions = positions
        self.window = config.window_of(index)

        self.norm1 = norm(f"{name}.norm1", config)
        # One matmul computes q, k and v from their stacked matrices. Muon updates each matrix separately.
        q = config.attention_width
        kv = config.kv_heads * config.head_size
        qkv_bias = config.bias or config.qkv_bias
        # Heads of q and k learn faster as separate matrices than in one matrix with the others; heads of v
        # equally fast. Short matrices also take fewer operations.
        pieces = (config.head_size,) * (config.n_head + 2 * config.kv_heads)
        self.qkv = Linear(f"{name}.attn.qkv", width, q + 2 * kv, qkv_bias, heights=(q, kv, kv), pieces=pieces)
        self.head_norm = HeadNorm(f"{name}.qk_norm", config) if config.qk_norm_gain else None
        self.values = ValueEmbedding(f"{name}.values", config) if index in config.value_layers else None
        self.out = Linear(f"{name}.attn.proj", q, width, config.bias)

        self.norm2 = norm(f"{name}.norm2", config)
        halves = (config.hidden,) * (2 if config.gated else 1)
        self.fc = Linear(f"{name}.mlp.fc", width, config.pre_width, config.bias, heights=halves)
        self.proj = Linear(f"{name}.mlp.proj", config.hidden, width, config.bias)

        # Ordered as the backward pass finishes their gradients. Parameters have the same layout, so that
        # final gradients are one range, which ranks can sum during the pass.
        parts = [self.proj, self.fc, self.norm2, self.out, self.head_norm, self.qkv, self.norm1]
        self.parts: list[Part] = [part for part in parts if part is not None]

    def scratch(self, kernels: Kernels, n: int, added: Floats2d | None, again: bool) -> Scratch:
        """Make the memory for gradients of n rows. dh1 is `added` if given; see `backward` for `again`."""
        config = self.config
        c = config.n_embd
        dh1 = kernels.zeros(n, c) if added is None else added
        datt = dh1  # attention's backward pass reads it before dh1 is written
        if config.attention_width != c:
            datt = kernels.zeros(n, config.attention_width)
        # A norm without parameters needs no sums over rows.
        sum_rows = kernels.capabilities.norm_sum_rows if config.norm_gain or config.bias else 0

        def sums() -> Wide2d | None:
            return kernels.accum_zeros(sum_rows, 3 * c) if sum_rows else None

        return Scratch(
            dh1=dh1,
            dh2=kernels.zeros(n, c),
            din=kernels.zeros(n, c),
            dmid=kernels.zeros(n, c),
            dout=kernels.zeros(n, c),
            dact=None if again else kernels.zeros(n, config.hidden),
            dpre=None if kernels.capabilities.overwrites_pre else kernels.zeros(n, config.pre_width),
            datt=datt,
            dqkv=kernels.zeros(n, config.qkv_width),
            dgain=kernels.accum_zeros(n, 2 * config.head_size) if config.qk_norm_gain else None,
            in_sums=sums(),
            mid_sums=sums(),
            out_sums=sums(),
        )

    def bind(self, kernels: Kernels) -> None:
        self.k = kernels
        sums = kernels.capabilities.sums_bias_gradients
        self.fc.bias_summed_in_backward = sums
        # Rotary positions and norms change dqkv after attention's backward pass, which would have summed it.
        self.qkv.bias_summed_in_backward = sums and not (self.positions.rotates or self.config.qk_norm)

    def attend(self, acts: LayerActivations, seq_len: int, positions: Ints1d | None) -> None:
        self._prepare(acts, seq_len, None)
        self.k.attention(acts.att, acts.lse, acts.qkv, AttentionMask(seq_len, positions, self.window))

    def attend_cached(
        self, acts: LayerActivations, cache: Floats5d, seq_len: int, start: Ints1d, slots: Ints1d | None
    ) -> None:
        self._prepare(acts, seq_len, start)
        self.k.attention_cached(acts.att, cache, acts.qkv, start, self.window, slots)

    def _prepare(self, acts: LayerActivations, seq_len: int, start: Ints1d | None) -> None:
        """Rotate and normalize queries and keys. Without gains any order works: rotations keep lengths."""
        if self.head_norm is not None:
            assert acts.xhat is not None and acts.qk_rstd is not None
            self.head_norm.forward(acts.qkv, acts.xhat, acts.qk_rstd)
        self.positions.rotate(acts.qkv, seq_len, start, inverse=False)
        if self.config.qk_norm and self.head_norm is None:
            assert acts.qk_rstd is not None
            self.k.qk_norm(acts.qkv, acts.qk_rstd, self.config.head_size, self.config.norm_eps)

    def before_attention(
        self, acts: LayerActivations, x: Floats2d, r: Floats2d | None, tokens: Ints1d
    ) -> None:
        """Compute the layer up to qkv. Its input is x + r, or x if r is None."""
        self.norm1.forward(acts.h1, acts.s1, acts.stats1, x, r)
        self.qkv.forward(acts.qkv, acts.h1)
        if self.values is not None:
            self.values.forward(acts.qkv, tokens)

    def after_attention(self, acts: LayerActivations) -> None:
        """Compute up to the activation. `project` does the rest of the forward pass."""
        if acts.added is None:
            self.out.forward(acts.s2, acts.att, acts.s1)
            self.norm2.forward(acts.h2, acts.s2, acts.stats2, acts.s2, None)
        else:
            self.out.forward(acts.added, acts.att)
            self.norm2.forward(acts.h2, acts.s2, acts.stats2, acts.s1, acts.added)
        self.k.linear_act(acts.act, acts.pre, acts.h2, self.fc.wb, self.config.mlp)

    def project(self, acts: LayerActivations, into: Floats2d) -> None:
        """into ← s2 + mlp(…) if kernels fuse the sum; otherwise, only compute mlp(…). See `output`."""
        if acts.added is None:
            self.proj.forward(into, acts.act, acts.s2)
        else:
            self.proj.forward(acts.added, acts.act)

    def output(self, acts: LayerActivations, into: Floats2d) -> tuple[Floats2d, Floats2d | None]:
        """Return the summands of the next layer's input: s2 and mlp(…), or their sum and None."""
        return (into, None) if acts.added is None else (acts.s2, acts.added)

    def backward(
        self,
        acts: LayerActivations,
        tmp: Scratch,
        seq_len: int,
        again: bool,
        accumulate: bool,
        positions: Ints1d | None,
    ) -> None:
        """tmp.din ← the gradient of x (and r), from tmp.dout, the gradient of s2 + mlp.

        If `again`, recompute the norms' outputs and the activation, which other layers have overwritten.
        `accumulate` applies to the bias gradients that are summed here. tmp keeps the inputs of
        `weight_gradients`.
        """
        h1 = acts.h1 if again else None
        h2 = acts.h2 if again else None
        # MLP: its matrices lead back to h2, and the norm to s2, with tmp.dout as residual gradient
        dpre = gradient_of_pre(acts, tmp)
        dact = acts.act if tmp.dact is None else tmp.dact
        w = self.proj.wb.w
        db = self.fc.bias_gradient_in_backward(accumulate)
        self.k.linear_backward_act(dpre, dact, tmp.dout, w, acts.pre, self.config.mlp, again, db)
        self.fc.backward(tmp.dh2, dpre)
        self.norm2.backward(tmp.dmid, h2, tmp.mid_sums, tmp.dh2, tmp.dout, acts.s2, acts.stats2)
        # Attention, in the same way
        self.out.backward(tmp.datt, tmp.dmid)
        db = self.qkv.bias_gradient_in_backward(accumulate)
        mask = AttentionMask(seq_len, positions, self.window)
        self.k.attention_backward(tmp.dqkv, tmp.datt, acts.att, acts.lse, acts.qkv, mask, db)
        # Undo `_prepare` in reverse order. A norm without gain reads rotated queries and keys; one with gain
        # reads x̂ from before the rotation.
        if self.config.qk_norm and self.head_norm is None:
            assert acts.qk_rstd is not None
            self.k.qk_norm_backward(tmp.dqkv, acts.qkv, acts.qk_rstd, self.config.head_size)
        self.positions.rotate(tmp.dqkv, seq_len, None, inverse=True)
        if self.head_norm is not None:
            assert tmp.dgain is not None and acts.xhat is not None and acts.qk_rstd is not None
            self.head_norm.backward(tmp.dqkv, tmp.dgain, acts.xhat, acts.qk_rstd)
        self.qkv.backward(tmp.dh1, tmp.dqkv)
        self.norm1.backward(tmp.din, h1, tmp.in_sums, tmp.dh1, tmp.dmid, acts.s1, acts.stats1)

    def weight_gradients(
        self,
        acts: LayerActivations,
        tmp: Scratch,
        out_sums: Wide2d | None,
        tokens: SortedTokens,
        accumulate: bool,
    ) -> None:
        """Compute the gradients of all parameters. `out_sums` is from the norm that computed tmp.dout."""
        self.proj.weight_gradients(tmp.dout, acts.act, accumulate, out_sums)
        self.fc.weight_gradients(gradient_of_pre(acts, tmp), acts.h2, accumulate)
        self.norm2.weight_gradients(tmp.mid_sums, tmp.dh2, acts.s2, acts.stats2, accumulate)
        self.out.weight_gradients(tmp.dmid, acts.att, accumulate, tmp.mid_sums)
        if self.head_norm is not None:
            assert tmp.dgain is not None
            self.head_norm.weight_gradients(tmp.dgain, accumulate)
        self.qkv.weight_gradients(tmp.dqkv, acts.h1, accumulate)
        if self.values is not None:
            self.values.weight_gradients(tmp.dqkv, tokens)
        self.norm1.weight_gradients(tmp.in_sums, tmp.dh1, acts.s1, acts.stats1, accumulate)


@dataclass(slots=True)
class LayerActivations:
    """Results of a layer's forward pass for the backward pass, over N rows."""

    s1: Floats2d  # (N, C), input: the residual stream
    h1: Floats2d  # (N, C), norm1(s1)
    qkv: Floats2d  # (N, (H + 2K)·head)
    att: Floats2d  # (N, H·head), attention's output
    s2: Floats2d  # (N, C), s1 + projected att
    h2: Floats2d  # (N, C), norm2(s2)
    pre: Floats2d  # (N, hidden), input of the activation; twice as wide if gated
    act: Floats2d  # (N, hidden), the activation's output
    # (N, C), additions of attention and the MLP to the residual stream, shared by all layers. None if kernels
    # add them directly.
    added: Floats2d | None
    stats1: Stats  # statistics of norm1, in the wide type like the fields below
    stats2: Stats
    lse: Wide2d  # (N, H)
    qk_rstd: Wide2d | None  # (N, H + K), for normalized queries and keys
    xhat: Floats2d | None = None  # (N, (H + K)·head), q and k without their gain, if they have one


STATISTICS = ("stats1", "stats2", "lse", "qk_rstd")  # fields in the wide type


@dataclass(slots=True)
class Scratch:
    """Gradients that a layer passes to the layer below, over N rows; None if not needed.

    The gradient of s is named ds. Arrays may share memory. Their users, in the order of a pass:

    | memory           | used as | written by                   | last read by                |
    |------------------|---------|------------------------------|-----------------------------|
    | added, dh1, datt | added   | out.forward, proj.forward    | the norm that adds it       |
    |                  | dhidden | linear_cross_entropy         | final_norm.weight_gradients |
    |                  | datt    | out.backward                 | attention_backward          |
    |                  | dh1     | qkv.backward                 | norm1.weight_gradients      |
    | pre, dpre        | pre     | linear_act                   | linear_backward_act         |
    |                  | dpre    | linear_backward_act          | fc.weight_gradients         |
    | act, dact        | act     | linear_act                   | proj.forward                |
    |                  | dact    | linear_backward_act          | itself                      |
    |                  | act     | the same, if dpre is given   | proj.weight_gradients       |

    dout and din are two arrays, because proj.weight_gradients reads dout after din is written. Layers swap
    them, as well as in_sums and out_sums (`of_layer_below`):

        layer i + 1   dout = A, din = B
        layer i       dout = B, din = A    din of the layer above is dout here
        layer i - 1   dout = A, din = B
    """

    dh1: Floats2d
    dh2: Floats2d
    din: Floats2d  # gradient of the layer's input
    dmid: Floats2d  # gradient of s2
    dout: Floats2d  # gradient of the layer's output
    dact: Floats2d | None  # None: shares memory with act
    dpre: Floats2d | None  # None: shares memory with pre
    datt: Floats2d  # dh1, unless the widths differ
    dqkv: Floats2d
    dgain: Wide2d | None  # (N, 2·head), gradients of the gain of queries and keys
    in_sums: Wide2d | None  # partial sums of norm1, of norm2 and of the layer above's norm
    mid_sums: Wide2d | None
    out_sums: Wide2d | None

    def of_layer_below(self) -> Scratch:
        """Return the same arrays with the names of the layer below, whose dout is this din."""
        return replace(self, dout=self.din, din=self.dout, out_sums=self.in_sums, in_sums=self.out_sums)


SUMS = ("in_sums", "mid_sums", "out_sums")  # fields without a row per token


def gradient_of_pre(acts: LayerActivations, tmp: Scratch) -> Floats2d:
    """Return the memory for the gradient of acts.pre, which may be acts.pre."""
    return acts.pre if tmp.dpre is None else tmp.dpre


class Part:
    """Parameters, with names and shapes in `specs`. Kernels receive None for an absent bias or gain."""

    def __init__(self, name: str, specs: Sequence[Spec]) -> None:
        self.name = name
        self.specs = specs

    def bind(self, kernels: Kernels, params: Tensors, grads: Tensors) -> None:
        """Take this part's arrays by name. `grads` has the gradients of trained tensors once they exist."""
        self.k = kernels
        w, b = f"{self.name}.w", f"{self.name}.b"
        self.w: Any = params.get(w)  # typed Any, so that parts with a weight need no check for None
        self.b = params.get(b)
        self.dw, self.db = grads.get(w), grads.get(b)


class Linear(Part):
    """y = x wᵀ + b, with w (outputs, inputs), b (outputs,), x (N, inputs), y (N, outputs)."""

    def __init__(
        self,
        name: str,
        inputs: int,
        outputs: int,
        bias: bool,
        group: str = MATRIX,
        heights: tuple[int, ...] = (),
        pieces: tuple[int, ...] = (),
    ) -> None:
        self.shape = (outputs, inputs)
        self.heights = heights
        specs = [Spec(f"{name}.w", self.shape, group, heights, pieces)]
        if bias:
            specs.append(Spec(f"{name}.b", (outputs,)))
        super().__init__(name, specs)
        # If True, the operation that computes dy in a backward pass also sums it for the bias gradient, while
        # it is in a cache (`Block.bind`).
        self.bias_summed_in_backward = False

    def bind(self, kernels: Kernels, params: Tensors, grads: Tensors) -> None:
        super().bind(kernels, params, grads)
        self.wb = Affine(self.w, self.b)

    def forward(self, y: Floats2d, x: Floats2d, onto: Floats2d | None = None) -> None:
        self.k.linear(y, x, self.wb, onto)

    def backward(self, dx: Floats2d, dy: Floats2d) -> None:
        self.k.linear_backward(dx, dy, self.wb.w)

    def bias_gradient_in_backward(self, accumulate: bool) -> Bias:
        """Return where the operation that computes dy must sum the bias gradient, or None if it must not."""
        return (
            BiasGradient(self.db, accumulate)
            if self.bias_summed_in_backward and self.db is not None
            else None
        )

    def weight_gradients(
        self, dy: Floats2d, x: Floats2d, accumulate: bool, sums: Wide2d | None = None
    ) -> None:
        db = None if self.bias_summed_in_backward else self.db
        if self.dw is not None:
            self.k.linear_backward_weights(Affine(self.dw, db), dy, x, accumulate, sums)
        elif db is not None:  # a bias whose matrix is not trained
            self.k.sum_rows(db, dy, accumulate)


class HeadNorm(Part):
    """A norm of each head, x / rms(x) · w, with separate weights for queries and keys."""

    def __init__(self, name: str, config: ModelConfig) -> None:
        super().__init__(name, [Spec(f"{name}.w", (2 * config.head_size,))])
        self.eps = config.norm_eps

    def forward(self, qkv: Floats2d, xhat: Floats2d, rstd: Wide2d) -> None:
        self.k.qk_norm_gain(qkv, xhat, rstd, self.w, self.eps)

    def backward(self, dqkv: Floats2d, dgain: Wide2d, xhat: Floats2d, rstd: Wide2d) -> None:
        self.k.qk_norm_gain_backward(dqkv, dgain, xhat, rstd, self.w)

    def weight_gradients(self, dgain: Wide2d, accumulate: bool) -> None:
        if self.dw is not None:
            self.k.sum_rows(self.dw, dgain, accumulate)


class ValueEmbedding(Part):
    """A trained vector per token that is added to the layer's values: w (padded V, K·head)."""

    def __init__(self, name: str, config: ModelConfig) -> None:
        self.shape = (config.padded_vocab, config.kv_heads * config.head_size)
        super().__init__(name, [Spec(f"{name}.w", self.shape, VALUES)])

    def forward(self, qkv: Floats2d, tokens: Ints1d) -> None:
        self.k.add_embedding(qkv, tokens, self.w)

    def zero_gradient(self) -> None:
        if self.dw is not None:
            self.k.zero(self.dw)

    def weight_gradients(self, dqkv: Floats2d, tokens: SortedTokens) -> None:
        """Add to the gradient. Workers do this together, so no worker may zero it here."""
        if self.dw is not None:
            self.k.embed_backward(self.dw, None, dqkv, tokens, 1)


class LayerNorm(Part):
    """y = (s - mean) / std · w + b over the C channels of a row, after the residual sum s = x + r."""

    centred = True

    def __init__(self, name: str, config: ModelConfig) -> None:
        present = {"w": config.norm_gain, "b": config.bias and self.centred}
        specs = [Spec(f"{name}.{kind}", (config.n_embd,)) for kind, there in present.items() if there]
        super().__init__(name, specs)
        self.eps = config.norm_eps

    def bind(self, kernels: Kernels, params: Tensors, grads: Tensors) -> None:
        super().bind(kernels, params, grads)
        self.wb = Gain(self.w, self.b)
        dw = self.dw
        if dw is None and self.db is not None:  # kernels compute both in one pass; this dw is not used
            dw = kernels.accum_zeros(*self.db.shape)
        self.dwb = None if dw is None else Affine(dw, self.db)

    @classmethod
    def stats(cls, config: ModelConfig, kernels: Kernels, n: int) -> Stats:
        return Stats(kernels.accum_zeros(n) if cls.centred else None, kernels.accum_zeros(n))

    def forward(self, y: Floats2d, s: Floats2d, stats: Stats, x: Floats2d, r: Floats2d | None) -> None:
        self.k.add_norm(y, s, stats, x, r, self.wb, self.eps)

    def backward(
        self,
        dx: Floats2d,
        y: Floats2d | None,
        sums: Wide2d | None,
        dy: Floats2d,
        dres: Floats2d | None,
        s: Floats2d,
        stats: Stats,
    ) -> None:
        self.k.norm_backward(dx, y, sums, dy, dres, s, stats, self.wb)

    def weight_gradients(
        self, sums: Wide2d | None, dy: Floats2d, s: Floats2d, stats: Stats, accumulate: bool
    ) -> None:
        if self.dwb is not None:
            self.k.norm_backward_weights(self.dwb, sums, dy, s, stats, accumulate)


class RMSNorm(LayerNorm):
    """y = s / rms(s) · w, without mean and bias."""

    centred = False


class GroupedRMSNorm(RMSNorm):
    """An RMS norm without gain of each of `norm_groups` parts of the channels, treating each as a row."""

    def __init__(self, name: str, config: ModelConfig) -> None:
        super().__init__(name, config)
        self.width = config.n_embd // config.norm_groups

    @classmethod
    def stats(cls, config: ModelConfig, kernels: Kernels, n: int) -> Stats:
        return Stats(None, kernels.accum_zeros(n, config.norm_groups))

    def forward(self, y: Floats2d, s: Floats2d, stats: Stats, x: Floats2d, r: Floats2d | None) -> None:
        groups, flat = self._groups, Stats(None, stats.rstd.reshape(-1))
        super().forward(groups(y), groups(s), flat, groups(x), groups(r))

    def backward(
        self,
        dx: Floats2d,
        y: Floats2d | None,
        sums: Wide2d | None,
        dy: Floats2d,
        dres: Floats2d | None,
        s: Floats2d,
        stats: Stats,
    ) -> None:
        groups, flat = self._groups, Stats(None, stats.rstd.reshape(-1))
        super().backward(groups(dx), groups(y), sums, groups(dy), groups(dres), groups(s), flat)

    def _groups(self, x: Any) -> Any:
        return None if x is None else x.reshape(-1, self.width)


class Positions(Part):
    """No positional encoding: the causal mask is the only source of order. Base class of the others."""

    rotates = False
    wpe: Floats2d | None = None  # learned positions, (context, C), and their gradient
    dwpe: Wide2d | None = None
    angles: Angles | None = None  # rotary positions

    def __init__(self, config: ModelConfig) -> None:
        super().__init__("positions", [])

    def bind(self, kernels: Kernels, params: Tensors, grads: Tensors) -> None: ...

    def rotate(self, qkv: Floats2d, seq_len: int, start: Ints1d | None, inverse: bool) -> None: ...


class LearnedPositions(Positions):
    """A trained vector per position, added to the token's vector."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.specs = [Spec(LEARNED, (config.seq_len, config.n_embd), EMBEDDING)]

    def bind(self, kernels: Kernels, params: Tensors, grads: Tensors) -> None:
        self.wpe = params[LEARNED]
        self.dwpe = grads.get(LEARNED)


class Rope(Positions):
    """Rotary positions (arXiv 2104.09864): q and k rotate by angles proportional to the position.

    Their product then depends only on their distance.
    """

    rotates = True
    angles: Angles

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.context = config.seq_len
        self.heads = config.n_head + config.kv_heads  # heads of q and k, which rotate
        self.frequencies = rope_frequencies(config)

    def bind(self, kernels: Kernels, params: Tensors, grads: Tensors) -> None:
        self.k = kernels
        angles = np.arange(self.context)[:, None] * self.frequencies  # (context, head/2)
        self.angles = Angles(kernels.accum_zeros(*angles.shape), kernels.accum_zeros(*angles.shape))
        kernels.put(self.angles.cos, np.cos(angles))
        kernels.put(self.angles.sin, np.sin(angles))

    def rotate(self, qkv: Floats2d, seq_len: int, start: Ints1d | None, inverse: bool) -> None:
        assert self.angles is not None
        self.k.rope(qkv, self.angles, self.heads, seq_len, start, inverse)


def rope_frequencies(config: ModelConfig) -> Array:
    """Return the rotation of each pair from one position to the next, in radians, (head/2,).

    Llama 3 divides frequencies with fewer than rope_slow turns in rope_context by rope_factor, keeps
    frequencies with more than rope_fast turns, and interpolates between them.
    """
    half = config.head_size // 2
    plain = config.rope_base ** (-np.arange(half) / half)
    if config.rope_scaling == "none":
        return plain
    if config.rope_scaling == "linear":
        return plain / config.rope_factor
    turns = plain * config.rope_context / (2 * math.pi)
    share = np.clip((turns - config.rope_slow) / (config.rope_fast - config.rope_slow), 0, 1)
    return share * plain + (1 - share) * plain / config.rope_factor


NORMS = {"layernorm": LayerNorm, "rmsnorm": RMSNorm}
POSITIONS = {"learned": LearnedPositions, "rope": Rope, "none": Positions}


def norm_of(config: ModelConfig) -> type[LayerNorm]:
    return NORMS[config.norm] if config.norm_groups == 1 else GroupedRMSNorm


def activation_widths(config: ModelConfig) -> dict[str, int]:
    """Return the width of each LayerActivations array of type `dtype`, except `added`."""
    c = config.n_embd
    widths = {"s1": c, "h1": c, "qkv": config.qkv_width, "att": config.attention_width, "s2": c, "h2": c}
    widths |= {"pre": config.pre_width, "act": config.hidden}
    if config.qk_norm_gain:
        widths["xhat"] = (config.n_head + config.kv_heads) * config.head_size
    return widths


def new_activations(config: ModelConfig, kernels: Kernels, n: int) -> LayerActivations:
    """Make the memory of the first layer for n rows."""
    stats = norm_of(config).stats
    fuses = kernels.capabilities.fuses_residual
    heads = config.n_head + config.kv_heads
    return LayerActivations(
        **{name: kernels.zeros(n, width) for name, width in activation_widths(config).items()},
        added=None if fuses else kernels.zeros(n, config.n_embd),
        stats1=stats(config, kernels, n),
        stats2=stats(config, kernels, n),
        lse=kernels.accum_zeros(n, config.n_head),
        qk_rstd=kernels.accum_zeros(n, heads) if config.qk_norm else None,
    )


def more_activations(first: LayerActivations, kernels: Kernels, kept: Sequence[str]) -> LayerActivations:
    """Make another layer's memory for the fields in `kept`, and share all others with the first layer.

    Fields that the backward pass recomputes can be shared, because layers run one at a time.
    """
    other = copy(first)
    for name in kept:
        shared = getattr(first, name)
        make = kernels.accum_zeros if name in STATISTICS else kernels.zeros
        if isinstance(shared, Stats):
            own = [None if each is None else make(*each.shape) for each in shared]
            setattr(other, name, Stats._make(own))
        elif shared is not None:
            setattr(other, name, make(*shared.shape))
    return other


def initial_std(spec: Spec, config: ModelConfig) -> float:
    """Return the standard deviation of a tensor's initial weights.

    GPT-2's is smaller for the two projections per layer into the residual stream. With `unit`, these,
    learned positions and the previous embedding are 0, and the layers' other matrices approximately preserve
    the size of their input; the MLP's first one reduces it.
    """
    into_residual = spec.name.endswith(("attn.proj.w", "mlp.proj.w"))
    if config.init_weights == "gpt2":
        if into_residual and config.init_residual:
            return config.init_std / math.sqrt(2 * config.n_layer)
        return config.init_std
    if spec.name in (LEARNED, PREVIOUS):
        return 0.0
    if spec.group == EMBEDDING:
        return EMBEDDING_STD
    if spec.group == HEAD:
        return HEAD_STD
    if into_residual:
        return 0.0
    gain = FC_GAIN if spec.name.endswith("mlp.fc.w") else 1.0
    return gain / math.sqrt(config.n_embd)
