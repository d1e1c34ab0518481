"""How help is printed: options in groups, with defaults; suggestions for wrong words; pages of the docs."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from distgpt.commands.settings import setting_text
from distgpt.core.base.errors import UsageError, nearest, print_lines
from distgpt.core.base.files import bundled
from distgpt.core.config import GROUPS, SETTINGS, RunConfig
from distgpt.core.config.presets import PRESETS, preset
from distgpt.core.data.textfile import BUNDLED_TEXTS

COMMON = 5  # commands that a list of commands shows first
# What other programs call an option, and what it is called here.
ELSEWHERE = {
    **dict.fromkeys(("learning-rate", "max-lr", "rate"), "lr"),
    **dict.fromkeys(("epochs", "max-steps", "max-iters", "iterations"), "steps"),
    **dict.fromkeys(("heads", "num-heads", "n-heads"), "n-head"),
    **dict.fromkeys(("layers", "num-layers"), "n-layer"),
    **dict.fromkeys(("dim", "width", "hidden-size", "d-model"), "n-embd"),
    **dict.fromkeys(("block-size", "context-length", "max-seq-len", "max-length"), "seq-len"),
    **dict.fromkeys(("fp16", "bf16", "precision", "half"), "dtype"),
    **dict.fromkeys(("device", "gpu", "gpus", "cuda", "backend"), "stage"),
    **dict.fromkeys(("model", "checkpoint", "ckpt"), "weights"),
    **dict.fromkeys(("dataset", "input", "text", "corpus"), "data"),
}


class Option(click.Option):
    """An option and the section of --help-all that lists it. Without one, --help lists it too.

    `undecided` is what it is by default whatever the preset: a word for what a run decides. `completes` is
    what complete.py calls its values.
    """

    def __init__(
        self,
        *words: Any,
        group: str = "",
        first: bool = False,
        undecided: str = "",
        completes: str = "",
        **how: Any,
    ) -> None:
        super().__init__(*words, **how)
        self.group, self.first, self.undecided, self.completes = group, first, undecided, completes

    def shell_complete(self, context: click.Context, begun: str) -> list[CompletionItem]:
        """Complete a value. A shell alone asks for that, and loads what answers."""
        from distgpt.commands.complete import COMPLETED

        if complete := COMPLETED.get(self.completes):
            return complete(context, self, begun)
        return super().shell_complete(context, begun)

    def record(self, context: click.Context, run: RunConfig | None) -> tuple[str, str] | None:
        """Return the option's spelling and its help, with the value that it has in `run` if left out."""
        record = super().get_help_record(context)
        if record and isinstance(self.show_default, str):  # which click puts in parentheses
            record = record[0], record[1].replace(f"({self.show_default})", self.show_default)
        value = None
        if run and self.default is None:
            value = self.undecided or _default(self.name or "", run)
        if record is None or value in (None, ""):
            return record
        if isinstance(value, bool):
            value = (self.opts if value else self.secondary_opts)[0].strip("-")
        return record[0], f"{record[1]}  [default: {value}]"


option = partial(click.option, cls=Option)


def _default(name: str, run: RunConfig) -> Any:
    if name == "save_every":
        return run.train.save_every or (f"{run.train.save_minutes:g}m" if run.train.save_minutes else "end")
    if name == "keep_every" and not run.train.keep_every:
        return f"{run.train.keep_every_minutes:g}m" if run.train.keep_every_minutes else "never"
    half = run.model if hasattr(run.model, name) else run.train
    value = getattr(half, name, None)
    return f"{value:g}" if isinstance(value, float) else value


def _preset_of(context: click.Context) -> str | None:
    """Return the preset whose values are the defaults of a command's settings, if it begins with one."""
    says = next(
        (getattr(p, "show_default", None) for p in context.command.params if p.name == "preset"), None
    )
    return context.params.get("preset") or (says if isinstance(says, str) else None)


def _show_all(context: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not context.resilient_parsing:
        context.meta[__name__] = True
        print_lines(context.get_help())
        context.exit()


_SWITCH: dict[str, Any] = {"is_flag": True, "is_eager": True, "expose_value": False, "callback": _show_all}
HELP_ALL = click.Option(["--help-all"], help="Show all options, by groups, and exit.", **_SWITCH)


class Command(click.Command):
    """A command that lists the options needed first; --help-all lists the others, in groups."""

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
            formatter.write(f"\nDefaults are those of the preset {name}. Of another: --preset gpt2 --help\n")

    def sections(self, context: click.Context, everything: bool) -> dict[str, list[tuple[str, str]]]:
        """Return what --help lists, or --help-all, by the name of the section."""
        name = _preset_of(context)
        run = preset(name) if name else None
        found: dict[str, list[tuple[str, str]]] = {"": [], **{group: [] for group in GROUPS}}
        for param in self.get_params(context):
            group, shown = "", param.get_help_record(context)
            if isinstance(param, Option):
                group, shown = param.group, param.record(context, run)
            if shown and not isinstance(param, click.Argument) and (everything or not _hides(param)):
                found[group if everything else ""].append(shown)
        return found

    def format_help_text(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_help_text(context, formatter)
        if self.example:
            formatter.write(f"\n  Example: {self.example}\n")

    def _call_eager(self, context: click.Context, args: list[str]) -> None:
        """Call back those options of a line that cannot be parsed that say how its error is written."""
        for param in self.params:
            if isinstance(param, click.Option) and param.is_eager and param.callback and not param.is_flag:
                given = _values(args, param.opts)
                if given and param.name and not context.resilient_parsing:
                    param.handle_parse_result(context, {param.name: given[-1]}, [])

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        """Parse a line; where that fails, suggest an option: another one, or one for what is left over."""
        shown = (p for p in self.get_params(context) if not getattr(p, "hidden", False))
        flags = [flag for p in shown for flag in (*p.opts, *p.secondary_opts)]
        allowed, context.allow_extra_args = context.allow_extra_args, True
        line = [*args]  # which the parser takes away
        try:
            rest = super().parse_args(context, args)
        except click.NoSuchOption as error:
            self._call_eager(context, line)
            alike = ", ".join(similar(error.option_name, flags))
            hint = f". Did you mean {alike}?" if alike else ""
            raise click.UsageError(f"No such option {error.option_name!r}{hint}", context) from None
        except click.BadOptionUsage:  # one without its value
            self._call_eager(context, line)
            raise
        if rest and not allowed and not context.resilient_parsing:
            flag = meant(rest, flags)
            hint = f". Did you mean {shlex.join([flag, ' '.join(rest)])}?" if flag else ""
            context.fail(f"Got unexpected extra argument{'s' * (len(rest) > 1)} ({' '.join(rest)}){hint}")
        return rest


command = partial(click.command, cls=Command)


def _hides(param: click.Parameter) -> bool:
    """Return whether --help leaves an option to --help-all."""
    return isinstance(param, Option) and bool(param.group) and not param.first and not param.hidden


def similar(wrong: str, known: Iterable[str]) -> list[str]:
    """Return what a wrong option may stand for: by other programs' names, or by its letters."""
    wrong, flags = wrong.lstrip("-").replace("_", "-").lower(), [flag for flag in known if flag[:2] == "--"]
    if (elsewhere := f"--{ELSEWHERE.get(wrong)}") in flags:
        return [elsewhere]
    return get_close_matches(f"--{wrong}", flags, n=1, cutoff=0.72)


def meant(words: Sequence[str], flags: Collection[str]) -> str:
    """Return the option among the `flags` that words without one may belong to; "" if there is none."""
    first, path = words[0], Path(words[0])
    is_there = os.path.exists(path)  # noqa: PTH110  # of Path it fails at names that are too long
    is_text = len(words) == 1 and (is_there or bool(path.suffix) or first in BUNDLED_TEXTS)
    fits = {
        "--weights": path.suffix in (".safetensors", ".gguf") or first.startswith("hub:"),
        "--preset": first in PRESETS,
        "--config": path.suffix == ".toml",
        "--data": is_text,
        "--val": is_text,
        "--prompt-file": is_there and path.is_file(),
        "--prompt": True,
    }
    if is_there and (path / "config.toml").is_file():  # a run
        fits = {"--weights": True, "--resume": True}
    return next((flag for flag, does in fits.items() if does and flag in flags), "")


def _values(args: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Return what a line gives for an option with a value, as `--flag value` or `--flag=value`."""
    after = [value for word, value in pairwise(args) if word in flags]
    return after or [
        word.partition("=")[2] for word in args if word.partition("=")[0] in flags and "=" in word
    ]


class NoCommand(click.UsageError):
    """A group was named without a command: its help is the answer."""


class Group(click.Group):
    """A list of commands whose summaries are wrapped, not cut, where the terminal is narrow."""

    command_class = Command

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        """Refuse a missing command the same way in every version of click."""
        if not args and not context.resilient_parsing:
            raise NoCommand(context.get_help(), context)
        return super().parse_args(context, args)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        named = ((name, self.get_command(context, name)) for name in self.list_commands(context))
        shown = [(name, found.get_short_help_str(500)) for name, found in named if found and not found.hidden]
        common = len(shown) if len(shown) <= 2 * COMMON else COMMON
        for title, records in (("Commands", shown[:common]), ("More commands", shown[common:])):
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


# Pages of the documentation, by `distgpt help TOPIC`

FOLDERS = {"how-to": "How-to pages", "tutorials": "Tutorials", "reference": "Reference pages"}
FOLDERS |= {"explanation": "Explanations"}
MADE = ("commands", "python-api")  # by `make docs` alone; --help lists what they would
GENERATED = "<!-- generated: settings -->"
NOT_SHOWN = re.compile(r"<!-- .*? -->\n?", re.DOTALL)
# A link to a page that is printed; to one that is not, it is a link to elsewhere.
TO_PAGE = re.compile(
    rf"\[([^]]+)\]\((?:\.\./(?:{'|'.join(FOLDERS)})/)?(?!(?:{'|'.join(MADE)})\.)([\w-]+)\.md[^)]*\)"
)
ELSEWHERE_LINK = re.compile(r"!?\[([^]]+)\]\([^)]+\)")


def topics(*folders: str) -> dict[str, Path]:
    """Return the pages in these folders, or in all, by the names of their files."""
    paths = (path for folder in folders or FOLDERS for path in sorted(bundled("docs", folder).glob("*.md")))
    return {path.stem: path for path in paths if path.stem not in MADE}


def contents(folder: str) -> str:
    """Return the names and titles of a folder's pages."""
    titles = {name: path.read_text("utf-8").partition("\n")[0] for name, path in topics(folder).items()}
    lines = (f"  {name:<20}{title.lstrip('# ')}" for name, title in titles.items())
    return "\n".join([f"{FOLDERS[folder]}:", *lines, ""])


def page(path: Path) -> str:
    """Return a page for a terminal: a link to another topic names it, other links are their words."""
    text = path.read_text("utf-8")
    text = text.replace(GENERATED, "\n".join(f"- `{name}`: {setting_text(name)}" for name in SETTINGS))
    text = NOT_SHOWN.sub("", text)
    return ELSEWHERE_LINK.sub(r"\1", TO_PAGE.sub(r"\1 (`distgpt help \2`)", text))


def _topics(context: click.Context, param: click.Parameter, begun: str) -> list[str]:
    return [name for name in (*topics(), *FOLDERS) if name.startswith(begun)]


@command("help", example="distgpt help out-of-memory")
@click.argument("topic", required=False, shell_complete=_topics)
@click.pass_context
def help(context: click.Context, topic: str | None) -> None:
    """Print a page of the documentation, or list them all. TOPIC may also be a command."""
    known, parent = topics(), context.parent
    if topic is None or topic in FOLDERS:
        for folder in [topic] if topic else FOLDERS:
            print_lines(contents(folder))
        print_lines("distgpt help TOPIC prints a page, as distgpt help out-of-memory.")
        print_lines("A batch script is what distgpt submit prints; a hostfile: distgpt help two-machines.")
    elif topic == "commands" and parent:
        print_lines(parent.get_help())
    elif topic in known:
        print_lines(page(known[topic]))
    elif parent and isinstance(parent.command, click.Group) and topic in parent.command.list_commands(parent):
        found = parent.command.get_command(parent, topic)
        print_lines(found.get_help(click.Context(found, parent, topic)) if found else "")
        for name in known:
            if name.startswith(topic.removesuffix("e")):  # tune: tuning
                print_lines(f"\nHow-to page: distgpt help {name}")
    else:
        raise UsageError(f"there is no help on {topic!r:.40}{nearest(topic, known)}")
