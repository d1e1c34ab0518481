"""Text generation for the command line: the prompt, the streamed text, the speed."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from distgpt.comm.agree import gather_ints, on_root, shared
from distgpt.comm.cores import peak_memory
from distgpt.comm.launched import shown_on_terminal
from distgpt.data.loading import bundled, read_text
from distgpt.data.tokenizers.naming import Tokenizer
from distgpt.errors import DataError, UsageError, harmless
from distgpt.machine.stages import Stage
from distgpt.model.generate import Sampling, generate, opening, rehearse
from distgpt.saved.modelfile import load_model
from distgpt.units import count

SAMPLE = "sample.safetensors"


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked for. Without weights: the bundled sample. Without a prompt: the start of a text."""

    weights: Path | None
    prompt: str | None
    prompt_file: Path | None
    max_new_tokens: int
    sampling: Sampling
    dtype: str
    matmul: str = "auto"
    context: int | None = None  # context length; None: that of training


def infer(request: Request, stage: Stage, as_json: bool) -> None:
    """Generate text and print it on rank 0. Collective."""
    comm = stage.comm
    path = request.weights or Path(on_root(comm, lambda: str(bundled("weights", SAMPLE))))
    model, description = load_model(path, stage.kernels(request.dtype, request.matmul), comm, request.context)
    if description.tokenizer is None:
        raise shared(DataError(f"{path} has no tokenizer: use it from Python, with tokens"))
    tokenizer = description.tokenizer
    if comm.rank == 0:
        stage.notes.report_to(partial(print, file=sys.stderr))
    ids: list[int] = on_root(comm, lambda: _prompt(request, tokenizer))
    rehearse(model)
    begun = time.perf_counter()
    tokens = generate(model, ids, request.max_new_tokens, request.sampling, comm)
    quiet = as_json or comm.rank != 0
    given = request.prompt is not None or request.prompt_file is not None
    new = list(tokens) if quiet else _stream(tokenizer, ids, tokens, given)
    seconds = time.perf_counter() - begun
    memory = gather_ints(comm, peak_memory())
    if comm.rank != 0:
        return
    rate = len(new) / seconds
    if as_json:
        text = tokenizer.decode([*ids, *new])[len(tokenizer.decode(ids)) :]
        answer = {"prompt": tokenizer.decode(ids), "text": text, "tokens": new}
        print(json.dumps({**answer, "seconds": seconds, "tokens_per_s": rate, "peak_memory": memory}))
    print(f"{count(len(new), 'token')} in {seconds:.2f} s ({rate:.1f} tokens/s)", file=sys.stderr)


def _prompt(request: Request, tokenizer: Tokenizer) -> list[int]:
    text = request.prompt
    if request.prompt_file is not None:
        if str(request.prompt_file) in ("-", "/dev/stdin"):
            text = read_text(Path("standard input"), sys.stdin.buffer)
        else:
            text = read_text(request.prompt_file)
    ids = opening(tokenizer) if text is None else tokenizer.encode(text).tolist()
    if not ids:
        raise UsageError("the prompt is empty: give at least one token to start from")
    return ids


def _stream(tokenizer: Tokenizer, prompt: list[int], tokens: Iterator[int], given: bool) -> list[int]:
    """Print the prompt, if the user has given one, and each token as soon as its text is complete."""
    shown = harmless if shown_on_terminal(sys.stdout) else str
    streamer, new = tokenizer.streamer(), []
    beginning = "".join(streamer.feed(token) for token in prompt)
    print(shown(beginning) if given else "", end="", flush=True)
    try:
        for token in tokens:
            new.append(token)
            print(shown(streamer.feed(token)), end="", flush=True)
    finally:  # what ends it early is said on a line of its own
        print(shown(streamer.flush()), flush=True)
    return new
