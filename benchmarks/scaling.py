"""Train on 1, 2, … ranks with the same total batch (strong scaling) and the same batch per rank (weak).

    python benchmarks/scaling.py --ranks 1,2

All runs have the same number of threads per rank. Accepts the options of `distgpt train`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import click
from charts import LineChart, Series
from record import end_with_errors

from distgpt.cluster.jobs.launchers import find_launcher
from distgpt.commands.bench import result_options, to_options
from distgpt.commands.options import settings
from distgpt.core.base.errors import UsageError
from distgpt.core.base.formatting import count, duration
from distgpt.core.comm.resources import usable_cores
from distgpt.core.config import RunConfig
from distgpt.core.config.run_request import asked_for, resolve
from distgpt.measure.jobs import BenchOptions, say, train
from distgpt.show.page import Block, Column, tabulated

MODES = ("strong", "weak")  # strong: same total batch; weak: same batch per rank
STEPS = 20  # default of --steps; the first two are warm-up
COLUMNS: tuple[Column, ...] = (
    ("scaling", "mode", str),
    ("ranks", "", lambda row: f"{row['ranks']}{'*' if row['shares_cores'] else ''}"),
    ("batch", "batch", "{:,}".format),
    ("step", "step_s", duration),
    ("tokens/s", "tokens_per_s", "{:,.0f}".format),
    ("speed-up", "speedup", "{:.2f}".format),
    ("efficiency", "efficiency", "{:.0%}".format),
)


@dataclass(frozen=True, slots=True)
class ScalingOptions(BenchOptions):
    """The command line. `settings` are options of `distgpt train`."""

    measured_ranks: str = "1,2"
    threads: int | None = None
    preset: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


@click.command("scaling.py", help=__doc__, context_settings={"show_default": True})
@click.option(
    *("--ranks", "measured_ranks"), default="1,2", metavar="N,…", help="Numbers of ranks to measure."
)
@click.option("--hostfile", type=click.Path(path_type=Path), help="Hosts to start them on.")
@click.option("--launcher", help='Launcher, such as mpirun or "srun --mpi=pmix".')
@click.option("--threads", type=click.IntRange(1), help="Per rank. Default: cores / most ranks.")
@click.option("--preset", help="Start from a named configuration. Default: tiny.")
@settings
@result_options(name="the preset's")
def main(**given: Any) -> None:
    options = to_options(ScalingOptions, given)
    if "init" in options.settings:
        raise UsageError("scaling.py trains new models: leave --init out")
    request = asked_for({"steps": STEPS, **options.settings}, options.preset)
    found = {"preset": request.name, **scaling(options, resolve(request), say)}
    options.finish("scaling", request.name, found, blocks(found))


def scaling(options: ScalingOptions, run: RunConfig, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure all rows of the result file.

    The runs are stored temporarily in `options.out`, which all hosts must share.
    """
    words, batch, cores = options.measured_ranks, run.train.batch_size, len(usable_cores())
    if not all(word.strip().isdecimal() and int(word) for word in words.split(",")):
        raise UsageError(f"--ranks {words!r} must be numbers of ranks, such as 1,2,4")
    ranks = sorted({1, *map(int, words.split(","))})
    if uneven := [n for n in ranks if batch % n]:
        raise UsageError(f"a batch of {count(batch, 'sequence')} cannot be cut for {uneven[0]} ranks")
    threads = options.threads or max(1, cores // max(ranks))
    launcher = find_launcher(options.launcher, options.hostfile)
    is_one_host = options.launcher is None and options.hostfile is None
    options.prepare()
    measured = []
    with tempfile.TemporaryDirectory(prefix=".runs-", dir=options.out.resolve()) as scratch:

        @cache
        def summary(ranks: int, batch: int) -> dict[str, Any]:
            what = f"training on {count(ranks, 'rank')}"
            say(f"{what}, {count(batch, 'sequence')} a step")
            words = ["--stage", "mpi" if ranks > 1 else "serial", "--threads", threads]
            config, out = run.with_values({"batch_size": batch}), Path(scratch, f"{ranks}-{batch}")
            return train(what, config, out, words, launcher if ranks > 1 else None, ranks)

        alone = summary(1, batch)
        for mode in MODES:
            for n in ranks:
                weight = 1 if mode == "strong" else n
                step = summary(n, batch * weight)["step_s_median"]
                speedup = weight * alone["step_s_median"] / step
                row = {"mode": mode, "ranks": n, "batch": batch * weight, "step_s": step, "speedup": speedup}
                row["tokens_per_s"] = weight * batch * run.model.seq_len / step
                row["efficiency"] = speedup / n
                row["shares_cores"] = is_one_host and n * threads > cores
                measured.append(row)
    return {
        "stage": "mpi",
        "threads": threads,
        "cores": cores,
        "batch_size": batch,
        "seq_len": run.model.seq_len,
        "parameters": alone["parameters"],
        "dtype": run.train.dtype,
        "measured": measured,
    }


def blocks(found: dict[str, Any]) -> list[Block]:
    what = f"{found['preset']}: {count(found['parameters'], 'parameter')}, {found['dtype']}"
    note = f"{count(found['threads'], 'thread')} per rank in every run."
    if any(row["shares_cores"] for row in found["measured"]):
        note += f" *: more threads than the {count(found['cores'], 'core')}, which is not scaling."
    return [
        f"{what}, {found['batch_size']:,} × {found['seq_len']:,} tokens.",
        *all_charts(found).values(),
        tabulated(COLUMNS, found["measured"], "Measured", note),
    ]


def all_charts(found: dict[str, Any]) -> dict[str, LineChart]:
    """Return charts of tokens per second by ranks for each kind of scaling, by file name suffix."""
    charts = {}
    for mode in MODES:
        rows = [row for row in found["measured"] if row["mode"] == mode and not row["shares_cores"]]
        if not rows:
            continue
        alone, most, last = rows[0]["tokens_per_s"], rows[-1]["ranks"], rows[-1]
        series = [
            Series("measured", [(row["ranks"], row["tokens_per_s"]) for row in rows]),
            Series("ideal", [(1, alone), (most, alone * most)], dashed=True),
        ]
        title = {"strong": "Strong scaling with one batch", "weak": "Weak scaling: a batch for each rank"}[
            mode
        ]
        text = f"{last['speedup']:.2f} times one rank's speed on {count(most, 'rank')}."
        charts[f"-{mode}"] = LineChart(
            title, text, "ranks", "tokens per second", series, log_x=True, log_y=True
        )
    return charts


if __name__ == "__main__":
    end_with_errors(main)
