"""The supported families of transformers: GPT-2, Llama and its relatives."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from distgpt.core.base.checked import checked
from distgpt.core.base.errors import DataError, UsageError
from distgpt.core.config import ModelConfig
from distgpt.core.config.presets import FAMILIES as FAMILY_CHOICES
from distgpt.core.ops.api import QK_SCALE

HEAD = "lm_head.weight"  # the same name in every family, without a prefix
# Types and factors of RoPE scaling, by their names in transformers and in distgpt.
SCALINGS = {"default": "none", "linear": "linear", "llama3": "llama3"}
FACTORS = {
    "linear": {"factor": "rope_factor"},
    "llama3": {"factor": "rope_factor", "low_freq_factor": "rope_slow", "high_freq_factor": "rope_fast"},
}
FULL, SLIDING = "full_attention", "sliding_attention"  # values in layer_types
OLD_CONTEXT = "original_max_position_embeddings"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TensorMapping:
    """One tensor of transformers: rows of ours from `first` on, or the whole tensor if transposed.

    If `ours` is empty, our model has no such tensor, and theirs is filled with `fill`.
    """

    theirs: str
    shape: tuple[int, ...]
    ours: str
    first: int = 0
    transposed: bool = False  # theirs is (in, out), ours (out, in)
    fill: float = 0.0
    norm_eps: float | None = None  # epsilon of our embedding's RMS norm, which theirs lacks; None: no norm

    @property
    def our_shape(self) -> tuple[int, ...]:
        """The shape of the corresponding rows of our tensor."""
        return self.shape[::-1] if self.transposed else self.shape

    @property
    def rows(self) -> int:
        return self.our_shape[0]


class Settings:
    """An untrusted config.json. Each value is checked when it is read."""

    def __init__(self, values: dict[str, Any], source: str) -> None:
        self.values, self.source = values, source

    def get(self, key: str, default: T) -> T:
        """Return a value of the default's type, or the default if the value is missing."""
        value = self.values.get(key)
        if value is None:
            return default
        try:
            return checked(type(default), value, (key,))
        except ValueError as error:
            raise DataError(f"{self.source}: {error}") from None

    def choice(self, key: str, default: str, known: Mapping[str, str]) -> str:
        value = self.values.get(key, default)
        if not isinstance(value, str) or value not in known:
            raise DataError(f"{self.source}: {key} must be one of {', '.join(known)}, not {value!r:.40}")
        return known[value]

    def demand(self, **wanted: Any) -> None:
        """Raise a DataError if a setting is present with another value."""
        for key, value in wanted.items():
            result = self.values.get(key)
            if result is not None and (result != value or type(result) is not type(value)):
                raise DataError(f"{self.source}: {key} must be {value!r}, not {result!r:.80}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Family:
    """A model type of transformers that our models can represent: GPT-2, or Llama with small differences."""

    title: str
    model_type: str
    architecture: str
    prefix: str  # prefix of tensor names
    buffers: str  # pattern of tensors that some versions store although they are not parameters
    keys: Mapping[str, tuple[str, float]]  # our setting → their name and default
    parts: Mapping[str, tuple[Any, ...]]  # our setting → the values that this family supports
    absent: Mapping[str, Any]  # their settings that must have these values
    windows: Literal["none", "all", "some"] = "none"  # layers that may have a sliding window

    @property
    def is_gpt2(self) -> bool:
        return self.model_type == "gpt2"

    def config_from(self, settings: Settings) -> ModelConfig:
        """Return our configuration for their model. Raises a DataError if ours cannot represent it."""
        settings.demand(**self.absent)
        values: dict[str, Any] = {ours: settings.get(*key) for ours, key in self.keys.items()}
        if not self.is_gpt2:
            return _llama_from(self, values, settings)
        mlp = settings.choice("activation_function", "gelu_new", ACTIVATIONS)
        bias, tied = settings.get("bias", True), settings.get("tie_word_embeddings", True)
        return ModelConfig(**values, mlp=mlp, bias=bias, tied=tied)

    def config_for(self, config: ModelConfig) -> dict[str, Any]:
        """Return the settings of their config.json."""
        values = {theirs: getattr(config, ours) for ours, (theirs, _) in self.keys.items()}
        if self.is_gpt2:
            values |= {
                "n_inner": config.mlp_width or None,
                "activation_function": {"gelu": "gelu_new"}.get(config.mlp, config.mlp),
                "scale_attn_weights": True,
                "scale_attn_by_inverse_layer_idx": False,
                **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
            }
            # GPT-2 has no such setting. Our import reads it: the zeros replace absent biases.
            return values if config.bias else values | {"bias": False}
        return values | {
            "intermediate_size": config.hidden,
            "num_key_value_heads": config.kv_heads,
            "head_dim": config.head_size,
            "hidden_act": "silu",
            **self.absent,
            **_angles_for(config),
            **self._windows_for(config),
        }

    def _windows_for(self, config: ModelConfig) -> dict[str, Any]:
        if self.windows == "none":
            return {}
        if self.windows == "all":
            return {"sliding_window": None if config.full_every else config.window or None}
        if not any(config.windows):
            return {"use_sliding_window": False}
        kinds = [SLIDING if window else FULL for window in config.windows]
        result = {"use_sliding_window": True, "sliding_window": config.window, "layer_types": kinds}
        # Older versions of transformers read this instead of layer_types.
        return result if FULL in kinds else result | {"max_window_layers": 0}

    def mappings(self, config: ModelConfig) -> list[TensorMapping]:
        """Return all tensors except the output layer."""
        result = (_gpt2_tensors if self.is_gpt2 else _llama_tensors)(config)
        return [_with_gain(each, config) for each in result]

    def all_mappings(self, config: ModelConfig) -> list[TensorMapping]:
        """Return all tensors, including the output layer unless it is tied."""
        head = TensorMapping(HEAD, (config.vocab_size, config.n_embd), "head.w")
        return self.mappings(config) if config.tied else [*self.mappings(config), head]

    def full_name(self, name: str) -> str:
        return name if name == HEAD else self.prefix + name

    def lacks(self, config: ModelConfig) -> list[str]:
        """Return the settings that this family does not support."""
        values = {setting: getattr(config, setting) for setting in self.parts}
        values["qkv_bias"] = config.qkv_bias and not config.bias
        values["qk_norm_gain"] = config.qk_norm  # a norm without gain has a gain of 1 there
        result = [
            f"{setting}={value}" for setting, value in values.items() if value not in self.parts[setting]
        ]
        some_windows = any(config.windows) and not all(config.windows)
        never = {
            "embed_norm": config.embed_norm and not _folds_embed_norm(config),
            "value_embeddings": config.value_embeddings,
            "previous_embedding": config.previous_embedding,
            "norm_groups": config.norm_groups > 1,
            "window": any(config.windows) and self.windows == "none",
            "full_every": some_windows and self.windows == "all",
            "n_kv_head": self.is_gpt2 and config.kv_heads < config.n_head,
            "head_dim": self.is_gpt2 and config.attention_width != config.n_embd,
            "final_norm=False": not config.final_norm,
        }
        return result + [setting for setting, is_set in never.items() if is_set]


GPT2 = Family(
    title="GPT-2",
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    prefix="transformer.",
    buffers=r"h\.\d+\.attn\.(bias|masked_bias)",
    keys={
        "vocab_size": ("vocab_size", 50257),
        "seq_len": ("n_positions", 1024),
        "n_embd": ("n_embd", 768),
        "n_layer": ("n_layer", 12),
        "n_head": ("n_head", 12),
        "mlp_width": ("n_inner", 0),
        "norm_eps": ("layer_norm_epsilon", 1e-5),
    },
    parts={
        "norm": ("layernorm",),
        "mlp": ("gelu", "relu"),
        "positions": ("learned",),
        **dict.fromkeys(("qkv_bias", "qk_norm", "qk_norm_gain"), (False,)),
    },
    absent={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
)
LLAMA = Family(
    title="Llama",
    model_type="llama",
    architecture="LlamaForCausalLM",
    prefix="model.",
    buffers=r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
    keys={
        "vocab_size": ("vocab_size", 32000),
        "seq_len": ("max_position_embeddings", 2048),
        "n_embd": ("hidden_size", 4096),
        "mlp_width": ("intermediate_size", 11008),
        "n_layer": ("num_hidden_layers", 32),
        "n_head": ("num_attention_heads", 32),
        "n_kv_head": ("num_key_value_heads", 0),
        "head_dim": ("head_dim", 0),
        "rope_base": ("rope_theta", 10_000.0),
        "norm_eps": ("rms_norm_eps", 1e-6),
    },
    parts={
        "norm": ("rmsnorm",),
        "mlp": ("swiglu",),
        "positions": ("rope",),
        **dict.fromkeys(("bias", "qkv_bias", "qk_norm", "qk_norm_gain"), (False,)),
    },
    absent={"attention_bias": False, "mlp_bias": False},
)
MISTRAL = replace(  # later versions equal Llama
    LLAMA,
    title="Mistral",
    model_type="mistral",
    architecture="MistralForCausalLM",
    keys={
        **LLAMA.keys,
        "seq_len": ("max_position_embeddings", 131072),
        "mlp_width": ("intermediate_size", 14336),
        "n_kv_head": ("num_key_value_heads", 8),
    },
    windows="all",
)
QWEN2 = replace(  # also Qwen 2.5; queries, keys and values have biases
    LLAMA,
    title="Qwen 2",
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    keys={
        **LLAMA.keys,
        "vocab_size": ("vocab_size", 151936),
        "seq_len": ("max_position_embeddings", 32768),
        "mlp_width": ("intermediate_size", 22016),
    },
    parts={**LLAMA.parts, "qkv_bias": (True,)},
    absent={},
    windows="some",
)
QWEN3 = replace(  # queries and keys are normalized per head
    QWEN2,
    title="Qwen 3",
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    keys={**QWEN2.keys, "head_dim": ("head_dim", 128)},
    parts={**LLAMA.parts, "qk_norm": (True,), "qk_norm_gain": (True,)},
    absent={"attention_bias": False},
)
FAMILIES = (GPT2, LLAMA, MISTRAL, QWEN2, QWEN3)
ACTIVATIONS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "relu": "relu"}


# -- settings


def _llama_from(family: Family, values: dict[str, Any], settings: Settings) -> ModelConfig:
    heads, hidden = values["n_head"], values.pop("mlp_width")
    if values["n_kv_head"] == heads:
        values["n_kv_head"] = 0
    if values["head_dim"] * heads == values["n_embd"]:
        values["head_dim"] = 0
    settings.demand(hidden_act="silu")
    values |= _rope(settings, values["rope_base"], values["seq_len"])
    values |= {setting: known for setting, (known,) in family.parts.items()}
    config = ModelConfig(**values, tied=settings.get("tie_word_embeddings", False))
    for key in ("intermediate_size", "num_key_value_heads", "head_dim"):
        if (count := settings.get(key, 1)) < 1:
            raise DataError(f"{settings.source}: {key} must be at least 1, not {count}")
    if family.windows != "none":
        config = replace(config, **_window(settings, config.n_layer, config.seq_len, family.windows))
    return config if hidden == config.hidden else replace(config, mlp_width=hidden)


def _window(settings: Settings, layers: int, seq_len: int, which: str) -> dict[str, Any]:
    """Return our settings of their sliding_window."""
    has_window = [True] * layers if which == "all" else _layers_with_window(settings, layers)
    if not any(has_window) or settings.values.get("sliding_window", 4096) is None:
        return {}
    window = settings.get("sliding_window", 4096)
    if window < 1:
        raise DataError(f"{settings.source}: sliding_window must be at least 1, not {window}")
    full = [i for i, has in enumerate(reversed(has_window)) if not has]  # counted from the last layer
    every = [*full, layers][1] if full else 0
    if full == [i for i in range(layers) if every and i % every == 0]:
        return {"window": window, "full_every": every}  # also if a longer --context needs it
    if window >= seq_len:
        return {}
    raise DataError(
        f"{settings.source}: all layers must have the sliding_window of {window}, except every Nth, counted"
        " from the last"
    )


def _layers_with_window(settings: Settings, layers: int) -> list[bool]:
    kinds = settings.values.get("layer_types")
    is_used = settings.get("use_sliding_window", False)
    is_there = is_used and settings.values.get("sliding_window", 4096) is not None
    if isinstance(kinds, list) and SLIDING in kinds and not is_there:
        raise DataError(f"{settings.source}: layer_types has {SLIDING}, but sliding_window is not used")
    if not is_used:
        return []
    if kinds is None:
        return [i >= settings.get("max_window_layers", 28) for i in range(layers)]
    known = isinstance(kinds, list) and all(kind in (FULL, SLIDING) for kind in kinds)
    if not known or len(kinds) != layers:
        raise DataError(
            f"{settings.source}: layer_types must list {FULL!r} or {SLIDING!r} per layer, not {kinds!r:.80}"
        )
    return [kind == SLIDING for kind in kinds]


def _rope(settings: Settings, older: float, context: int) -> dict[str, Any]:
    """Return our RoPE settings, from rope_theta and rope_scaling (older) or rope_parameters (newer)."""
    result: dict[str, Any] = {}
    settings.demand(partial_rotary_factor=1.0)
    for name in ("rope_parameters", "rope_scaling"):  # the second takes precedence, as in transformers
        given = settings.values.get(name) or {}
        if not isinstance(given, dict):
            raise DataError(f"{settings.source}: {name} is {given!r:.40}, not an object")
        result |= given
    within = Settings(result, f"{settings.source}: the settings of RoPE")
    within.demand(partial_rotary_factor=1.0)
    ours: dict[str, Any] = {"rope_base": within.get("rope_theta", older)}
    result.setdefault("rope_type", result.get("type", "default"))
    kind = within.choice("rope_type", "default", SCALINGS)
    if kind == "none":
        within.demand(factor=1.0)  # without a rope_type nothing is scaled
        return ours
    factors = FACTORS[kind]
    if missing := [key for key in factors if result.get(key) is None]:
        raise DataError(f"{within.source} lacks {missing[0]}, which {kind} requires")
    ours |= {"rope_scaling": kind, **{own: within.get(key, 1.0) for key, own in factors.items()}}
    return ours | ({"rope_context": within.get(OLD_CONTEXT, context)} if kind == "llama3" else {})


def _angles_for(config: ModelConfig) -> dict[str, Any]:
    if config.rope_scaling == "none":
        return {"rope_parameters": {"rope_type": "default", "rope_theta": config.rope_base}}
    factors = {key: getattr(config, ours) for key, ours in FACTORS[config.rope_scaling].items()}
    if config.rope_scaling == "llama3":
        factors[OLD_CONTEXT] = config.rope_context
    scaling = {"rope_type": config.rope_scaling, **factors}
    return {"rope_scaling": scaling, "rope_parameters": {**scaling, "rope_theta": config.rope_base}}


# -- tensors


def _gpt2_tensors(config: ModelConfig) -> list[TensorMapping]:
    """Return the tensors of GPT-2, whose linear layers are stored as (in, out)."""
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


def _llama_tensors(config: ModelConfig) -> list[TensorMapping]:
    """Return the tensors of Llama. Ours has q, k and v in one tensor, and gate and up in another.

    Both rotate the first half of a head with the second half, by the same angles.
    """
    C, H, size = config.n_embd, config.hidden, config.head_size
    Q, KV = config.attention_width, config.kv_heads * size
    places = (("q", Q, 0), ("k", KV, Q), ("v", KV, Q + KV))
    eps = config.norm_eps if config.embed_norm else None
    tensors: list[tuple[str, tuple[int, ...], str, int]] = [
        ("input_layernorm.weight", (C,), "norm1.w", 0),
        ("post_attention_layernorm.weight", (C,), "norm2.w", 0),
        *((f"self_attn.{x}_proj.weight", (rows, C), "attn.qkv.w", first) for x, rows, first in places),
        ("self_attn.o_proj.weight", (C, Q), "attn.proj.w", 0),
        ("mlp.gate_proj.weight", (H, C), "mlp.fc.w", 0),
        ("mlp.up_proj.weight", (H, C), "mlp.fc.w", H),
        ("mlp.down_proj.weight", (C, H), "mlp.proj.w", 0),
    ]
    if config.qkv_bias:
        tensors += [(f"self_attn.{x}_proj.bias", (rows,), "attn.qkv.b", first) for x, rows, first in places]
    if config.qk_norm:
        tensors += [
            (f"self_attn.{x}_norm.weight", (size,), "qk_norm.w", i * size) for i, x in enumerate("qk")
        ]
    mappings = [
        TensorMapping("embed_tokens.weight", (config.vocab_size, C), "wte", norm_eps=eps),
        TensorMapping("norm.weight", (C,), "final_norm.w"),
    ]
    for i in range(config.n_layer):
        for theirs, shape, ours, first in tensors:
            mappings.append(TensorMapping(f"layers.{i}.{theirs}", shape, f"blocks.{i}.{ours}", first))
    return mappings


def _folds_embed_norm(config: ModelConfig) -> bool:
    """Return whether the embedding can be stored after its norm, which then depends only on the token."""
    is_plain = config.norm == "rmsnorm" and not config.norm_gain
    return is_plain and not config.tied and not config.has_position_vectors


def _with_gain(mapping: TensorMapping, config: ModelConfig) -> TensorMapping:
    """Return the mapping of a tensor. The gain of a norm that has none in our model is constant."""
    is_gain = mapping.ours.endswith(".w") and len(mapping.shape) == 1
    is_of_heads = "qk_norm" in mapping.ours
    if not is_gain or (config.qk_norm_gain if is_of_heads else config.norm_gain):
        return mapping
    return replace(mapping, ours="", fill=QK_SCALE if is_of_heads else 1.0)


def recognised(settings: Settings) -> tuple[Family, ModelConfig]:
    """Return the family and our configuration for this config.json. Raises a DataError if unsupported."""
    name = settings.values.get("model_type")
    family = next((family for family in FAMILIES if family.model_type == name), None)
    if family is None:
        *others, last = (repr(family.model_type) for family in FAMILIES)
        known = f"{', '.join(others)} and {last}"
        raise DataError(f"{settings.source}: model_type {name!r:.40} is not supported; {known} are")
    if settings.values.get("quantization_config") is not None:
        raise DataError(f"{settings.source}: quantized weights cannot be imported")
    try:
        config = family.config_from(settings)
    except UsageError as error:
        words = {ours: theirs for ours, (theirs, _) in family.keys.items()}
        text = re.sub(r"\w+", lambda word: words.get(word[0], word[0]), str(error))
        raise DataError(f"{settings.source}: {text}") from None
    if config.vocab_size < 1:
        raise DataError(f"{settings.source}: vocab_size must be at least 1, not {config.vocab_size}")
    return family, config


def family_for(config: ModelConfig, source: object, where: str = "transformers") -> Family:
    """Return the family that our model can be exported as."""
    closest = min(FAMILIES, key=lambda family: len(family.lacks(config)))
    if lacking := closest.lacks(config):
        raise UsageError(
            f"cannot export {source}; train a model that {where} supports, with --family"
            f" {' or '.join(FAMILY_CHOICES)}. The closest one, {closest.title}, has no"
            f" {', no '.join(lacking)}"
        )
    return closest
