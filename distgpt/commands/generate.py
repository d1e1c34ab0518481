"""distgpt infer, chat, serve and eval, and the options of commands that use a model"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import click

from distgpt.commands.help import command
from distgpt.commands.options import (
    PATH,
    POSITIVE,
    SIZE,
    F,
    json_option,
    setting_option,
    stage_options,
    texts,
    together,
)
from distgpt.core.base.errors import UsageError, first_line, print_lines
from distgpt.core.comm.agree import on_every_rank
from distgpt.core.config import (
    AUTO_DTYPE,
    DEFAULT_TEMPERATURE,
    INFERENCE_DTYPES,
    SETTINGS,
    GpuConfig,
    Setting,
)
from distgpt.core.cpu.stages import open_stage
from distgpt.core.generate.request import REQUEST_SETTINGS, Request
from distgpt.inference.serving.limits import LIMITS, Limits, ListenOn


def dtype_option(auto: str) -> Callable[[F], F]:
    """Add --dtype for a model in inference. `auto` describes its default for unquantized weights."""
    of = f"Compute in this number format. auto: the format the weights are rounded to; otherwise {auto}."
    return click.option("--dtype", type=click.Choice(INFERENCE_DTYPES), default=AUTO_DTYPE, help=of)


adapter_option = click.option("--adapter", type=PATH, help="Adapter to merge, or its run.")

# The fields of ModelSpec.
model_options = together(
    click.option(
        "--weights", type=PATH, help="Weights file, run, .gguf, or hub:ORG/NAME. [default: a sample]"
    ),
    dtype_option("bfloat16 if it is faster, float32 if not"),
    click.option(
        "--context",
        type=POSITIVE,
        help="Context length in tokens, except with learned positions. [default: the model's]",
    ),
    click.option("--cache-memory", type=SIZE, help="KV cache limit. [default: half of free memory]"),
    adapter_option,
)


def request_options(unused: Collection[str] = (), **defaults: object) -> Callable[[F], F]:
    """Add an option for each setting of a request. `defaults` override the usual defaults."""

    def added(name: str, about: Setting) -> Callable[[F], F]:
        how: dict[str, Any] = {"default": defaults.get(name, getattr(Request(), name))}
        how |= {"is_flag": True} if about.kind is bool else {"multiple": True} if name == "stop" else {}
        return setting_option(name, about, **how)

    return together(*(added(*known) for known in REQUEST_SETTINGS.items() if known[0] not in unused))


def announce_sample(weights: Path | None, rank: int) -> None:
    """Print on rank 0 that the bundled sample is used, if it is."""
    if weights is None and rank == 0:
        print_lines("no --weights: using the bundled sample", err=True)


@command(example='distgpt infer --weights runs/mine --prompt "The harbour" --n 3')
@stage_options
@click.option("--prompt", help="Prompt.")
@click.option("--prompt-file", type=PATH, help="File with the prompt; -: standard input.")
@click.option(
    "--prompts",
    type=PATH,
    help='File with a JSON object per line, such as {"prompt": "Once", "max_new_tokens": 9}.',
)
@click.option("--out", type=PATH, help="Output file of --prompts. An existing one is resumed.")
@request_options(max_new_tokens=200, temperature=DEFAULT_TEMPERATURE)
@model_options
@json_option
def infer(
    stage: str, threads: int | None, gpu: GpuConfig, prompts: Path | None, out: Path | None, **options: Any
) -> None:
    """Generate text from a prompt, or from a file of prompts."""
    prompt, prompt_file, as_json = (options.pop(name) for name in ("prompt", "prompt_file", "as_json"))
    if (prompt, prompt_file, prompts).count(None) < 2:
        raise click.UsageError("--prompt, --prompt-file and --prompts cannot be combined")
    if (prompts is None) != (out is None):
        raise click.UsageError("--prompts and --out must be set together")
    if prompts is not None and as_json:
        raise click.UsageError("--prompts and --json cannot be combined: --prompts writes JSON to --out")
    settings = {name: options.pop(name) for name in REQUEST_SETTINGS}
    ready = open_stage(stage, threads, gpu)
    announce_sample(options["weights"], ready.comm.rank)
    request = on_every_rank(ready.comm, lambda: Request(**settings))
    from distgpt.core.generate.engine_setup import ModelSpec
    from distgpt.core.generate.single import infer_one

    spec = ModelSpec(part=options.pop("adapter"), **options)
    if prompts is not None and out is not None:
        from distgpt.inference.generation.batch import infer_file
        from distgpt.show.display import ItemProgress

        infer_file(spec, prompts, out, request, ready, ItemProgress())
    else:
        infer_one(spec, prompt if prompt_file is None else prompt_file, request, ready, as_json)


UNUSED = ("n", "logprobs", "prompt_logprobs", "overflow")
UNTAUGHT = (
    "this model was not trained to chat and continues text instead; to train it, use distgpt tune"
    " (distgpt help tuning)"
)


@command(example='distgpt chat --weights model.safetensors --system "Be brief."')
@stage_options
@click.option("--system", default="", show_default=False, help="System prompt.")
@request_options(UNUSED, max_new_tokens=512, temperature=DEFAULT_TEMPERATURE)
@model_options
@click.option("--speed", is_flag=True, help="Print the speed of each answer.")
def chat(stage: str, threads: int | None, gpu: GpuConfig, system: str, speed: bool, **options: Any) -> None:
    """Chat with a model in a terminal, or through a pipe with one message per line.

    Prompts use the model's chat template, or a simple one if it has none.
    """
    request = Request(**{name: options.pop(name) for name in REQUEST_SETTINGS if name not in UNUSED})
    ready = open_stage(stage, threads, gpu)
    announce_sample(options["weights"], ready.comm.rank)
    from distgpt.core.generate.engine_setup import SAMPLE, ModelSpec
    from distgpt.corpora.chats.format import ChatFormat, was_tuned_on_chats
    from distgpt.inference.generation.chat import Chat, Conversation

    loaded = ModelSpec(part=options.pop("adapter"), **options).load(ready)
    talk = ChatFormat(loaded.tokenizer)
    if not (talk.is_taught or was_tuned_on_chats(loaded.files)):
        print_lines(UNTAUGHT, err=True)
    engine = loaded.engine(loaded.slots(1, request.lookup))
    name, context = (options["weights"] or Path(SAMPLE)).name, loaded.model.config.seq_len
    greeting = f"{name}, context {context:,}, {talk.describe()}; /help lists commands"
    Chat(Conversation(engine, talk, request, context, system), speed, greeting).run()


def _limit_option(name: str, about: Setting) -> Callable[[F], F]:
    as_size: dict[str, Any] = {"type": SIZE, "default": "1M"} if name == "body" else {}
    return setting_option(name, about, **{"default": getattr(Limits(), name), **as_size})


@command(example="distgpt serve --weights runs/mine --port 8000")
@stage_options
@click.option("--name", help="Model name in the API. [default: the file name]")
@click.option("--host", default="127.0.0.1", help="Address to listen on; 0.0.0.0: all interfaces.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, help="Port; 0: a free one.")
@click.option("--api-key", envvar="DISTGPT_API_KEY", show_envvar=True, help="Key that clients must send.")
@click.option(
    "--allow-origin", "origins", multiple=True, metavar="ORIGIN", help="Allow web pages of this origin."
)
@click.option(
    "--proxy", "proxies", multiple=True, metavar="ADDRESS", help="Trust client addresses from this proxy."
)
@click.option("--slots", type=POSITIVE, default=32, help="Maximum number of concurrent sequences.")
@together(*(_limit_option(*known) for known in LIMITS.items()))
@model_options
@click.option("--log", type=click.Choice(("quiet", "requests", "prompts")), default="requests")
def serve(
    stage: str, threads: int | None, gpu: GpuConfig, weights: Path | None, name: str | None, **options: Any
) -> None:
    """Serve OpenAI-compatible completions and chats over HTTP, with a web page to try them."""
    try:
        from distgpt.inference.serving.server import Server, bound, checked_key, checked_proxies
    except ImportError as error:
        needs = f"Starlette, uvicorn and prometheus-client ({first_line(error)})"
        raise UsageError(f"serve requires {needs}: pip install 'distgpt[serve]'") from None
    from distgpt.core.generate.engine_setup import SAMPLE, ModelSpec

    most, limits = options.pop("slots"), Limits(**{name: options.pop(name) for name in LIMITS})
    where = {key: options.pop(key) for key in ("host", "port", "origins", "log")}
    key, proxies = checked_key(options.pop("api_key")), checked_proxies(options.pop("proxies"))
    listen_on = ListenOn(limits=limits, key=key, proxies=proxies, **where)
    shown = name or (weights or Path(SAMPLE)).absolute().name.removesuffix(".safetensors")
    spec = ModelSpec(weights, part=options.pop("adapter"), **options)
    ready = open_stage(stage, threads, gpu)
    announce_sample(weights, ready.comm.rank)
    listener = bound(listen_on.host, listen_on.port)
    loaded = spec.load(ready)
    side_by_side = loaded.slots(most, lookup=0)
    if ready.on_gpu:
        from distgpt.inference.decoding.batched import rehearse_together

        rehearse_together(side_by_side)
    Server(loaded, side_by_side, shown, listen_on, listener).serve_model()


# The benchmarks of inference/evaluation/questions.py, and the file for each option.
BENCHMARKS = {
    "hellaswag": "HellaSwag file, such as hellaswag_val.jsonl.",
    "arc_easy": "ARC Easy file, such as ARC-Easy-Test.jsonl.",
    "arc_challenge": "ARC Challenge file, such as ARC-Challenge-Test.jsonl.",
    "piqa": "PIQA file, such as valid.jsonl, next to valid-labels.lst.",
    "winogrande": "WinoGrande file, such as dev.jsonl.",
    "lambada": "LAMBADA file, one document or JSON object per line.",
    "mmlu": "MMLU directory with dev/ and test/.",
}


@command(name="eval", example="distgpt eval --weights runs/mine --val held-out.txt")
@stage_options
@click.option("--weights", type=PATH, required=True, help="Weights file, run, .gguf, or hub:ORG/NAME.")
@adapter_option
@click.option("--val", shell_complete=texts, help="Text to evaluate on, or shards with a validation part.")
@together(
    *(click.option(f"--{name.replace('_', '-')}", type=PATH, help=of) for name, of in BENCHMARKS.items())
)
@click.option("--core", type=PATH, help="Directory of the CORE score's files, with core.yaml.")
@click.option("--chats", is_flag=True, help="Read --val as chats, like tune, and evaluate only the answers.")
@click.option("--val-tokens", type=click.IntRange(0), default=0, help="Tokens of --val to use; 0: all.")
@click.option(
    "--context",
    type=POSITIVE,
    help="Context length in tokens, except with learned positions. [default: the model's]",
)
@dtype_option("float32")
@setting_option("matmul", SETTINGS["matmul"], default="auto")
@json_option
def eval(stage: str, threads: int | None, gpu: GpuConfig, as_json: bool, **options: Any) -> None:
    """Evaluate a model on text, shards, or benchmark files as published by their authors."""
    from distgpt.inference.evaluation.evaluate import evaluate, page
    from distgpt.show.display import ItemProgress

    benchmarks = {name: path for name in BENCHMARKS if (path := options.pop(name)) is not None}
    if options["val"] is None and options["core"] is None and not benchmarks:
        raise UsageError("nothing to evaluate; pass --val, or a benchmark such as --hellaswag")
    ready = open_stage(stage, threads, gpu)
    result = evaluate(ready, benchmarks=benchmarks, **options, progress=ItemProgress("sequences"))
    if ready.comm.rank == 0 and as_json:
        print(json.dumps(result, allow_nan=False))
    elif ready.comm.rank == 0:
        print_lines(page(result))
