"""Pages that the site generates: the reference, from the package's declarations, and the notebooks."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from html import unescape
from pathlib import Path
from typing import Any

import click
import counts
import notebook_pages
from mkdocs.structure.files import File

from distgpt.commands.cli import cli
from distgpt.commands.help import Command, setting_text
from distgpt.core.config import GROUPS, SETTINGS
from distgpt.core.config.presets import PRESETS, preset

MARK = re.compile(r"<!-- generated: (\w+) -->")
OUTSIDE = re.compile(r"\[([^]]+)\]\((?:\.\./)+((?:benchmarks|distgpt|examples|tests)/[^)]+)\)")
NUMBER = re.compile(r"([-−+±]?\d[\d,.]*( ?(%|x|[kMG]i?B|[mµ]?s|min|h))?|–|)")
NOTE = re.compile(r"\n\(On the site .*?\)\n", re.DOTALL)  # shown only in the plain file


def on_files(files: Any, config: Any) -> Any:
    """Add the notebooks as pages, and CONTRIBUTING.md with its links relative to docs/."""
    docs = Path(config.docs_dir)
    text = (docs.parent / "CONTRIBUTING.md").read_text().replace("](docs/", "](")
    files.append(File.generated(config, "contributing.md", content=text))
    for path in (docs / "notebooks").glob("*.ipynb"):
        page, pictures = notebook_pages.convert(path)
        for name, content in {f"{path.stem}.md": page, **pictures}.items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Insert generated tables and counts, and print links to files outside docs/ as paths."""
    markdown = counts.filled(OUTSIDE.sub(r"\1 (`\2`)", markdown))
    if not page.file.src_uri.startswith("notebooks/"):
        markdown = markdown.replace(".ipynb)", ".md)")
    if not MARK.search(markdown):
        return markdown
    made = {"commands": commands, "settings": settings, "presets": presets}
    return MARK.sub(lambda mark: made[mark[1]](), NOTE.sub("", markdown))


def on_page_content(html: str, **_: Any) -> str:
    """Mark short code and the kinds of table columns for site.css."""
    html = re.sub(r"<code>(?=[^<]{1,28}</code>)", '<code class="short">', html)
    return re.sub(r"<table>.*?</table>", lambda found: _marked(found[0]), html, flags=re.DOTALL)


def _marked(table: str) -> str:
    rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL) for row in table.split("<tr>")[1:]]
    kinds = [
        _kind([unescape(re.sub(r"<.*?>", "", cell)) for cell in column]) for column in zip(*rows, strict=True)
    ]
    cells = itertools.cycle(kinds)
    return re.sub(r"<(t[hd])(?=[ >])", lambda found: f'<{found[1]} class="{next(cells)}"', table)


def _kind(column: Sequence[str]) -> str:
    """Return the class of a column: the first cell is its head."""
    if all(NUMBER.fullmatch(cell) for cell in column[1:]) and any(column[1:]):
        return "number"
    longest = max(map(len, column))
    return "short" if longest <= 18 else "long" if longest > 40 else "medium"


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
    """Return a command's help as Markdown, with its preformatted paragraphs as code."""
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
