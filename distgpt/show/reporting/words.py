"""Texts made safe to show: whitespace and control characters, escaping, and how wide they will be."""

import html
import unicodedata
from collections.abc import Sequence

from distgpt.errors import printable

# Widths in em, of the widest sans-serif font in common use: what is measured too wide never collides.
NARROW = dict.fromkeys("ijlI.,:;'|![]() ft/\\r", 0.4)
WIDE = dict.fromkeys("mwMW@%—", 0.98)


PROSE = 30  # characters from which a cell of a table is text to read, not a number to compare


def prose_columns(rows: Sequence[Sequence[str]]) -> set[int]:
    """The columns of a table, the first aside, that hold sentences: these are not set to the right."""
    return {i for row in rows for i, cell in enumerate(row) if i > 0 and len(cell) > PROSE}


def one_line(text: str) -> str:
    """All whitespace becomes single spaces, control characters are spelled out."""
    return printable(" ".join(text.split()))


def many_lines(text: str) -> str:
    """Lines stay lines; every other control character is spelled out."""
    return "\n".join(printable(line.expandtabs(4)) for line in text.split("\n"))


def escaped(text: str) -> str:
    """One line, for an element or an attribute of HTML or XML."""
    return html.escape(one_line(text))


def text_width(text: str, size: float, bold: bool = False) -> float:
    """An upper estimate, in the unit of `size`, of how wide a font will print this line."""
    return sum(map(_em, text)) * size * (1.1 if bold else 1.0)


def _em(character: str) -> float:
    if unicodedata.combining(character):
        return 0.0
    if unicodedata.east_asian_width(character) in "WF":
        return 1.05
    known = NARROW.get(character) or WIDE.get(character)
    return known or (0.74 if character.isupper() else 0.64)


def shorten(text: str, room: float, size: float) -> str:
    """As much of a line as fits, with an ellipsis where it was cut."""
    if text_width(text, size) <= room:
        return text
    while text and text_width(text + "…", size) > room:
        text = text[:-1]
    return text.rstrip() + "…"


def wrap(text: str, room: float, size: float, most: int = 3) -> list[str]:
    """At most so many lines that fit; words longer than a line are cut in pieces."""
    lines: list[str] = []
    line = ""
    for word in text.split():
        joined = f"{line} {word}" if line else word
        if text_width(joined, size) <= room:
            line = joined
            continue
        if line:
            lines.append(line)
        line = word
        while text_width(line, size) > room and len(lines) < most:
            fits = next((n for n in range(len(line), 1, -1) if text_width(line[:n], size) <= room), 1)
            lines.append(line[:fits])
            line = line[fits:]
    lines.append(line)
    if len(lines) > most:
        rest = " ".join(lines[most - 1 :])
        lines = [*lines[: most - 1], shorten(rest, room, size)]
    return lines
