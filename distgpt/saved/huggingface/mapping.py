"""What a family of foreign models is: its configuration in our words, and its tensors in terms of ours."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from distgpt.config import ModelConfig
from distgpt.errors import DataError

HEAD = "lm_head.weight"  # of the same name in all families, without a prefix

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Place:
    """One of their tensors: rows of ours from `first` on, or all of them if it is turned.

    Where `ours` is empty our model has no such tensor, and theirs must be zeros.
    """

    theirs: str
    shape: tuple[int, ...]
    ours: str
    first: int = 0
    turned: bool = False  # theirs is (in, out), ours (out, in)

    @property
    def rows(self) -> int:
        """Of ours."""
        return self.shape[-1] if self.turned else self.shape[0]


class Settings:
    """A config.json, which nobody has looked at yet: each value is checked where it is asked for."""

    def __init__(self, values: dict[str, Any], source: str) -> None:
        self.values, self.source = values, source

    def whole(self, key: str, default: int) -> int:
        return self._typed(key, default, (int,), "a whole number")

    def number(self, key: str, default: float) -> float:
        value = self._typed(key, default, (int, float), "a number")
        try:
            return float(value)
        except OverflowError:
            raise DataError(f"{self.source}: {key} is {value!r:.40}…, a number too large") from None

    def flag(self, key: str, default: bool) -> bool:
        return self._typed(key, default, (bool,), "true or false")

    def choice(self, key: str, default: str, known: dict[str, str], why_not: str) -> str:
        value = self.values.get(key, default)
        if not isinstance(value, str) or value not in known:
            raise DataError(f"{self.source}: {key} is {value!r:.40}: {why_not}")
        return known[value]

    def demand(self, key: str, value: Any, why: str) -> None:
        """Refuse anything but this value, or none at all."""
        found = self.values.get(key)
        if found is not None and (found != value or type(found) is not type(value)):
            raise DataError(f"{self.source}: {key} is {found!r:.80}: {why}")

    def _typed(self, key: str, default: T, types: tuple[type, ...], what: str) -> T:
        """The default where there is no value; type(), because JSON's true is an int to Python."""
        value = default if self.values.get(key) is None else self.values[key]
        if type(value) not in types:
            raise DataError(f"{self.source}: {key} is {value!r:.40}, not {what}")
        return cast(T, value)


@dataclass(frozen=True, slots=True, eq=False)  # each is itself alone
class Family:
    """A kind of model that transformers knows by `model_type`, as far as ours can be one."""

    title: str
    model_type: str
    architecture: str
    prefix: str
    buffers: re.Pattern[str]  # stored by some versions, though no parameters
    keys: dict[str, str]  # what it calls settings of ours
    config_from: Callable[[Settings], ModelConfig]
    config_for: Callable[[ModelConfig], dict[str, Any]]
    places: Callable[[ModelConfig], list[Place]]
    features: Callable[[ModelConfig], dict[str, bool]]  # no model of it has, and whether ours does

    def lacks(self, config: ModelConfig) -> list[str]:
        """What our model has and this family does not."""
        found = self.features(config) | {
            "norm without gain": not config.norm_gain,
            "norm after the embedding": config.embed_norm,
            "output layer without a norm in front": not config.final_norm,
        }
        return [feature for feature, present in found.items() if present]

    def renamed(self, config: ModelConfig) -> dict[str, Any]:
        return {theirs: getattr(config, ours) for ours, theirs in self.keys.items()}

    def in_its_words(self, text: str) -> str:
        """With its names in the place of our settings'."""
        return re.sub(r"\w+", lambda word: self.keys.get(word[0], word[0]), text)

    def all_places(self, config: ModelConfig) -> list[Place]:
        """With the output layer, if that is not the embedding."""
        head = Place(HEAD, (config.vocab_size, config.n_embd), "head.w")
        return self.places(config) if config.tied else [*self.places(config), head]

    def full_name(self, name: str) -> str:
        return name if name == HEAD else self.prefix + name


def turn(out: NDArray[Any], source: NDArray[Any]) -> None:
    """out ← sourceᵀ, in strips that fit into the processor's cache."""
    for start in range(0, len(source), 64):
        out[:, start : start + 64] = source[start : start + 64].T


def refuse_infinite(array: NDArray[Any], name: str, source: object) -> None:
    if not np.isfinite(array).all():
        raise DataError(f"{source}: {name} holds numbers that are not finite")
