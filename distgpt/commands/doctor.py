"""distgpt doctor"""

from __future__ import annotations

from pathlib import Path

import click

from distgpt.commands.help import command
from distgpt.commands.options import PATH
from distgpt.core.base.errors import UsageError
from distgpt.core.config import STAGES


@command(example="distgpt doctor --hostfile hostfile --ssh")
@click.option("--stage", type=click.Choice(STAGES), help="Exit with 2 if this stage cannot run here.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with everything known.")
@click.option(
    "--hostfile", type=PATH, help="Check the hosts of a job before its launch; exit with 2 on errors."
)
@click.option("--ssh", is_flag=True, help="With --hostfile: ask each host over ssh what it has.")
@click.option("--caches", is_flag=True, help="Show what distgpt keeps on disk between starts, and where.")
@click.option(
    "--empty",
    type=click.Choice(("compiled", "all")),
    help="With --caches: remove what is compiled, or downloads too, also while other processes run.",
)
def doctor(
    stage: str | None, as_json: bool, hostfile: Path | None, ssh: bool, caches: bool, empty: str | None
) -> None:
    """Report what this machine, a job under mpirun or the hosts of a hostfile can run, and what they lack."""
    if empty and not caches:
        raise UsageError("--empty needs --caches")
    if caches:
        if stage or hostfile or ssh:
            raise UsageError("--caches is a report of its own: leave --stage, --hostfile and --ssh out")
        from distgpt.measure.doctor.caches import report_caches

        report_caches(empty or "", as_json)
        return
    if hostfile is None:
        if ssh:
            raise UsageError("--ssh needs --hostfile FILE")
        from distgpt.measure.doctor.report import report

        report(stage, as_json)
        return
    if stage:
        raise UsageError("--stage is about this machine, --hostfile about others: leave one of them out")
    from distgpt.measure.doctor import hosts

    hosts.report(hostfile, ssh, as_json)
