"""Texts and tables made safe to show: one line, several, wrapped, and aligned for a terminal."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from io import StringIO
from shutil import get_terminal_size

from rich.box import Box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from distgpt.errors import printable

WIDEST = 100
LONG = 24  # characters from which a word may be broken
PROSE = 30  # characters from which a cell of a table is text to read, not a number to compare
RULE_BELOW_HEAD = "    \n    \n ─  \n    \n    \n    \n    \n    \n"


def one_line(text: str) -> str:
    """All whitespace becomes single spaces, control characters are spelled out."""
    return printable(" ".join(text.split()))


def many_lines(text: str) -> str:
    """Lines stay lines; every other control character is spelled out."""
    return "\n".join(printable(line.expandtabs(4)) for line in text.split("\n"))


def prose_columns(rows: Sequence[Sequence[str]]) -> set[int]:
    """The columns of a table, the first aside, that hold sentences: these are not set to the right."""
    return {i for row in rows for i, cell in enumerate(row) if i > 0 and len(cell) > PROSE}


def wrapped(text: str) -> str:
    """A sentence or more, in lines that fit."""
    return textwrap.fill(text, _width())


def wrap(text: str, room: float, size: float = 13, most: int = 3) -> list[str]:
    """At most so many lines that fit into so many pixels; words longer than a line are cut in pieces."""
    text = one_line(text)
    letter = 1.3 if any(c > "\u2e7f" for c in text) else 0.66  # as wide as a usual one, and some room
    letters = max(int(room / size / letter), 2)
    lines = textwrap.wrap(text, letters)
    if len(lines) > most:
        lines[most - 1 :] = [lines[most - 1][: letters - 1].rstrip() + "…"]
    return lines


def terminal_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """First column and sentences to the left, the rest to the right; too long texts are wrapped.

    Words are broken in long ones only: a narrow terminal gets a table that is wider than itself.
    """
    cells = [[one_line(cell) for cell in row] for row in [columns, *rows]]
    count = max(map(len, cells))
    if not count:
        return ""
    left = {0} | prose_columns(cells[1:])
    table = Table(box=Box(RULE_BELOW_HEAD), show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    head, *body = [[Text(cell) for cell in [*row, *[""] * (count - len(row))]] for row in cells]
    least = 0
    for i in range(count):
        words = [word for row in cells for word in (row[i].split() if i < len(row) else [])]
        longest = min(max((Text(word).cell_len for word in words), default=0), LONG)
        least += longest + 2
        justify = "left" if i in left else "right"
        table.add_column(head[i], justify=justify, overflow="fold", min_width=longest, vertical="top")  # type: ignore[arg-type]
    for row in body:
        table.add_row(*row)
    out = StringIO()
    Console(file=out, width=max(_width(), least), color_system=None, force_terminal=False).print(table)
    lines = (line.rstrip() for line in out.getvalue().splitlines())
    text = "\n".join(line if line.strip("─ ") else line.replace("─ ", "  ") for line in lines)
    return text if _encodes("─") else text.replace("─", "-")


def _width() -> int:
    return min(WIDEST, max(get_terminal_size((WIDEST, 24)).columns, 20))


def _encodes(text: str) -> bool:
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return False
    return True
