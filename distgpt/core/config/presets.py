"""A run's configuration: both halves, TOML, and presets."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from distgpt.core.base.errors import DistgptError, UsageError, nearest
from distgpt.core.base.files import read_small
from distgpt.core.config.setting import brief, settings_of
from distgpt.core.config.settings import BATCH_TOKENS, ModelConfig, TrainConfig

LONGEST = 1 << 18  # characters of TOML
MOST_DOTS = 2000  # the parser keeps every beginning of a dotted key

MODEL, TRAIN = settings_of(ModelConfig), settings_of(TrainConfig)
SETTINGS = MODEL | TRAIN
FORMER_NAMES = {about.formerly: name for name, about in SETTINGS.items() if about.formerly}

# Settings that a resumed run may change: the others say what the steps so far have computed.
CHANGEABLE = {name for name, about in SETTINGS.items() if about.changeable}


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Both halves, as saved in a run directory and inside every weights file."""

    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def with_values(self, values: Mapping[str, Any]) -> RunConfig:
        """Return a copy with some settings changed. Refuse unknown names and impossible values."""
        for key in values:
            if key not in SETTINGS:
                raise UsageError(f"unknown setting {_unknown(key, SETTINGS)}")
        model = {key: value for key, value in values.items() if key in MODEL}
        train = {key: value for key, value in values.items() if key in TRAIN}
        return RunConfig(replace(self.model, **model), replace(self.train, **train))

    @staticmethod
    def from_dict(halves: Mapping[str, Mapping[str, Any]]) -> RunConfig:
        """Return the configuration of which dataclasses.asdict made this."""
        return RunConfig(ModelConfig(**halves["model"]), TrainConfig(**halves["train"]))

    def to_toml(self) -> str:
        return "\n".join(f"[{title}]\n{as_toml(half)}" for title, half in asdict(self).items())


def renamed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with former names, and former names of choices, replaced by those of today."""
    found = {FORMER_NAMES.get(name, name): value for name, value in values.items()}
    for name, value in found.items():
        if name in SETTINGS and isinstance(value, str):
            found[name] = dict(SETTINGS[name].former_choices).get(value, value)
    return found


def parse_toml(text: str, source: str) -> dict[str, Any]:
    """Return the settings in a TOML text, from its top level, [model] and [train] alike, as one flat dict."""
    return flat_settings(load_toml(text, source), source)


def load_toml(text: str, source: str) -> dict[str, Any]:
    """Return the document in a TOML text, which is bounded before it is parsed."""
    if len(text) > LONGEST:
        raise UsageError(f"{source} is no configuration: it is longer than {LONGEST:,} characters")
    if text.count(".") > MOST_DOTS:
        raise UsageError(f"{source} is no configuration: it has more than {MOST_DOTS:,} dots")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise UsageError(f"{source} is not valid TOML: it is nested too deeply") from None
    except ValueError as error:  # also of Python, at numbers and dates that are none
        why = "a number has too many digits" if "set_int_max_str_digits" in str(error) else error
        raise UsageError(f"{source} is not valid TOML: {why}") from None


def flat_settings(document: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the settings of a document's top level and of its tables, as one flat dict."""
    tables = {"model": set(MODEL), "train": {*TRAIN, BATCH_TOKENS}}
    flat: dict[str, Any] = {}
    for key, value in renamed(document).items():
        if not isinstance(value, dict):
            flat[key] = value
        elif key in tables:
            value = renamed(value)
            for name in value:
                if name not in tables[key]:
                    raise UsageError(
                        f"{source}: [{key}] has no setting {name!r:.80}{nearest(name[:80], tables[key])}"
                    )
            flat |= value
        else:
            raise UsageError(f"{source}: unknown table [{key:.80}]; [model] and [train] are known")
    return flat


def _unknown(name: str, known: Iterable[str]) -> str:
    return f"{name!r:.80}{nearest(name[:80], known)}"


def differences(before: RunConfig, now: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ, by name: the value before, and the value now.

    Values still unknown (vocabulary size, steps of an epoch run) do not count as different."""
    old, new = ({**asdict(run.model), **asdict(run.train)} for run in (before, now))
    if not now.model.vocab_size:
        del new["vocab_size"]
    if now.train.epochs:
        del new["steps"]
    return {name: (old[name], value) for name, value in new.items() if old[name] != value}


def as_toml(values: Mapping[str, Any]) -> str:
    """Return a line for each setting."""
    return "".join(f"{name} = {_toml(value)}\n" for name, value in values.items())


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = "".join(c if c.isprintable() and c not in '"\\' else f"\\U{ord(c):08x}" for c in value)
        return f'"{escaped}"'
    return repr(value)


# Presets

DEFAULT_PRESET = "tiny"
BATCH_KEYS = {"batch_size", BATCH_TOKENS}

_GPT2_RECIPE: dict[str, Any] = {
    "vocab_size": 50257,
    "seq_len": 1024,
    BATCH_TOKENS: 1 << 19,
    "steps": 19073,
    "lr": 6e-4,
    "min_lr": 6e-5,
    "schedule": "cosine",
    "warmup": 715,
    "weight_decay": 0.1,
    "tokenizer": "gpt2",
    "eval_every": 250,
    "val_tokens": 20 << 16,
    "sample_every": 250,
}


def _gpt2(n_layer: int, n_head: int, n_embd: int, **more: Any) -> dict[str, Any]:
    return {**_GPT2_RECIPE, "n_layer": n_layer, "n_head": n_head, "n_embd": n_embd, **more}


def _llama(n_layer: int, n_head: int, n_kv_head: int, n_embd: int, **more: Any) -> dict[str, Any]:
    """A published shape with gpt2's recipe, at a shorter context than the published model's."""
    shape = {"n_kv_head": n_kv_head, "positions": "rope", "norm": "rmsnorm", "mlp": "swiglu", "bias": False}
    context = {"seq_len": 2048, "tokenizer": "auto"}
    return _gpt2(n_layer, n_head, n_embd, **{**shape, **context, **more})


def _microgpt(n_layer: int, n_embd: int, seq_len: int, n_head: int) -> dict[str, Any]:
    return {
        "n_layer": n_layer,
        "n_embd": n_embd,
        "seq_len": seq_len,
        "n_head": n_head,
        "norm": "rmsnorm",
        "norm_gain": False,
        "embed_norm": True,
        "final_norm": False,
        "mlp": "relu",
        "bias": False,
        "tied": False,
        "vocab_size": 27,
        "vocab_multiple": 1,
        "init_std": 0.08,
        "init_residual": False,
        "data": "names",
        "tokenizer": "char",
        "steps": 1000,
        "batch_size": 16,
        "lr": 0.01,
        "schedule": "linear",
        "warmup": 0,
        "weight_decay": 0.0,
        "clip": 0.0,
        "beta1": 0.85,
        "beta2": 0.99,
    }


# What brings a loss soonest (docs/explanation/learning.md). `lr` is the rate of the layers' matrices.
_FAST: dict[str, Any] = {
    "norm": "rmsnorm",
    "norm_gain": False,
    "embed_norm": True,
    "mlp": "relu2",
    "positions": "rope",
    "qk_norm": True,
    "value_embeddings": True,
    "bias": False,
    "tied": False,
    "init_weights": "unit",
    "optimizer": "muon",
    "lr": 0.03,
    "embedding_lr": 0.3,
    "head_lr": 0.008,
    "vector_lr": 0.01,
    "schedule": "wsd",
    "warmup": 40,
    "weight_decay": 0.28,
    "clip": 0.0,
    "beta1": 0.8,
    "eps": 1e-10,
}

# First weights from pairs of tokens, and the rates that they need: for short runs.
_FROM_PAIRS: dict[str, Any] = {
    "init_weights": "bigrams",
    "lr": 0.04,
    "embedding_lr": 0.02,
    "value_lr": 0.1,
    "head_lr": 0.0007,
}

# A size for a CPU and for minutes.
_FOUR_LAYERS: dict[str, Any] = {
    "n_layer": 4,
    "n_head": 4,
    "n_embd": 256,
    "seq_len": 512,
    BATCH_TOKENS: 1 << 12,
}

_STUDY = {
    "S": (1, 64, 128, 4),
    "M": (2, 128, 128, 8),
    "L": (4, 256, 256, 8),
    "VL": (6, 384, 512, 12),
    "XL": (8, 512, 512, 16),
}

# Published models and workloads, as differences from the defaults.
PRESETS: dict[str, dict[str, Any]] = {
    # Learns a short text within a minute. A model as small as this takes a higher rate than `fast`.
    "tiny": {**_FAST, "lr": 0.05},
    # The same size by AdamW. A shorter warm-up makes gradients of 17 to 75 on other texts.
    "tiny-adamw": {
        "positions": "rope",
        "norm": "rmsnorm",
        "mlp": "swiglu",
        "bias": False,
        "steps": 1000,
        "warmup": 120,
    },
    # The recipe that learns fastest; and up to about two million tokens.
    "fast": {**_FAST, **_FOUR_LAYERS, "window": 128, "steps": 1000},
    "sprint": {**_FAST, **_FROM_PAIRS, **_FOUR_LAYERS, "steps": 330},
    "gpt-mini": {
        "n_layer": 6,
        "n_head": 6,
        "n_embd": 384,
        "seq_len": 256,
        "tied": False,
        "data": "story",
        "tokenizer": "word",
        "shift_windows": False,
        "steps": 50,
        "batch_size": 16,
        "lr": 3e-4,
        "schedule": "linear",
        "warmup": 0,
        "weight_decay": 0.0,
        "clip": 1.0,
    },
    "gpt2": _gpt2(12, 12, 768),
    # The larger the model, the lower its learning rate, as published for GPT-3 at these sizes.
    "gpt2-medium": _gpt2(24, 16, 1024, lr=3e-4, min_lr=3e-5),
    "gpt2-large": _gpt2(36, 20, 1280, lr=2.5e-4, min_lr=2.5e-5),
    "gpt2-xl": _gpt2(48, 25, 1600, lr=2e-4, min_lr=2e-5),
    "gpt2-modern": _gpt2(12, 12, 768, positions="rope", norm="rmsnorm", mlp="swiglu", bias=False),
    "gpt2-fast": _gpt2(12, 12, 768, **_FAST, window=256),
    "smollm2-135m": _llama(30, 9, 3, 576, vocab_size=49152, mlp_width=1536, rope_base=1e5),
    "smollm2-360m": _llama(
        32, 15, 5, 960, vocab_size=49152, mlp_width=2560, rope_base=1e5, lr=3e-4, min_lr=3e-5
    ),
    "qwen3-0.6b": {
        **_llama(28, 16, 8, 1024, vocab_size=151936, mlp_width=3072, rope_base=1e6, lr=2.5e-4, min_lr=2.5e-5),
        "head_dim": 128,
        "qk_norm": True,
        "qk_norm_gain": True,
        "norm_eps": 1e-6,
    },
    "llama3.2-1b": {
        **_llama(16, 32, 8, 2048, vocab_size=128256, mlp_width=8192, rope_base=5e5, lr=2e-4, min_lr=2e-5),
        "rope_scaling": "llama3",
        "rope_factor": 32.0,
    },
    "microgpt": _microgpt(1, 16, 16, 4),
    **{name: _microgpt(*shape) for name, shape in _STUDY.items()},
    **{f"M{name}5": _microgpt(n, c, 512, h) for name, (n, c, _, h) in _STUDY.items()},
}


def preset(name: str, *changes: Mapping[str, Any]) -> RunConfig:
    """Return the full configuration behind a preset's name, with changes to it, later ones over earlier ones.

    `batch_tokens` is `batch_size` in tokens: the later one of the two counts.
    """
    return layered(RunConfig(), base_preset(name), *changes)


def base_preset(name: str) -> dict[str, Any]:
    """Return a preset as differences from the defaults."""
    if name not in PRESETS:
        raise UsageError(f"unknown preset {_unknown(name, PRESETS)}")
    return PRESETS[name]


def layered(base: RunConfig, *layers: Mapping[str, Any]) -> RunConfig:
    """Return a configuration changed by these layers, later ones over earlier ones."""
    values: dict[str, Any] = {}
    for layer in map(renamed, layers):
        if BATCH_KEYS & layer.keys():
            values = {key: value for key, value in values.items() if key not in BATCH_KEYS}
        values |= layer
    if values.keys() >= BATCH_KEYS:
        raise UsageError("batch_size and batch_tokens say the same thing: give one of them")
    # What is to be decided still has the base's value: a resumed run's own, else the default.
    values = {key: value for key, value in values.items() if not _is_undecided(key, value)}
    tokens = values.pop(BATCH_TOKENS, None)
    if tokens is not None:
        length = {key: value for key, value in values.items() if key == "seq_len"}
        values["batch_size"] = _sequences(tokens, base.with_values(length).model.seq_len)
    return base.with_values(values)


def _is_undecided(name: str, value: Any) -> bool:
    return name in SETTINGS and bool(value) and value == SETTINGS[name].undecided


def _sequences(tokens: Any, seq_len: int) -> int:
    if type(tokens) is not int or tokens < 1 or tokens % seq_len:
        raise UsageError(
            f"batch_tokens is {brief(tokens)}: it must be a multiple of seq_len {seq_len}, or use batch_size"
        )
    return tokens // seq_len


def read_text(path: Path, what: str) -> str:
    """Return the text of a TOML file; `what` names the option or argument that asks for it."""
    try:
        return read_small(path, LONGEST).decode()
    except DistgptError as error:
        raise UsageError(f"{what}: {error}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{what} {path} is not valid UTF-8: {error}") from None
