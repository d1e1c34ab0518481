"""`distgpt bench allreduce` from its options to its table, file and picture."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from distgpt.comm.agree import on_root
from distgpt.comm.launched import launched_as
from distgpt.errors import DataError, UsageError
from distgpt.files import atomic_file
from distgpt.machine.launchers import find_launcher
from distgpt.machine.processes import distgpt_command, run
from distgpt.machine.stages import opened
from distgpt.measure.bench.failing import raise_failure
from distgpt.measure.bench.results import prepare, save
from distgpt.measure.peer.running import unsteered
from distgpt.show.charts import LineChart, Series, standalone
from distgpt.show.tables import terminal_table
from distgpt.units import count

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
COLUMNS = ("array", "algorithm", "median", "fastest", "GB/s", "bus GB/s")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the options say, in their words."""

    stage: str = "mpi"
    sizes: str | None = None
    max_bytes: str = "256M"
    algorithms: str | None = None
    repeats: int = 30
    seconds: float = 60.0

    def words(self) -> list[str]:
        given = (("--sizes", self.sizes), ("--algorithms", self.algorithms))
        chosen = [word for flag, value in given if value for word in (flag, value)]
        limits = [
            "--max-bytes",
            self.max_bytes,
            "--repeats",
            str(self.repeats),
            "--seconds",
            str(self.seconds),
        ]
        return ["--stage", self.stage, *chosen, *limits]

    def bytes(self) -> list[int]:
        from distgpt.measure.bench.allreduce import sizes_up_to

        if self.sizes:
            return list(dict.fromkeys(size_in_words("--sizes", word) for word in self.sizes.split(",")))
        return sizes_up_to(size_in_words("--max-bytes", self.max_bytes))


def size_in_words(flag: str, text: str) -> int:
    """ "64K" → 65536. Gradients are numbers of 4 bytes."""
    found = re.fullmatch(r"(\d+)\s*([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if found is None:
        raise UsageError(f"{flag} {text!r}: sizes are bytes, or as in 64K, 16M, 1G")
    size = int(found[1]) * _UNITS[found[2].upper()]
    if size < 4 or size % 4 or size > 1 << 40:
        raise UsageError(f"{flag} {text!r}: an array has a multiple of 4 bytes, and at most 1024G")
    return size


def bench(
    wanted: Wanted,
    launch: tuple[int, Path | None, str | None],
    out: Path | None,
    name: str | None,
    as_json: bool,
) -> None:
    """Measure with the ranks there are, or start some. `out` None: nothing is saved."""
    sizes = wanted.bytes()
    if launched_as() > 1:
        found = _as_rank(wanted, sizes, out)
        if found is None:
            return
    else:
        _refuse_one(launch[0])
        if out is not None:
            prepare(out)
        found = launched(wanted, *launch, hear=_progress())
    click.echo(json.dumps(found) if as_json else shown(found))
    if out is not None:
        write(out, name or f"{found['stage']}-{found['ranks']}", found)


def _progress() -> Callable[[str], None] | None:
    """Where somebody watches: lines on the way, which are no results."""
    return partial(click.echo, err=True) if sys.stderr.isatty() else None


def _as_rank(wanted: Wanted, sizes: Sequence[int], out: Path | None) -> dict[str, Any] | None:
    """What was found, on rank 0. Collective."""
    from distgpt.measure.bench.allreduce import Plan, allreduce, gpu_config

    on_gpu = wanted.stage == "mpi-cuda"
    stage = opened(wanted.stage, None, gpu_config() if on_gpu else None)
    if out is not None:
        on_root(stage.comm, partial(prepare, out))
    names = [word.strip() for word in wanted.algorithms.split(",")] if wanted.algorithms else []
    # Without a folder, the program that started this one reads our output.
    say = partial(print, flush=True) if out is None else _progress()

    def hear(row: dict[str, Any]) -> None:
        if say is not None:
            say(in_words(row))

    found = allreduce(stage, names, Plan(sizes, wanted.repeats, wanted.seconds), hear)
    return found if stage.comm.rank == 0 else None


def in_words(row: dict[str, Any]) -> str:
    """A row on the way."""
    told = f"left out for lack of {row['left_out']}" if "left_out" in row else duration(row["seconds"])
    return f"{byte_count(row['bytes'])}, {row['algorithm']}: {told}"


def _refuse_one(ranks: int) -> None:
    if ranks < 2:
        raise UsageError("bench allreduce needs --ranks of at least 2: one has nobody to exchange with")


def launched(
    wanted: Wanted,
    ranks: int,
    hostfile: Path | None,
    launcher: str | None,
    hear: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """What ranks that are started for it find; `hear` is told each row on the way."""
    command = distgpt_command("bench", "allreduce", *wanted.words(), "--measure-only")

    def heard(line: str) -> None:
        if hear is not None and not line.startswith("{"):
            hear(line)

    ended = run(find_launcher(launcher, hostfile).command(ranks, command), env=unsteered(), on_line=heard)
    if ended.code:
        raise_failure(ended, f"bench allreduce on {count(ranks, 'rank')}")
    for line in reversed(ended.output.splitlines()):
        if line.startswith("{"):
            found: dict[str, Any] = json.loads(line)
            return found
    raise DataError(f"{count(ranks, 'rank')} measured and told nothing: {ended.last_words()}")


def write(folder: Path, name: str, found: dict[str, Any]) -> Path:
    """The file, and a picture beside it."""
    path = save(folder, "allreduce", name, found)
    with atomic_file(path.with_suffix(".svg")) as file:
        file.write(standalone(chart(found)).encode())
    click.echo(f"written to {path} and {path.with_suffix('.svg').name}", err=True)
    return path


def shown(found: dict[str, Any]) -> str:
    """For a terminal."""
    table = terminal_table(COLUMNS, cells(found))
    return "\n".join([heading(found), "", table, *left_out(found)])


def heading(found: dict[str, Any]) -> str:
    """What was measured, where."""
    where = "on one machine" if found["nodes"] == 1 else f"on {found['nodes']} hosts"
    return f"{count(found['ranks'], 'rank')} {where}, {found['library']}"


def left_out(found: dict[str, Any]) -> list[str]:
    """Algorithms that cannot be had here, and sizes that were not measured, each with the reason."""
    told = [f"{name} left out: {reason}" for name, reason in found["left_out"].items()]
    sizes: dict[tuple[str, str], list[str]] = {}
    for row in found["not_measured"]:
        sizes.setdefault((row["algorithm"], row["left_out"]), []).append(byte_count(row["bytes"]))
    return told + [
        f"{name} not measured for lack of {lack}: {', '.join(several)}"
        for (name, lack), several in sizes.items()
    ]


def cells(found: dict[str, Any]) -> list[list[str]]:
    return [
        [
            byte_count(row["bytes"]),
            row["algorithm"],
            duration(row["seconds"]),
            duration(row["min_seconds"]),
            f"{row['bytes_per_s'] / 1e9:.3g}",
            f"{row['bus_bytes_per_s'] / 1e9:.3g}",
        ]
        for row in found["rows"]
    ]


def byte_count(size: float) -> str:
    for unit, word in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.4g} {word}"
    return f"{size:g} B"


def duration(seconds: float) -> str:
    for unit, word in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {word}"
    return f"{seconds * 1e9:.3g} ns"


def _curves(found: dict[str, Any], key: str, factor: float) -> list[Series]:
    """One for each algorithm, over the size."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in found["rows"]:
        rows.setdefault(row["algorithm"], []).append(row)
    return [
        Series(name, [row["bytes"] for row in own], [row[key] * factor for row in own])
        for name, own in rows.items()
    ]


def chart(found: dict[str, Any]) -> LineChart:
    smallest, largest = (pick(found["rows"], key=lambda row: row["bytes"]) for pick in (min, max))
    return LineChart(
        f"Sum over {found['ranks']} ranks: time",
        f"{byte_count(smallest['bytes'])} take {duration(smallest['seconds'])}, "
        f"{byte_count(largest['bytes'])} take {duration(largest['seconds'])}.",
        "bytes",
        "microseconds",
        _curves(found, "seconds", 1e6),
        log_x=True,
        log_y=True,
    )


def bandwidth(found: dict[str, Any]) -> LineChart:
    best = max(found["rows"], key=lambda row: float(row["bus_bytes_per_s"]))
    rate = f"{best['bus_bytes_per_s'] / 1e9:.3g} GB/s"
    return LineChart(
        f"Sum over {found['ranks']} ranks: what each rank moves",
        f"At best {rate}, for {byte_count(best['bytes'])} and {best['algorithm']}.",
        "bytes",
        "bus GB/s",
        _curves(found, "bus_bytes_per_s", 1e-9),
        log_x=True,
        log_y=False,
    )
