"""distgpt serve"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from distgpt.commands.help import command
from distgpt.commands.model_options import announce_sample, model_options
from distgpt.commands.options import LocaleText, parsed_size, setting_option, stage_options
from distgpt.core.base.errors import UsageError, first_line
from distgpt.core.base.tables import lacks_component
from distgpt.core.config import GpuConfig
from distgpt.core.cpu.stages import open_stage
from distgpt.serving.limits import LIMITS, Limits, ListenOn


def limit_options(command: Any) -> Any:
    """Add an option for each limit that is one."""
    for name, about in reversed(LIMITS.items()):
        how: dict[str, Any] = {"default": getattr(Limits(), name), "show_default": True}
        if name == "body":
            how = {"type": str, "default": "1M", "metavar": "SIZE", "callback": parsed_size}
        command = setting_option(name, about, **how)(command)
    return command


@command(example="distgpt serve --weights runs/mine --port 8000")
@stage_options
@click.option("--name", type=LocaleText(), help="The model's name for clients; that of the file if left out.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0: all.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="Port; 0: pick a free one."
)
@click.option(
    "--api-key",
    envvar="DISTGPT_API_KEY",
    show_envvar=True,
    help="What clients must send as Authorization: Bearer KEY. In the environment nobody else sees it.",
)
@click.option(
    "--allow-origin",
    "origins",
    multiple=True,
    metavar="ORIGIN",
    help="Let pages of this site ask too, as https://example.org; may be repeated.",
)
@click.option(
    "--proxy",
    "proxies",
    multiple=True,
    metavar="ADDRESS",
    help="Log the addresses that X-Forwarded-For of this proxy, or network, gives; may be repeated.",
)
@click.option(
    "--lanes",
    type=click.IntRange(1),
    default=32,
    show_default=True,
    help="Sequences generated at the same time.",
)
@limit_options
@model_options
@click.option(
    "--log",
    type=click.Choice(("quiet", "requests", "prompts")),
    default="requests",
    show_default=True,
    help="A line for each request, with its prompts or without.",
)
def serve(
    stage: str,
    threads: int | None,
    gpu: GpuConfig,
    weights: Path | None,
    name: str | None,
    **options: Any,
) -> None:
    """Answer requests over HTTP as OpenAI's /v1/completions and its chats do, with a page to try it."""
    try:
        from distgpt.serving.server import Server, bound, checked_key, checked_proxies
    except ImportError as error:
        if lacks_component(error):
            raise
        raise UsageError(
            f"serve needs Starlette and uvicorn ({first_line(error)}): pip install 'distgpt[serve]'"
        ) from None
    from distgpt.core.generate.engine_setup import SAMPLE, ModelSpec

    lanes, limits = options.pop("lanes"), Limits(**{name: options.pop(name) for name in LIMITS})
    where = {key: options.pop(key) for key in ("host", "port", "origins", "log")}
    key, proxies = checked_key(options.pop("api_key")), checked_proxies(options.pop("proxies"))
    listen_on = ListenOn(limits=limits, key=key, proxies=proxies, **where)
    shown = name or (weights or Path(SAMPLE)).absolute().name.removesuffix(".safetensors")
    spec = ModelSpec(weights, part=options.pop("adapter"), **options)
    ready = open_stage(stage, threads, gpu)
    announce_sample(weights, ready.comm.rank, "serve")
    listener = bound(listen_on.host, listen_on.port)
    loaded = spec.load(ready)
    side_by_side = loaded.slots(lanes, lookup=0)
    if ready.on_gpu:
        from distgpt.decoding.batched import rehearse_together

        rehearse_together(side_by_side)
    Server(loaded, side_by_side, shown, listen_on, listener).run()
