"""Llama's configuration and tensors in ours, which have q, k, v in one tensor, and gate and up in another.

Both turn the first half of a head against the second half, by the same angles.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from distgpt.config import ModelConfig
from distgpt.errors import DataError
from distgpt.model.layers import Rope
from distgpt.saved.huggingface.mapping import Family, Place, Settings

_KEYS = {
    "seq_len": "max_position_embeddings",
    "n_embd": "hidden_size",
    "mlp_width": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "norm_eps": "rms_norm_eps",
}


def _config_from(settings: Settings) -> ModelConfig:
    heads = settings.whole("num_attention_heads", 32)
    width = settings.whole("hidden_size", 4096)
    settings.demand("num_key_value_heads", heads, f"distgpt has as many heads for k and v as for q, {heads}")
    settings.demand("head_dim", width // max(heads, 1), "distgpt divides the width among the heads")
    settings.demand("attention_bias", False, "distgpt's biases are everywhere or nowhere")
    settings.demand("mlp_bias", False, "distgpt's biases are everywhere or nowhere")
    settings.choice("hidden_act", "silu", {"silu": "swiglu"}, "distgpt's SwiGLU has silu")
    _refuse_other_angles(settings)
    hidden = settings.whole("intermediate_size", 11008)
    config = ModelConfig(
        vocab_size=settings.whole("vocab_size", 32000),
        seq_len=settings.whole("max_position_embeddings", 2048),
        n_layer=settings.whole("num_hidden_layers", 32),
        n_head=heads,
        n_embd=width,
        norm="rmsnorm",
        norm_eps=settings.number("rms_norm_eps", 1e-6),
        mlp="swiglu",
        positions="rope",
        bias=False,
        tied=settings.flag("tie_word_embeddings", False),
    )
    if hidden < 1:
        raise DataError(f"{settings.source}: intermediate_size is {hidden}: it must be at least 1")
    return config if hidden == config.hidden else replace(config, mlp_width=hidden)


def _refuse_other_angles(settings: Settings) -> None:
    """Older versions keep the base beside what scales the angles, newer ones both in one object."""
    newer = settings.values.get("rope_parameters") or {}
    if not isinstance(newer, dict):
        raise DataError(f"{settings.source}: rope_parameters is {newer!r:.40}, not an object")
    settings.demand("rope_scaling", {}, "distgpt's RoPE is not scaled")
    within = Settings(newer, f"{settings.source}: rope_parameters")
    within.demand("rope_type", "default", "distgpt's RoPE is not scaled")
    within.demand("partial_rotary_factor", 1.0, "distgpt's RoPE turns whole heads")
    for place in (settings, within):
        if (base := place.number("rope_theta", Rope.base)) != Rope.base:
            raise DataError(f"{place.source}: rope_theta is {base:g}: distgpt's RoPE has {Rope.base:g}")


def _config_for(config: ModelConfig) -> dict[str, Any]:
    return {
        "intermediate_size": config.hidden,
        "num_key_value_heads": config.n_head,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rope_theta": Rope.base,
        "rope_parameters": {"rope_type": "default", "rope_theta": Rope.base},
    }


def _places(config: ModelConfig) -> list[Place]:
    width, hidden = config.n_embd, config.hidden
    places = [
        Place("embed_tokens.weight", (config.vocab_size, width), "wte"),
        Place("norm.weight", (width,), "final_norm.w"),
    ]
    for i in range(config.n_layer):
        for theirs, shape, ours, first in (
            ("input_layernorm", (width,), "norm1", 0),
            ("post_attention_layernorm", (width,), "norm2", 0),
            ("self_attn.q_proj", (width, width), "attn.qkv", 0),
            ("self_attn.k_proj", (width, width), "attn.qkv", width),
            ("self_attn.v_proj", (width, width), "attn.qkv", 2 * width),
            ("self_attn.o_proj", (width, width), "attn.proj", 0),
            ("mlp.gate_proj", (hidden, width), "mlp.fc", 0),
            ("mlp.up_proj", (hidden, width), "mlp.fc", hidden),
            ("mlp.down_proj", (width, hidden), "mlp.proj", 0),
        ):
            places.append(Place(f"layers.{i}.{theirs}.weight", shape, f"blocks.{i}.{ours}.w", first))
    return places


def _features(config: ModelConfig) -> dict[str, bool]:
    return {
        "LayerNorm": config.norm == "layernorm",
        "GELU": config.mlp == "gelu",
        "ReLU": config.mlp == "relu",
        "learned positions": config.positions == "learned",
        "model without positions": config.positions == "none",
        "bias": config.bias,
    }


LLAMA = Family(
    title="Llama",
    model_type="llama",
    architecture="LlamaForCausalLM",
    prefix="model.",
    buffers=re.compile(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq"),
    keys=_KEYS,
    config_from=_config_from,
    config_for=_config_for,
    places=_places,
    features=_features,
)
