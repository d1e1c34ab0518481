"""The parts of the doctor's pages: rows, tables, and verdicts with their remedies."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from distgpt.errors import escape, escape_lines

WIDTH = 100
NARROW = 60  # from here on advice has lines of its own, so that its commands are not broken
MOST_ROWS = 64


def print_page(parts: Callable[[bool], Iterable[RenderableType]], plain: bool = False) -> None:
    """Print what `parts(narrow)` gives; `plain`: as if there were no terminal."""
    console = Console(highlight=False, force_terminal=False if plain else None)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = WIDTH
    with console.capture() as page:
        for part in parts(console.width < NARROW):
            console.print(part)
    print("\n".join(line.rstrip() for line in page.get().rstrip().splitlines()))


def indented(part: RenderableType) -> Padding:
    return Padding(part, (0, 0, 1, 2))


def pairs(rows: Iterable[tuple[str, str]]) -> Table:
    table = grid(2)
    for name, text in rows:
        table.add_row(Text(name, "dim"), Text(escape(text)))
    return table


def grid(columns: int) -> Table:
    """Nothing in it is cut: a word that does not fit is broken."""
    table = Table.grid(padding=(0, 2))
    for _ in range(columns):
        table.add_column(overflow="fold")
    return table


def headed(*right: str, left: tuple[str, ...] = ()) -> Table:
    """A table with these headings: first those of columns of numbers, then those of words."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    for heading in (*right, *left):
        table.add_column(heading, justify="left" if heading in left else "right", overflow="fold")
    return table


def cells(*values: object) -> list[Text]:
    return [Text(escape(str(value))) for value in values]


def advice(rows: Iterable[tuple[str, Text, list[str]]], narrow: bool) -> RenderableType:
    """For each name a verdict and sentences, where an arrow begins what to do."""
    table, parts = grid(3), list[RenderableType]()
    for name, verdict, sentences in rows:
        text = Text("\n".join(map(escape_lines, sentences)))
        text.highlight_regex("→ .*", "cyan")
        table.add_row(Text(name, "bold"), verdict, text)
        parts.append(Text.assemble((name, "bold"), "  ", verdict))
        parts += [Padding(text, (0, 0, 0, 2))] if text.plain else []
    return Group(*parts) if narrow else table
