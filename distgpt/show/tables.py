"""Texts and tables made safe to show: one line, several, wrapped, and aligned for a terminal."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from io import StringIO
from shutil import get_terminal_size

from rich.box import Box
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from distgpt.errors import escape

WIDEST = 100
LONG = 24  # characters from which a word may be broken
SHORT = 10  # the same in the first column, of names and paths
PROSE = 30  # characters from which a cell of a table is text to read, not a number to compare
RULE_BELOW_HEAD = "    \n    \n ─  \n    \n    \n    \n    \n    \n"


def one_line(text: str) -> str:
    """Make all whitespace single spaces, and spell out control characters."""
    return escape(" ".join(text.split()))


def many_lines(text: str) -> str:
    """Keep lines, and spell out every other control character."""
    return "\n".join(escape(line.expandtabs(4)) for line in text.split("\n"))


def prose_columns(rows: Sequence[Sequence[str]]) -> set[int]:
    """Return the columns, the first aside, that hold sentences: these are not set to the right."""
    return {i for row in rows for i, cell in enumerate(row) if i > 0 and len(cell) > PROSE}


def wrapped(text: str) -> str:
    """Break sentences into lines that fit."""
    return textwrap.fill(text, _width())


def wrap(text: str, room: float, size: float = 13, most: int = 3) -> list[str]:
    """Break a text into at most `most` lines of `room` pixels; words longer than a line are cut in pieces."""
    text = one_line(text)
    letter = 1.3 if any(c > "\u2e7f" for c in text) else 0.66  # as wide as a usual one, and some room
    letters = max(int(room / size / letter), 2)
    lines = textwrap.wrap(text, letters)
    if len(lines) > most:
        lines[most - 1 :] = [lines[most - 1][: letters - 1].rstrip() + "…"]
    return lines


def terminal_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table: first column and sentences to the left, wrapped where need be; the rest to the right.

    Words are broken in long ones only. Where the terminal is too narrow for that, every row is a list.
    """
    cells = [[one_line(cell) for cell in row] for row in [columns, *rows]]
    count = max(map(len, cells))
    if not count:
        return ""
    cells = [[*row, *[""] * (count - len(row))] for row in cells]
    left = {0} | prose_columns(cells[1:])
    widths = _widths(cells, left, _width()) or _widths(cells, left, _columns() or sys.maxsize)
    if widths is None:
        return "\n".join(line for row in cells[1:] for line in _listed(cells[0], row))
    table = Table(box=Box(RULE_BELOW_HEAD), show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for i, width in enumerate(widths):
        justify: JustifyMethod = "left" if i in left else "right"
        table.add_column(Text(cells[0][i]), justify=justify, overflow="fold", width=width, vertical="top")
    for row in cells[1:]:
        table.add_row(*map(Text, row))
    out = StringIO()
    Console(file=out, width=sum(widths) + 2 * count, color_system=None, force_terminal=False).print(table)
    lines = (line.rstrip() for line in out.getvalue().splitlines())
    text = "\n".join(line if line.strip("─ ") else line.replace("─ ", "  ") for line in lines)
    return text if _encodes("─") else text.replace("─", "-")


def _widths(cells: Sequence[Sequence[str]], flexible: Iterable[int], room: int) -> list[int] | None:
    """Return the widths of columns, of which some may be wrapped; None if the table does not fit."""
    widths = [max(Text(row[i]).cell_len for row in cells) for i in range(len(cells[0]))]
    least = {i: min(LONG, max(map(_longest_word, (row[i] for row in cells)))) for i in flexible}
    least[0] = min(least[0], SHORT)
    while sum(widths) + 2 * (len(widths) - 1) > room:
        if not (wide := [i for i in least if widths[i] > least[i]]):
            return None
        widths[max(wide, key=widths.__getitem__)] -= 1
    return widths


def _longest_word(cell: str) -> int:
    return max((Text(word).cell_len for word in cell.split()), default=0)


def _listed(head: Sequence[str], row: Sequence[str]) -> Iterator[str]:
    """Yield a row as lines: its first cell, then each other column with its name."""
    label = min(max(map(len, head[1:]), default=0), _width() // 2)
    yield from textwrap.wrap(row[0], _width()) or [""]
    for name, cell in zip(head[1:], row[1:], strict=True):
        if cell:
            first, rest = f"  {name:<{label}}  ", " " * (label + 4)
            yield from textwrap.wrap(cell, _width(), initial_indent=first, subsequent_indent=rest)


def _width() -> int:
    return min(WIDEST, max(_columns() or WIDEST, 20))


def _columns() -> int:
    """Return the terminal's columns; 0 if there is none."""
    return get_terminal_size((0, 24)).columns


def _encodes(text: str) -> bool:
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return False
    return True
