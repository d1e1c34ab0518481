"""Options of `distgpt train` for a site: metrics for Prometheus and a log of JSON."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from distgpt.commands.help import option
from distgpt.commands.options import PATH, F, together

if TYPE_CHECKING:
    from distgpt.core.comm.api import Comm
    from distgpt.core.train.lines import Closing, Listeners

_display = partial(option, group="display")


def watch_options(command: F) -> F:
    """Add them. What records a run arrives as the argument `recorders`: functions, called on rank 0 alone."""

    @functools.wraps(command)
    def with_recorders(
        *args: object,
        tensorboard: bool,
        metrics_textfile: Path | None,
        metrics_port: str | None,
        **more: Any,
    ) -> object:
        recorders: list[Callable[[], Closing]] = []
        if metrics_textfile is not None:
            from distgpt.callbacks.monitoring.exporter import Textfile

            recorders.append(partial(Textfile, metrics_textfile))
        if metrics_port is not None:
            from distgpt.callbacks.monitoring.port import Port

            recorders.append(partial(Port, metrics_port))
        if tensorboard:
            from distgpt.show.display import TensorBoard

            recorders.append(TensorBoard)
        return command(*args, recorders=recorders, **more)

    add = together(_LOG_FORMAT, _TENSORBOARD, _TEXTFILE, _PORT)
    return add(with_recorders)  # type: ignore[return-value]


def listeners(
    comm: Comm, shown: str, log_lines: float | None, recorders: Iterable[Callable[[], Closing]]
) -> Listeners:
    """Return the listeners of a run on rank 0: its display, and what `recorders` make. Collective.

    `shown` is json, live, plain, or auto: live for a single process on a terminal. Some launchers give their
    ranks a terminal that nobody looks at. `log_lines`: seconds between lines.
    """
    from distgpt.core.comm.agree import on_every_rank
    from distgpt.core.train.lines import Lines, Listeners

    def chosen() -> list[Closing]:
        if comm.rank:
            return []
        display: Closing
        if shown == "json":
            from distgpt.callbacks.monitoring.structured import JsonLines

            display = JsonLines(log_lines)
        elif shown == "live" or (shown == "auto" and comm.size == 1 and sys.stdout.isatty()):
            from distgpt.show.display import Live

            display = Live(log_lines)
        else:
            display = Lines(log_lines)
        return [display, *(make() for make in recorders)]

    return Listeners(*on_every_rank(comm, chosen))


def _begin_log(context: click.Context, param: click.Parameter, value: str) -> str:
    """Turn to JSON before other options are looked at, whose errors shall be objects, too.

    Not where another command only reads this one's options, as `distgpt submit` does: without a parent.
    """
    if value == "json" and context.parent and not context.resilient_parsing:
        write_json(context)
    return value


def write_json(context: click.Context, *how: str) -> None:
    """Let all that this command writes from now on be JSON; `how`: see callbacks/monitoring/structured.py."""
    from distgpt.callbacks.monitoring.structured import as_json

    context.find_root().with_resource(as_json(*how))


_LOG_FORMAT = _display(
    "--log-format",
    type=click.Choice(["plain", "json"]),
    default="plain",
    show_default=True,
    is_eager=True,
    callback=_begin_log,
    help="Write lines for people, or (json) an object for each, with time, level, host, rank and event.",
)
_TENSORBOARD = _display(
    "--tensorboard", is_flag=True, help="Also write TensorBoard events into the run directory."
)
_TEXTFILE = _display(
    "--metrics-textfile",
    type=PATH,
    help="Also write metrics for Prometheus into this file (.prom), or a file of its own in this folder, for"
    " node_exporter, every 15 s.",
)
_PORT = _display(
    "--metrics-port",
    metavar="[ADDRESS:]PORT",
    help="Also answer Prometheus at /metrics of this port on rank 0's host. Without an address: to 127.0.0.1"
    " alone; 0.0.0.0: on all.",
)
