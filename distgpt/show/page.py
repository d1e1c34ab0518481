"""A report as one HTML file: no network, no scripts, for a screen, a phone, paper and a screen reader."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Protocol

from distgpt.show.reporting.style import page_style
from distgpt.show.reporting.words import escaped, many_lines, prose_columns

LONG = 24  # characters from which a word may be broken
# A page may show what it holds and nothing else: whatever a text says, nothing is loaded and nothing runs.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


class Block(Protocol):
    """Something a section shows, charts too; ids inside begin with `name`."""

    def html(self, name: str) -> str: ...


@dataclass(frozen=True)
class Table:
    """First column text, the others to the right, except columns of sentences. All cells are text."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    note: str = ""

    def html(self, name: str) -> str:
        count = max([len(self.columns), *map(len, self.rows)], default=0)
        prose = prose_columns(self.rows)
        caption = f'<figcaption id="{name}">{escaped(self.caption)}</figcaption>' if self.caption else ""
        head = "".join(cell(self._at(self.columns, i), i, prose, "col") for i in range(count))
        rows = "".join(
            "<tr>" + "".join(cell(self._at(row, i), i, prose) for i in range(count)) + "</tr>\n"
            for row in self.rows
        )
        label = f'aria-labelledby="{name}"' if caption else f'aria-label="{self._label()}"'
        note = f'<p class="note">{escaped(self.note)}</p>' if self.note else ""
        return (
            f'<figure class="table">{caption}<div class="scroll" role="region" tabindex="0" {label}>'
            f"<table {label}><thead><tr>{head}</tr></thead>\n<tbody>\n{rows}</tbody></table></div>"
            f"{note}</figure>"
        )

    def _label(self) -> str:
        return escaped("Table: " + ", ".join(filter(None, self.columns)))

    @staticmethod
    def _at(row: Sequence[str], i: int) -> str:
        return row[i] if i < len(row) else ""


def cell(text: str, i: int, prose: set[int], scope: str = "row") -> str:
    kinds = ["prose"] * (i in prose) + ["long"] * any(len(word) > LONG for word in text.split())
    kind = f' class="{" ".join(kinds)}"' if kinds else ""
    if scope == "row" and i > 0:
        return f"<td{kind}>{escaped(text)}</td>"
    return f'<th scope="{scope}"{kind}>{escaped(text)}</th>'


@dataclass(frozen=True)
class Paragraph:
    text: str

    def html(self, name: str) -> str:
        return f"<p>{escaped(self.text)}</p>"


@dataclass(frozen=True)
class Texts:
    """Titled texts shown as they are, such as what a model wrote."""

    pairs: Sequence[tuple[str, str]]

    def html(self, name: str) -> str:
        return "\n".join(
            f'<figure class="sample"><figcaption>{escaped(title)}</figcaption>'
            f"<pre>{escape(many_lines(text))}</pre></figure>"
            for title, text in self.pairs
        )


@dataclass(frozen=True)
class Facts:
    """Names and what they are, such as the machine that something was measured on."""

    pairs: Sequence[tuple[str, str]]

    def html(self, name: str) -> str:
        rows = "".join(f"<dt>{escaped(key)}</dt><dd>{escaped(value)}</dd>\n" for key, value in self.pairs)
        return f"<dl>\n{rows}</dl>" if rows else ""


@dataclass(frozen=True)
class Verdict:
    """Passed or failed, told by a word, a sign and a colour."""

    good: bool
    text: str

    def html(self, name: str) -> str:
        kind, word = ("good", "Passed") if self.good else ("bad", "Failed")
        sign = "M4 12.5l5 5l11 -11" if self.good else "M6 6l12 12M18 6l-12 12"
        icon = f'<svg viewBox="0 0 24 24" aria-hidden="true"><path d="{sign}"/></svg>'
        return (
            f'<p class="verdict {kind}">{icon}<span><strong>{word}.</strong> {escaped(self.text)}</span></p>'
        )


@dataclass(frozen=True)
class Section:
    title: str
    blocks: Sequence[Block]

    def html(self, name: str) -> str:
        blocks = "\n".join(block.html(f"{name}-{i}") for i, block in enumerate(self.blocks, start=1))
        heading = f'<h2 id="{name}">{escaped(self.title)}</h2>'
        return f'<section aria-labelledby="{name}">\n{heading}\n{blocks}\n</section>'


def page(title: str, lead: str, sections: Sequence[Section], footer: str = "") -> str:
    """The whole file. With many sections it begins with links to them."""
    names = [f"section-{i}" for i in range(1, len(sections) + 1)]
    links = "".join(
        f'<li><a href="#{name}">{escaped(section.title)}</a></li>'
        for name, section in zip(names, sections, strict=True)
    )
    nav = f'<nav aria-label="Contents"><ul>{links}</ul></nav>\n' if len(sections) > 2 else ""
    body = "\n".join(section.html(name) for name, section in zip(names, sections, strict=True))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{escaped(title)}</title>
<style>
{page_style()}</style>
</head>
<body>
<header>
<h1>{escaped(title)}</h1>
{f'<p class="lead">{escaped(lead)}</p>' if lead else ""}
</header>
{nav}<main>
{body}
</main>
{f"<footer>{escaped(footer)}</footer>" if footer else ""}
</body>
</html>
"""
