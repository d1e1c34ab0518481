"""distgpt infer"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from distgpt.commands.help import command
from distgpt.commands.model_options import announce_sample, model_options, request_options
from distgpt.commands.options import PATH, LocaleText, stage_options
from distgpt.core.base.tables import imported
from distgpt.core.comm.agree import on_every_rank
from distgpt.core.config import DEFAULT_TEMPERATURE, GpuConfig
from distgpt.core.cpu.stages import open_stage
from distgpt.core.generate.request import REQUEST_SETTINGS, Request

DEFAULTS = {"max_new_tokens": 200, "temperature": DEFAULT_TEMPERATURE}  # where a request has others


@command(example='distgpt infer --weights runs/mine --prompt "The harbour" --n 3')
@stage_options
@click.option("--prompt", type=LocaleText(), help="Text to continue.")
@click.option("--prompt-file", type=PATH, help="File with the text to continue; -: standard input.")
@click.option(
    "--prompts",
    type=PATH,
    help='File with a prompt per line, as in {"prompt": "Once", "max_new_tokens": 9}: settings of its own.',
)
@click.option(
    "--out",
    type=PATH,
    help="File for their samples, a line each. Prompts that it has already are left out.",
)
@request_options(DEFAULTS)
@model_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of streamed text.")
def infer(
    stage: str,
    threads: int | None,
    gpu: GpuConfig,
    prompt: str | None,
    prompt_file: Path | None,
    prompts: Path | None,
    out: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Generate text from a prompt, or from a file of prompts."""
    if (prompt, prompt_file, prompts).count(None) < 2:
        raise click.UsageError("--prompt, --prompt-file and --prompts exclude each other")
    if (prompts is None) != (out is None):
        raise click.UsageError("--prompts and --out belong together")
    if prompts is not None and as_json:
        raise click.UsageError("--prompts writes JSON to --out: --json has no meaning with it")
    settings = {name: options.pop(name) for name in REQUEST_SETTINGS}
    ready = open_stage(stage, threads, gpu)
    announce_sample(options["weights"], ready.comm.rank, "infer", *(["--prompt", prompt] if prompt else []))
    request = on_every_rank(ready.comm, lambda: Request(**settings))
    from distgpt.core.generate.engine_setup import ModelSpec
    from distgpt.core.generate.single import infer_one

    spec = ModelSpec(part=options.pop("adapter"), **options)
    if prompts is not None and out is not None:
        infer_file = imported("distgpt.generation.batch:infer_file", "--prompts")
        from distgpt.show.progress import ItemProgress

        infer_file(spec, prompts, out, request, ready, ItemProgress())
    else:
        infer_one(spec, prompt if prompt_file is None else prompt_file, request, ready, as_json)
