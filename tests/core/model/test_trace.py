"""Looking inside a model from Python: hidden states and attention weights are those its scores come from."""

from dataclasses import replace

import distgpt
import numpy as np
import pytest
from distgpt.core.config import ModelConfig

CONFIG = ModelConfig(vocab_size=13, seq_len=7, n_layer=3, n_head=3, n_embd=24, init_std=0.2)
MODERN = replace(CONFIG, norm="rmsnorm", mlp="swiglu", positions="rope", bias=False, tied=False)
BARE = replace(CONFIG, final_norm=False, embed_norm=True)
TOKENS = np.random.default_rng(0).integers(0, 13, (4, 7))


GROUPED = replace(CONFIG, n_kv_head=1)
WINDOWS = replace(CONFIG, window=3, full_every=3)


@pytest.fixture(
    params=[CONFIG, MODERN, BARE, GROUPED, WINDOWS],
    ids=["gpt2", "modern", "no final norm", "grouped queries", "windows"],
)
def model(request):
    return distgpt.init(request.param, seed=3, dtype="float64")


def test_hidden_states_lead_to_the_scores(model):
    trace = model.trace(TOKENS)
    parameters = model.parameters()
    head = parameters["wte" if model.config.tied else "head.w"]
    np.testing.assert_allclose(trace.hidden[-1] @ head.T[:, :13], trace.logits, atol=1e-12)
    np.testing.assert_allclose(trace.logits, model.logits(TOKENS), atol=1e-12)
    assert len(trace.hidden) == 4 and {x.shape for x in trace.hidden} == {(4, 7, 24)}
    embedded = parameters["wte"][TOKENS] + parameters.get("wpe", 0)
    if model.config.embed_norm:
        embedded = embedded - embedded.mean(-1, keepdims=True)
        embedded /= np.sqrt((embedded**2).mean(-1, keepdims=True) + model.config.norm_eps)
    np.testing.assert_allclose(trace.hidden[0], embedded, atol=1e-12)


def test_attention_is_what_the_next_layer_was_made_of(model):
    """Layer 0 again, from its own hidden states and weights, by the formulas of the architecture."""
    trace, p = model.trace(TOKENS), model.parameters()
    weights = trace.attention[0]
    assert weights.shape == (4, 3, 7, 7)
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-12)
    assert not np.triu(weights, 1).any()
    x = trace.hidden[0]
    centred = x - x.mean(-1, keepdims=True) if model.config.norm == "layernorm" else x
    y = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + model.config.norm_eps)
    y = y * p["blocks.0.norm1.w"] + p.get("blocks.0.norm1.b", 0)
    qkv = (y @ p["blocks.0.attn.qkv.w"].T + p.get("blocks.0.attn.qkv.b", 0)).reshape(4, 7, -1, 8)
    q, k, v = np.split(qkv.swapaxes(1, 2), [3, 3 + model.config.kv_heads], axis=1)
    if model.config.positions == "learned":
        scores = np.exp(q @ k.swapaxes(2, 3) / np.sqrt(8)) * np.tri(7)
        scores *= 1 - np.tri(7, k=-model.config.window) if model.config.window else 1
        np.testing.assert_allclose(weights, scores / scores.sum(-1, keepdims=True), atol=1e-12)
    mixed = (weights @ v).swapaxes(1, 2).reshape(4, 7, 24)
    s = x + mixed @ p["blocks.0.attn.proj.w"].T + p.get("blocks.0.attn.proj.b", 0)
    centred = s - s.mean(-1, keepdims=True) if model.config.norm == "layernorm" else s
    y = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + model.config.norm_eps)
    y = y * p["blocks.0.norm2.w"] + p.get("blocks.0.norm2.b", 0)
    pre = y @ p["blocks.0.mlp.fc.w"].T + p.get("blocks.0.mlp.fc.b", 0)
    if model.config.mlp == "gelu":
        act = 0.5 * pre * (1 + np.tanh(np.sqrt(2 / np.pi) * (pre + 0.044715 * pre**3)))
    else:
        gate, up = np.split(pre, 2, -1)
        act = gate / (1 + np.exp(-gate)) * up
    out = act @ p["blocks.0.mlp.proj.w"].T + p.get("blocks.0.mlp.proj.b", 0)
    np.testing.assert_allclose(trace.hidden[1], s + out, atol=1e-10)


def test_one_sequence_needs_no_axis_of_sequences(model):
    one, many = model.trace(TOKENS[0]), model.trace(TOKENS)
    np.testing.assert_allclose(one.logits, many.logits[0], atol=1e-12)
    np.testing.assert_allclose(one.attention[2], many.attention[2][0], atol=1e-12)
    np.testing.assert_allclose(model.logits(TOKENS[0]), one.logits, atol=1e-12)
    assert model.logits(TOKENS[0].tolist()).shape == (7, 13)
    assert model.loss(TOKENS[0], TOKENS[1]) == model.loss(TOKENS[:1], TOKENS[1:2])
    np.testing.assert_array_equal(
        model.gradients(TOKENS[0], TOKENS[1])["wte"], model.gradients(TOKENS[:1], TOKENS[1:2])["wte"]
    )


def test_a_model_says_what_it_is():
    model = distgpt.init(CONFIG, dtype="float64")
    said = repr(model)
    for part in ("3 layers, 3 heads, 24 wide, context 7", "float64"):
        assert part in said
    assert "(4, 3, 7, 7)" in repr(model.trace(TOKENS))


def test_temperatures_next_to_nothing_are_greedy():
    model = distgpt.init(CONFIG, dtype="float64")
    greedy = model.generate([1, 2], 5, temperature=0)
    assert model.generate([1, 2], 5) == model.generate([1, 2], 5, temperature=0.8) != greedy
    for temperature in (1e-300, 1e-30, 1e-7, 1e-6):
        assert model.generate([1, 2], 5, temperature=temperature) == greedy
