"""Renders chat templates. Third-party templates run in a separate process that executes this file.

It imports nothing from distgpt. Each input line is a JSON object with "source" and "values"; each output line
has "text" or "error".
"""

from __future__ import annotations

import json
import resource
import sys
from contextlib import suppress
from datetime import datetime
from functools import lru_cache, partial
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY = 512 << 20  # bytes of address space
LONGEST = 1 << 24  # characters of output


class _Generation(Extension):
    """Accepts {% generation %}, which marks answers in some templates, and renders its contents."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: str) -> None:
    raise TemplateError(message)


@lru_cache(8)
def _template(source: str) -> Template:
    """Compile a template with the same settings as transformers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda how: datetime.now().strftime(how)
    return environment.from_string(source)


def render(source: str, values: dict[str, Any]) -> str:
    return _template(source).render(**values)


def _answer(line: bytes) -> dict[str, str]:
    try:
        asked = json.loads(line)
        text = render(asked["source"], asked["values"])
        if len(text) > LONGEST:
            return {"error": f"the result has {len(text):,} characters"}
        text.encode()
    except TemplateError as error:
        return {"error": str(error.message or type(error).__name__)[:300]}
    except MemoryError:
        return {"error": "exceeded the memory limit"}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:300]}
    return {"text": text}


def main() -> None:
    with suppress(OSError, ValueError):  # systems without this limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for line in sys.stdin.buffer:
        sys.stdout.write(json.dumps(_answer(line)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
