"""distgpt bench scaling"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from distgpt.commands.options import FiniteRange, settings


@click.command("scaling")
@click.option("--ranks", default="1,2", show_default=True, metavar="N,…", help="Numbers of ranks to measure.")
@click.option("--hostfile", type=click.Path(path_type=Path), help="Hosts to start them on.")
@click.option("--launcher", help='What starts them: mpirun, or as in "srun --mpi=pmix".')
@click.option("--threads", type=click.IntRange(1), help="Per rank; cores / most ranks if left out.")
@click.option("--preset", help="Start from a named configuration; tiny if left out.")
@settings
@click.option("--strong", is_flag=True, help="Only with the whole batch the same.")
@click.option("--weak", is_flag=True, help="Only with each rank's batch the same.")
@click.option(
    "--predict", default="8,64,1024", show_default=True, metavar="N,…", help="Ranks to predict for."
)
@click.option(
    "--network", metavar="RATE,LATENCY", help="Predict for hosts on another one, as in 1gbit,100us."
)
@click.option(
    "--ranks-per-node", type=click.IntRange(1), default=1, show_default=True, help="With --network."
)
@click.option(
    "--seconds", type=FiniteRange(1), default=10.0, show_default=True, help="About how long for the sums."
)
@click.option("--name", help="Name of the results; the preset's if left out.")
@click.option(
    "--out", type=click.Path(path_type=Path), default="bench", show_default=True, help="Folder for results."
)
@click.option("--json", "as_json", is_flag=True, help="Print the results as one JSON object.")
def bench_scaling(
    ranks: str,
    hostfile: Path | None,
    launcher: str | None,
    threads: int | None,
    preset: str | None,
    strong: bool,
    weak: bool,
    predict: str,
    network: str | None,
    ranks_per_node: int,
    seconds: float,
    name: str | None,
    out: Path,
    as_json: bool,
    **flags: Any,
) -> None:
    """Train on 1, 2, … ranks, and predict what 8, 64 or 1,024 would do.

    Strong scaling cuts one batch into more parts; weak scaling gives every rank a batch of that size.
    Predictions come from an α–β model that is fitted to sums over these very ranks.
    """
    from distgpt.measure.bench.scaling_command import Asked, bench

    given = {key: value for key, value in flags.items() if value is not None}
    modes = [mode for mode, chosen in (("strong", strong), ("weak", weak)) if chosen] or ["strong", "weak"]
    asked = Asked(ranks, predict, modes, threads, hostfile, launcher, network, ranks_per_node, seconds)
    bench(asked, preset, given, name, out, as_json)
