"""Help output: options in groups, with defaults; suggestions for mistyped words; pages of the docs."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import click

from distgpt.core.base.errors import UsageError, did_you_mean, print_lines
from distgpt.core.base.files import bundled
from distgpt.core.config import BATCH_IN_TOKENS, BATCH_TOKENS, GROUPS, SETTINGS, RunConfig, Setting
from distgpt.core.config.presets import preset

# Settings with an option, in the order of --help. --set, TOML files and presets set the others.
OPTIONS = (
    *("data", "tokenizer", "init", "lora_rank", "lora_base"),
    *("steps", "batch_size", BATCH_TOKENS, "seq_len", "grad_accum", "pack"),
    *("optimizer", "lr", "schedule", "warmup", "weight_decay", "clip", "seed", "dtype"),
    *("vocab_size", "n_layer", "n_head", "n_kv_head", "n_embd", "norm", "mlp"),
    *("positions", "window", "bias", "tied"),
    *("grad_sync", "gradient_dtype", "outer_every"),
    *("reproducible_parts", "balance", "recompute"),
    *("save_every", "save", "keep", "keep_every", "on_bad_step"),
    *("sample_every", "eval_every", "patience", "val", "val_fraction", "val_tokens", "hellaswag"),
)
KNOWN = {**SETTINGS, BATCH_TOKENS: BATCH_IN_TOKENS}
GRAPHS = "cuda_graph"  # the name of GpuConfig's field `graphs` in --set


def spelled(name: str, about: Setting) -> str:
    """Return the option's flag, such as --seq-len; for a switch both flags, such as --bias/--no-bias."""
    return about.flag or "--" + name.replace("_", "-")


def setting_text(name: str) -> str:
    """Return a setting's help, values, default and option for the reference."""
    about, run = SETTINGS[name], RunConfig()
    default = getattr(run.model if hasattr(run.model, name) else run.train, name)
    signs = (("≥", about.low), (">", about.above), ("≤", about.most), ("<", about.below))
    bounds = [f"{sign} {limit:,}" for sign, limit in signs if limit is not None]
    choices = [*filter(None, [about.undecided]), *about.choices]
    facts = [
        " or ".join(choices) or " ".join([about.kind.__name__, ", ".join(bounds)]).strip(),
        f"default {json.dumps(about.undecided or default)}",  # TOML syntax
        *(["may change on resume"] if about.changeable else []),
        f"`{spelled(name, about)}`" if name in OPTIONS else f"`--set {name}=…`",
    ]
    return f"{about.help} *{'; '.join(facts)}*"


class Option(click.Option):
    """An option and its section in --help-all. Options without a section are also in --help.

    `undecided`: the default for any preset, a word for a value that the run decides.
    """

    def __init__(
        self, *words: Any, group: str = "", first: bool = False, undecided: str = "", **how: Any
    ) -> None:
        super().__init__(*words, **how)
        self.group, self.first, self.undecided = group, first, undecided


option = partial(click.option, cls=Option)


def _default(name: str, run: RunConfig) -> Any:
    if name == "save_every":
        return run.train.save_every or (f"{run.train.save_minutes:g}m" if run.train.save_minutes else "end")
    if name == "keep_every" and not run.train.keep_every:
        return f"{run.train.keep_every_minutes:g}m" if run.train.keep_every_minutes else "never"
    half = run.model if hasattr(run.model, name) else run.train
    value = getattr(half, name, None)
    return f"{value:g}" if isinstance(value, float) else value


def _preset_of(context: click.Context) -> str:
    """Return the preset whose values are the defaults of a command's settings, "" if it uses none."""
    named = (p for p in context.command.params if isinstance(p, Option) and p.name == "preset")
    return next((context.params.get("preset") or param.undecided for param in named), "")


def _show_all(context: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not context.resilient_parsing:
        context.meta[__name__] = True
        print_lines(context.get_help())
        context.exit()


_SWITCH: dict[str, Any] = {"is_flag": True, "is_eager": True, "expose_value": False, "callback": _show_all}
HELP_ALL = click.Option(["--help-all"], help="Show all options by group and exit.", **_SWITCH)


class Command(click.Command):
    """A command whose --help lists the most important options, and --help-all the others, in groups."""

    def __init__(self, *args: Any, example: str = "", **how: Any) -> None:
        super().__init__(*args, **how)
        self.example = example

    def get_params(self, context: click.Context) -> list[click.Parameter]:
        params = super().get_params(context)
        return [*params, HELP_ALL] if any(_hides(param) for param in self.params) else params

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        for group, records in self.sections(context, bool(context.meta.get(__name__))).items():
            if records:
                with formatter.section(group.capitalize() or "Options"):
                    formatter.write_dl(records)
        if name := _preset_of(context):
            formatter.write(
                f"\nDefaults are from the preset {name}. For another preset: --preset gpt2 --help\n"
            )

    def sections(self, context: click.Context, everything: bool) -> dict[str, list[tuple[str, str]]]:
        """Return the entries of --help or --help-all by section."""
        context.show_default = True
        options = [param for param in self.get_params(context) if not isinstance(param, click.Argument)]
        if name := _preset_of(context):
            run = preset(name)
            own = [o for o in options if isinstance(o, Option) and (o.undecided or o.default is None)]
            values = {each.name: each.undecided or _default(each.name or "", run) for each in own}
            context.default_map = {key: value for key, value in values.items() if value != ""}
        result: dict[str, list[tuple[str, str]]] = {"": [], **{group: [] for group in GROUPS}}
        for param in options:
            if (shown := param.get_help_record(context)) and (everything or not _hides(param)):
                result[param.group if everything and isinstance(param, Option) else ""].append(shown)
        return result

    def format_help_text(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_help_text(context, formatter)
        if self.example:
            formatter.write(f"\n  Example: {self.example}\n")


command = partial(click.command, cls=Command)


def _hides(param: click.Parameter) -> bool:
    """Return whether only --help-all lists an option."""
    return isinstance(param, Option) and bool(param.group) and not param.first and not param.hidden


class NoCommand(click.UsageError):
    """A group was named without a command. Its message is the group's help."""


class Group(click.Group):
    """A list of commands whose summaries are wrapped, not truncated, in a narrow terminal."""

    command_class = Command

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        """Reject a missing command in the same way with every version of click."""
        if not args and not context.resilient_parsing:
            raise NoCommand(context.get_help(), context)
        return super().parse_args(context, args)

    def list_commands(self, context: click.Context) -> list[str]:
        """Return the commands in declaration order, not alphabetically."""
        return [*self.commands]

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        result = super().get_command(context, name)
        if result is None and not context.resilient_parsing:  # resilient parsing: shell completion
            context.fail(f"no such command {name!r}{did_you_mean(name, self.list_commands(context))}")
        return result

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        named = ((name, self.get_command(context, name)) for name in self.list_commands(context))
        with formatter.section("Commands"):
            formatter.write_dl([(name, result.get_short_help_str(500)) for name, result in named if result])


# Pages of the documentation, for `distgpt help TOPIC`

FOLDERS = {"how-to": "How-to pages", "tutorials": "Tutorials", "reference": "Reference pages"}
FOLDERS |= {"explanation": "Explanations"}
MADE = ("commands", "python-api")  # made by `make docs`; --help has their content
GENERATED = "<!-- generated: settings -->"
NOT_SHOWN = re.compile(r"<!-- .*? -->\n?", re.DOTALL)
# A link to a page that `distgpt help` can print; ELSEWHERE_LINK is any other link.
TO_PAGE = re.compile(
    rf"\[([^]]+)\]\((?:\.\./(?:{'|'.join(FOLDERS)})/)?(?!(?:{'|'.join(MADE)})\.)([\w-]+)\.md[^)]*\)"
)
ELSEWHERE_LINK = re.compile(r"!?\[([^]]+)\]\([^)]+\)")


def topics(*folders: str) -> dict[str, Path]:
    """Return the pages in these directories, or in all, by file name."""
    paths = (path for folder in folders or FOLDERS for path in sorted(bundled("docs", folder).glob("*.md")))
    return {path.stem: path for path in paths if path.stem not in MADE}


def contents(folder: str) -> str:
    titles = {name: path.read_text("utf-8").partition("\n")[0] for name, path in topics(folder).items()}
    lines = (f"  {name:<20}{title.lstrip('# ')}" for name, title in titles.items())
    return "\n".join([f"{FOLDERS[folder]}:", *lines, ""])


def page(path: Path) -> str:
    """Format a page for a terminal: a link to another topic names it; other links become plain text."""
    text = path.read_text("utf-8")
    text = text.replace(GENERATED, "\n".join(f"- `{name}`: {setting_text(name)}" for name in SETTINGS))
    text = NOT_SHOWN.sub("", text)
    return ELSEWHERE_LINK.sub(r"\1", TO_PAGE.sub(r"\1 (`distgpt help \2`)", text))


def section(name: str) -> str:
    """Return the section of a page whose heading is `name`, such as out-of-memory, or ""."""
    for path in topics().values():
        text = page(path)
        for result in re.finditer(r"^(##+) (.+)$", text, re.MULTILINE):
            if re.sub(r"\W+", "-", result[2].lower()) == name:
                end = re.compile(rf"^##{{1,{len(result[1]) - 1}}} ", re.MULTILINE).search(text, result.end())
                return text[result.start() : end.start() if end else None]
    return ""


def _topics(context: click.Context, param: click.Parameter, begun: str) -> list[str]:
    return [name for name in topics() if name.startswith(begun)]


@command("help", example="distgpt help out-of-memory")
@click.argument("topic", required=False, shell_complete=_topics)
@click.pass_context
def help(context: click.Context, topic: str | None) -> None:
    """Print a page of the documentation, or list all pages. TOPIC may also be a section or a command."""
    known, parent = topics(), context.parent
    if topic is None:
        for folder in FOLDERS:
            print_lines(contents(folder))
        print_lines("distgpt help TOPIC prints a page, such as distgpt help out-of-memory.")
        print_lines("For a batch script, see distgpt submit; for a hostfile, distgpt help two-machines.")
    elif topic in known:
        print_lines(page(known[topic]))
    elif parent and isinstance(parent.command, click.Group) and topic in parent.command.list_commands(parent):
        result = parent.command.get_command(parent, topic)
        print_lines(result.get_help(click.Context(result, parent, topic)) if result else "")
        for name in known:
            if name.startswith(topic.removesuffix("e")):  # tune: tuning
                print_lines(f"\nHow-to page: distgpt help {name}")
    elif text := section(topic):
        print_lines(text)
    else:
        raise UsageError(f"no help topic {topic!r:.40}{did_you_mean(topic, known)}")
