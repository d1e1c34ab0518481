"""Models as transformers stores them give the scores of the formulas in test_model.py."""

import json
from dataclasses import replace

import distgpt
import numpy as np
import pytest
from distgpt.core.config import ModelConfig
from distgpt.core.saved.tensors import write_tensors
from distgpt.models.formats.huggingface import import_model

from models import plain_logits

V, T, L, H, C, F = 37, 9, 2, 3, 12, 20  # the width of the MLP is no multiple of C
GPT2 = {"model_type": "gpt2", "n_layer": L, "n_head": H, "n_embd": C, "vocab_size": V, "n_positions": T}
GPT2 |= {"n_inner": F, "layer_norm_epsilon": 1e-3, "activation_function": "gelu_new"}
LLAMA = {"model_type": "llama", "num_hidden_layers": L, "num_attention_heads": H, "hidden_size": C}
LLAMA |= {"intermediate_size": F, "vocab_size": V, "max_position_embeddings": T, "rms_norm_eps": 1e-3}
LLAMA |= {"tie_word_embeddings": False, "hidden_act": "silu"}
OURS = ModelConfig(vocab_size=V, seq_len=T, n_layer=L, n_head=H, n_embd=C, mlp_width=F, norm_eps=1e-3)
MODERN = {"norm": "rmsnorm", "mlp": "swiglu", "positions": "rope", "bias": False, "tied": False}


def drawn(random, *shape):
    return random.normal(len(shape) == 1, 0.4, shape).astype(np.float32)


def gpt2(random):
    """Their tensors and ours. Theirs of linear layers are (inputs, outputs)."""
    theirs = {"wte.weight": drawn(random, V, C), "wpe.weight": drawn(random, T, C)}
    ours = {name.removesuffix(".weight"): values for name, values in theirs.items()}
    layers = [("ln_f", "final_norm", (C,))]
    for i in range(L):
        for name, own, shape in (
            *(("ln_1", "norm1", (C,)), ("ln_2", "norm2", (C,))),
            *(("attn.c_attn", "attn.qkv", (C, 3 * C)), ("attn.c_proj", "attn.proj", (C, C))),
            *(("mlp.c_fc", "mlp.fc", (C, F)), ("mlp.c_proj", "mlp.proj", (F, C))),
        ):
            layers.append((f"h.{i}.{name}", f"blocks.{i}.{own}", shape))
    for name, own, shape in layers:
        w, b = drawn(random, *shape), drawn(random, shape[-1])
        theirs |= {f"{name}.weight": w, f"{name}.bias": b}
        ours |= {f"{own}.w": w.T, f"{own}.b": b}
    return {f"transformer.{name}": values for name, values in theirs.items()}, ours


def llama(random):
    """Their tensors are (outputs, inputs); one of ours holds several of theirs, one after the other."""
    layers = [("wte", (V, C), "model.embed_tokens"), ("final_norm.w", (C,), "model.norm")]
    layers.append(("head.w", (V, C), "lm_head"))
    for i in range(L):
        for own, shape, *names in (
            *(("norm1", (C,), "input_layernorm"), ("norm2", (C,), "post_attention_layernorm")),
            ("attn.qkv", (C, C), *(f"self_attn.{which}_proj" for which in "qkv")),
            ("attn.proj", (C, C), "self_attn.o_proj"),
            ("mlp.fc", (F, C), "mlp.gate_proj", "mlp.up_proj"),
            ("mlp.proj", (C, F), "mlp.down_proj"),
        ):
            layers.append((f"blocks.{i}.{own}.w", shape, *(f"model.layers.{i}.{name}" for name in names)))
    theirs, ours = {}, {}
    for own, shape, *names in layers:
        theirs |= (parts := {f"{name}.weight": drawn(random, *shape) for name in names})
        ours[own] = np.concatenate([*parts.values()])
    return theirs, ours


@pytest.mark.parametrize(
    "settings, tensors, different", [(GPT2, gpt2, {}), (LLAMA, llama, MODERN)], ids=["gpt2", "llama"]
)
def test_scores_are_those_of_the_formula(settings, tensors, different, tmp_path):
    random = np.random.default_rng(3)
    theirs, ours = tensors(random)
    write_tensors(tmp_path / "model.safetensors", theirs, {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(settings))
    import_model(str(tmp_path), tmp_path / "ours.safetensors", None)
    model, ids = distgpt.load(tmp_path / "ours.safetensors", dtype="float64"), random.integers(0, V, T)
    config = replace(OURS, **different)
    assert model.config == config
    expected = plain_logits(config, ours, ids)
    np.testing.assert_allclose(model.logits(ids[None])[0], expected, rtol=0, atol=1e-9)
    assert expected.std() > 0.2
