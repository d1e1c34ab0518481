"""Run commands while of distgpt only named modules can be imported: python alone.py ASKED FOLDER.

ASKED is JSON: a list of modules, `null` for all, and a list of commands. Each process leaves a file in FOLDER
that lists the modules which it has loaded.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path


class Refusal:
    """Refuses every other module of distgpt, as if its file were not there."""

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name.startswith("distgpt.") and name.removeprefix("distgpt.") not in self.names:
            raise ModuleNotFoundError(f"{name} is not of the core", name=name)
        return None


def run(names: list[str] | None, commands: list[list[str]]) -> None:
    """Run the commands, one after the other."""
    if names is not None:
        sys.meta_path.insert(0, Refusal(frozenset(names)))  # type: ignore[arg-type]
    from distgpt.commands.cli import main

    for words in commands:
        if words[0] == "load":  # not a command, but what Python users call
            import distgpt

            print(distgpt.load(words[1]).generate("a", max_new_tokens=8, seed=1))
            continue
        sys.argv = ["distgpt", *words]
        try:
            main()
        except SystemExit as done:
            if done.code:
                raise


if __name__ == "__main__":
    asked, folder = sys.argv[1:]
    run(*json.loads(asked))
    loaded = (name.removeprefix("distgpt.") for name in sys.modules if name.startswith("distgpt."))
    Path(folder, str(os.getpid())).write_text("\n".join(sorted(loaded)))
