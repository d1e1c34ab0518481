"""Which configuration a run gets: defaults, then the preset, then the TOML file, then the flags."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distgpt.config import RunConfig, parse_toml
from distgpt.errors import UsageError
from distgpt.presets import preset

DEFAULT_PRESET = "tiny"


def resolve(preset_name: str | None, toml: Path | None, flags: Mapping[str, Any]) -> tuple[str, RunConfig]:
    """The run's name and its configuration. A TOML file may name a preset too; a flag goes before it."""
    from_file = _read(toml) if toml else {}
    named = from_file.pop("preset", None)
    chosen = preset_name or named or DEFAULT_PRESET
    name = toml.stem if toml and not preset_name else chosen
    return name, preset(str(chosen)).with_values({**from_file, **flags})


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path} cannot be read: {error}") from None
    return parse_toml(text, str(path))
