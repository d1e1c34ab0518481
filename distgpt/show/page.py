"""Results as blocks: tables, texts, charts; rendered for a terminal, or as one HTML file.

The file needs no network and no scripts. It is for a screen, a phone, paper and a screen reader.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from io import StringIO
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any

from rich.box import Box
from rich.console import Console, JustifyMethod
from rich.table import Table as RichTable
from rich.text import Text

from distgpt.core.base.errors import escape
from distgpt.show.charts import COLOURS, Chart, svg

if TYPE_CHECKING:
    from jinja2 import Template

WIDEST = 100  # characters
PROSE = 30  # characters from which a cell of a table is text to read, not a number to compare
RULE_BELOW_HEAD = Box("    \n    \n ─  \n    \n    \n    \n    \n    \n")


@dataclass(frozen=True)
class Table:
    """A table of texts: the first column and sentences to the left, the others to the right."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    note: str = ""

    @property
    def prose(self) -> set[int]:
        return prose_columns(self.rows)


# A heading, the key of a row's value ("": the row itself), and the text of it.
Column = tuple[str, str, Callable[[Any], str]]


def tabulated(
    columns: Sequence[Column],
    rows: Sequence[Any],
    caption: str = "",
    note: str = "",
    unknown: str = "",
) -> Table:
    """Return rows as a table, without the columns that no row has a value for."""

    def cell(row: Any, key: str, text: Callable[[Any], str]) -> str:
        value = row.get(key) if key else row
        return unknown if value is None else text(value)

    cells = [[cell(row, key, text) for _, key, text in columns] for row in rows]
    kept = [i for i in range(len(columns)) if not rows or any(line[i] not in ("", unknown) for line in cells)]
    return Table([columns[i][0] for i in kept], [[line[i] for i in kept] for line in cells], caption, note)


@dataclass(frozen=True)
class Paragraph:
    text: str


@dataclass(frozen=True)
class Texts:
    """Titled texts shown as they are, such as what a model wrote."""

    pairs: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class KeyValues:
    """Names and what they are, such as the machine that something was measured on."""

    pairs: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Verdict:
    """Passed or failed, told by a word, a sign and a colour."""

    good: bool
    text: str


Block = Table | Paragraph | Texts | KeyValues | Verdict | Chart


@dataclass(frozen=True)
class Section:
    title: str
    blocks: Sequence[Block]


def terminal(blocks: Iterable[Block]) -> str:
    """Render blocks for a terminal, one below the other. Charts and empty tables are left out."""
    return "\n\n".join(text for block in blocks for text in _in_terminal(block) if text)


def _in_terminal(block: Block) -> list[str]:
    match block:
        case Table(columns, rows, caption, note) if rows:
            lines = [caption, terminal_table(columns, rows)]
            return ["\n".join(line for line in lines if line), _wrapped(note)]
        case Paragraph(text) | Verdict(_, text):
            return [_wrapped(text)]
        case Texts(pairs):
            return [f"{title}\n{_wrapped(escape(text))}" for title, text in pairs]
        case KeyValues(pairs):
            return ["\n".join(f"{key}: {value}" for key, value in pairs)]
    return []


def _wrapped(text: str) -> str:
    return textwrap.fill(text, _width())


def _width() -> int:
    return max(20, min(WIDEST, get_terminal_size((WIDEST, 24)).columns))


def prose_columns(rows: Sequence[Sequence[str]]) -> set[int]:
    """Return the columns, the first aside, that hold sentences: these are not set to the right."""
    return {i for row in rows for i, cell in enumerate(row) if i > 0 and len(cell) > PROSE}


def terminal_table(columns: Sequence[str], rows: Sequence[Sequence[str]], wraps: bool = True) -> str:
    """Format a table: first column and sentences to the left, the rest to the right; nothing is cut.

    Sentences are wrapped, if it `wraps`. Where words do not fit into 100 columns, it is as wide as the
    terminal.
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
    if wraps:
        most = get_terminal_size((console.width, 24)).columns
        console.width = max(_width(), min(console.measure(table).minimum, most))
    console.print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def html(title: str, lead: str, sections: Sequence[Section], footer: str = "") -> str:
    """Render the whole file. With many sections it begins with links to them."""
    return _template().render(
        title=title, lead=lead, sections=sections, footer=footer, colours=COLOURS
    )  # fmt: skip


@cache
def _template() -> Template:
    """Load the template. Every text that it shows becomes one line and is escaped."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("distgpt.show", ""),
        autoescape=True,
        finalize=lambda value: escape(value) if type(value) is str else value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["kind"] = lambda block: "Chart" if isinstance(block, Chart) else type(block).__name__
    environment.filters["svg"] = svg
    environment.filters["lines"] = lambda text: "\n".join(map(escape, text.expandtabs(4).split("\n")))
    return environment.get_template("page.html.j2")
