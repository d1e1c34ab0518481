"""A report as one HTML file: no network, no scripts, for a screen, a phone, paper and a screen reader."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from distgpt.show.charts import DARK, FONT, LIGHT, NARROW, WIDE, Chart, chart_style
from distgpt.show.tables import LONG, many_lines, one_line, prose_columns

if TYPE_CHECKING:
    from jinja2 import Template


@dataclass(frozen=True)
class Table:
    """First column text, the others to the right, except columns of sentences. All cells are text."""

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
        """The classes of every cell: columns of sentences, and words that may be broken."""
        prose = prose_columns(self.rows)
        return [
            ["prose " * (i in prose) + "long" * _has_long_words(text) for i, text in enumerate(line)]
            for line in self.lines
        ]


def _has_long_words(text: str) -> bool:
    return any(len(word) > LONG for word in text.split())


# A heading, the key of a row's value ("": the row itself), and the text of it.
Column = tuple[str, str, Callable[[Any], str]]


def tabulated(
    columns: Sequence[Column],
    rows: Sequence[Any],
    caption: str = "",
    note: str = "",
    unknown: str = "",
) -> Table:
    """Rows as a table, without the columns that no row has a value for."""

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
class Facts:
    """Names and what they are, such as the machine that something was measured on."""

    pairs: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Verdict:
    """Passed or failed, told by a word, a sign and a colour."""

    good: bool
    text: str


Block = Table | Paragraph | Texts | Facts | Verdict | Chart


@dataclass(frozen=True)
class Section:
    title: str
    blocks: Sequence[Block]


def page(title: str, lead: str, sections: Sequence[Section], footer: str = "") -> str:
    """The whole file. With many sections it begins with links to them."""
    return _template().render(
        title=title,
        lead=lead,
        sections=sections,
        footer=footer,
        light=LIGHT,
        dark=DARK,
        font=FONT,
        chart_style=chart_style(),
        widths={"wide": WIDE, "narrow": NARROW},
    )


@cache
def _template() -> Template:
    """Every text that it shows becomes one line and is escaped."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    from distgpt.show.svg import svg  # loads matplotlib

    environment = Environment(
        loader=PackageLoader("distgpt.show", ""),
        autoescape=True,
        finalize=_one_line,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["kind"] = lambda block: "Chart" if isinstance(block, Chart) else type(block).__name__
    environment.filters["svg"] = svg
    environment.filters["many_lines"] = many_lines
    return environment.get_template("page.html.j2")


def _one_line(value: Any) -> Any:
    """Of plain texts; what is markup already stays."""
    return one_line(value) if type(value) is str else value
