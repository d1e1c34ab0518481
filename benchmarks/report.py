"""One HTML page of all results in a folder: what `distgpt bench` and the programs beside this one left.

    python benchmarks/report.py bench                       # writes bench/report.html

It needs no network and no scripts: a file to open, to print or to send.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import forward_page
import scaling_page
import train_beside_torch
from record import end_with_errors

from distgpt.checked import parse_json
from distgpt.errors import DataError, StorageError, UsageError, print_lines
from distgpt.files import atomic_file, read_small, storage_errors
from distgpt.formatting import count
from distgpt.formatting import size as in_bytes
from distgpt.measure.bench import allreduce, infer
from distgpt.show.charts import Bar, BarChart
from distgpt.show.page import Block, Facts, Paragraph, Section, page, tabulated

Result = dict[str, Any]


def _train(found: Result) -> list[Block]:
    rows = found["rows"]
    bars = [
        Bar(", ".join(str(row[key]) for key in ("who", "stage") if row.get(key)), row["tokens_per_s"])
        for row in rows
    ]
    best = max(rows, key=lambda row: float(row["tokens_per_s"]))
    description = (
        f"The fastest, {best.get('who', 'distgpt')}, trains on {best['tokens_per_s']:,.0f} tokens a second."
    )
    notes = " ".join(train_beside_torch.notes(found))
    chart = BarChart("Tokens per second", description, "tokens/s", bars)
    return [chart, tabulated(train_beside_torch.COLUMNS, rows, "Training", notes)]


def _infer(found: Result) -> list[Block]:
    return [tabulated(infer.COLUMNS, found["rows"], "Inference", infer.note_of(found))]


def _allreduce(found: Result) -> list[Block]:
    best = max(found["rows"], key=lambda row: float(row["bus_bytes_per_s"]))
    speed, size = allreduce.gigabytes(best["bus_bytes_per_s"]), in_bytes(best["bytes"])
    most = f"At best {speed} GB/s, for {size} and {best['algorithm']}."
    bandwidth = allreduce.chart(found, "what each rank moves", most, "bus GB/s", "bus_bytes_per_s", 1e-9)
    note = " ".join(f"{each}." for each in allreduce.left_out(found))
    table = tabulated(allreduce.COLUMNS, found["rows"], allreduce.heading(found), note)
    return [allreduce.time_chart(found), bandwidth, table]


# In the order of the page: the heading, and what shows a result of the kind.
KINDS: dict[str, tuple[str, Callable[[Result], list[Block]]]] = {
    "forward": ("Forward pass", forward_page.render_html),
    "train": ("Training", _train),
    "infer": ("Inference", _infer),
    "scaling": ("Scaling", scaling_page.render_html),
    "allreduce": ("Sums over ranks", _allreduce),
}
# What a file may raise that has our form and not our contents.
DAMAGED = (KeyError, TypeError, ValueError, IndexError, AttributeError, ArithmeticError)
APART = ("date", "command")  # differ between any two results, and stand elsewhere
LONGEST = 400  # characters of a fact
# Of any other text, and of a table: more than a result has. Drawing takes time that grows faster.
MOST_CHARACTERS, MOST_ROWS = 1000, 5000
COMPANIONS = {"compare.json": "a comparison of stages", "profile.json": "a profile of a training step"}


def write(folder: Path, out: Path | None) -> Path:
    """Write the page and return its path."""
    with storage_errors("read", folder):
        if not folder.is_dir():
            raise UsageError(f"{folder} is no folder: name the one that distgpt bench wrote into (--out)")
        companions = [
            path for name in COMPANIONS for path in sorted([*folder.glob(name), *folder.glob(f"*/{name}")])
        ]
    path = out or folder / "report.html"
    if out is None and (folder / "compare.json").exists():
        raise UsageError(f"{path} is the report of a comparison: name another place with --out")
    results, foreign = load_all(folder)
    beside = [f"{path.relative_to(folder)}: {COMPANIONS[path.name]}" for path in companions]
    text = assemble(results, [name for name in foreign if name not in COMPANIONS], beside)
    with atomic_file(path) as file:
        file.write(text.encode())
    return path


def load_all(folder: Path) -> tuple[list[Result], list[str]]:
    """All results in a folder by name, each with its "file", and the names of files that are none."""
    with storage_errors("read", folder):
        paths = sorted(folder.glob("*.json"))
    results, foreign = [], []
    for path in paths:
        try:
            found = _bounded(parse_json(read_small(path)))
        except (ValueError, DataError, StorageError):
            found = None
        if isinstance(found, dict) and str(found.get("kind")) in KINDS and "environment" in found:
            results.append(found | {"file": path.name})
        else:
            foreign.append(path.name)
    if not results:
        raise DataError(f"{folder} holds no results of distgpt bench")
    return results, foreign


def _bounded(value: Any) -> Any:
    """With long texts cut; a ValueError where there is more of anything than a result has."""
    if isinstance(value, str):
        return value if len(value) <= MOST_CHARACTERS else value[: MOST_CHARACTERS - 1] + "…"
    if isinstance(value, dict | list) and len(value) > MOST_ROWS:
        raise ValueError("it is too long")
    if isinstance(value, dict):
        return {_bounded(key): _bounded(each) for key, each in value.items()}
    return [_bounded(each) for each in value] if isinstance(value, list) else value


def assemble(results: Sequence[Result], foreign: Sequence[str], companions: Sequence[str]) -> str:
    """The whole page. What cannot be shown is named at its end."""
    try:
        return _assemble(results, foreign, companions, section_of_result)
    except DAMAGED:  # in drawing one of them: look for it

        def drawn(result: Result) -> Section:
            section = section_of_result(result)
            page("", "", [section])
            return section

        return _assemble(results, foreign, companions, drawn)


def section_of_result(result: Result) -> Section:
    """What the page shows of one result; one of DAMAGED if it is not as we write it."""
    heading, show = KINDS[result["kind"]]
    command = result["environment"].get("command", "an unknown command")
    return Section(f"{heading}: {result.get('name')}", [*show(result), Paragraph(f"Measured by: {command}")])


def _assemble(
    results: Sequence[Result],
    foreign: Sequence[str],
    companions: Sequence[str],
    section_of: Callable[[Result], Section],
) -> str:
    sections, strange, shown = [], list(foreign), []
    for kind in KINDS:
        for result in sorted((r for r in results if r["kind"] == kind), key=lambda r: str(r.get("name"))):
            try:
                sections.append(section_of(result))
                shown.append(result)
            except DAMAGED:
                strange.append(str(result.get("file", f"{kind}: {result.get('name')}")))
    environments = [result["environment"] for result in shown]
    sections.append(Section("Measured on", machine(environments)))
    if companions:
        sections.append(Section("Beside these", [Paragraph(text) for text in companions]))
    if strange:
        text = "These files are no results of distgpt bench, or damaged, and left out: " + ", ".join(strange)
        sections.append(Section("Left out", [Paragraph(text)]))
    days = sorted(str(each["date"])[:10] for each in environments if each.get("date"))
    when = f", measured from {days[0]} to {days[-1]}" if days else ""
    if len(set(days)) == 1:
        when = f", measured on {days[0]}"
    lead = (
        f"{count(len(shown), 'result')} of distgpt bench{when}. Predictions are dashed, and labelled as such."
    )
    return page("Measurements", lead, sections, "Made by benchmarks/report.py.")


def machine(environments: Sequence[dict[str, Any]]) -> list[Block]:
    """The facts that all results share, then those that differ."""
    facts: list[tuple[str, str]] = []
    various: list[str] = []
    for key in dict.fromkeys(key for each in environments for key in each):
        values = list(dict.fromkeys(words(each.get(key))[:LONGEST] for each in environments))
        if key in APART or values == [""]:
            continue
        if len(values) == 1:
            facts.append((key.replace("_", " "), values[0]))
        else:
            various.append(f"{key.replace('_', ' ')}: " + " / ".join(value or "unknown" for value in values))
    blocks: list[Block] = [Facts(facts)]
    if various:
        blocks.append(Paragraph("Results of different machines or states are on this page. They differ in:"))
        blocks += [Paragraph(text) for text in various]
    return blocks


def words(value: Any) -> str:
    """A fact as text."""
    if value is None:
        return ""
    if isinstance(value, dict):
        return ", ".join(f"{key} {words(each)}" for key, each in value.items() if each is not None)
    if isinstance(value, list):
        return ", ".join(map(words, value)) or "none"
    if isinstance(value, int) and value >= 1 << 30:
        return f"{value / 2**30:.1f} GiB"
    return str(value)


@click.command("report.py", help=__doc__)
@click.argument("folder", metavar="DIR", default=Path("bench"), type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="The page; DIR/report.html if left out.")
def main(folder: Path, out: Path | None) -> None:
    print_lines(write(folder, out))


if __name__ == "__main__":
    end_with_errors(main)
