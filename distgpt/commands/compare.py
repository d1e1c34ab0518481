"""distgpt compare"""

from __future__ import annotations

from pathlib import Path

import click

from distgpt.commands.help import command
from distgpt.commands.options import PATH
from distgpt.core.base.errors import DisagreementError, print_lines


@command(example="distgpt compare runs/first runs/second")
@click.argument("a", type=PATH)
@click.argument("b", type=PATH)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a page.")
def compare(a: Path, b: Path, as_json: bool) -> None:
    """Say at which step two runs part, and why.

    Reads the files of both, and computes nothing: losses, gradient norms and weights to the bit, then
    settings, text, versions, processors, ranks and threads at the step where they part. Exit code 1: they
    do. (compare-stages is for one job that it trains on several stages.)
    """
    import json

    from distgpt.proofs.comparing import compare as compare_runs
    from distgpt.proofs.comparing import page, verdict

    found = compare_runs(a, b)
    print_lines(json.dumps(found.to_json()) if as_json else page(found))
    if not found.is_same:
        raise DisagreementError(verdict(found))
