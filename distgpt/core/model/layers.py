"""The parts of a GPT: what parameters each has, and its forward and backward pass in terms of kernels.

Begin with `Block`, a layer: what it does before, in and after attention, and on the way back. Its parts have
`forward`; `backward`, the gradient of the input, row by row or sequence by sequence, so that slices of a
batch can run side by side; and `weights`, the gradients of the parameters, over all rows at once. The variant
of each part is chosen here, once, when the model is built.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from distgpt.core.config import ModelConfig
from distgpt.core.model.memory import EMBEDDING, HEAD, LEARNED, MATRIX, VALUES, Spec
from distgpt.core.ops.api import (
    Affine,
    Angles,
    Array,
    Bias,
    BiasGradient,
    Floats2d,
    Floats5d,
    Gain,
    Ints1d,
    Kernels,
    SortedTokens,
    Stats,
    Wide2d,
)

Tensors = Mapping[str, Array]

# Standard deviations of initial weights by `unit`, and a factor of the MLP's first matrix.
EMBEDDING_STD, HEAD_STD, FC_GAIN = 0.8, 0.001, 0.4


class Part:
    """Parameters by name; an absent one (a bias, a gain) is None, as kernels expect it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def specs(self) -> list[Spec]:
        raise NotImplementedError

    def bind(self, kernels: Kernels, params: Tensors, grads: Tensors) -> None:
        """Take this part's arrays, by name. `grads` has those of what is trained, once there are any."""
        raise NotImplementedError


class Linear(Part):
    """y = x wᵀ + b"""

    def __init__(
        self,
        name: str,
        inputs: int,
        outputs: int,
        bias: bool,
        group: str = MATRIX,
        heights: tuple[int, ...] = (),
    ) -> None:
        super().__init__(name)
        self.shape, self.bias, self.group, self.heights = (outputs, inputs), bias, group, heights
        self.sums_along = False  # True if the operation that computes dy also sums the gradient of the bias

    def specs(self) -> list[Spec]:
        weight = Spec(f"{self.name}.w", self.shape, self.group, self.heights)
        return [weight, Spec(f"{self.name}.b", self.shape[:1])] if self.bias else [weight]

    def bind(self, kernels: Kernels, params: Tensors, grads: Tensors) -> None:
        w, b = f"{self.name}.w", f"{self.name}.b"
        self.k, self.wb = kernels, Affine(params[w], params.get(b))
        self.dwb = Affine(grads[w], grads.get(b)) if w in grads else None

    def forward(self, y: Floats2d, x: Floats2d, onto: Floats2d | None = None) -> None:
        self.k.linear(y, x, self.wb, onto)

    def backward(self, dx: Floats2d, dy: Floats2d) -> None:
        self.k.linear_backward(dx, dy, self.wb.w)

    def bias_along(self, accumulate: bool) -> Bias:
        if self.dwb is None or self.dwb.b is None or not self.sums_along:
            return None
        return BiasGradient(self.dwb.b, accumulate)

    def weights(self, dy: Floats2d, x: Floats2d, accumulate: bool, sums: Wide2d | None = None) -> None:
        if self.dwb is None:  # it is not trained
            return
        dwb = Affine(self.dwb.w, None) if self.sums_along else self.dwb
        self.k.linear_backward_weights(dwb, dy, x, accumulate, sums)


class HeadNorm(Part):
    """Each head of queries, x / rms(x) · w, and each head of keys in the same way, with other weights."""

    def __init__(self, name: str, config: ModelConfig) -> None:
        super().__init__(name)
        self.shape, self.eps = (2 * config.head_size,), config.norm_eps

    def specs(self) -> list[Spec]:
        return [Spec(f"{self.name}.w", self.shape)]

    def bind(self, kernels: Kernels, params: Tensors, grads: Tensors) -> None:
        name = f"{self.name}.w"
        self.k, self.w, self.dw = kernels, params[name], grads.get(name)

    def forward(self, qkv: Floats2d, xhat: Floats2d, rstd: Wide2d) -> None:
        self.k.qk_norm_gain(qkv, xhat, rstd, self.w, self.eps)

    def backward(self, dqkv: Floats2d, dgain: Wide2d, xhat: Floats2d, rstd: Wide2d) -> None:
        self.k.qk_norm_gain_backward(dqkv, dgain, xhat, rstd, self.w)

    def weights(self, dgain: Wide2d, accumulate: bool) -> None:
        if self.dw is not None:
            self.k.sum_rows(self.dw, dgain, accumulate)


class ValueEmbedding(Part):
    """A trained vector of each token, which is added to the values of its layer."""

    def __init__(self, name: str, config: ModelConfig) -> None:
        super().__init__(name)
        self.shape = (config.padded_vocab, config.kv_heads * config.head_size)

    def specs(self) -> list[Spec]:
        return [Spec(f"{self.name}.w", self.shape, VALUES)]

    def bind(self, kernels: Kernels, params: Tensors, grads: Tensors) -> None:
        name = f"{self.name}.w"
        self.k, self.w, self.dw = kernels, params[name], grads.get(name)

    def forward(self, qkv: Floats2d, tokens: Ints1d) -> None:
        self.k.add_embedding(qkv, tokens, self.w)

    def zero_gradient(self) -> None:
        if self.dw is not None:
            self.k.zero(self.dw)

    def weights(self, dqkv: Floats2d, tokens: SortedTokens) -> None:
        """Add to the gradient. Workers do this together, so none of them may set it to 0 here."""
        if self.dw is not None:
            self.k.embed_backward(self.dw, None, dqkv, tokens, 1)


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

    def bind(self, kernels: Kernels, params: Tensors, grads: Tensors) -> None:
        w, b = f"{self.name}.w", f"{self.name}.b"
        self.k, self.wb = kernels, Gain(params.get(w), params.get(b))
        self.dwb = Affine(grads[w], grads.get(b)) if w in grads else None

    @classmethod
    def stats(cls, kernels: Kernels, n: int) -> Stats:
        """Make the memory for the statistics of n rows."""
        return Stats(kernels.wide_zeros(n) if cls.centred else None, kernels.wide_zeros(n))

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

    def weights(self, sums: Wide2d | None, dy: Floats2d, s: Floats2d, stats: Stats, accumulate: bool) -> None:
        if self.dwb is not None:
            self.k.norm_backward_weights(self.dwb, sums, dy, s, stats, accumulate)


class RMSNorm(LayerNorm):
    """y = s / rms(s) · w: no mean is taken off, and there is no bias."""

    centred = False


class LearnedPositions:
    """One trained vector per position, added to the token's."""

    rotates = False

    def __init__(self, config: ModelConfig) -> None:
        self.shape = (config.seq_len, config.n_embd)
        self.wpe: Floats2d | None = None
        self.dwpe: Wide2d | None = None

    def specs(self) -> list[Spec]:
        return [Spec(LEARNED, self.shape, EMBEDDING)]

    def bind(self, kernels: Kernels, params: Tensors, grads: Tensors) -> None:
        self.wpe, self.dwpe = params.get(LEARNED), grads.get(LEARNED)

    def rotate(self, qkv: Floats2d, seq_len: int, start: Ints1d | None, inverse: bool) -> None:
        """Do nothing: only rotary positions rotate q and k."""


class NoPositions(LearnedPositions):
    """No positions: the causal mask alone tells the order of tokens."""

    def specs(self) -> list[Spec]:
        return []


class Rope(NoPositions):
    """Rotary positions: q and k rotate by angles that grow with the position, so attention sees distances."""

    rotates = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.heads, self.half = config.n_head + config.kv_heads, config.head_size // 2
        self.frequencies = rope_frequencies(config)

    def bind(self, kernels: Kernels, params: Tensors, grads: Tensors) -> None:
        self.k = kernels
        positions = np.arange(self.shape[0])[:, None]
        angles = positions * self.frequencies
        self.angles = Angles(*(kernels.wide_zeros(*angles.shape) for _ in range(2)))
        kernels.put(self.angles.cos, np.cos(angles))
        kernels.put(self.angles.sin, np.sin(angles))

    def rotate(self, qkv: Floats2d, seq_len: int, start: Ints1d | None, inverse: bool) -> None:
        self.k.rope(qkv, self.angles, self.heads, seq_len, start, inverse)


def rope_frequencies(config: ModelConfig) -> Array:
    """Return what each pair turns by from one position to the next, (head/2,).

    Llama 3 divides by rope_factor those that turn less than rope_slow times in rope_context, leaves those
    that turn more than rope_fast times, and takes a mean in between.
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
POSITIONS = {"learned": LearnedPositions, "rope": Rope, "none": NoPositions}


@dataclass(slots=True)
class LayerActivations:
    """Results of a layer's forward pass that the backward pass reads, over N rows."""

    s1: Floats2d  # (N, C), the input: the residual stream
    h1: Floats2d  # norm1(s1)
    qkv: Floats2d  # (N, (H + 2K)·head)
    att: Floats2d  # attention's output, (N, H·head)
    s2: Floats2d  # s1 + projected att
    h2: Floats2d  # norm2(s2)
    pre: Floats2d  # the activation's input, (N, hidden), twice as wide where it is gated
    act: Floats2d  # the activation's output, (N, hidden)
    # What attention and the MLP add to the residual stream, (N, C); None where kernels add it themselves. All
    # layers share it, and a backward pass uses it as dh1.
    added: Floats2d | None
    stats1: Stats
    stats2: Stats
    lse: Wide2d  # (N, H)
    qk_rstd: Wide2d | None  # (N, H + K), of normalised queries and keys
    xhat: Floats2d | None  # (N, (H + K)·head): these without their gain, where they have one


@dataclass(slots=True)
class Scratch:
    """Gradients that one layer leaves to the one below, over N rows; None where not needed.

    A gradient of s is named ds.
    """

    dh1: Floats2d
    dh2: Floats2d
    din: Floats2d  # the gradient of the layer's input
    dmid: Floats2d  # the gradient of s2
    dout: Floats2d  # the gradient of the layer's output
    dact: Floats2d | None  # None: it takes the place of act
    dpre: Floats2d | None  # None: it takes the place of pre
    datt: Floats2d  # dh1, unless it has another width
    dqkv: Floats2d
    dgain: Wide2d | None  # (N, 2·head), gradients of the gain of queries and keys
    in_sums: Wide2d | None  # partial sums of the norms: those of norm1, of norm2, of the layer above
    mid_sums: Wide2d | None
    out_sums: Wide2d | None

    def of_layer_below(self) -> Scratch:
        """Return the same arrays by the names that the layer below knows them by: this din is its dout."""
        return replace(self, dout=self.din, din=self.dout, out_sums=self.in_sums, in_sums=self.out_sums)


SUMS = ("in_sums", "mid_sums", "out_sums")  # which have no row per token


class Block:
    """One layer: s1 = x + r; s2 = s1 + attention(norm1(s1)); the next one gets s2 and mlp(norm2(s2))."""

    def __init__(self, config: ModelConfig, index: int, positions: LearnedPositions) -> None:
        name, width, bias = f"blocks.{index}", config.n_embd, config.bias
        self.act, self.positions = config.mlp, positions
        self.qk_norm, self.head, self.eps = config.qk_norm, config.head_size, config.norm_eps
        self.window = config.window_of(index)
        self.norm1 = NORMS[config.norm](f"{name}.norm1", config)
        q, kv = config.attention_width, config.kv_heads * config.head_size
        self.head_norm = HeadNorm(f"{name}.qk_norm", config) if config.qk_norm_gain else None
        self.qkv = Linear(f"{name}.attn.qkv", width, q + 2 * kv, bias or config.qkv_bias, heights=(q, kv, kv))
        self.out = Linear(f"{name}.attn.proj", q, width, bias)
        self.norm2 = NORMS[config.norm](f"{name}.norm2", config)
        halves = (config.hidden,) * (2 if config.gated else 1)
        self.fc = Linear(f"{name}.mlp.fc", width, config.pre_width, bias, heights=halves)
        self.proj = Linear(f"{name}.mlp.proj", config.hidden, width, bias)
        self.values = ValueEmbedding(f"{name}.values", config) if index in config.value_layers else None
        # In the order in which the backward pass finishes their gradients.
        parts = [self.proj, self.fc, self.norm2, self.out, self.head_norm, self.qkv, self.norm1]
        self.parts: list[Part] = [part for part in parts if part is not None]

    @staticmethod
    def activations(config: ModelConfig) -> dict[str, int]:
        """Return the widths of LayerActivations that are of `dtype`."""
        c, pre = config.n_embd, config.pre_width
        streams = dict.fromkeys(("s1", "h1", "att", "s2", "h2"), c) | {"att": config.attention_width}
        heads = config.n_head + config.kv_heads
        xhat = {"xhat": heads * config.head_size} if config.qk_norm_gain else {}
        return {**streams, "qkv": config.qkv_width, "pre": pre, "act": config.hidden, **xhat}

    @classmethod
    def new_activations(
        cls,
        config: ModelConfig,
        kernels: Kernels,
        n: int,
        other: LayerActivations | None = None,
        kept: Sequence[str] = (),
    ) -> LayerActivations:
        """Make the memory of a layer for n rows; with `other`, share that layer's but for what is `kept`."""
        widths, stats = cls.activations(config), NORMS[config.norm].stats
        fuses, heads = kernels.capabilities.fuses_residual, config.n_head + config.kv_heads

        def array(name: str) -> Floats2d:
            shared: Floats2d | None = None if name in kept else getattr(other, name, None)
            return kernels.zeros(n, widths[name]) if shared is None else shared

        own = None if "statistics" in kept else other
        return LayerActivations(
            s1=array("s1"),
            h1=array("h1"),
            qkv=array("qkv"),
            att=array("att"),
            s2=array("s2"),
            h2=array("h2"),
            pre=array("pre"),
            act=array("act"),
            added=other.added if other else None if fuses else kernels.zeros(n, config.n_embd),
            stats1=own.stats1 if own else stats(kernels, n),
            stats2=own.stats2 if own else stats(kernels, n),
            lse=own.lse if own else kernels.wide_zeros(n, config.n_head),
            qk_rstd=own.qk_rstd if own else kernels.wide_zeros(n, heads) if config.qk_norm else None,
            xhat=array("xhat") if config.qk_norm_gain else None,
        )

    def scratch(
        self, config: ModelConfig, kernels: Kernels, n: int, added: Floats2d | None, again: bool
    ) -> Scratch:
        """Make the memory for gradients of n rows. dh1 is `added`, if there; `again`: of `backward`."""
        can, c = kernels.capabilities, config.n_embd
        dh1 = kernels.zeros(n, c) if added is None else added
        dh2, din, dmid, dout = (kernels.zeros(n, c) for _ in range(4))
        sums = can.norm_sum_rows if config.norm_gain or config.bias else 0
        in_sums, mid_sums, out_sums = (kernels.wide_zeros(sums, 3 * c) if sums else None for _ in range(3))
        own_width = config.attention_width != c
        return Scratch(
            dh1=dh1,
            dh2=dh2,
            din=din,
            dmid=dmid,
            dout=dout,
            dact=None if again else kernels.zeros(n, config.hidden),
            dpre=None if can.overwrites_pre else kernels.zeros(n, config.pre_width),
            datt=kernels.zeros(n, config.attention_width) if own_width else dh1,  # read before dh1 is written
            dqkv=kernels.zeros(n, config.qkv_width),
            dgain=kernels.wide_zeros(n, 2 * config.head_size) if config.qk_norm_gain else None,
            in_sums=in_sums,
            mid_sums=mid_sums,
            out_sums=out_sums,
        )

    def bind(self, kernels: Kernels) -> None:
        self.k = kernels
        sums = kernels.capabilities.sums_bias_gradients
        self.fc.sums_along = sums
        # Rotary positions and norms change dqkv after attention's backward pass has summed it.
        self.qkv.sums_along = sums and not (self.positions.rotates or self.qk_norm)

    def attend(self, acts: LayerActivations, seq_len: int, positions: Ints1d | None) -> None:
        self._prepare(acts, seq_len, None)
        self.k.attention(acts.att, acts.lse, acts.qkv, seq_len, positions, self.window)

    def attend_cached(
        self, acts: LayerActivations, cache: Floats5d, seq_len: int, start: Ints1d, lanes: Ints1d | None
    ) -> None:
        self._prepare(acts, seq_len, start)
        self.k.attention_cached(acts.att, cache, acts.qkv, start, self.window, lanes)

    def _prepare(self, acts: LayerActivations, seq_len: int, start: Ints1d | None) -> None:
        """Rotate and normalise queries and keys. Without gains the order does not matter: a rotation keeps
        the length."""
        if self.head_norm is not None:
            assert acts.xhat is not None and acts.qk_rstd is not None
            self.head_norm.forward(acts.qkv, acts.xhat, acts.qk_rstd)
        self.positions.rotate(acts.qkv, seq_len, start, inverse=False)
        if self.qk_norm and self.head_norm is None:
            assert acts.qk_rstd is not None
            self.k.qk_norm(acts.qkv, acts.qk_rstd, self.head, self.eps)

    def before_attention(
        self, acts: LayerActivations, x: Floats2d, r: Floats2d | None, tokens: Ints1d
    ) -> None:
        """Compute up to qkv. x + r is this layer's input; r is None where x is that already."""
        self.norm1.forward(acts.h1, acts.s1, acts.stats1, x, r)
        self.qkv.forward(acts.qkv, acts.h1)
        if self.values is not None:
            self.values.forward(acts.qkv, tokens)

    def after_attention(self, acts: LayerActivations) -> None:
        """Compute up to the activation; `project` is the rest of the forward pass."""
        if acts.added is None:
            self.out.forward(acts.s2, acts.att, acts.s1)
            self.norm2.forward(acts.h2, acts.s2, acts.stats2, acts.s2, None)
        else:
            self.out.forward(acts.added, acts.att)
            self.norm2.forward(acts.h2, acts.s2, acts.stats2, acts.s1, acts.added)
        self.k.linear_act(acts.act, acts.pre, acts.h2, self.fc.wb, self.act)

    def project(self, acts: LayerActivations, into: Floats2d) -> None:
        """Compute mlp(…), and where that costs nothing its sum with s2, in `into`: see `output`."""
        if acts.added is None:
            self.proj.forward(into, acts.act, acts.s2)
        else:
            self.proj.forward(acts.added, acts.act)

    def output(self, acts: LayerActivations, into: Floats2d) -> tuple[Floats2d, Floats2d | None]:
        """Return what the next layer adds up: s2 and mlp(…), or their sum and None."""
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
        """tmp.din ← the gradient of x (and of r), from tmp.dout, that of s2 + mlp. `weights` reads tmp then.

        With `again` the norms' outputs and the activation are computed anew, as other layers share them.
        `accumulate` is for the gradients of biases that come along.
        """
        h1, h2 = (acts.h1, acts.h2) if again else (None, None)
        dpre, dact = gradient_of_pre(acts, tmp), acts.act if tmp.dact is None else tmp.dact
        w, db = self.proj.wb.w, self.fc.bias_along(accumulate)
        self.k.linear_backward_act(dpre, dact, tmp.dout, w, acts.pre, self.act, again, db)
        self.fc.backward(tmp.dh2, dpre)
        self.norm2.backward(tmp.dmid, h2, tmp.mid_sums, tmp.dh2, tmp.dout, acts.s2, acts.stats2)
        self.out.backward(tmp.datt, tmp.dmid)
        db = self.qkv.bias_along(accumulate)
        self.k.attention_backward(
            tmp.dqkv, tmp.datt, acts.att, acts.lse, acts.qkv, seq_len, db, positions, self.window
        )
        # Undo `_prepare`, its last step first: a norm without gain reads rotated queries and keys, one with
        # gain an x̂ from before the rotation.
        if self.qk_norm and self.head_norm is None:
            assert acts.qk_rstd is not None
            self.k.qk_norm_backward(tmp.dqkv, acts.qkv, acts.qk_rstd, self.head)
        self.positions.rotate(tmp.dqkv, seq_len, None, inverse=True)
        if self.head_norm is not None:
            assert tmp.dgain is not None and acts.xhat is not None and acts.qk_rstd is not None
            self.head_norm.backward(tmp.dqkv, tmp.dgain, acts.xhat, acts.qk_rstd)
        self.qkv.backward(tmp.dh1, tmp.dqkv)
        self.norm1.backward(tmp.din, h1, tmp.in_sums, tmp.dh1, tmp.dmid, acts.s1, acts.stats1)

    def weights(
        self,
        acts: LayerActivations,
        tmp: Scratch,
        out_sums: Wide2d | None,
        tokens: SortedTokens,
        accumulate: bool,
    ) -> None:
        """Compute the gradients of all parameters. out_sums: those of the norm that computed tmp.dout."""
        self.proj.weights(tmp.dout, acts.act, accumulate, out_sums)
        self.fc.weights(gradient_of_pre(acts, tmp), acts.h2, accumulate)
        self.norm2.weights(tmp.mid_sums, tmp.dh2, acts.s2, acts.stats2, accumulate)
        self.out.weights(tmp.dmid, acts.att, accumulate, tmp.mid_sums)
        if self.head_norm is not None:
            assert tmp.dgain is not None
            self.head_norm.weights(tmp.dgain, accumulate)
        self.qkv.weights(tmp.dqkv, acts.h1, accumulate)
        if self.values is not None:
            self.values.weights(tmp.dqkv, tokens)
        self.norm1.weights(tmp.in_sums, tmp.dh1, acts.s1, acts.stats1, accumulate)


def gradient_of_pre(acts: LayerActivations, tmp: Scratch) -> Floats2d:
    """Return the memory for the gradient of acts.pre: its own, or scratch memory."""
    return acts.pre if tmp.dpre is None else tmp.dpre


def initial_std(spec: Spec, config: ModelConfig) -> float:
    """Return the standard deviation of a tensor's initial weights.

    GPT-2's is smaller for projections into the residual stream, two per layer. By `unit` those are 0, and all
    other matrices of the layers keep the size of their input, about; the MLP's first one has less.
    """
    into_residual = spec.name.endswith(("attn.proj.w", "mlp.proj.w"))
    if config.init_weights == "gpt2":
        scaled = into_residual and config.init_residual
        return config.init_std / math.sqrt(2 * config.n_layer) if scaled else config.init_std
    if spec.group == VALUES:
        return 1 / math.sqrt(config.n_embd)
    if spec.group != MATRIX:
        return HEAD_STD if spec.group == HEAD else EMBEDDING_STD
    if into_residual:
        return 0.0
    return (FC_GAIN if spec.name.endswith("mlp.fc.w") else 1.0) / math.sqrt(config.n_embd)
