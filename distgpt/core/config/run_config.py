"""A run's configuration: model and training settings, changed in layers, read from and written to TOML."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from distgpt.core.base.errors import DistgptError, UsageError, did_you_mean
from distgpt.core.base.files import read_small
from distgpt.core.config.setting import brief, settings_of
from distgpt.core.config.settings import BATCH_TOKENS, ModelConfig, TrainConfig

LONGEST_TOML = 1 << 18  # characters
MOST_TOML_DOTS = 2000  # the parser keeps every prefix of a dotted key

MODEL, TRAIN = settings_of(ModelConfig), settings_of(TrainConfig)
SETTINGS = MODEL | TRAIN
# Removed settings and the values at which they had no effect. A run with another value cannot resume.
REMOVED: dict[str, object] = {
    "adapter_kind": "auto",
    "head_decay": 0.0,
    "keep_minutes": 0.0,
    "log_every": 1,
    "recheck_every": 0,
}

EXTRA = "extra"  # the table of an extension's settings; one of them is extra.NAME
BATCH_KEYS = {"batch_size", BATCH_TOKENS}

# Settings that may change on resume. The other settings determine the results of earlier steps.
CHANGEABLE = {name for name, about in SETTINGS.items() if about.changeable}


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Model and training settings, as saved in a run directory and in every weights file."""

    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def with_values(self, values: Mapping[str, object]) -> RunConfig:
        """Return a copy with some settings changed. Reject unknown names and invalid values."""
        for name in values:
            if name in REMOVED:
                raise UsageError(f"distgpt no longer has the setting {name}; remove it from config.toml")
            if name not in SETTINGS and name != EXTRA:
                raise UsageError(f"unknown setting {name!r:.80}{did_you_mean(name[:80], SETTINGS)}")
        # The copies check the types of the values.
        model: dict[str, Any] = {name: value for name, value in values.items() if name in MODEL}
        train: dict[str, Any] = {name: value for name, value in values.items() if name not in MODEL}
        return RunConfig(replace(self.model, **model), replace(self.train, **train))

    def to_toml(self) -> str:
        return "\n".join(f"[{title}]\n{as_toml(half)}" for title, half in asdict(self).items())


def differences(before: RunConfig, now: RunConfig) -> dict[str, tuple[object, object]]:
    """Return the settings that differ, by name: the value before, and the value now.

    Values that are still unknown (vocabulary size, steps of an epoch run) do not count as different.
    """
    old, new = (_flat(asdict(run.model) | asdict(run.train)) for run in (before, now))
    if not now.model.vocab_size:
        del new["vocab_size"]
    if now.train.epochs:
        del new["steps"]
    return {name: (old.get(name), value) for name, value in new.items() if old.get(name) != value}


def _flat(values: Mapping[str, Any]) -> dict[str, object]:
    """Return the values with each setting of an extension under extra.NAME."""
    extra = values.get(EXTRA)
    if not isinstance(extra, dict):
        return {**values}
    own = {f"{EXTRA}.{name}": value for name, value in extra.items()}
    return {**{name: value for name, value in values.items() if name != EXTRA}, **own}


def renamed(values: Mapping[str, object]) -> dict[str, object]:
    """Return the values with old choices replaced by current ones.

    Drop removed settings whose value had no effect.
    """
    result: dict[str, object] = {}
    for name, value in values.items():
        if name in REMOVED and value == REMOVED[name]:
            continue
        choices = dict(SETTINGS[name].former_choices) if name in SETTINGS else {}
        result[name] = choices.get(value, value) if isinstance(value, str) else value
    return result


def former_choices(text: str, source: str) -> list[str]:
    """Return a line for each value in a TOML document that has a new name."""
    result = []
    for half in load_toml(text, source).values():
        for name, value in half.items() if isinstance(half, dict) else ():
            for former, now in SETTINGS[name].former_choices if name in SETTINGS else ():
                if value == former:
                    result.append(f"{name} = {former!r} is {now!r} now")
    return result


def layered(base: RunConfig, *layers: Mapping[str, object]) -> RunConfig:
    """Return a configuration changed by these layers; later layers override earlier ones.

    `batch_tokens` is `batch_size` in tokens; the later of the two overrides the other.
    """
    values: dict[str, object] = {}
    extra: dict[str, object] = dict(base.train.extra)
    for layer in map(_flat, map(renamed, layers)):
        if BATCH_KEYS & layer.keys():
            values = {name: value for name, value in values.items() if name not in BATCH_KEYS}
        values |= layer
    if values.keys() >= BATCH_KEYS:
        raise UsageError("batch_size and batch_tokens cannot be combined: both set the batch")
    # A setting decided when the run opens keeps the base's value until then.
    undecided = {name: about.undecided for name, about in SETTINGS.items() if about.undecided}
    values = {name: each for name, each in values.items() if name not in undecided or each != undecided[name]}
    for name in [name for name in values if name.startswith(f"{EXTRA}.")]:
        extra[name.partition(".")[2]] = values.pop(name)
    values[EXTRA] = extra
    tokens = values.pop(BATCH_TOKENS, None)
    if tokens is None:
        return base.with_values(values)
    length = {name: value for name, value in values.items() if name == "seq_len"}
    seq_len = base.with_values(length).model.seq_len
    if type(tokens) is not int or tokens < 1 or tokens % seq_len:
        raise UsageError(
            f"batch_tokens ({brief(tokens)}) must be a multiple of seq_len ({seq_len}); or set batch_size"
        )
    return base.with_values({**values, "batch_size": tokens // seq_len})


# Functions that read and write TOML.


def parse_toml(text: str, source: str) -> dict[str, object]:
    """Return the settings in a TOML document, from its top level, [model] and [train], as one flat dict."""
    return flat_settings(load_toml(text, source), source)


def load_toml(text: str, source: str) -> dict[str, object]:
    """Parse a TOML document after checking its size."""
    if len(text) > LONGEST_TOML:
        raise UsageError(f"{source} is not a configuration: longer than {LONGEST_TOML:,} characters")
    if text.count(".") > MOST_TOML_DOTS:
        raise UsageError(f"{source} is not a configuration: more than {MOST_TOML_DOTS:,} dots")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise UsageError(f"{source} is not valid TOML: nested too deeply") from None
    except ValueError as error:  # includes Python errors for invalid dates and long numbers
        why = "a number has too many digits" if "set_int_max_str_digits" in str(error) else error
        raise UsageError(f"{source} is not valid TOML: {why}") from None


def flat_settings(document: Mapping[str, object], source: str) -> dict[str, object]:
    """Return the settings of a document's top level and tables as one flat dict."""
    tables = {"model": set(MODEL), "train": {*TRAIN, BATCH_TOKENS}}
    flat: dict[str, object] = {}
    for key, value in renamed(document).items():
        if not isinstance(value, dict) or key == EXTRA:
            flat[key] = value
        elif key in tables:
            inside = renamed(value)
            for name in inside:
                if name not in tables[key] and name not in REMOVED and name != EXTRA:
                    raise UsageError(
                        f"{source}: [{key}] has no setting {name!r:.80}{did_you_mean(name[:80], tables[key])}"
                    )
            flat |= inside
        else:
            raise UsageError(f"{source}: unknown table [{key:.80}] (allowed: model, train)")
    return flat


def read_text(path: Path, what: str) -> str:
    """Return the content of a TOML file. `what` is the option or argument that names it, for errors."""
    try:
        return read_small(path, LONGEST_TOML).decode()
    except DistgptError as error:
        raise UsageError(f"{what}: {error}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{what} {path} is not valid UTF-8: {error}") from None


def as_toml(values: Mapping[str, object]) -> str:
    return "".join(f"{name} = {_toml(value)}\n" for name, value in values.items() if value != {})


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {_toml(each)}" for name, each in value.items()) + "}"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = "".join(c if c.isprintable() and c not in '"\\' else f"\\U{ord(c):08x}" for c in value)
        return f'"{escaped}"'
    return repr(value)
