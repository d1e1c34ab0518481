"""distgpt bench report"""

from __future__ import annotations

from pathlib import Path

import click


@click.command("report")
@click.argument("folder", metavar="DIR", default=Path("bench"), type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="The page; DIR/report.html if left out.")
def bench_report(folder: Path, out: Path | None) -> None:
    """Make one HTML page of all results in DIR.

    It needs no network and no scripts: a file to open, to print or to send.
    """
    from distgpt.measure.bench.report import write

    click.echo(write(folder, out))
