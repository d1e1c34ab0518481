"""GPT-2's configuration and tensors in ours. Its linear layers are stored as (in, out)."""

from __future__ import annotations

import re
from typing import Any

from distgpt.config import ModelConfig
from distgpt.saved.huggingface.mapping import Family, Place, Settings

_KEYS = {
    "seq_len": "n_positions",
    "n_embd": "n_embd",
    "n_layer": "n_layer",
    "n_head": "n_head",
    "mlp_width": "n_inner",
    "norm_eps": "layer_norm_epsilon",
}
_ACTIVATIONS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "relu": "relu"}


def _config_from(settings: Settings) -> ModelConfig:
    settings.demand("scale_attn_weights", True, "distgpt always scales attention by 1/√(head size)")
    settings.demand("scale_attn_by_inverse_layer_idx", False, "distgpt does not scale attention by the layer")
    settings.demand("add_cross_attention", False, "distgpt has no cross-attention")
    return ModelConfig(
        vocab_size=settings.whole("vocab_size", 50257),
        seq_len=settings.whole("n_positions", 1024),
        n_layer=settings.whole("n_layer", 12),
        n_head=settings.whole("n_head", 12),
        n_embd=settings.whole("n_embd", 768),
        mlp_width=settings.whole("n_inner", 0),
        norm_eps=settings.number("layer_norm_epsilon", 1e-5),
        mlp=settings.choice(
            "activation_function",
            "gelu_new",
            _ACTIVATIONS,
            f"distgpt has {', '.join(_ACTIVATIONS)} (its GELU is the tanh form, not the exact one)",
        ),
        bias=settings.flag("bias", True),
        tied=settings.flag("tie_word_embeddings", True),
    )


def _config_for(config: ModelConfig) -> dict[str, Any]:
    """`bias` is no setting of GPT-2: it tells our import that the zeros stand for absent biases."""
    return {
        "n_inner": config.mlp_width or None,
        "activation_function": {"gelu": "gelu_new"}.get(config.mlp, config.mlp),
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        **({} if config.bias else {"bias": False}),
    }


def _places(config: ModelConfig) -> list[Place]:
    width = config.n_embd
    linears = {
        "attn.c_attn": ("attn.qkv", width, 3 * width),
        "attn.c_proj": ("attn.proj", width, width),
        "mlp.c_fc": ("mlp.fc", width, config.hidden),
        "mlp.c_proj": ("mlp.proj", config.hidden, width),
    }
    places = [
        Place("wte.weight", (config.vocab_size, width), "wte"),
        Place("wpe.weight", (config.seq_len, width), "wpe"),
        *_norm("ln_f", "final_norm", config),
    ]
    for i in range(config.n_layer):
        places += _norm(f"h.{i}.ln_1", f"blocks.{i}.norm1", config)
        places += _norm(f"h.{i}.ln_2", f"blocks.{i}.norm2", config)
        for theirs, (ours, inputs, outputs) in linears.items():
            name = f"blocks.{i}.{ours}"
            places.append(Place(f"h.{i}.{theirs}.weight", (inputs, outputs), f"{name}.w", turned=True))
            places.append(_bias(f"h.{i}.{theirs}", name, outputs, config))
    return places


def _norm(theirs: str, ours: str, config: ModelConfig) -> list[Place]:
    gain = Place(f"{theirs}.weight", (config.n_embd,), f"{ours}.w")
    return [gain, _bias(theirs, ours, config.n_embd, config)]


def _bias(theirs: str, ours: str, size: int, config: ModelConfig) -> Place:
    return Place(f"{theirs}.bias", (size,), f"{ours}.b" if config.bias else "")


def _features(config: ModelConfig) -> dict[str, bool]:
    return {
        "RMSNorm": config.norm == "rmsnorm",
        "SwiGLU": config.mlp == "swiglu",
        "RoPE": config.positions == "rope",
        "model without positions": config.positions == "none",
    }


GPT2 = Family(
    title="GPT-2",
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    prefix="transformer.",
    buffers=re.compile(r"h\.\d+\.attn\.(bias|masked_bias)"),
    keys=_KEYS,
    config_from=_config_from,
    config_for=_config_for,
    places=_places,
    features=_features,
)
