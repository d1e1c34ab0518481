"""`distgpt bench allreduce`: from its options to its table, file and charts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from distgpt.comm.agree import on_root
from distgpt.comm.launched import launched_as
from distgpt.config import GpuConfig
from distgpt.errors import UsageError
from distgpt.machine.launchers import find_launcher
from distgpt.machine.stages import opened
from distgpt.measure.bench.results import Columns, Row, prepare, save, tabulated
from distgpt.measure.bench.sums import Plan, measure_all
from distgpt.measure.jobs import ask
from distgpt.show.charts import LineChart, Series
from distgpt.show.page import Block
from distgpt.show.tables import terminal_table
from distgpt.units import count, duration, parse_size
from distgpt.units import size as in_bytes

FIRST_SIZE, STEP = 8, 4  # bytes, and the factor between sizes


@dataclass(frozen=True, slots=True)
class AllreduceOptions:
    """The command line. `measure_only`: print the result as JSON and save nothing."""

    stage: str = "mpi"
    ranks: int = 2
    hostfile: Path | None = None
    launcher: str | None = None
    sizes: str | None = None
    max_bytes: str = "256M"
    algorithms: str | None = None
    repeats: int = 30
    seconds: float = 60.0
    name: str | None = None
    out: Path = Path("bench")
    as_json: bool = False
    measure_only: bool = False

    def array_sizes(self) -> list[int]:
        """The sizes to measure, in this order."""
        if self.sizes:
            return list(dict.fromkeys(array_size("--sizes", word) for word in self.sizes.split(",")))
        return sizes_up_to(array_size("--max-bytes", self.max_bytes))

    def names(self) -> list[str]:
        return [word.strip() for word in self.algorithms.split(",")] if self.algorithms else []


def array_size(flag: str, text: str) -> int:
    """ "64K" → 65536. Gradients have elements of 4 bytes."""
    try:
        found = parse_size(text)
    except UsageError as error:
        raise UsageError(f"{flag}: {error}") from None
    if found < 4 or found % 4 or found > 1 << 40:
        raise UsageError(f"{flag} {text!r}: an array has a multiple of 4 bytes, and at most 1024G")
    return found


def sizes_up_to(largest: int) -> list[int]:
    """8 bytes and on by factors of 4, and the largest itself."""
    sizes = [FIRST_SIZE]
    while sizes[-1] * STEP <= largest:
        sizes.append(sizes[-1] * STEP)
    return sizes if sizes[-1] == largest or largest < FIRST_SIZE else [*sizes, largest // 4 * 4]


def bench(options: AllreduceOptions) -> None:
    """Measure with the ranks that this was launched as, or start some."""
    sizes, silent = options.array_sizes(), options.measure_only
    if launched_as() > 1:
        found = _as_rank(options, sizes)
        if found is None:
            return
    else:
        if options.ranks < 2:
            raise UsageError("bench allreduce needs --ranks of at least 2: one rank has nothing to exchange")
        if not silent:
            prepare(options.out)
        found = start(options, _progress())
    click.echo(json.dumps(found) if options.as_json or silent else text(found))
    if not silent:
        name = options.name or f"{found['stage']}-{found['ranks']}"
        path = save(options.out, "allreduce", name, found, {"": chart(found)})
        click.echo(f"written to {path} and {path.with_suffix('.svg').name}", err=True)


def _progress() -> Callable[[str], None] | None:
    """What prints a line for each size, where standard error is a terminal."""
    return partial(click.echo, err=True) if sys.stderr.isatty() else None


def start(options: AllreduceOptions, on_line: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Start the ranks and return what they measure; `on_line` gets a line for each row on the way."""
    limits = ["--max-bytes", options.max_bytes, "--repeats", options.repeats, "--seconds", options.seconds]
    words = ["bench", "allreduce", "--measure-only", "--stage", options.stage, *limits]
    for flag, value in (("--sizes", options.sizes), ("--algorithms", options.algorithms)):
        words += [flag, value] if value else []

    def progress(line: str) -> None:
        if on_line is not None and not line.startswith("{"):
            on_line(line)

    launcher = find_launcher(options.launcher, options.hostfile)
    what = f"bench allreduce on {count(options.ranks, 'rank')}"
    return ask(what, words, launcher, options.ranks, progress)


def _as_rank(options: AllreduceOptions, sizes: Sequence[int]) -> dict[str, Any] | None:
    """Measure as one of the ranks; the result on rank 0. Collective."""
    # Through the host: it works everywhere, and the others are opened one by one.
    on_gpu = GpuConfig(allreduce="host") if options.stage == "mpi-cuda" else None
    stage = opened(options.stage, None, on_gpu)
    if not options.measure_only:
        on_root(stage.comm, partial(prepare, options.out))
    # With --measure-only, the program that started this one reads our output.
    say = partial(print, flush=True) if options.measure_only else _progress()

    def report(row: Row) -> None:
        if say is not None:
            took = (
                f"left out for lack of {row['left_out']}" if "left_out" in row else duration(row["seconds"])
            )
            say(f"{in_bytes(row['bytes'])}, {row['algorithm']}: {took}")

    plan = Plan(sizes, options.repeats, options.seconds)
    found = measure_all(stage, options.names(), plan, report)
    return found if stage.comm.rank == 0 else None


# -- showing


COLUMNS: Columns = {
    "array": lambda row: in_bytes(row["bytes"]),
    "algorithm": lambda row: str(row["algorithm"]),
    "median": lambda row: duration(row["seconds"]),
    "fastest": lambda row: duration(row["min_seconds"]),
    "GB/s": lambda row: f"{row['bytes_per_s'] / 1e9:.3g}",
    "bus GB/s": lambda row: f"{row['bus_bytes_per_s'] / 1e9:.3g}",
}


def text(found: dict[str, Any]) -> str:
    table = tabulated(COLUMNS, found["rows"])
    return "\n".join([heading(found), "", terminal_table(table.columns, table.rows), *left_out(found)])


def blocks(found: dict[str, Any]) -> list[Block]:
    """For the report."""
    note = " ".join(f"{each}." for each in left_out(found))
    return [chart(found), bandwidth(found), tabulated(COLUMNS, found["rows"], heading(found), note)]


def heading(found: dict[str, Any]) -> str:
    where = "on one machine" if found["nodes"] == 1 else f"on {found['nodes']} hosts"
    return f"{count(found['ranks'], 'rank')} {where}, {found['library']}"


def left_out(found: dict[str, Any]) -> list[str]:
    """Algorithms that are not available here, and sizes that were not measured, each with the reason."""
    sizes: dict[tuple[str, str], list[str]] = {}
    for row in found["not_measured"]:
        sizes.setdefault((row["algorithm"], row["left_out"]), []).append(in_bytes(row["bytes"]))
    return [f"{name} left out: {reason}" for name, reason in found["left_out"].items()] + [
        f"{name} not measured for lack of {lack}: {', '.join(several)}"
        for (name, lack), several in sizes.items()
    ]


def chart(found: dict[str, Any]) -> LineChart:
    smallest, largest = (pick(found["rows"], key=lambda row: row["bytes"]) for pick in (min, max))
    description = (
        f"{in_bytes(smallest['bytes'])} take {duration(smallest['seconds'])}, "
        f"{in_bytes(largest['bytes'])} take {duration(largest['seconds'])}."
    )
    return _chart(found, "time", description, "microseconds", "seconds", 1e6)


def bandwidth(found: dict[str, Any]) -> LineChart:
    best = max(found["rows"], key=lambda row: float(row["bus_bytes_per_s"]))
    description = (
        f"At best {best['bus_bytes_per_s'] / 1e9:.3g} GB/s, for {in_bytes(best['bytes'])}"
        f" and {best['algorithm']}."
    )
    return _chart(found, "what each rank moves", description, "bus GB/s", "bus_bytes_per_s", 1e-9)


def _chart(
    found: dict[str, Any], what: str, description: str, label: str, key: str, factor: float
) -> LineChart:
    """A line for each algorithm over the size; times on a logarithmic axis."""
    rows: dict[str, list[Row]] = {}
    for row in found["rows"]:
        rows.setdefault(row["algorithm"], []).append(row)
    series = [
        Series(name, [row["bytes"] for row in own], [row[key] * factor for row in own])
        for name, own in rows.items()
    ]
    title = f"Sum over {found['ranks']} ranks: {what}"
    return LineChart(title, description, "bytes", label, series, log_x=True, log_y=key == "seconds")
