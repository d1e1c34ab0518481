"""A group of commands that imports a command only when it is called, so that --help stays fast."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click

from distgpt.config import nearest


class LazyGroup(click.Group):
    """Each of `names` is the command NAME in distgpt/commands/<prefix>NAME.py, with _ for -."""

    def __init__(self, *args: Any, names: tuple[str, ...], prefix: str = "", **others: Any) -> None:
        super().__init__(*args, **others)
        self._names, self._prefix = names, prefix

    def list_commands(self, context: click.Context) -> list[str]:
        return list(self._names)

    def get_command(self, context: click.Context, name: str) -> click.Command:
        if name not in self._names:
            context.fail(f"no such command {name!r}{nearest(name, self._names)}")
        module = self._prefix + name.replace("-", "_")
        command: click.Command = getattr(import_module(f"distgpt.commands.{module}"), module)
        return command
