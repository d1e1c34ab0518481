"""Results as one HTML file, for screens, phones, paper and screen readers.

The file needs no network and no scripts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from charts import svg
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from distgpt.core.base.errors import escape
from distgpt.show.page import Block, prose_columns
from distgpt.show.plot import COLOURS

PAGE_COLOURS = COLOURS | {"paper": "#ffffff", "surface": "#f4f6f8", "accent": "#0b5fae"}


@dataclass(frozen=True)
class Section:
    title: str
    blocks: Sequence[Block]


def html(title: str, lead: str, sections: Sequence[Section], footer: str = "") -> str:
    return _template().render(
        title=title, lead=lead, sections=sections, footer=footer, colours=PAGE_COLOURS
    )  # fmt: skip


@cache
def _template() -> Template:
    """Load the template, which escapes all values and joins their lines."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=lambda value: escape(value) if type(value) is str else value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["kind"] = lambda block: "Chart" if hasattr(block, "draw") else type(block).__name__
    environment.filters["prose"] = lambda table: prose_columns(table.rows)
    environment.filters["svg"] = svg
    return environment.get_template("pages.html.j2")
