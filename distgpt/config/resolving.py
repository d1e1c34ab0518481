"""Which configuration a run gets: defaults, preset, the model it begins with, TOML file, flags."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from distgpt.config import ModelConfig, RunConfig, parse_toml
from distgpt.config.presets import preset
from distgpt.errors import UsageError

DEFAULT_PRESET = "tiny"


def resolve(
    preset_name: str | None,
    toml: Path | None,
    flags: Mapping[str, Any],
    model_in: Callable[[str], ModelConfig],
) -> tuple[str, RunConfig]:
    """The run's name and its configuration. A TOML file may name a preset too; a flag goes before it.

    Where the run begins with weights from a file, `model_in` tells the model in there.
    """
    from_file = _read(toml) if toml else {}
    named = from_file.pop("preset", None)
    chosen = preset_name or named or DEFAULT_PRESET
    name = toml.stem if toml and not preset_name else chosen
    init = {**from_file, **flags}.get("init")
    begun = asdict(model_in(init)) if init and isinstance(init, str) else {}
    run = preset(str(chosen), begun, from_file, flags)
    for key, value in begun.items():
        asked = getattr(run.model, key)
        if asked != value and not (key == "seq_len" and run.model.positions != "learned"):
            raise UsageError(f"{init} holds a model whose {key} is {value!r}; {asked!r} is asked for")
    return name, run


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path} cannot be read: {error}") from None
    return parse_toml(text, str(path))
