"""A family of models of transformers: what is common to reading and writing their config.json and tensors."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from distgpt.core.base.checked import checked
from distgpt.core.base.errors import DataError
from distgpt.core.config import ModelConfig

HEAD = "lm_head.weight"  # the same name in every family, without a prefix
# Values of our settings, as people call them where that is not the word of the setting.
_PART_NAMES = {
    "layernorm": "LayerNorm",
    "rmsnorm": "RMSNorm",
    "gelu": "GELU",
    "relu": "ReLU",
    "relu2": "ReLU²",
    "swiglu": "SwiGLU",
    "learned": "learned positions",
    "rope": "RoPE",
    "none": "model without positions",
}
SWITCH_NAMES = {
    ("bias", True): "bias",
    ("qkv_bias", True): "biases of queries, keys and values (qkv_bias)",
    ("qkv_bias", False): "model without biases of queries, keys and values (qkv_bias)",
    ("qk_norm", True): "norm of queries and keys (qk_norm)",
    ("qk_norm", False): "model without a norm of queries and keys (qk_norm)",
    ("qk_norm_gain", True): "gain of queries and keys (qk_norm_gain)",
    ("qk_norm_gain", False): "queries and keys without gain (qk_norm_gain)",
}

T = TypeVar("T")


def part_name(value: str) -> str:
    """Return what people call a norm, an activation or a kind of positions."""
    return _PART_NAMES.get(value, value)


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
        """Return a value of the default's type, or the default if there is none."""
        value = self.values.get(key)
        if value is None:
            return default
        try:
            return checked(type(default), value, (key,))
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
    windows = "none"  # of attention: in which layers it has them: none, all or some
    shapes_heads = False  # where several heads of q may share one of k and v, and have any size

    @abstractmethod
    def config_from(self, settings: Settings) -> ModelConfig:
        """Our configuration of their model; a DataError if ours cannot be that model."""

    @abstractmethod
    def config_for(self, config: ModelConfig) -> dict[str, Any]:
        """Return what their config.json says besides `keys`."""

    @abstractmethod
    def mappings(self, config: ModelConfig) -> list[TensorMapping]:
        """Return all tensors but the output layer."""

    def lacks(self, config: ModelConfig) -> list[str]:
        """Name what our model has and this family does not."""
        values = {setting: getattr(config, setting) for setting in self.parts}
        values["qkv_bias"] = config.qkv_bias and not config.bias
        other = [(setting, value) for setting, value in values.items() if value not in self.parts[setting]]
        missing = [SWITCH_NAMES.get(part) or part_name(part[1]) for part in other]
        never = {
            "norm without gain": not config.norm_gain,
            "norm after the embedding": config.embed_norm,
            "value embeddings": config.value_embeddings,
            "windows of attention (window)": any(config.windows) and self.windows == "none",
            "layers without a window beside those with one (full_every)": any(config.windows)
            and not all(config.windows)
            and self.windows == "all",
            "queries in groups (n_kv_head)": config.kv_heads < config.n_head and not self.shapes_heads,
            "heads of another size (head_dim)": config.attention_width != config.n_embd
            and not self.shapes_heads,
            "output layer without a norm in front": not config.final_norm,
        }
        return missing + [feature for feature, present in never.items() if present]

    def values_from(self, settings: Settings) -> dict[str, Any]:
        return {ours: settings.get(*key) for ours, key in self.keys.items()}

    def values_for(self, config: ModelConfig) -> dict[str, Any]:
        return {theirs: getattr(config, ours) for ours, (theirs, _) in self.keys.items()}

    def in_its_words(self, text: str) -> str:
        """Return a message with the family's names in place of our settings'."""
        return re.sub(r"\w+", lambda word: self.keys[word[0]][0] if word[0] in self.keys else word[0], text)

    def all_mappings(self, config: ModelConfig) -> list[TensorMapping]:
        """With the output layer, if that is not the embedding."""
        head = TensorMapping(HEAD, (config.vocab_size, config.n_embd), "head.w")
        return self.mappings(config) if config.tied else [*self.mappings(config), head]

    def full_name(self, name: str) -> str:
        return name if name == HEAD else self.prefix + name
