"""Print Markdown tables of the results of block N of gpu_session.sh.

    python benchmarks/node_table.py OUT [OUT2 …]

Multiple directories are from multiple calls on one machine. Skips missing results and lists failed parts at
the end.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from distgpt.core.base.formatting import duration
from distgpt.core.base.formatting import size as in_bytes

Row = dict[str, Any]
MODEL = "GPT-2 bfloat16"
RATES = ("prefill", "decode", "whole")


def main() -> None:
    parser = argparse.ArgumentParser(description="Tables of a whole node.")
    parser.add_argument("folders", nargs="+", type=Path, metavar="OUT")
    print("\n".join(page(parser.parse_args().folders)))


def page(folders: Sequence[Path]) -> Iterator[str]:
    steps, peaks = training(folders), rows_in(folders, "threads.json", "peaks")
    yield from lines_of(folders, "doctor.txt", "", "The node")
    if steps:
        yield from by_cores(steps, {row["threads"]: row["bfloat16"] for row in peaks})
        yield from on_all(steps)
    yield from small(rows_in(folders, "small.json"))
    yield from text(folders)
    yield from sums(folders)
    yield from lines_of(folders, "serving.txt", "^first token|clients,", "Served")
    yield from lines_of(folders, "python_cost.txt", "", "Python in a step")
    yield from became(folders)


def rows_in(folders: Iterable[Path], pattern: str, name: str | None = None) -> list[Row]:
    rows = [
        row | {"file": path.stem}
        for folder in folders
        for path in sorted(folder.glob(pattern))
        for row in json.loads(path.read_text())
    ]
    wanted = (row for row in rows if "error" not in row)
    return [row for row in wanted if (row["row"] == name if name else row["row"] != "peaks")]


def training(folders: Sequence[Path]) -> list[Row]:
    """Return a row for each way to train the node's model, with its cores and the program in `who`."""
    found = []
    for who, patterns in {
        "threads": ("threads.json",),
        "without AMX": ("threads-without-amx.json",),
        "ranks": ("ranks-*.json",),
        "both": ("both-*.json",),
        "PyTorch": ("torch.json", "ddp.json"),
    }.items():
        for pattern in patterns:
            rows = rows_in(folders, pattern, MODEL)
            found += [row | {"who": who, "cores": row["ranks"] * row["threads"]} for row in rows]
    return found


def fastest(rows: Iterable[Row]) -> Row | None:
    return max(rows, key=lambda row: float(row["tokens_per_s"]), default=None)


def best(steps: Sequence[Row], cores: int, *who: str) -> Row | None:
    return fastest(row for row in steps if row["cores"] == cores and row["who"] in who)


def table(heading: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"\n**{heading}**\n"
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def speed(row: Row | None, of: Callable[[Row], str] = lambda row: "") -> str:
    return f"{row['tokens_per_s']:,.0f}{of(row)}" if row else ""


def shape(row: Row) -> str:
    return f" ({row['ranks']} × {row['threads']})"


def mode(row: Row) -> str:
    ranks = f", DDP of {row['ranks']} × {row['threads']}" if row["ranks"] > 1 else ""
    return f" ({row['mode']}{ranks})"


def by_cores(steps: Sequence[Row], peaks: dict[int, float]) -> Iterator[str]:
    """Tokens/s by number of cores, with threads, ranks of one thread, both, and PyTorch's fastest mode."""
    one = best(steps, 1, "threads")

    def times(row: Row) -> str:
        return f" ({row['tokens_per_s'] / one['tokens_per_s']:.1f} ×)" if one else ""

    def share(row: Row | None, cores: int) -> str:
        return f"{row['gflops'] / peaks[cores]:.0%}" if row and cores in peaks else ""

    rows = []
    for cores in sorted({row["cores"] for row in steps}):
        ours = best(steps, cores, "threads")
        rows.append(
            [
                str(cores),
                speed(ours, times),
                share(ours, cores),
                speed(best(steps, cores, "ranks"), times),
                speed(best(steps, cores, "both"), shape),
                speed(best(steps, cores, "PyTorch"), mode),
            ]
        )
    columns = ["cores", "threads", "of their peak", "ranks of one thread", "ranks × threads", "PyTorch"]
    yield from table(f"{MODEL}, tokens/s by cores", columns, rows)


def on_all(steps: Sequence[Row]) -> Iterator[str]:
    """All ways on all cores, fastest first, with the ratio to the reference."""
    most = max(row["cores"] for row in steps)
    rows = sorted((r for r in steps if r["cores"] == most), key=lambda row: -float(row["tokens_per_s"]))
    named = [[row["who"] + (mode(row) if "mode" in row else shape(row)), speed(row)] for row in rows]
    yield from table(f"{MODEL}, all ways on {most} cores", ["way", "tokens/s"], named)
    ours, theirs = (best(steps, most, *who) for who in (("threads", "ranks", "both"), ("PyTorch",)))
    if ours and theirs:
        yield f"\n{ours['tokens_per_s'] / theirs['tokens_per_s']:.2f} × PyTorch's best on {most} cores."


def small(rows: Sequence[Row]) -> Iterator[str]:
    if not rows:
        return
    counts = sorted({row["threads"] for row in rows})
    names = list(dict.fromkeys(row["row"] for row in rows))

    def cell(name: str, threads: int) -> str:
        return speed(fastest(r for r in rows if r["row"] == name and r["threads"] == threads))

    found = ([name, *(cell(name, threads) for threads in counts)] for name in names)
    yield from table("Small presets, tokens/s by threads", ["preset", *map(str, counts)], found)


def text(folders: Sequence[Path]) -> Iterator[str]:
    results = (
        json.loads(path.read_text()) for each in folders for path in sorted(each.glob("text-*/*.json"))
    )
    rows = [
        [row["dtype"], str(row["requests"]), str(result["threads"]), *(f"{row[key]:,.0f}" for key in RATES)]
        for result in results
        for row in result["rows"]
    ]
    if rows:
        columns = ["type", "requests", "threads", "prompts", "decoding", "new tokens, of all the time"]
        yield from table("Text, tokens/s", columns, rows)


def sums(folders: Sequence[Path]) -> Iterator[str]:
    paths = (path for each in folders for path in sorted(each.glob("sums/allreduce-*.json")))
    results = sorted((json.loads(path.read_text()) for path in paths), key=lambda found: int(found["ranks"]))
    rows = [
        [str(found["ranks"]), in_bytes(row["bytes"]), row["algorithm"], duration(row["seconds"])]
        for found in results
        for row in found["rows"]
    ]
    if rows:
        yield from table("Sums over ranks of the node", ["ranks", "array", "by", "median"], rows)


def lines_of(folders: Sequence[Path], name: str, having: str, heading: str) -> Iterator[str]:
    lines = [
        line
        for folder in folders
        if (folder / name).exists()
        for line in (folder / name).read_text().splitlines()
        if re.search(having, line) and not re.match(r"\$ |\[exit code ", line)
    ]
    if lines:
        yield from (f"\n**{heading}**\n", "```text", *lines, "```")


def became(folders: Sequence[Path]) -> Iterator[str]:
    """Return the commit and each part that did not finish."""
    for folder in folders:
        if not (folder / "block.json").exists():
            continue
        found = json.loads((folder / "block.json").read_text())
        failed = [
            f"{name}: {part.get('skipped') or 'exit code ' + str(part['exit_code'])}"
            for name, part in found["parts"].items()
            if part["exit_code"] != 0
        ]
        kind = "a trial run on the emulator, without valid times" if found["rehearsal"] else found["date"]
        yield f"\n{folder.name}: {kind}, {found['commit']}. {'; '.join(failed) or 'Every part ended well'}."


if __name__ == "__main__":
    main()
