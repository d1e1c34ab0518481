"""Small models of every architecture, and their formulas for one sequence at a time."""

from dataclasses import replace

import numpy as np
from distgpt.core.config import MLPS, NORMS, POSITIONS, ModelConfig
from distgpt.core.model.model import Architecture, Model
from distgpt.core.model.passes import Pass
from distgpt.core.ops.activations import ACTIVATIONS

BASE = ModelConfig(vocab_size=13, seq_len=9, n_layer=2, n_head=3, n_embd=24, tied=False, vocab_multiple=8, init_std=0.2)

SCALED = {"qk_norm": True, "qk_norm_gain": True}

VARIANTS = {
    "gpt2": BASE,
    **{norm: replace(BASE, norm=norm, bias=False) for norm in NORMS},
    **{mlp: replace(BASE, mlp=mlp) for mlp in MLPS if mlp != BASE.mlp},
    **{kind: replace(BASE, positions=kind) for kind in POSITIONS if kind != BASE.positions},
    "tied": replace(BASE, tied=True),
    "bias without gain": replace(BASE, norm_gain=False),
    "no gain": replace(BASE, norm="rmsnorm", norm_gain=False, bias=False),
    "groups of channels": replace(BASE, norm="rmsnorm", norm_gain=False, bias=False, norm_groups=4, embed_norm=True),
    "embed norm": replace(BASE, embed_norm=True),
    "microgpt": replace(
        BASE, embed_norm=True, final_norm=False, norm="rmsnorm", norm_gain=False, mlp="relu", bias=False
    ),
    "modern": replace(BASE, norm="rmsnorm", mlp="swiglu", positions="rope", bias=False, tied=True),
    "normalised queries": replace(BASE, positions="rope", qk_norm=True, init_weights="unit"),
    "grouped queries": replace(BASE, n_head=6, n_kv_head=2, n_embd=36, positions="rope", rope_base=50.0, qk_norm=True),
    "linear scaling": replace(BASE, positions="rope", rope_scaling="linear", rope_factor=3.0),
    # Four pairs with different frequencies in the context.
    "llama3 scaling": replace(
        BASE, positions="rope", rope_base=20.0, rope_scaling="llama3", rope_context=16, rope_slow=0.5, rope_fast=2
    ),
    "a head size of its own": replace(
        BASE, n_head=4, n_kv_head=2, head_dim=10, positions="rope", mlp="swiglu", mlp_width=37
    ),
    "biases of queries, keys and values": replace(BASE, norm="rmsnorm", bias=False, qkv_bias=True),
    "scaled queries": replace(
        BASE, n_head=4, n_kv_head=2, head_dim=4, norm="rmsnorm", positions="rope", bias=False, **SCALED
    ),
    "one key for all": replace(BASE, n_kv_head=1, mlp="swiglu"),
    "value embeddings": replace(BASE, n_layer=3, value_embeddings=True, positions="rope", init_weights="unit"),
    "previous embedding": replace(BASE, previous_embedding=True, positions="rope", embed_norm=True),
    "windows": replace(BASE, n_layer=3, window=4, full_every=2, positions="rope"),
    "windows everywhere": replace(BASE, n_head=6, n_kv_head=2, window=2, full_every=0),
    "one head, one layer": replace(BASE, n_layer=1, n_head=1),
}


def batch(config, n_seq, seq_len, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, config.vocab_size, (2, n_seq * seq_len)).astype(np.int32)


def build(config, kernels):
    model = Model(Architecture(config), kernels)
    model.initialise(7)
    rng = np.random.default_rng(1)  # gains and biases away from their plain initial values
    for spec in model.layout.specs:
        if not spec.is_matrix:
            model.params[spec.name][...] += 0.3 * rng.standard_normal(spec.shape)
    return model


def check_by_differences(model, gradients, tokens, targets, kind=""):
    """Compare gradients of three sequences with central differences.

    Along one random direction per tensor, so that every element of it takes part.
    """
    step, work, total = 1e-5, Pass(model, 3, len(tokens) // 3, training=False), model.kernels.accum_zeros(1)
    for name, gradient in gradients.items():
        direction = np.random.default_rng(2).standard_normal(gradient.shape)
        start, losses = model.params[name].copy(), []
        for sign in (1, -1):
            model.params[name][...] = start + sign * step * direction
            work.loss(total, tokens, targets)
            losses.append(float(total[0]))
        model.params[name][...] = start
        numeric, exact = (losses[0] - losses[1]) / (2 * step), float((gradient * direction).sum())
        assert abs(exact - numeric) < 1e-6 * abs(numeric) + 1e-9, (kind, name)


def plain_logits(c, params, tokens, begins=0):
    return plain_trace(c, params, tokens, begins)[0]


def plain_trace(c, params, tokens, begins=0):
    """Compute one sequence by the formulas, one head at a time.

    Return its logits, and lists of the hidden states before and after each layer, and of each head's weights.
    `begins`: the first token that each token sees, if a window has moved.
    """
    hidden, attended = [], []
    p = {name: np.array(array, np.float64) for name, array in params.items()}
    at = np.arange(len(tokens))

    def norm(name, x):
        grouped = x.reshape(len(x), c.norm_groups, -1)
        centred = grouped - grouped.mean(-1, keepdims=True) if c.norm == "layernorm" else grouped
        y = (centred / np.sqrt((centred**2).mean(-1, keepdims=True) + c.norm_eps)).reshape(x.shape)
        return y * p.get(f"{name}.w", 1) + p.get(f"{name}.b", 0)

    def linear(name, x):
        return x @ p[f"{name}.w"].T + p.get(f"{name}.b", 0)

    def slowed(frequency):
        wavelength = 2 * np.pi / frequency
        is_fast = c.rope_scaling == "llama3" and wavelength < c.rope_context / c.rope_fast
        if c.rope_scaling == "none" or is_fast:
            return frequency
        if c.rope_scaling == "linear" or wavelength > c.rope_context / c.rope_slow:
            return frequency / c.rope_factor
        smooth = (c.rope_context / wavelength - c.rope_slow) / (c.rope_fast - c.rope_slow)
        return (1 - smooth) * frequency / c.rope_factor + smooth * frequency

    def turned(x):
        half = x.shape[1] // 2
        frequencies = np.array([slowed(c.rope_base ** (-i / half)) for i in range(half)])
        z = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * np.arange(len(x))[:, None] * frequencies)
        return np.concatenate([z.real, z.imag], 1)

    def attention(name, x, window):
        heads, qkv = [], linear(f"{name}.attn.qkv", x)
        if f"{name}.values.w" in p:
            added = p[f"{name}.values.w"][tokens]
            qkv[:, -added.shape[1] :] += added
        every = np.split(qkv, c.qkv_width // c.head_size, 1)
        for h, q in enumerate(every[: c.n_head]):
            group = h // (c.n_head // c.kv_heads)
            k, v = every[c.n_head + group], every[c.n_head + c.kv_heads + group]
            if c.qk_norm_gain:
                gains = np.split(p[f"{name}.qk_norm.w"], 2)
                q, k = (
                    x / np.sqrt((x**2).mean(1, keepdims=True) + c.norm_eps) * gain
                    for x, gain in zip((q, k), gains, strict=True)
                )
            q, k = (turned(q), turned(k)) if c.positions == "rope" else (q, k)
            if c.qk_norm and not c.qk_norm_gain:
                q, k = (1.2 * x / np.sqrt((x**2).mean(1, keepdims=True) + c.norm_eps) for x in (q, k))
            seen = (np.maximum(begins, at + 1 - window)[:, None] <= at) & (at <= at[:, None])
            scores = np.where(seen, q @ k.T / np.sqrt(c.head_size), -np.inf)
            weights = np.exp(scores - scores.max(1, keepdims=True))
            attended.append(weights / weights.sum(1, keepdims=True))
            heads.append(attended[-1] @ v)
        return np.concatenate(heads, 1)

    def activated(x):
        left, *right = np.split(x, 2 if c.gated else 1, 1)
        return ACTIVATIONS[c.mlp].compute(left)[0] * (right[0] if right else 1)

    x = p["wte"][tokens] + (p["wpe"][: len(tokens)] if c.positions == "learned" else 0)
    if c.previous_embedding:
        x += p["previous.w"][np.where(at > begins, [0, *tokens[:-1]], 0)]
    x = norm("embed_norm", x) if c.embed_norm else x
    for i in range(c.n_layer):
        hidden.append(x)
        name = f"blocks.{i}"
        all_seen = c.window == 0 or (c.full_every and (c.n_layer - 1 - i) % c.full_every == 0)
        x = x + linear(f"{name}.attn.proj", attention(name, norm(f"{name}.norm1", x), len(x) if all_seen else c.window))
        x = x + linear(f"{name}.mlp.proj", activated(linear(f"{name}.mlp.fc", norm(f"{name}.norm2", x))))
    x = norm("final_norm", x) if c.final_norm else x
    logits = x @ p["wte" if c.tied else "head.w"][: c.vocab_size].T
    return logits, [*hidden, x], attended


def sequences_for(config, count=40):
    rng = np.random.default_rng(5)
    lengths = rng.integers(2, config.seq_len + 2, count)
    return [rng.integers(0, config.vocab_size, length) for length in lengths]


def one_by_one(model, sequences):
    total = 0.0
    for sequence in sequences:
        work, loss = Pass(model, 1, len(sequence) - 1, training=False), model.kernels.accum_zeros(1)
        work.loss(loss, *(model.kernels.integers(side) for side in (sequence[:-1], sequence[1:])))
        total += float(loss[0]) * (len(sequence) - 1)
    return total / sum(len(sequence) - 1 for sequence in sequences)
