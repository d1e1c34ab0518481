"""What commands that use a model share: options for its weights, dtype and text; the bundled sample."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import click

from distgpt.commands.options import PATH, F, parsed_size, setting_option
from distgpt.core.base.errors import command_line, print_lines
from distgpt.core.config import AUTO_DTYPE, INFERENCE_DTYPES, SETTINGS
from distgpt.core.generate.request import REQUEST_SETTINGS, Request


def dtype_option(auto: str) -> Callable[[F], F]:
    """Add --dtype, for a model that is not trained; `auto` says what that is for weights that are floats."""
    return click.option(
        "--dtype",
        type=click.Choice(INFERENCE_DTYPES),
        default=AUTO_DTYPE,
        show_default=True,
        help=f"Compute in this number format. auto: what the weights are rounded to; of others {auto}.",
    )


def model_options(command: F) -> F:
    """Add --weights, --dtype, --context, --cache-memory and --adapter: the fields of a ModelSpec."""
    weights = click.option(
        "--weights", type=PATH, help="Weights file, run, or hub:ORG/NAME; a bundled sample if left out."
    )
    context = click.option(
        "--context",
        type=click.IntRange(1),
        help="Context length, if not that of training; impossible with learned positions.",
    )
    memory = click.option(
        "--cache-memory",
        metavar="SIZE",
        callback=parsed_size,
        help="The most memory for keys and values of samples side by side. "
        "[default: 4G, or half of a rank's share of what is free]",
    )
    dtype = dtype_option("bfloat16 where that is faster, else float32")
    return weights(dtype(context(memory(adapter_option(command)))))


def adapter_option(command: F) -> F:
    """Add --adapter."""
    adapter = click.option(
        "--adapter",
        type=PATH,
        help="Merge this adapter, or that of a run with --lora-rank, into the weights.",
    )
    return adapter(command)


def request_options(defaults: Mapping[str, object], unused: Collection[str] = ()) -> Callable[[F], F]:
    """Add an option for each setting of a request, with `defaults` where they are other ones."""

    def decorate(command: F) -> F:
        for name, about in reversed(REQUEST_SETTINGS.items()):
            default = defaults.get(name, getattr(Request(), name))
            how: dict[str, Any] = {"default": default, "show_default": True}
            how |= {"is_flag": True} if about.kind is bool else {"multiple": True} if name == "stop" else {}
            if name not in unused:
                command = setting_option(name, about, **how)(command)
        return command

    return decorate


def number_options(command: F) -> F:
    """Add --dtype and --matmul, for a model that is not trained."""
    matmul = setting_option("matmul", SETTINGS["matmul"], default="auto", show_default=True)
    return dtype_option("float32")(matmul(command))


def announce_sample(weights: Path | None, rank: int, *words: str) -> None:
    """Print on rank 0 that the bundled sample writes, if it does, and how the newest run would."""
    if weights is not None or rank:
        return
    from distgpt.core.saved.weights import newest_run

    newest = newest_run(Path("runs"))
    own = f"; your newest run: {command_line(*words, '--weights', newest)}" if newest else ""
    print_lines(f"no --weights: this is the bundled sample{own}", err=True)
