"""The part that all commands of `distgpt bench` share: options, and the files that they leave."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distgpt.core.base.errors import print_lines
from distgpt.core.base.files import atomic_file, storage_errors
from distgpt.measure.doctor.facts import environment
from distgpt.show.charts import Chart, svg
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
        """Make the folder for results, and check that it can be written to, before anything is measured."""
        with storage_errors("write to", self.out):
            self.out.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.out):
                pass

    def finish(
        self,
        kind: str,
        name: str,
        found: Row,
        blocks: Sequence[Block],
        charts: Mapping[str, Chart] | None = None,
    ) -> None:
        """Print what was found, and save it under the user's name for it, or this one."""
        if self.as_json:
            print(json.dumps(found), flush=True)
        else:
            print_lines(terminal(blocks))
        say(f"written to {save(self.out, kind, self.name or name, found, charts)}")


def say(line: str) -> None:
    """Report progress."""
    print_lines(line, err=True)


def save(folder: Path, kind: str, name: str, found: Row, charts: Mapping[str, Chart] | None = None) -> Path:
    """Write {kind}-{name}.json, replacing an earlier one, and {kind}-{name}{key}.svg for each chart."""
    words = re.sub(r"[^\w.]+", "-", name).strip("-")
    path = folder / f"{kind}-{words or 'unnamed'}.json"
    write_result(path, kind, name, found)
    for ending, chart in (charts or {}).items():
        with atomic_file(path.with_name(f"{path.stem}{ending}.svg")) as file:
            file.write(svg(chart, alone=True).encode())
    return path


def write_result(path: Path, kind: str, name: str, found: Row) -> Path:
    """Write a file of results with the machine that they were found on, and return its path."""
    with storage_errors("make", path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"kind": kind, "name": name, "environment": environment(), **found}, indent=1)
    with atomic_file(path) as file:
        file.write(text.encode() + b"\n")
    return path
