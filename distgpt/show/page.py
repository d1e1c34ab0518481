"""Tables and paragraphs of results, rendered for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from io import StringIO
from shutil import get_terminal_size
from typing import Any

from rich.box import Box
from rich.console import Console, JustifyMethod
from rich.table import Table as RichTable
from rich.text import Text

from distgpt.core.base.errors import escape

WIDEST = 100  # characters
PROSE = 30  # characters; a longer cell of a table is prose, not a number
RULE_BELOW_HEAD = Box("    \n    \n ─  \n    \n    \n    \n    \n    \n")


@dataclass(frozen=True)
class Table:
    """A table of strings. The first column and prose are left-aligned, other columns right-aligned."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    note: str = ""


# Heading, key of a row's value ("": the row itself), and format.
Column = tuple[str, str, Callable[[Any], str]]


def tabulated(
    columns: Sequence[Column],
    rows: Sequence[Any],
    caption: str = "",
    note: str = "",
    unknown: str = "",
) -> Table:
    """Return rows as a table, without columns in which no row has a value."""

    def cell(row: Any, key: str, text: Callable[[Any], str]) -> str:
        value = row.get(key) if key else row
        return unknown if value is None else text(value)

    cells = [[cell(row, key, text) for _, key, text in columns] for row in rows]
    kept = [i for i in range(len(columns)) if not rows or any(line[i] not in ("", unknown) for line in cells)]
    return Table([columns[i][0] for i in kept], [[line[i] for i in kept] for line in cells], caption, note)


Block = Table | str  # a string is a paragraph


def terminal(blocks: Iterable[Block]) -> str:
    """Render blocks for a terminal, without empty tables."""
    result: list[str] = []
    for block in blocks:
        if isinstance(block, str):
            result.append(textwrap.fill(block, _width()))
        elif isinstance(block, Table) and block.rows:  # programs in benchmarks/ also have charts
            table = terminal_table(block.columns, block.rows)
            result += [f"{block.caption}\n{table}".lstrip("\n"), textwrap.fill(block.note, _width())]
    return "\n\n".join(filter(None, result))


def _width() -> int:
    return max(20, min(WIDEST, get_terminal_size((WIDEST, 24)).columns))


def fitting(columns: Sequence[Column], spare: Collection[str]) -> list[Column]:
    """Return the columns, on a narrow terminal without those whose key is in `spare`."""
    return [column for column in columns if _width() == WIDEST or column[1] not in spare]


def prose_columns(rows: Sequence[Sequence[str]]) -> set[int]:
    """Return the columns after the first that contain prose."""
    return {i for row in rows for i, cell in enumerate(row) if i > 0 and len(cell) > PROSE}


def terminal_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table: first column and prose left-aligned, the rest right-aligned, nothing truncated.

    Prose is wrapped. If the words do not fit in 100 columns, the table is as wide as the terminal.
    """
    left = {0} | prose_columns(rows)
    table = RichTable(box=RULE_BELOW_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for i, head in enumerate(columns):
        justify: JustifyMethod = "left" if i in left else "right"
        table.add_column(Text(escape(head)), justify=justify, overflow="fold", vertical="top")
    for row in rows:
        table.add_row(*(Text(escape(cell)) for cell in row))
    out = StringIO()
    console = Console(file=out, width=1 << 16, color_system=None, force_terminal=False)
    most = get_terminal_size((console.width, 24)).columns
    console.width = max(_width(), min(console.measure(table).minimum, most))
    console.print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())
