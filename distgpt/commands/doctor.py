"""distgpt doctor"""

from __future__ import annotations

import click

from distgpt.machine.stages import STAGES


@click.command()
@click.option("--stage", type=click.Choice(STAGES), help="Exit with 2 if this stage cannot run here.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object with everything about every rank.")
def doctor(stage: str | None, as_json: bool) -> None:
    """Report what this machine, or a job under mpirun, can run, and what to install for the rest."""
    from distgpt.machine.doctor import report

    report(stage, as_json)
