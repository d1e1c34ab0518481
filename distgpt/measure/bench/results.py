"""The part that all commands of `distgpt bench` share: options, and the files that they leave."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distgpt.core.base.errors import print_lines
from distgpt.core.base.files import atomic_file, storage_errors
from distgpt.measure.doctor.facts import environment
from distgpt.show.page import Block, terminal

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """The options of every command: how it starts ranks, and where its results go."""

    ranks: int = 2
    hostfile: Path | None = None
    launcher: str | None = None
    name: str | None = None
    out: Path = Path("bench")
    as_json: bool = False

    def prepare(self) -> None:
        prepare(self.out)

    def finish(self, kind: str, name: str, found: Row, blocks: Sequence[Block]) -> None:
        """Print what was found, and save it under the user's name for it, or this one."""
        if self.as_json:
            print(json.dumps(found), flush=True)
        else:
            print_lines(terminal(blocks))
        say(f"written to {save(self.out, kind, self.name or name, found)}")


def prepare(folder: Path) -> None:
    """Make a folder for results, and check that it can be written to, before anything is measured."""
    with storage_errors("write to", folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


def say(line: str) -> None:
    """Report progress."""
    print_lines(line, err=True)


def save(folder: Path, kind: str, name: str, found: Row) -> Path:
    """Write {kind}-{name}.json, with the machine that it was found on, replacing an earlier one."""
    words = re.sub(r"[^\w.]+", "-", name).strip("-")
    path = folder / f"{kind}-{words or 'unnamed'}.json"
    text = json.dumps({"kind": kind, "name": name, "environment": environment(), **found}, indent=1)
    with atomic_file(path) as file:
        file.write(text.encode() + b"\n")
    return path
