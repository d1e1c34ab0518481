"""Models as transformers stores them give the scores of their published formulas, written here in NumPy."""

import json

import numpy as np
import pytest

import distgpt
from distgpt.saved.huggingface.convert import import_model
from distgpt.saved.tensors import write_tensors

V, T, L, H, C, F = 37, 9, 2, 3, 12, 20  # the width of the MLP is no multiple of C
GPT2 = {"model_type": "gpt2", "n_layer": L, "n_head": H, "n_embd": C, "vocab_size": V, "n_positions": T}
GPT2 |= {"n_inner": F, "layer_norm_epsilon": 1e-3, "activation_function": "gelu_new"}
LLAMA = {"model_type": "llama", "num_hidden_layers": L, "num_attention_heads": H, "hidden_size": C}
LLAMA |= {"intermediate_size": F, "vocab_size": V, "max_position_embeddings": T, "rms_norm_eps": 1e-3}
LLAMA |= {"tie_word_embeddings": False, "hidden_act": "silu"}


def gpt2_shapes():
    yield from (("wte.weight", (V, C)), ("wpe.weight", (T, C)), ("ln_f.weight", (C,)), ("ln_f.bias", (C,)))
    for i in range(L):
        for name, shape in (
            *(("ln_1", (C,)), ("ln_2", (C,)), ("attn.c_attn", (C, 3 * C)), ("attn.c_proj", (C, C))),
            *(("mlp.c_fc", (C, F)), ("mlp.c_proj", (F, C))),
        ):
            yield from ((f"h.{i}.{name}.weight", shape), (f"h.{i}.{name}.bias", shape[-1:]))


def llama_shapes():
    yield from (
        ("model.embed_tokens.weight", (V, C)),
        ("model.norm.weight", (C,)),
        ("lm_head.weight", (V, C)),
    )
    for i in range(L):
        for name, shape in (
            *((f"self_attn.{which}_proj", (C, C)) for which in "qkvo"),
            *(("mlp.gate_proj", (F, C)), ("mlp.up_proj", (F, C)), ("mlp.down_proj", (C, F))),
            *(("input_layernorm", (C,)), ("post_attention_layernorm", (C,))),
        ):
            yield f"model.layers.{i}.{name}.weight", shape


def attention(q, k, v):
    """Causal, of heads side by side in (T, C)."""
    heads = [np.split(x, H, axis=-1) for x in (q, k, v)]
    out = []
    for qh, kh, vh in zip(*heads, strict=True):
        scores = qh @ kh.T / np.sqrt(C // H)
        scores[np.triu_indices(len(scores), 1)] = -np.inf
        p = np.exp(scores - scores.max(-1, keepdims=True))
        out.append(p / p.sum(-1, keepdims=True) @ vh)
    return np.concatenate(out, axis=-1)


def gpt2(w, ids):
    """x W + b with weights of shape (inputs, outputs)."""

    def norm(x, name):
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-3) * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x, name):
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    x = w["wte.weight"][ids] + w["wpe.weight"][: len(ids)]
    for i in range(L):
        qkv = linear(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn")
        x = x + linear(attention(*np.split(qkv, 3, axis=-1)), f"h.{i}.attn.c_proj")
        h = linear(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc")
        h = 0.5 * h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
        x = x + linear(h, f"h.{i}.mlp.c_proj")
    return norm(x, "ln_f") @ w["wte.weight"].T


def llama(w, ids):
    """x Wᵀ with weights of shape (outputs, inputs); the two halves of a head are turned together."""

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-3) * w[f"{name}.weight"]

    def turned(x):
        half = C // H // 2
        angles = np.arange(len(x))[:, None] * 10000.0 ** (-np.arange(half) / half)
        parts = []
        for head in np.split(x, H, axis=-1):
            a, b = head[:, :half], head[:, half:]
            parts += [a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)]
        return np.concatenate(parts, axis=-1)

    x = w["model.embed_tokens.weight"][ids]
    for i in range(L):
        layer = f"model.layers.{i}"
        h = norm(x, f"{layer}.input_layernorm")
        q, k, v = (h @ w[f"{layer}.self_attn.{which}_proj.weight"].T for which in "qkv")
        x = x + attention(turned(q), turned(k), v) @ w[f"{layer}.self_attn.o_proj.weight"].T
        h = norm(x, f"{layer}.post_attention_layernorm")
        gate, up = (h @ w[f"{layer}.mlp.{which}_proj.weight"].T for which in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"{layer}.mlp.down_proj.weight"].T
    return norm(x, "model.norm") @ w["lm_head.weight"].T


@pytest.mark.parametrize(
    ("config", "shapes", "formula", "prefix"),
    [(GPT2, gpt2_shapes, gpt2, "transformer."), (LLAMA, llama_shapes, llama, "")],
    ids=["gpt2", "llama"],
)
def test_scores_are_those_of_the_formula(config, shapes, formula, prefix, tmp_path):
    draw = np.random.default_rng(3)
    weights = {name: draw.normal(len(shape) == 1, 0.4, shape) for name, shape in shapes()}
    stored = {prefix + name: values.astype(np.float32) for name, values in weights.items()}
    write_tensors(tmp_path / "model.safetensors", stored, {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config))
    import_model(str(tmp_path), tmp_path / "ours.safetensors", None)
    ids = draw.integers(0, V, T)
    found = distgpt.load(tmp_path / "ours.safetensors", dtype="float64").logits(ids[None])[0]
    exact = {name: stored[prefix + name].astype(np.float64) for name in weights}
    np.testing.assert_allclose(found, formula(exact, ids), rtol=0, atol=1e-9)
    assert found.std() > 0.2
