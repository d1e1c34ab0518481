"""The families of transformers that our models can be: their config.json and tensors in terms of ours."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from distgpt.checked import checked
from distgpt.config import ModelConfig
from distgpt.errors import DataError, UsageError

HEAD = "lm_head.weight"  # the same name in every family, without a prefix
# Values of our settings, as people call them.
PART_NAMES = {
    "layernorm": "LayerNorm",
    "rmsnorm": "RMSNorm",
    "gelu": "GELU",
    "relu": "ReLU",
    "relu2": "ReLU²",
    "swiglu": "SwiGLU",
    "learned": "learned positions",
    "rope": "RoPE",
    "none": "model without positions",
    True: "bias",
}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TensorMapping:
    """One of their tensors: rows of ours from `first` on, or all of them if it is transposed.

    Where `ours` is empty our model has no such tensor, and theirs must be zeros.
    """

    theirs: str
    shape: tuple[int, ...]
    ours: str
    first: int = 0
    transposed: bool = False  # theirs is (in, out), ours (out, in)

    @property
    def rows(self) -> int:
        """Return how many rows of ours it is."""
        return self.shape[-1] if self.transposed else self.shape[0]


class Settings:
    """A config.json from anywhere: each value is checked when it is read."""

    def __init__(self, values: dict[str, Any], source: str) -> None:
        self.values, self.source = values, source

    def get(self, key: str, default: T) -> T:
        """A value of the default's type, or the default if there is none."""
        value = self.values.get(key)
        if value is None:
            return default
        try:
            return cast(T, checked(type(default), value, (key,)))
        except ValueError as error:
            raise DataError(f"{self.source}: {error}") from None

    def choice(self, key: str, default: str, known: Mapping[str, str], why_not: str) -> str:
        value = self.values.get(key, default)
        if not isinstance(value, str) or value not in known:
            raise DataError(f"{self.source}: {key} is {value!r:.40}: {why_not}")
        return known[value]

    def demand(self, key: str, value: Any, why: str) -> None:
        """Refuse anything but this value, or none at all."""
        found = self.values.get(key)
        if found is not None and (found != value or type(found) is not type(value)):
            raise DataError(f"{self.source}: {key} is {found!r:.80}: {why}")


class Family(ABC):
    """A model type of transformers, as far as ours can be one."""

    title: str
    model_type: str
    architecture: str
    prefix: str  # of the names of tensors
    buffers: re.Pattern[str]  # stored by some versions, though not parameters
    keys: Mapping[str, tuple[str, float]]  # our setting → their name for it, and their default
    parts: Mapping[str, tuple[Any, ...]]  # our setting → the values that this family knows
    groups_queries = False  # where several heads of q share one of k and v

    @abstractmethod
    def config_from(self, settings: Settings) -> ModelConfig:
        """Our configuration of their model; a DataError if ours cannot be that model."""

    @abstractmethod
    def config_for(self, config: ModelConfig) -> dict[str, Any]:
        """Return what their config.json says besides `keys`."""

    @abstractmethod
    def mappings(self, config: ModelConfig) -> list[TensorMapping]:
        """All tensors but the output layer."""

    def lacks(self, config: ModelConfig) -> list[str]:
        """Name what our model has and this family does not."""
        values = {setting: getattr(config, setting) for setting in self.parts}
        missing = [PART_NAMES[value] for setting, value in values.items() if value not in self.parts[setting]]
        never = {
            "norm without gain": not config.norm_gain,
            "norm after the embedding": config.embed_norm,
            "norm of queries and keys (qk_norm)": config.qk_norm,
            "value embeddings": config.value_embeddings,
            "queries in groups (n_kv_head)": config.kv_heads < config.n_head and not self.groups_queries,
            "output layer without a norm in front": not config.final_norm,
        }
        return missing + [feature for feature, present in never.items() if present]

    def values_from(self, settings: Settings) -> dict[str, Any]:
        return {ours: settings.get(*key) for ours, key in self.keys.items()}

    def values_for(self, config: ModelConfig) -> dict[str, Any]:
        return {theirs: getattr(config, ours) for ours, (theirs, _) in self.keys.items()}

    def in_its_words(self, text: str) -> str:
        """A message with the family's names in place of our settings'."""
        return re.sub(r"\w+", lambda word: self.keys[word[0]][0] if word[0] in self.keys else word[0], text)

    def all_mappings(self, config: ModelConfig) -> list[TensorMapping]:
        """With the output layer, if that is not the embedding."""
        head = TensorMapping(HEAD, (config.vocab_size, config.n_embd), "head.w")
        return self.mappings(config) if config.tied else [*self.mappings(config), head]

    def full_name(self, name: str) -> str:
        return name if name == HEAD else self.prefix + name


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


class Llama(Family):
    """Llama. Ours has its q, k and v in one tensor, and its gate and up projections in another.

    Both rotate the first half of a head against the second half, by the same angles.
    """

    title = "Llama"
    model_type = "llama"
    architecture = "LlamaForCausalLM"
    prefix = "model."
    groups_queries = True
    buffers = re.compile(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
    keys: Mapping[str, tuple[str, float]] = {
        "vocab_size": ("vocab_size", 32000),
        "seq_len": ("max_position_embeddings", 2048),
        "n_embd": ("hidden_size", 4096),
        "mlp_width": ("intermediate_size", 11008),
        "n_layer": ("num_hidden_layers", 32),
        "n_head": ("num_attention_heads", 32),
        "n_kv_head": ("num_key_value_heads", 0),
        "rope_base": ("rope_theta", 10_000.0),
        "norm_eps": ("rms_norm_eps", 1e-6),
    }
    parts: Mapping[str, tuple[Any, ...]] = {
        "norm": ("rmsnorm",),
        "mlp": ("swiglu",),
        "positions": ("rope",),
        "bias": (False,),
    }

    def config_from(self, settings: Settings) -> ModelConfig:
        values = self.values_from(settings)
        heads, hidden = values["n_head"], values.pop("mlp_width")
        if values["n_kv_head"] == heads:
            values["n_kv_head"] = 0
        head_size = values["n_embd"] // max(heads, 1)
        settings.demand("head_dim", head_size, "distgpt divides the width among the heads")
        settings.demand("attention_bias", False, "distgpt's biases are everywhere or nowhere")
        settings.demand("mlp_bias", False, "distgpt's biases are everywhere or nowhere")
        settings.choice("hidden_act", "silu", {"silu": "swiglu"}, "distgpt's SwiGLU has silu")
        values["rope_base"] = self._base_of_angles(settings, values["rope_base"])
        values |= {setting: known for setting, (known,) in self.parts.items()}
        config = ModelConfig(**values, tied=settings.get("tie_word_embeddings", False))
        for key in ("intermediate_size", "num_key_value_heads"):
            if (count := settings.get(key, 1)) < 1:
                raise DataError(f"{settings.source}: {key} is {count}: it must be at least 1")
        return config if hidden == config.hidden else replace(config, mlp_width=hidden)

    @staticmethod
    def _base_of_angles(settings: Settings, older: float) -> float:
        """Older versions keep the base beside what scales the angles, newer ones both in one object."""
        newer = settings.values.get("rope_parameters") or {}
        if not isinstance(newer, dict):
            raise DataError(f"{settings.source}: rope_parameters is {newer!r:.40}, not an object")
        settings.demand("rope_scaling", {}, "distgpt's RoPE is not scaled")
        within = Settings(newer, f"{settings.source}: rope_parameters")
        within.demand("rope_type", "default", "distgpt's RoPE is not scaled")
        within.demand("partial_rotary_factor", 1.0, "distgpt's RoPE rotates whole heads")
        base = within.get("rope_theta", older)
        if settings.values.get("rope_theta") is not None and base != older:
            raise DataError(f"{settings.source}: rope_theta is {older:g} and, in rope_parameters, {base:g}")
        return base

    def config_for(self, config: ModelConfig) -> dict[str, Any]:
        return {
            "intermediate_size": config.hidden,
            "num_key_value_heads": config.kv_heads,
            "head_dim": config.head_size,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_base},
        }

    def mappings(self, config: ModelConfig) -> list[TensorMapping]:
        C, H, KV = config.n_embd, config.hidden, config.kv_heads * config.head_size
        mappings = [
            TensorMapping("embed_tokens.weight", (config.vocab_size, C), "wte"),
            TensorMapping("norm.weight", (C,), "final_norm.w"),
        ]
        for i in range(config.n_layer):
            for theirs, shape, ours, first in (
                ("input_layernorm", (C,), "norm1", 0),
                ("post_attention_layernorm", (C,), "norm2", 0),
                ("self_attn.q_proj", (C, C), "attn.qkv", 0),
                ("self_attn.k_proj", (KV, C), "attn.qkv", C),
                ("self_attn.v_proj", (KV, C), "attn.qkv", C + KV),
                ("self_attn.o_proj", (C, C), "attn.proj", 0),
                ("mlp.gate_proj", (H, C), "mlp.fc", 0),
                ("mlp.up_proj", (H, C), "mlp.fc", H),
                ("mlp.down_proj", (C, H), "mlp.proj", 0),
            ):
                mappings.append(
                    TensorMapping(f"layers.{i}.{theirs}.weight", shape, f"blocks.{i}.{ours}.w", first)
                )
        return mappings


FAMILIES: tuple[Family, ...] = (Gpt2(), Llama())


def recognised(settings: Settings) -> tuple[Family, ModelConfig]:
    """The family and our configuration of a model with this config.json, or a DataError that says why not."""
    name = settings.values.get("model_type")
    family = next((family for family in FAMILIES if family.model_type == name), None)
    if family is None:
        known = " and ".join(repr(family.model_type) for family in FAMILIES)
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


def family_for(config: ModelConfig, source: object) -> Family:
    """The family that a model of ours can be exported as."""
    lacking = {family: family.lacks(config) for family in FAMILIES}
    for family, features in lacking.items():
        if not features:
            return family
    reasons = "; ".join(f"{family.title} has no {', no '.join(lacking[family])}" for family in FAMILIES)
    raise UsageError(f"{source} cannot be exported, as transformers has no such model: {reasons}")
