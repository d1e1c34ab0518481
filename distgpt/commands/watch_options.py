"""Options of `distgpt train` for a site: metrics for Prometheus and a log of JSON."""

from __future__ import annotations

import functools
from functools import partial
from pathlib import Path
from typing import Any

import click

from distgpt.commands.help import option
from distgpt.commands.options import PATH, F, together
from distgpt.core.base.tables import COMPONENTS

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
        asked: dict[str, Any] = {"textfile": metrics_textfile, "port": metrics_port}
        wanted = [partial(_made, name, value) for name, value in asked.items() if value is not None]
        wanted += [partial(_made, "tensorboard")] * bool(tensorboard)
        return command(*args, recorders=wanted, **more)

    add = together(_LOG_FORMAT, _TENSORBOARD, _TEXTFILE, _PORT)
    return add(with_recorders)  # type: ignore[return-value]


def _made(name: str, *how: Any) -> Any:
    from distgpt.core.train.lines import LISTENERS  # which loads NumPy

    return LISTENERS[name](*how)


def _begin_log(context: click.Context, param: click.Parameter, value: str) -> str:
    """Turn to JSON before other options are looked at, whose errors shall be objects, too.

    Not where another command only reads this one's options, as `distgpt submit` does: without a parent.
    """
    if value == "json" and context.parent and not context.resilient_parsing:
        write_json(context)
    return value


def write_json(context: click.Context, *how: str) -> None:
    """Let all that this command writes from now on be JSON; `how`: see callbacks/monitoring/structured.py."""
    as_json: Any = COMPONENTS["structured log"]
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
