import json
from dataclasses import replace

import distgpt
import numpy as np
import pytest
from distgpt.core.config import ModelConfig
from distgpt.core.saved.tensors import write_tensors
from distgpt.models.formats.huggingface import import_model

from models import plain_logits

V, T, L, H, C, F = 37, 9, 2, 3, 12, 20  # F is not a multiple of C
GPT2 = {"model_type": "gpt2", "n_layer": L, "n_head": H, "n_embd": C, "vocab_size": V, "n_positions": T}
GPT2 |= {"n_inner": F, "layer_norm_epsilon": 1e-3, "activation_function": "gelu_new"}
LLAMA = {"model_type": "llama", "num_hidden_layers": L, "num_attention_heads": H, "hidden_size": C}
LLAMA |= {"intermediate_size": F, "vocab_size": V, "max_position_embeddings": T, "rms_norm_eps": 1e-3}
LLAMA |= {"tie_word_embeddings": False, "hidden_act": "silu"}
OURS = ModelConfig(vocab_size=V, seq_len=T, n_layer=L, n_head=H, n_embd=C, mlp_width=F, norm_eps=1e-3)
MODERN = {"norm": "rmsnorm", "mlp": "swiglu", "positions": "rope", "bias": False, "tied": False}

LAYER = {  # our tensors, stored shapes, published names
    "gpt2": (
        *((f"norm{i}", (C,), f"ln_{i}") for i in (1, 2)),
        *(("attn.qkv", (C, 3 * C), "attn.c_attn"), ("attn.proj", (C, C), "attn.c_proj")),
        *(("mlp.fc", (C, F), "mlp.c_fc"), ("mlp.proj", (F, C), "mlp.c_proj")),
    ),
    "llama": (
        *(("norm1", (C,), "input_layernorm"), ("norm2", (C,), "post_attention_layernorm")),
        ("attn.qkv", (C, C), *(f"self_attn.{which}_proj" for which in "qkv")),
        *(("attn.proj", (C, C), "self_attn.o_proj"), ("mlp.fc", (F, C), "mlp.gate_proj", "mlp.up_proj")),
        ("mlp.proj", (C, F), "mlp.down_proj"),
    ),
}
AROUND = {
    "gpt2": (("wte", (V, C), "wte"), ("wpe", (T, C), "wpe"), ("final_norm.", (C,), "ln_f")),
    "llama": (("wte", (V, C), "embed_tokens"), ("final_norm.", (C,), "norm"), ("head.", (V, C), "lm_head")),
}


def tensors(kind, random):
    """Return theirs and ours. GPT-2 stores linear layers as (inputs, outputs); Llama splits some of ours."""
    prefix, blocks = {"gpt2": ("transformer.", "h"), "llama": ("model.", "layers")}[kind]
    layers = [*AROUND[kind]]
    for i in range(L):
        layers += [(f"blocks.{i}.{own}.", shape, *(f"{blocks}.{i}.{name}" for name in names))
                   for own, shape, *names in LAYER[kind]]  # fmt: skip
    theirs, ours = {}, {}
    for own, shape, *names in layers:
        parts = [random.normal(len(shape) == 1, 0.4, shape).astype(np.float32) for _ in names]
        theirs |= {prefix * (name != "lm_head") + f"{name}.weight": x for name, x in zip(names, parts, strict=True)}
        is_layer = own.endswith(".")
        ours[own + "w" * is_layer] = np.concatenate(parts).T if kind == "gpt2" and is_layer else np.concatenate(parts)
        if kind == "gpt2" and is_layer:
            ours[f"{own}b"] = theirs[f"{prefix}{names[0]}.bias"] = random.normal(1, 0.4, shape[-1]).astype(np.float32)
    return theirs, ours


@pytest.mark.parametrize("settings, different", [(GPT2, {}), (LLAMA, MODERN)], ids=["gpt2", "llama"])
def test_published_weights_match_formulas(settings, different, tmp_path):
    random = np.random.default_rng(3)
    theirs, ours = tensors(settings["model_type"], random)
    write_tensors(tmp_path / "model.safetensors", theirs, {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(settings))
    import_model(str(tmp_path), tmp_path / "ours.safetensors", None)
    model, ids = distgpt.load(tmp_path / "ours.safetensors", dtype="float64"), random.integers(0, V, T)
    config = replace(OURS, **different)
    assert model.config == config
    expected = plain_logits(config, ours, ids)
    np.testing.assert_allclose(model.logits(ids[None])[0], expected, rtol=0, atol=1e-9)
    assert expected.std() > 0.2
