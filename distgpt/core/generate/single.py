"""`distgpt infer` with one prompt: streamed text or JSON, and the speed."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from distgpt.core.base.errors import escape, escape_model_text, print_lines
from distgpt.core.base.formatting import count
from distgpt.core.comm.agree import gather, on_root
from distgpt.core.comm.job import shown_on_terminal
from distgpt.core.comm.resources import peak_memory
from distgpt.core.cpu.stages import Stage
from distgpt.core.data.textfile import read_text
from distgpt.core.data.tokenizers import Tokenizer
from distgpt.core.generate.engine import complete
from distgpt.core.generate.engine_setup import ModelSpec
from distgpt.core.generate.request import Completion, Event, Likelihood, Request
from distgpt.core.generate.sample import default_prompt
from distgpt.core.generate.slots import Slots, on_ranks


def infer_one(
    spec: ModelSpec, prompt: str | Path | None, settings: Request, stage: Stage, as_json: bool
) -> None:
    """Continue one prompt and print the result on rank 0. Ranks average their logits. Collective.

    The prompt is a string, a text file, or None for the default prompt.
    """
    comm, loaded = stage.comm, spec.load(stage)
    tokenizer = loaded.tokenizer
    ids: list[int] = on_root(comm, lambda: _prompt(prompt, tokenizer))
    text = tokenizer.decode(ids[len(tokenizer.first) :])
    request = settings.override(ids, {})
    slots = loaded.slots(request.n, request.lookup)
    begun = time.perf_counter()

    def act(slots: Slots) -> list[Completion]:
        engine = loaded.engine(slots)
        if as_json:
            return complete(engine, [request])[0]
        engine.submit(request)
        return stream("" if prompt is None else text, engine.run(), request.n)

    samples = on_ranks(slots, comm, act)
    seconds = time.perf_counter() - begun
    memory = gather(comm, peak_memory())
    if comm.rank != 0:
        return
    made = sum(len(sample.tokens) for sample in samples)
    if as_json:
        several = {"choices": [sample.as_json() for sample in samples]} if request.n > 1 else {}
        answer = {"prompt": text, **samples[0].as_json(), **several}
        print(
            json.dumps({**answer, "seconds": seconds, "tokens_per_s": made / seconds, "peak_memory": memory})
        )
    else:
        _print_probabilities(tokenizer, ids, samples[0].prompt_likelihoods)
        for sample in samples:
            _print_probabilities(tokenizer, sample.tokens, sample.likelihoods)
    print(f"{count(made, 'token')} in {seconds:.2f} s ({made / seconds:.1f} tokens/s)", file=sys.stderr)


def _prompt(given: str | Path | None, tokenizer: Tokenizer) -> list[int]:
    if given is None:
        return default_prompt(tokenizer)
    text = given
    if isinstance(given, Path):
        piped = str(given) in ("-", "/dev/stdin")
        text = read_text(Path("standard input"), sys.stdin.buffer) if piped else read_text(given)
    return tokenizer.encode_prompt(str(text))


def stream(prompt: str, events: Iterable[Event], n: int) -> list[Completion]:
    """Print the prompt, then text as it becomes final. Multiple samples are printed in sequence."""
    shown = escape_model_text if shown_on_terminal(sys.stdout) else str
    samples, unseen, turn = [Completion() for _ in range(n)], [""] * n, 0
    heads = [f"--- {number} of {n}\n" * (n > 1) + shown(prompt) for number in range(1, n + 1)]
    print(heads[0], end="", flush=True)
    try:
        for event in events:
            samples[event.choice].add(event)
            unseen[event.choice] += event.text
            while turn < n:
                print(shown(unseen[turn]), end="", flush=True)
                unseen[turn] = ""
                if samples[turn].reason is None:
                    break
                turn += 1
                if turn < n:
                    print(f"\n{heads[turn]}", end="", flush=True)
    finally:  # an error message starts on a new line
        print(flush=True)
    return samples


def _print_probabilities(
    tokenizer: Tokenizer, tokens: Sequence[int], likelihoods: Sequence[Likelihood | None] | None
) -> None:
    """Print each token's probability and the most likely tokens, one token per line."""
    for token, result in zip(tokens, likelihoods, strict=True) if likelihoods else ():
        if result is not None:
            pairs = [(token, result.logprob), *result.alternatives]
            words = [f"{escape(repr(tokenizer.decode([i])))} {math.exp(p):.1%}" for i, p in pairs]
            print_lines(words[0] + (f"   of {', '.join(words[1:])}" if words[1:] else ""))
