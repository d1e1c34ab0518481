"""Tables for a terminal: the rows of a page's table, aligned, in plain characters."""

import textwrap
import unicodedata
from collections.abc import Sequence

from distgpt.show.reporting.words import one_line, prose_columns

GAP = "  "
WIDEST = 100


def wrapped(text: str) -> str:
    """A sentence or more, in lines that fit."""
    return textwrap.fill(text, WIDEST)


def terminal_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """First column and sentences to the left, the rest to the right; too long texts are wrapped."""
    table = [[one_line(cell) for cell in row] for row in [columns, *rows]]
    count = max(map(len, table))
    if not count:
        return ""
    for row in table:
        row.extend([""] * (count - len(row)))
    widths = _widths([[_cells(row[i]) for row in table] for i in range(count)])
    left = {0} | prose_columns(table[1:])
    printed = [_printed(row, widths, left) for row in table]
    line = GAP.join("─" * width for width in widths)
    return "\n".join([*printed[0], line, *(text for row in printed[1:] for text in row)])


def _widths(columns: Sequence[Sequence[int]]) -> list[int]:
    """Each column as wide as its widest cell, but the widest columns give way until all fit."""
    widths = [max(column) for column in columns]
    while sum(widths) + len(GAP) * (len(widths) - 1) > WIDEST and max(widths) > 24:
        widths[widths.index(max(widths))] -= 1
    return widths


def _printed(row: Sequence[str], widths: Sequence[int], left: set[int]) -> list[str]:
    cells = [_folded(cell, width) for cell, width in zip(row, widths, strict=True)]
    lines = []
    for i in range(max(map(len, cells))):
        texts = [cell[i] if i < len(cell) else "" for cell in cells]
        padded = [
            text + space if column in left else space + text
            for column, text in enumerate(texts)
            for space in [" " * (widths[column] - _cells(text))]
        ]
        lines.append(GAP.join(padded).rstrip())
    return lines


def _folded(text: str, width: int) -> list[str]:
    lines, line = [], ""
    for word in text.split(" "):
        joined = f"{line} {word}" if line else word
        if _cells(joined) <= width:
            line = joined
            continue
        if line:
            lines.append(line)
        line = word
        while _cells(line) > width:
            lines.append(line[:width])
            line = line[width:]
    return [*lines, line]


def _cells(text: str) -> int:
    """How many places of a terminal a text takes."""
    return sum(0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF") for c in text)
