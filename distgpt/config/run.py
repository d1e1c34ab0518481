"""The configuration of a run: model and training, read from and written as TOML."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from distgpt.config.model import ModelConfig
from distgpt.config.setting import settings_of
from distgpt.config.training import BATCH_TOKENS, TrainConfig
from distgpt.errors import UsageError, nearest

MODEL, TRAIN = settings_of(ModelConfig), settings_of(TrainConfig)
SETTINGS = MODEL | TRAIN

# Settings that a resumed run may change: none of them alters what the steps so far computed.
CHANGEABLE = {name for name, about in SETTINGS.items() if about.changeable}


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Both halves, as saved in a run directory and inside every weights file."""

    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def with_values(self, values: Mapping[str, Any]) -> RunConfig:
        """A copy with some settings of either half changed; refuses unknown names and impossible values."""
        for key in values:
            if key not in SETTINGS:
                raise UsageError(f"unknown setting {key!r}{nearest(key, SETTINGS)}")
        model = {key: value for key, value in values.items() if key in MODEL}
        train = {key: value for key, value in values.items() if key in TRAIN}
        return RunConfig(replace(self.model, **model), replace(self.train, **train))

    def to_toml(self) -> str:
        return "\n".join(
            f"[{title}]\n" + "".join(f"{name} = {_toml(value)}\n" for name, value in half.items())
            for title, half in asdict(self).items()
        )


def parse_toml(text: str, source: str) -> dict[str, Any]:
    """The settings in a TOML text, from its top level, [model] and [train] alike, as one flat dict."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{source} is not valid TOML: {error}") from None
    tables = {"model": set(MODEL), "train": {*TRAIN, BATCH_TOKENS}}
    flat: dict[str, Any] = {}
    for key, value in document.items():
        if not isinstance(value, dict):
            flat[key] = value
        elif key in tables:
            for name in value:
                if name not in tables[key]:
                    raise UsageError(f"{source}: [{key}] has no setting {name!r}{nearest(name, tables[key])}")
            flat |= value
        else:
            raise UsageError(f"{source}: unknown table [{key}]; [model] and [train] are known")
    return flat


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = "".join(c if c.isprintable() and c not in '"\\' else f"\\U{ord(c):08x}" for c in value)
        return f'"{escaped}"'
    return repr(value)
