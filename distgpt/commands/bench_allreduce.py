"""distgpt bench allreduce"""

from __future__ import annotations

from pathlib import Path

import click

from distgpt.commands.options import FiniteRange, launch_options


@click.command("allreduce")
@click.option("--stage", type=click.Choice(["mpi", "mpi-cuda"]), default="mpi", show_default=True)
@launch_options
@click.option("--sizes", metavar="BYTES,…", help="Sizes of the arrays, in this order, as in 8,64K,16M.")
@click.option("--max-bytes", default="256M", show_default=True, help="Largest size, if --sizes is left out.")
@click.option(
    "--algorithms",
    metavar="NAME,…",
    help="packed, chunked; of mpi-cuda: nccl, host, host-chunked, cuda-aware.",
)
@click.option(
    "--repeats", type=click.IntRange(1), default=30, show_default=True, help="Most repetitions of a size."
)
@click.option(
    "--seconds", type=FiniteRange(1), default=60.0, show_default=True, help="About how long, in all."
)
@click.option("--name", help="Name of the results; stage and ranks if left out.")
@click.option(
    "--out", type=click.Path(path_type=Path), default="bench", show_default=True, help="Folder for results."
)
@click.option("--json", "as_json", is_flag=True, help="Print the results as one JSON object.")
@click.option("--measure-only", is_flag=True, hidden=True)  # for the ranks that this command starts
def bench_allreduce(
    stage: str,
    ranks: int,
    hostfile: Path | None,
    launcher: str | None,
    sizes: str | None,
    max_bytes: str,
    algorithms: str | None,
    repeats: int,
    seconds: float,
    name: str | None,
    out: Path,
    as_json: bool,
    measure_only: bool,
) -> None:
    """Time the sum over ranks that every training step makes, by size and by algorithm.

    Starts the ranks itself, or measures with those of the launcher that it was started by.
    """
    from distgpt.measure.bench.allreduce_page import Wanted, bench

    bench(
        Wanted(stage, sizes, max_bytes, algorithms, repeats, seconds),
        (ranks, hostfile, launcher),
        None if measure_only else out,
        name,
        as_json or measure_only,
    )
