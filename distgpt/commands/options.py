"""Options that commands share: the settings of a run, its stage, and how jobs are started.

Not here: the options of commands that use a model (generate.py).
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import click
from click.shell_completion import CompletionItem

from distgpt.commands.help import GRAPHS, KNOWN, OPTIONS, option, spelled
from distgpt.core.base.errors import UsageError, did_you_mean
from distgpt.core.base.formatting import parse_duration, parse_size
from distgpt.core.components import extra_settings
from distgpt.core.config import DEEPEST, ON_GPU, STAGES, GpuConfig, Setting, settings_of
from distgpt.core.config.presets import DEFAULT_PRESET, FAMILIES, PRESETS
from distgpt.core.config.run_request import RunRequest, asked_for
from distgpt.core.config.setting import Value, Values
from distgpt.core.data.textfile import BUNDLED_TEXTS

F = TypeVar("F", bound=Callable[..., object])
PATH = click.Path(path_type=Path)
POSITIVE = click.IntRange(1)
json_option = click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")


# Shell completion: names, or names and files.

Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def names(*known: str) -> Complete:
    return lambda context, param, begun: [CompletionItem(name) for name in known if name.startswith(begun)]


def names_or_files(*known: str) -> Complete:
    """Complete these names, or files and directories if none matches."""
    fitting = names(*known)
    return lambda context, param, begun: (
        fitting(context, param, begun) or [CompletionItem(begun, type="file")]
    )


files, presets, texts = names_or_files(), names(*PRESETS), names_or_files(*BUNDLED_TEXTS)
tokenizers = names_or_files("auto", "byte", "char", "word", "gpt2", "bpe:", "hub:")
# Settings of type str that name files.
COMPLETED = {"data": texts, "val": texts, "tokenizer": tokenizers, "init": files, "hellaswag": files}

_HELP = {
    "save_every": "Save a checkpoint every N steps (500), by time (10m), or only at the end (end).",
    "keep_every": "Also keep a checkpoint permanently every N steps (5000), by time (12h), or never.",
}


def together(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Return a decorator that adds these options to a command, in order."""

    def decorate(command: F) -> F:
        for add in reversed(options):
            command = add(command)
        return command

    return decorate


class FiniteRange(click.FloatRange):
    """A float range without inf and nan."""

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> float:
        number = float(super().convert(value, param, context))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, context)
        return number


class Threads(click.types.IntParamType):
    """An integer, or "auto", the same as no option."""

    name = "integer|auto"

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> Any:
        if isinstance(value, str) and value.lower() == "auto":
            return None
        return super().convert(value, param, context)


class Parsed(click.types.StringParamType):
    """The result of a function of a string, such as a number with a unit."""

    def __init__(self, name: str, parse: Callable[[str], object]) -> None:
        self.name, self._parse = name, parse

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> Any:
        return self._parse(str(value))


def steps_or_time(steps: str, minutes: str, word: str) -> Parsed:
    """Return a type for an option that sets steps or minutes between checkpoints (0 for `word`)."""

    def parse(text: str) -> Values:
        if text == word:
            return {steps: 0, minutes: 0.0}
        if text.isdecimal() and int(text):
            return {steps: int(text)}
        try:
            return {steps: 0, minutes: parse_duration(text) / 60}
        except UsageError:
            what = f"a number of steps, a time such as 10m, or {word}"
            raise UsageError(f"{spelled(steps, KNOWN[steps])} {text!r:.80} must be {what}") from None

    return Parsed(f"steps|time|{word}", parse)


# A time such as 30m in seconds; a size such as 64MB in bytes.
TIME, SIZE = Parsed("time", parse_duration), Parsed("size", parse_size)
_KINDS: dict[str, Any] = {
    "save_every": steps_or_time("save_every", "save_minutes", "end"),
    "keep_every": steps_or_time("keep_every", "keep_every_minutes", "never"),
}


def parsed_settings(context: click.Context, param: click.Parameter, pairs: Sequence[str]) -> Values:
    """Return the settings of `--set NAME=VALUE`, each with its type."""
    known = {**KNOWN, GRAPHS: settings_of(GpuConfig)["graphs"], **extra_settings()}
    result: Values = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise UsageError(f"--set {pair!r:.80} must be NAME=VALUE, such as rope_base=50000")
        if name not in known:
            raise UsageError(f"--set: unknown setting {name!r:.80}{did_you_mean(name[:80], known)}")
        result[name] = known[name].parse(name, text)
    return result


def joined_sources(context: click.Context, param: click.Parameter, sources: Sequence[str]) -> str | None:
    """Return the value of the setting `data`: all sources with weights, or the last one without."""
    plain = [source for source in sources if not re.search(r".:[^:,/\\]*$", source)]
    if len(plain) == len(sources):
        return sources[-1] if sources else None
    if plain and len(sources) > 1:
        raise UsageError(f"--data {plain[0]} must have a weight, as others have: --data {plain[0]}:1")
    return ",".join(sources)


def setting_option(name: str, about: Setting, **more: Any) -> Callable[[F], F]:
    """Add the option of a setting. `more`: arguments of click.option that override the setting's."""
    from_setting = {
        "type": _kind(name, about),
        "help": _HELP.get(name, about.help),
        "group": about.group,
        "first": about.first,
        "undecided": about.undecided,
        "shell_complete": COMPLETED.get(name),
        **({"multiple": True, "callback": joined_sources} if name == "data" else {}),
    }
    return option(spelled(name, about), name, **{**from_setting, **more})


def _kind(name: str, about: Setting) -> Any:
    if about.choices:
        return click.Choice([*filter(None, [about.undecided]), *about.choices])
    return _KINDS.get(name, about.kind)


set_option = option(
    "--set",
    "assigned",
    multiple=True,
    metavar="NAME=VALUE",
    callback=parsed_settings,
    help="Set any setting, even without an option of its name (distgpt help settings); may be repeated.",
)


def settings_but(*unused: str) -> Callable[[F], F]:
    """Add --set, and an option for each name in OPTIONS except these flags.

    Defaults are None: an option that is not set keeps the preset's value.
    """
    wanted = [name for name in OPTIONS if spelled(name, KNOWN[name]) not in unused]
    return together(set_option, *(setting_option(name, KNOWN[name], default=None) for name in wanted))


def set_by_user(flags: Mapping[str, Value | Values | None]) -> Values:
    """Return the settings among `flags` that the user set. One option may set multiple settings."""
    result: Values = {}
    for name, value in flags.items():
        given = value if isinstance(value, dict) else {} if value is None else {name: value}
        if twice := result.keys() & given.keys():
            raise UsageError(f"{min(twice)} is set twice, by --set and by an option")
        result |= given
    return result


settings = settings_but()

# The base of a run's settings.
preset_options = together(
    option(
        "--preset",
        is_eager=True,  # --help shows its values
        undecided=DEFAULT_PRESET,
        shell_complete=presets,
        help="Start from a named configuration (tiny, fast, gpt2, …).",
    ),
    option("--config", type=PATH, help="Read settings from this TOML file."),
)

# Options that determine the settings of a new run.
sizing_options = together(
    option(
        "--depth",
        group="model",
        first=True,
        type=click.IntRange(1, DEEPEST),
        help="Number of layers; other settings follow from it and from the text.",
    ),
    option(
        "--family",
        group="model",
        first=True,
        type=click.Choice([*FAMILIES]),
        help="Train an architecture that transformers and llama.cpp can load, with --within, --depth, or the"
        " preset fast, sprint or tiny.",
    ),
    option(
        "--within",
        group="schedule",
        first=True,
        metavar="TIME",
        help="Train the best model that fits in this time, such as 30m: measure this machine, then choose"
        " --depth. Includes time before a resume.",
    ),
)

# Options of commands that start jobs of multiple ranks.
launch_options = together(
    click.option("--ranks", type=POSITIVE, default=2, help="Number of processes to start."),
    click.option("--hostfile", type=PATH, help="Hosts to start them on."),
    click.option("--launcher", help='Launcher, such as mpirun or "srun --mpi=pmix".'),
)


def asked_by(stage: str, gpu: GpuConfig, flags: dict[str, Any]) -> tuple[GpuConfig, RunRequest]:
    """Return the request made by the options of a run. On CPUs, --deterministic is a recipe of the run."""
    named = [flags.pop(name, None) for name in ("preset", "config", "out", "resume")]
    request = asked_for(set_by_user(flags), *named)
    if stage in ON_GPU or not gpu.deterministic:
        return gpu, request
    return replace(gpu, deterministic=False), replace(request, deterministic=True)


def _gpu_options(command: F) -> F:
    """Add an option for each field of GpuConfig. They are passed as one argument, `gpu`."""
    known = settings_of(GpuConfig)
    plain = GpuConfig()

    @functools.wraps(command)
    def with_gpu(*args: object, **options: Any) -> object:
        chosen = {name: options.pop(name) for name in known}
        if GRAPHS in (assigned := options.get("assigned", {})):
            options["assigned"] = {name: value for name, value in assigned.items() if name != GRAPHS}
            chosen["graphs"] = assigned[GRAPHS]
        gpu = GpuConfig(**chosen)
        return command(*args, gpu=gpu, **options)

    def added(name: str, about: Setting) -> Callable[[F], F]:
        hidden = name == "graphs"  # rarely needed, and commands without --set have no other option for it
        is_flag = about.kind is bool
        return setting_option(name, about, default=getattr(plain, name), is_flag=is_flag, hidden=hidden)

    return together(*(added(name, about) for name, about in known.items()))(cast(F, with_gpu))


# Backend and threads. The options of GPU stages are passed as the argument `gpu`.
stage_options = together(
    click.option(
        "--stage",
        type=click.Choice(STAGES),
        default="serial",
        help="Backend: CPU (serial), CPUs with MPI (mpi), GPU (cuda), or GPUs with MPI (mpi-cuda).",
    ),
    option("--threads", type=Threads(), group="computing", help="CPU threads per rank. [default: auto]"),
    _gpu_options,
)
