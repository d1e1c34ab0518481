"""distgpt infer"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from distgpt.commands.options import PATH, Typed, dtype_option, stage_options
from distgpt.config import DEFAULT_TEMPERATURE, GpuConfig
from distgpt.formatting import parse_size
from distgpt.stages import open_stage

# The settings of a request, which a line of --prompts may have too, by the same names with _ for -.
_SETTINGS: dict[str, dict[str, Any]] = {
    "--max-new-tokens": {"type": click.IntRange(0), "default": 200, "help": "Tokens to generate."},
    "--temperature": {
        "type": float,
        "default": DEFAULT_TEMPERATURE,
        "help": "Sampling temperature; 0: greedy, the likeliest token each time.",
    },
    "--top-k": {"type": int, "default": 0, "help": "Sample from the k likeliest tokens; 0: from all."},
    "--top-p": {
        "type": float,
        "default": 1.0,
        "help": "Sample from the likeliest tokens that add up to p.",
    },
    "--min-p": {
        "type": float,
        "default": 0.0,
        "help": "Sample from tokens at least p times as likely as the likeliest.",
    },
    "--repetition-penalty": {
        "type": float,
        "default": 1.0,
        "help": "What the scores of tokens that came before are divided by.",
    },
    "--seed": {"type": click.IntRange(0), "default": 0, "help": "Seed of the sampling."},
    "--stop": {
        "type": Typed(),
        "multiple": True,
        "help": "End before this text, which is not printed; may be repeated.",
    },
    "--n": {"type": click.IntRange(1), "default": 1, "help": "Samples of each prompt."},
    "--logprobs": {
        "type": click.IntRange(0),
        "help": "Also the log-probability of each token, and of so many of the likeliest.",
    },
}
# Only handed on if it is asked for, so that answers of earlier versions still belong to their prompts.
_OF_PROMPT = {
    "--prompt-logprobs": {"is_flag": True, "help": "With --logprobs: those of the prompt's tokens too."}
}
_HOW: dict[str, dict[str, Any]] = {
    "--overflow": {
        "type": click.Choice(("slide", "shift", "stop")),
        "default": "slide",
        "help": "Past the context: see all that fits, computed anew for every token; drop the older half "
        "(what is left is computed anew once, but with RoPE or no positions moved); or end.",
    },
    "--lookup": {
        "type": click.IntRange(0),
        "default": 0,
        "help": "Guess so many tokens, at most 64, from what followed the last ones before, and check them "
        "at once: the same text, faster where it repeats.",
    },
}


def _options(of: dict[str, dict[str, Any]]) -> Callable[[Any], Any]:
    def decorate(command: Any) -> Any:
        for flag, how in reversed(of.items()):
            shown = "default" in how and flag not in ("--top-k", "--top-p", "--min-p", "--repetition-penalty")
            command = click.option(flag, show_default=shown, **how)(command)
        return command

    return decorate


def _bytes(context: click.Context, param: click.Parameter, value: str | None) -> int | None:
    return None if value is None else parse_size(value)


@click.command()
@stage_options
@click.option("--weights", type=PATH, help="Weights file; a bundled sample if left out.")
@click.option("--prompt", type=Typed(), help="Text to continue.")
@click.option("--prompt-file", type=PATH, help="File with the text to continue; -: standard input.")
@click.option(
    "--prompts",
    type=PATH,
    help='File with a prompt per line, as in {"prompt": "Once", "max_new_tokens": 9}: settings of its own.',
)
@click.option("--out", type=PATH, help="Where their samples go, a line for each prompt; is resumed.")
@_options(_SETTINGS)
@_options(_OF_PROMPT)
@_options(_HOW)
@dtype_option
@click.option(
    "--context",
    type=click.IntRange(1),
    help="Context length, if not that of training; impossible with learned positions.",
)
@click.option(
    "--cache-memory",
    metavar="SIZE",
    callback=_bytes,
    help="The most memory for keys and values of samples side by side. "
    "[default: 4G, or half of a rank's share of what is free]",
)
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
    names = (flag[2:].replace("-", "_") for flag in (*_SETTINGS, *_HOW))
    settings = {name: options.pop(name) for name in names}
    if options.pop("prompt_logprobs"):
        settings["prompt_logprobs"] = True
    from distgpt.inference.manyprompts import infer_file
    from distgpt.inference.oneprompt import infer_one
    from distgpt.inference.source import Source

    source, ready = Source(**options), open_stage(stage, threads, gpu)
    if prompts is not None and out is not None:
        from distgpt.show.answering import Answering

        infer_file(source, prompts, out, settings, ready, Answering())
    else:
        infer_one(source, prompt if prompt_file is None else prompt_file, settings, ready, as_json)
