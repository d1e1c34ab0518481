"""`distgpt bench scaling` from its options to its tables, file and pictures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import click

from distgpt.config.presets import resolve
from distgpt.errors import UsageError
from distgpt.files import atomic_file
from distgpt.measure.bench.network import parse_network
from distgpt.measure.bench.results import save
from distgpt.measure.bench.scaling import MOST_RANKS
from distgpt.measure.bench.scaling_page import charts, conclusions, efficiency, tables
from distgpt.measure.bench.scaling_runs import Outlook, Setup, scaling, threads_per_rank
from distgpt.show.charts import standalone
from distgpt.show.tables import terminal_table, wrapped

STEPS = 20  # if nothing else is said: the first two are not counted


@dataclass(frozen=True, slots=True)
class Asked:
    """What the options say."""

    ranks: str
    predict: str
    modes: Sequence[str]
    threads: int | None = None
    hostfile: Path | None = None
    launcher: str | None = None
    network: str | None = None
    ranks_per_node: int = 1
    seconds: float = 10.0


def bench(
    asked: Asked, preset: str | None, flags: Mapping[str, Any], name: str | None, out: Path, as_json: bool
) -> None:
    ranks = sorted({1, *numbers("--ranks", asked.ranks)})
    chosen, run = resolve(preset, None, {"steps": STEPS, **flags}, _no_weights)
    threads = asked.threads or threads_per_rank(ranks)
    setup = Setup(run, ranks, threads, asked.modes, asked.hostfile, asked.launcher, asked.seconds)
    network = parse_network(asked.network) if asked.network else None
    outlook = Outlook(numbers("--predict", asked.predict), network, asked.ranks_per_node)
    found = {"preset": chosen, **scaling(setup, outlook, out, partial(click.echo, err=True))}
    click.echo(json.dumps(found) if as_json else shown(found))
    click.echo(f"written to {write(out, name or chosen, found)}", err=True)


def write(folder: Path, name: str, found: dict[str, Any]) -> Path:
    """The file, and pictures beside it."""
    path = save(folder, "scaling", name, found)
    for ending, chart in (*charts(found).items(), ("efficiency", efficiency(found))):
        with atomic_file(path.with_name(f"{path.stem}-{ending}.svg")) as file:
            file.write(standalone(chart).encode())
    return path


def shown(found: dict[str, Any]) -> str:
    """For a terminal."""
    lines = []
    for table in tables(found):
        lines += [terminal_table(table.columns, table.rows), wrapped(table.note), ""]
    return "\n".join([*lines, *map(wrapped, conclusions(found))])


def numbers(flag: str, text: str) -> list[int]:
    """ "1,2,4" → [1, 2, 4]"""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and 1 <= int(word) <= MOST_RANKS for word in words):
        raise UsageError(
            f"{flag} {text!r}: numbers of ranks from 1 to {MOST_RANKS:,} are needed, as in 1,2,4"
        )
    return sorted({int(word) for word in words})


def _no_weights(path: str) -> NoReturn:
    raise UsageError("bench scaling trains new models: leave --init out")
