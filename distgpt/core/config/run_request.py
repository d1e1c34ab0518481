"""The complete request for a run, and the configuration that it resolves to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from distgpt.core.base.errors import UsageError, nearest_path, reject_combination
from distgpt.core.config.presets import DEFAULT_PRESET, base_preset
from distgpt.core.config.run_config import RunConfig, layered, parse_toml, read_text, renamed
from distgpt.core.config.settings import ModelConfig

WARMUP_PART = 5  # a preset's warm-up is at most 1/5 of the steps
# Defaults for further training. A preset's learning rates are meant for random weights.
PRETRAINED_PRESET = "tiny-adamw"
PRETRAINED: dict[str, float] = {
    "lr": 5e-5,
    "min_lr": 0.0,
    "embedding_lr": 0.0,
    "value_lr": 0.0,
    "head_lr": 0.0,
    "vector_lr": 0.0,
}
ADAPTED_LR = 2e-3  # the maximum for LoRA

# Options of recipes, which are not settings.
RECIPES = ("decay_from", "within", "depth", "family", "deterministic")

Value = bool | int | float | str


@dataclass(frozen=True, slots=True)
class RunRequest:
    """Everything requested for a run, from the options of a command or from Python.

    Recipes convert their own options to `given`, `derived` and other fields before the settings are resolved.
    """

    preset: str | None = None
    toml: Path | None = None
    given: Mapping[str, Value] = field(default_factory=dict)  # settings with the highest priority
    out: Path | None = None
    resume: str | None = None  # "auto", or the path of a run or checkpoint
    fetches: bool = True  # whether to download missing weights from the hub

    # Options of recipes. None or False: not set.
    decay_from: str | None = None
    within: str | None = None
    depth: int | None = None
    family: str | None = None
    tokens: float = 0.0  # training tokens with `depth`; 0: as many as the depth requires
    deterministic: bool = False  # requires CPUs

    # Results of recipes, besides `given`.
    derived: Mapping[str, Value] = field(default_factory=dict)  # settings between the preset and the file
    title: str = ""  # the run's name
    expected_bits: float = 0.0  # the bits per byte that --within expects on held-out text; 0: unknown
    uncounted: float = 0.0  # seconds of this process that do not count as the run's time

    @property
    def name(self) -> str:
        """Return the name of the run, which defaults to its preset's or its settings file's."""
        return self.title or self.preset or (self.toml.stem if self.toml else DEFAULT_PRESET)

    @property
    def has_recipes(self) -> bool:
        """Return whether a recipe's option is set, or the setting that implies a recipe."""
        words = (getattr(self, name) for name in RECIPES)
        return any(word is not None and word is not False for word in words) or bool(self.given.get("chats"))

    def layers(self) -> tuple[str, dict[str, object], dict[str, object]]:
        """Return the preset's name ("" for none), the settings of the file, and the given settings."""
        file: dict[str, object] = (
            parse_toml(read_text(self.toml, "--config"), str(self.toml)) if self.toml else {}
        )
        chosen = str(self.preset or file.get("preset") or "")
        file.pop("preset", None)
        given: dict[str, object] = dict(self.given)
        if self.within is not None:
            ends = {name: given.get(name) for name in ("steps", "epochs")}
            ends["set train_minutes"] = given.get("train_minutes")
            reject_combination("--within", ends, "both set the end of the run")
        if "steps" in given:
            reject_combination("--steps", {"epochs": given.get("epochs")}, "both set the end of the run")
            given["epochs"] = 0.0
        return chosen, file, given

    def refuse_mistyped(self) -> None:
        """Raise a UsageError if `resume` has no run to continue, and nothing describes a new one."""
        names = self.preset or self.toml or self.depth or {"data", "init"} & self.given.keys()
        if self.resume == "auto" and self.out and not self.out.exists() and not names:
            raise UsageError(
                f"{self.out} has no run to resume; to start one there, pass --data, --preset or"
                f" --config{nearest_path(self.out)}"
            )

    def settings(self) -> dict[str, object]:
        """Return the settings from the file, overridden by the given ones."""
        _, file, given = self.layers()
        return renamed(file | given)

    def named(self, setting: str) -> object:
        """Return a setting from flags, file or preset; None if none of them sets it."""
        chosen, file, given = self.layers()
        return {**(base_preset(chosen) if chosen else {}), **file, **given}.get(setting)


def asked_for(
    settings: Mapping[str, Any],
    preset: str | None = None,
    toml: Path | None = None,
    out: Path | None = None,
    resume: str | None = None,
) -> RunRequest:
    """Create the request from a user's settings, which may include options of recipes."""
    words = {name: settings[name] for name in RECIPES if name in settings}
    given = {name: value for name, value in settings.items() if name not in RECIPES}
    return RunRequest(preset, toml, given, out, resume, **words)


def resolve(request: RunRequest, weights: ModelConfig | None = None) -> RunConfig:
    """Return the configuration of a new run. `weights` is the model in the file that `init` names.

    In order of increasing priority: defaults, preset, that model, values derived by recipes, file, given
    settings.
    """
    chosen, file, given = request.layers()
    said = file | given
    if not chosen:
        chosen = PRETRAINED_PRESET if said.get("init") else DEFAULT_PRESET
    held = _of_weights(weights, said) if weights else {}
    run = layered(RunConfig(), base_preset(chosen), held, request.derived, file, given)
    for key, value in asdict(weights).items() if weights else ():
        wanted = getattr(run.model, key)
        # Another context length fits, unless it needs more position vectors than the weights have.
        fits = key == "seq_len" and (not run.model.has_position_vectors or wanted < value)
        if wanted != value and not fits:
            raise UsageError(f"{said['init']} contains a model with {key} {value!r}, not {wanted!r}")
    return _with_fitting_warmup(run, request.derived, file, given)


def resumed(base: RunConfig, request: RunRequest) -> RunConfig:
    """Return the configuration of a resumed run, which is the saved one with the settings given now."""
    chosen, file, given = request.layers()
    named = base_preset(chosen) if chosen else {}
    # The run's initial model overrides a preset.
    held = (
        asdict(base.model) | {key: getattr(base.train, key) for key in PRETRAINED} if base.train.init else {}
    )
    run = layered(base, named, held, file, given)
    return _with_fitting_warmup(run, file, given) if named else run


def _of_weights(weights: ModelConfig, said: Mapping[str, object]) -> dict[str, object]:
    """Return the settings implied by pretrained weights: their model, and lower learning rates."""
    result = asdict(weights) | PRETRAINED
    if said.get("lora_rank"):  # adapters start at 0 (docs/how-to/tuning.md)
        result |= {"lr": float(f"{min(ADAPTED_LR, 1 / weights.n_embd):.2g}"), "weight_decay": 0.0}
    return result


def _with_fitting_warmup(run: RunConfig, *chosen: Mapping[str, object]) -> RunConfig:
    """Shorten a preset's warm-up for a short run, unless the user has set a warm-up."""
    if any("warmup" in layer for layer in chosen):
        return run
    return run.with_values({"warmup": min(run.train.warmup, run.train.steps // WARMUP_PART)})
