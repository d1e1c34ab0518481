"""distgpt doctor"""

from __future__ import annotations

from pathlib import Path

import click

from distgpt.commands.options import PATH
from distgpt.errors import UsageError
from distgpt.jobs.hostfile import WRITERS
from distgpt.stages import STAGES


@click.command()
@click.option("--stage", type=click.Choice(STAGES), help="Exit with 2 if this stage cannot run here.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object with everything about every rank.")
@click.option(
    "--hostfile",
    type=PATH,
    help="Look at a job on these hosts before it is launched: exit with 2 if it would not start.",
)
@click.option("--ssh", is_flag=True, help="With --hostfile: ask each host what it has.")
@click.option("--write-for", type=click.Choice(WRITERS), help="Print --hostfile as this launcher wants it.")
def doctor(stage: str | None, as_json: bool, hostfile: Path | None, ssh: bool, write_for: str | None) -> None:
    """Report what this machine, a job under mpirun or the hosts of a hostfile can run, and what they lack."""
    if hostfile is None:
        if ssh or write_for:
            raise UsageError(f"{'--ssh' if ssh else '--write-for'} needs --hostfile FILE")
        from distgpt.doctor.report import report

        report(stage, as_json)
        return
    if stage:
        raise UsageError("--stage is about this machine, --hostfile about others: leave one of them out")
    if write_for and (ssh or as_json):
        raise UsageError("--write-for prints a hostfile and nothing else: leave out --ssh and --json")
    from distgpt.doctor import before_launch

    if write_for:
        before_launch.write(hostfile, write_for)
    else:
        before_launch.report(hostfile, ssh, as_json)
