"""The site's reference: commands, settings and presets, made from the package's own declarations."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click
import counts
from mkdocs.structure.files import File

from distgpt.commands.cli import cli
from distgpt.commands.help import Command, setting_text
from distgpt.core.config import GROUPS, SETTINGS
from distgpt.core.config.presets import PRESETS, preset

MARK = re.compile(r"<!-- generated: (\w+) -->")
OUTSIDE = re.compile(r"\[([^]]+)\]\((?:\.\./)+((?:benchmarks|distgpt|examples|tests)/[^)]+)\)")
NOTE = re.compile(r"\n\(On the site .*?\)\n", re.DOTALL)  # for those who read the plain file


def on_files(files: Any, config: Any) -> Any:
    """Add CONTRIBUTING.md, which lies beside docs/, with its links as seen from there."""
    text = (Path(config.docs_dir).parent / "CONTRIBUTING.md").read_text().replace("](docs/", "](")
    files.append(File.generated(config, "contributing.md", content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace each mark by what it names, and links to other files of the repository by their names."""
    markdown = counts.filled(OUTSIDE.sub(r"\1 (`\2`)", markdown))
    if not MARK.search(markdown):
        return markdown
    made = {"commands": commands, "settings": settings, "presets": presets}
    return MARK.sub(lambda mark: made[mark[1]](), NOTE.sub("", markdown))


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [[*heads], ["---"] * len([*heads]), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def commands() -> str:
    return "\n".join(_command(name, found, context) for name, found, context in _all(cli, "distgpt"))


def _all(group: click.Group, path: str) -> Iterator[tuple[str, click.Command, click.Context]]:
    context = click.Context(group, info_name=path)
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        if isinstance(found, click.Group):
            yield f"{path} {name}", found, click.Context(found, info_name=f"{path} {name}")
            yield from _all(found, f"{path} {name}")
        elif found:
            yield (
                f"{path} {name}",
                found,
                click.Context(found, info_name=f"{path} {name}"),
            )


def _command(name: str, found: click.Command, context: click.Context) -> str:
    level = "##" if name.count(" ") == 1 else "###"
    parts = [f"{level} {name}\n", _prose(found.help or ""), f"```\n{found.get_usage(context)}\n```\n"]
    if isinstance(found, Command):
        parts.append(f"For example:\n\n```bash\n{found.example}\n```\n")
        for group, records in found.sections(context, everything=True).items():
            rows = [(f"`{spelling}`", text) for spelling, text in records]
            title = f"**{group.capitalize()}**\n\n" if group else ""
            parts += [title + table(("option", ""), rows)] * bool(rows)
    return "\n".join(parts)


def _prose(text: str) -> str:
    """Return a command's help as Markdown: what keeps its lines is code."""
    blocks = []
    for block in inspect.cleandoc(text).split("\n\n"):
        kept = block.startswith("\b\n")
        blocks.append("```\n" + block[2:] + "\n```" if kept else block)
    return "\n\n".join(blocks) + "\n"


def settings() -> str:
    parts = []
    for group in GROUPS:
        rows = [(f"`{name}`", setting_text(name)) for name, about in SETTINGS.items() if about.group == group]
        parts.append(f"### {group.capitalize()}\n\n" + table(("key", ""), rows))
    return "\n".join(parts)


def presets() -> str:
    rows = []
    for name in PRESETS:
        run = preset(name)
        model, train = run.model, run.train
        shape = map(str, (model.n_layer, model.n_embd, model.n_head, model.seq_len))
        tokens = train.batch_size * model.seq_len
        rows.append(
            (f"`{name}`", *shape, f"{train.steps:,}", f"{tokens:,}", train.optimizer, f"{train.lr:g}")
        )
    heads = ("preset", "layers", "width", "heads", "context", "steps", "tokens a step", "optimizer", "lr")
    return table(heads, rows)
