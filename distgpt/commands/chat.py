"""distgpt chat"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from distgpt.commands.help import command
from distgpt.commands.model_options import announce_sample, model_options, request_options
from distgpt.commands.options import LocaleText, stage_options
from distgpt.core.base.errors import print_lines
from distgpt.core.config import DEFAULT_TEMPERATURE, GpuConfig
from distgpt.core.cpu.stages import open_stage
from distgpt.core.generate.request import REQUEST_SETTINGS, Request

DEFAULTS = {"max_new_tokens": 512, "temperature": DEFAULT_TEMPERATURE}
UNUSED = ("n", "logprobs", "prompt_logprobs", "overflow")
UNTAUGHT = (
    "this model was never taught to chat, it continues texts like those it has read: distgpt tune teaches it"
    " answers (distgpt help tuning)"
)


@command(example='distgpt chat --weights model.safetensors --system "Be brief."')
@stage_options
@click.option("--system", default="", type=LocaleText(), help="What the model is told before all turns.")
@request_options(DEFAULTS, UNUSED)
@model_options
@click.option("--speed", is_flag=True, help="After each answer say how long it took.")
def chat(stage: str, threads: int | None, gpu: GpuConfig, system: str, speed: bool, **options: Any) -> None:
    """Chat with a model, in a terminal or through a pipe, a message in each line.

    The model's own chat template makes a prompt of the turns, or a simple one where it has none.
    """
    request = Request(**{name: options.pop(name) for name in REQUEST_SETTINGS if name not in UNUSED})
    ready = open_stage(stage, threads, gpu)
    announce_sample(options["weights"], ready.comm.rank, "chat")
    from distgpt.core.generate.engine_setup import SAMPLE, ModelSpec
    from distgpt.generation.chat import Conversation
    from distgpt.generation.chat_terminal import Chat
    from distgpt.texts.chats.format import ChatFormat, was_tuned_on_chats

    loaded = ModelSpec(part=options.pop("adapter"), **options).load(ready)
    talk = ChatFormat(loaded.tokenizer)
    if not (talk.is_taught or was_tuned_on_chats(loaded.files)):
        print_lines(UNTAUGHT, err=True)
    engine = loaded.engine(loaded.slots(1, request.lookup))
    name, context = (options["weights"] or Path(SAMPLE)).name, loaded.model.config.seq_len
    greeting = f"{name}, context {context:,}, {talk.describe()}; /help lists commands"
    Chat(Conversation(engine, talk, request, context, system), speed, greeting).run()
