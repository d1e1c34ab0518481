"""`distgpt infer` with a file of prompts: ranks share them, answers go into another file."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from distgpt.comm.agree import on_root
from distgpt.comm.api import Comm
from distgpt.data.tokenizers.naming import Tokenizer
from distgpt.errors import DataError, UsageError, print_lines
from distgpt.formatting import count
from distgpt.inference.engine import Engine
from distgpt.inference.promptfile import Answers, Prompt, read_prompts, reserved
from distgpt.inference.request import Settings, refuse_senseless
from distgpt.inference.source import Source
from distgpt.inference.spreading import Answer, spread
from distgpt.inference.start import MOST_LANES, chunk_for
from distgpt.stages import Stage

ROOM = 2 * MOST_LANES  # prompts that a rank has at once, so that none of its lanes is idle


class Watcher(Protocol):
    """Shows how far a file of prompts is."""

    def began(self, total: int, done: int) -> None: ...

    def advanced(self, done: int, tokens: int) -> None: ...

    def close(self) -> None: ...


def infer_file(
    source: Source, prompts: Path, out: Path, settings: Settings, stage: Stage, watching: Watcher
) -> None:
    """Answer every prompt of a file in another one, which may hold some of the answers. Collective.

    Ranks share the prompts. What can be known to be wrong is refused before anything is computed.
    """
    comm = stage.comm
    refuse_senseless({**settings, "prompt_logprobs": False}, comm)  # a line may say how many
    opened = source.open(stage)
    lanes = source.lanes(opened.model, MOST_LANES, comm, settings["lookup"])
    engine = Engine(lanes, opened.tokenizer, chunk_for(opened.model))
    begun = time.perf_counter()
    if comm.rank != 0:
        on_root(comm, lambda: None)
        spread(comm, engine, [], ROOM, lambda answers: None)
        return
    with ExitStack() as stack:
        mark = opened.mark(drops=settings["overflow"] == "shift" and lanes.can_drop)
        todo, answers = _begin(comm, stack, prompts, out, opened.tokenizer, mark, settings, engine)
        asked = [(prompt.tokens, prompt.settings) for prompt in todo]
        watching.began(len(todo) + len(answers.done), len(answers.done))
        stack.callback(watching.close)
        made = 0

        def answered(found: list[Answer]) -> None:
            nonlocal made
            if found:
                answers.add([(todo[number], samples) for number, samples in found])
                tokens = sum(len(sample["tokens"]) for _, samples in found for sample in samples)
                made += tokens
                watching.advanced(len(answers.done), tokens)

        spread(comm, engine, asked, ROOM, answered)
        answers.finish()
    seconds = time.perf_counter() - begun
    said = f"{count(len(todo), 'prompt')}, {count(made, 'token')} in {seconds:.2f} s"
    print_lines(f"{said} ({made / seconds:.1f} tokens/s): {out}", err=True)


def _begin(
    comm: Comm,
    stack: ExitStack,
    prompts: Path,
    out: Path,
    tokenizer: Tokenizer,
    mark: str,
    settings: Settings,
    engine: Engine,
) -> tuple[list[Prompt], Answers]:
    """On rank 0: the prompts that are left, and the file of answers. All ranks raise what is wrong."""
    found: list[Any] = []

    def begin() -> None:
        asked = read_prompts(prompts, tokenizer, settings)
        for prompt in asked:
            try:
                engine.check(prompt.request())
            except UsageError as error:
                raise DataError(f"{prompts}, line {prompt.line}: {error}") from None
        stack.enter_context(reserved(out))
        answers = Answers(out, asked, mark)
        found[:] = [prompt for prompt in asked if prompt.line not in answers.done], answers

    on_root(comm, begin)
    return found[0], found[1]
