"""Results as blocks: tables, texts, charts; rendered for a terminal, or as one HTML file.

The file needs no network and no scripts. It is for a screen, a phone, paper and a screen reader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from distgpt.errors import escape
from distgpt.show.charts import DARK, FONT, LIGHT, Chart, chart_style
from distgpt.show.tables import LONG, many_lines, one_line, prose_columns, terminal_table, wrapped

if TYPE_CHECKING:
    from jinja2 import Template


@dataclass(frozen=True)
class Table:
    """A table of texts: the first column and sentences to the left, the others to the right."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    note: str = ""

    @property
    def lines(self) -> list[list[str]]:
        """The head and the rows, each with as many cells as the longest."""
        count = max(len(self.columns), *map(len, self.rows), 0)
        return [[*row, *[""] * (count - len(row))] for row in (self.columns, *self.rows)]

    @property
    def kinds(self) -> list[list[str]]:
        """The CSS classes of every cell: columns of sentences, and words that may be broken."""
        prose = prose_columns(self.rows)
        return [
            [
                "prose " * (i in prose) + "long" * any(len(word) > LONG for word in text.split())
                for i, text in enumerate(line)
            ]
            for line in self.lines
        ]


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
            return ["\n".join(line for line in lines if line), wrapped(note)]
        case Paragraph(text) | Verdict(_, text):
            return [wrapped(text)]
        case Texts(pairs):
            return [f"{title}\n{wrapped(escape(text))}" for title, text in pairs]
        case KeyValues(pairs):
            return ["\n".join(f"{key}: {value}" for key, value in pairs)]
    return []


def html(title: str, lead: str, sections: Sequence[Section], footer: str = "") -> str:
    """Render the whole file. With many sections it begins with links to them."""
    return _template().render(
        title=title,
        lead=lead,
        sections=sections,
        footer=footer,
        light=LIGHT,
        dark=DARK,
        font=FONT,
        chart_style=chart_style(),
    )


@cache
def _template() -> Template:
    """Load the template. Every text that it shows becomes one line and is escaped."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    from distgpt.show.drawing import svg  # loads matplotlib

    environment = Environment(
        loader=PackageLoader("distgpt.show", ""),
        autoescape=True,
        finalize=lambda value: one_line(value) if type(value) is str else value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["kind"] = lambda block: "Chart" if isinstance(block, Chart) else type(block).__name__
    environment.filters["svg"] = svg
    environment.filters["many_lines"] = many_lines
    return environment.get_template("page.html.j2")
