"""The families of transformers that our models can be: GPT-2, and the list of all."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from distgpt.core.base.errors import DataError, UsageError
from distgpt.core.config import ModelConfig
from distgpt.models.formats.family import Family, Settings, TensorMapping
from distgpt.models.formats.llama import Llama, Mistral, Qwen2, Qwen3


class Gpt2(Family):
    """GPT-2. Its linear layers are stored as (in, out)."""

    title = "GPT-2"
    model_type = "gpt2"
    architecture = "GPT2LMHeadModel"
    prefix = "transformer."
    buffers = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")
    keys: Mapping[str, tuple[str, float]] = {
        "vocab_size": ("vocab_size", 50257),
        "seq_len": ("n_positions", 1024),
        "n_embd": ("n_embd", 768),
        "n_layer": ("n_layer", 12),
        "n_head": ("n_head", 12),
        "mlp_width": ("n_inner", 0),
        "norm_eps": ("layer_norm_epsilon", 1e-5),
    }
    parts: Mapping[str, tuple[Any, ...]] = {
        "norm": ("layernorm",),
        "mlp": ("gelu", "relu"),
        "positions": ("learned",),
        **dict.fromkeys(("qkv_bias", "qk_norm", "qk_norm_gain"), (False,)),
    }
    activations: Mapping[str, str] = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "relu": "relu"}

    def config_from(self, settings: Settings) -> ModelConfig:
        settings.demand("scale_attn_weights", True, "distgpt always scales attention by 1/√(head size)")
        no_scale = "distgpt does not scale attention by the layer"
        settings.demand("scale_attn_by_inverse_layer_idx", False, no_scale)
        settings.demand("add_cross_attention", False, "distgpt has no cross-attention")
        known = f"distgpt has {', '.join(self.activations)} (its GELU is the tanh form, not the exact one)"
        return ModelConfig(
            **self.values_from(settings),
            mlp=settings.choice("activation_function", "gelu_new", self.activations, known),
            bias=settings.get("bias", True),
            tied=settings.get("tie_word_embeddings", True),
        )

    def config_for(self, config: ModelConfig) -> dict[str, Any]:
        """`bias` is no setting of GPT-2: it says to our import that the zeros stand for absent biases."""
        return {
            "n_inner": config.mlp_width or None,
            "activation_function": {"gelu": "gelu_new"}.get(config.mlp, config.mlp),
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
            **({} if config.bias else {"bias": False}),
        }

    def mappings(self, config: ModelConfig) -> list[TensorMapping]:
        C, H = config.n_embd, config.hidden
        layer: tuple[tuple[str, str, tuple[int, ...]], ...] = (
            ("ln_1", "norm1", (C,)),
            ("ln_2", "norm2", (C,)),
            ("attn.c_attn", "attn.qkv", (C, 3 * C)),
            ("attn.c_proj", "attn.proj", (C, C)),
            ("mlp.c_fc", "mlp.fc", (C, H)),
            ("mlp.c_proj", "mlp.proj", (H, C)),
        )
        biased: list[tuple[str, str, tuple[int, ...]]] = [("ln_f", "final_norm", (C,))]
        for i in range(config.n_layer):
            biased += [(f"h.{i}.{theirs}", f"blocks.{i}.{ours}", shape) for theirs, ours, shape in layer]
        mappings = [
            TensorMapping("wte.weight", (config.vocab_size, C), "wte"),
            TensorMapping("wpe.weight", (config.seq_len, C), "wpe"),
        ]
        for theirs, ours, shape in biased:
            mappings.append(TensorMapping(f"{theirs}.weight", shape, f"{ours}.w", transposed=len(shape) == 2))
            mappings.append(TensorMapping(f"{theirs}.bias", shape[-1:], f"{ours}.b" if config.bias else ""))
        return mappings


EXPORTABLE = ("tiny-adamw", "gpt2")  # presets of these shapes
FAMILIES: tuple[Family, ...] = (Gpt2(), Llama(), Mistral(), Qwen2(), Qwen3())


def recognised(settings: Settings) -> tuple[Family, ModelConfig]:
    """Return family and our configuration of a model with this config.json; a DataError says why not."""
    name = settings.values.get("model_type")
    family = next((family for family in FAMILIES if family.model_type == name), None)
    if family is None:
        *others, last = (repr(family.model_type) for family in FAMILIES)
        known = f"{', '.join(others)} and {last}"
        raise DataError(f"{settings.source}: model_type is {name!r:.40}; {known} can be imported")
    if settings.values.get("quantization_config") is not None:
        raise DataError(f"{settings.source}: its weights are quantized, which cannot be imported")
    try:
        config = family.config_from(settings)
    except UsageError as error:
        raise DataError(f"{settings.source}: {family.in_its_words(str(error))}") from None
    if config.vocab_size < 1:
        raise DataError(f"{settings.source}: vocab_size is {config.vocab_size}: it must be at least 1")
    return family, config


def family_for(config: ModelConfig, source: object, where: str = "transformers") -> Family:
    """Return the family that a model of ours can be exported as."""
    lacking = {family: family.lacks(config) for family in FAMILIES}
    for family, features in lacking.items():
        if not features:
            return family
    fewest = min(map(len, lacking.values()))
    told = [family for family in FAMILIES if family in FAMILIES[:2] or len(lacking[family]) == fewest]
    reasons = "; ".join(f"{family.title} has no {', no '.join(lacking[family])}" for family in told)
    raise UsageError(
        f"{source} cannot be exported: train a model that {where} has, by --preset {' or '.join(EXPORTABLE)};"
        f" this one does not fit, as {reasons}"
    )
