"""distgpt bench"""

from __future__ import annotations

import click

from distgpt.comm.launched import launched_as
from distgpt.commands.lazy import LazyGroup
from distgpt.errors import UsageError

NAMES = ("forward", "train", "allreduce", "scaling", "report")
# Of these, a launcher may start several processes; of the others, as what they start themselves to measure.
TOGETHER = ("forward", "allreduce")
MEASURING = "--measure-peak"


class _Bench(LazyGroup):
    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, command, rest = super().resolve_command(context, args)
        if name not in TOGETHER and MEASURING not in rest and launched_as() > 1:
            raise UsageError(
                f"distgpt bench {name} is for one process, and was launched as {launched_as()}: "
                "run it without a launcher"
            )
        return name, command, rest


@click.group(cls=_Bench, names=NAMES, prefix="bench_")
def bench() -> None:
    """Measure this machine: passes, training, sums over ranks, scaling."""
