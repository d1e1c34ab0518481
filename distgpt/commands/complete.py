"""Completion in shells of what an option takes: files and folders, and names beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import click
from click.shell_completion import CompletionItem, ShellComplete

from distgpt.core.config.presets import PRESETS
from distgpt.core.data.textfile import BUNDLED_TEXTS

Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def names(known: Iterable[str]) -> Complete:
    """Complete these names alone."""
    return lambda context, param, begun: [CompletionItem(name) for name in known if name.startswith(begun)]


def names_or_files(*known: str) -> Complete:
    """Complete these names, and files and folders."""

    def complete(context: click.Context, param: click.Parameter, begun: str) -> list[CompletionItem]:
        if not (fitting := names(known)(context, param, begun)):
            return [CompletionItem(begun, type="file")]  # the shell lists them
        # bash would list them only where no name fits
        return fitting + [CompletionItem(path) for path in _here(begun) if path not in known]

    return complete


def _here(begun: str) -> list[str]:
    """List what in this folder begins so, folders with a slash; hidden ones and odd names are left out."""
    with suppress(OSError):
        found = (path for path in Path().iterdir() if path.name.startswith(begun) and path.name[0] != ".")
        return sorted(f"{path.name}{'/' * path.is_dir()}" for path in found if path.name.isprintable())
    return []


files, presets = names_or_files(), names(PRESETS)
texts = names_or_files(*BUNDLED_TEXTS)
tokenizers = names_or_files("auto", "byte", "char", "word", "gpt2", "bpe:", "hub:")
# Settings that are texts, but stand for files.
COMPLETED = {"data": texts, "val": texts, "tokenizer": tokenizers, "init": files, "hellaswag": files}


def line_of(*commands: click.Command) -> Complete:
    """Complete an argument that is the line of one of these commands."""
    known = {command.name or "": command for command in commands}

    def complete(context: click.Context, param: click.Parameter, begun: str) -> list[CompletionItem]:
        name, *rest = context.params.get(param.name or "") or [""]
        if name not in known:
            return names(known)(context, param, begun)
        return ShellComplete(known[name], {}, name, "").get_completions(rest, begun)

    return complete
