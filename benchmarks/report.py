"""Write an HTML page with all results of `distgpt bench` and the benchmarks in a directory.

    python benchmarks/report.py bench                       # writes bench/report.html

The page needs no network and no scripts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import forward_work
import scaling
import train_beside_torch
from charts import LineChart, Series
from pages import Section, html
from record import end_with_errors

from distgpt.core.base.checked import parse_json
from distgpt.core.base.errors import DataError, StorageError, UsageError, print_lines
from distgpt.core.base.files import atomic_file, read_small, storage_errors
from distgpt.core.base.formatting import count, duration, size
from distgpt.measure.bench import allreduce, infer
from distgpt.show.page import Block

Result = dict[str, Any]


def time_chart(found: Result) -> LineChart:
    """Draw a line for each algorithm: microseconds over size, on log axes."""
    ends = [pick(found["rows"], key=lambda row: row["bytes"]) for pick in (min, max)]
    each = (f"{size(row['bytes'])} take {duration(row['seconds'])}" for row in ends)
    points: dict[str, list[tuple[float, float]]] = {}
    for row in found["rows"]:
        points.setdefault(row["algorithm"], []).append((row["bytes"], row["seconds"] * 1e6))
    series = [Series(name, own) for name, own in points.items()]
    title = f"Sum over {found['ranks']} ranks: time"
    return LineChart(title, ", ".join(each) + ".", "bytes", "microseconds", series, log_x=True, log_y=True)


# Kind of result: heading and function, in page order.
KINDS: dict[str, tuple[str, Callable[[Result], list[Block]]]] = {
    "forward": ("Forward pass", forward_work.blocks),
    "train": ("Training", train_beside_torch.blocks),
    "infer": ("Inference", infer.blocks),
    "scaling": ("Scaling", scaling.blocks),
    "allreduce": ("Sums over ranks", lambda found: [time_chart(found), *allreduce.blocks(found)]),
}
# Errors that a file with the expected format but invalid content may raise.
DAMAGED = (KeyError, TypeError, ValueError, IndexError, AttributeError, ArithmeticError)


def write(folder: Path, out: Path | None) -> Path:
    with storage_errors("read", folder):
        if not folder.is_dir():
            raise UsageError(f"{folder} is not a directory; pass the --out of distgpt bench")
    path = out or folder / "report.html"
    text = assemble(*load_all(folder))
    with atomic_file(path) as file:
        file.write(text.encode())
    return path


def load_all(folder: Path) -> tuple[list[Result], list[str]]:
    """Return all results in a directory by name, each with its "file", and the names of other files."""
    with storage_errors("read", folder):
        paths = sorted(folder.glob("*.json"))
    results, foreign = [], []
    for path in paths:
        try:
            found = parse_json(read_small(path))
        except (ValueError, DataError, StorageError):
            found = None
        if isinstance(found, dict) and str(found.get("kind")) in KINDS and "environment" in found:
            results.append(found | {"file": path.name})
        else:
            foreign.append(path.name)
    if not results:
        raise DataError(f"{folder} holds no results of distgpt bench")
    return results, foreign


def assemble(results: Sequence[Result], foreign: Sequence[str]) -> str:
    """Render the page. List invalid files at the end."""
    sections, strange = [], list(foreign)
    for kind in KINDS:
        for result in sorted((r for r in results if r["kind"] == kind), key=lambda r: str(r.get("name"))):
            try:
                sections.append(_section(result))
            except DAMAGED:
                strange.append(str(result.get("file", f"{kind}: {result.get('name')}")))
    lead = f"{count(len(sections), 'result')} of distgpt bench."
    if strange:
        text = "Skipped files, which are invalid or not results of distgpt bench: " + ", ".join(strange)
        sections.append(Section("Left out", [text]))
    return html("Measurements", lead, sections, "Made by benchmarks/report.py.")


def _section(result: Result) -> Section:
    heading, blocks = KINDS[result["kind"]]
    where = result["environment"]
    facts = [f"{where.get('cores')} cores of {where.get('processor')}", *(where.get("gpus") or [])]
    facts += [str(where[key]) for key in ("date", "commit") if where.get(key)]
    about = f"Measured by: {where.get('command', 'an unknown command')} ({', '.join(facts)})"
    return Section(f"{heading}: {result.get('name')}", [*blocks(result), about])


@click.command("report.py", help=__doc__)
@click.argument("folder", metavar="DIR", default=Path("bench"), type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="Path of the page  [default: DIR/report.html]")
def main(folder: Path, out: Path | None) -> None:
    print_lines(write(folder, out))


if __name__ == "__main__":
    end_with_errors(main)
