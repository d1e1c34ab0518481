"""Text generation for the command line: the prompt, the streamed text, the speed."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from distgpt.comm.agree import gather_ints, on_every_rank, on_root, shared
from distgpt.comm.api import Comm
from distgpt.comm.cores import peak_memory
from distgpt.comm.launched import shown_on_terminal
from distgpt.data.loading import bundled, read_text
from distgpt.data.tokenizers.naming import Tokenizer
from distgpt.errors import DataError, UsageError, harmless, print_lines, printable
from distgpt.inference.averaged import averaged
from distgpt.inference.completing import Completion
from distgpt.inference.engine import Engine
from distgpt.inference.lanes import Lanes
from distgpt.inference.promptfile import Answers, Prompt, read_prompts, reserved
from distgpt.inference.request import Event, Request, request_of
from distgpt.inference.sampling import Likelihood
from distgpt.inference.spreading import Answer, spread
from distgpt.inference.start import MOST_LANES, agreed_lanes, chunk_for, rehearse
from distgpt.inference.text import opening
from distgpt.machine.stages import Stage
from distgpt.model.model import Model
from distgpt.saved.modelfile import dtype_of, load_model
from distgpt.saved.places import weights_file
from distgpt.saved.tensors import fingerprint
from distgpt.units import count

SAMPLE = "sample.safetensors"
ROOM = 2 * MOST_LANES  # prompts that a rank has at once, so that none of its lanes is idle
Settings = dict[str, Any]  # of a request, by name


class Opened(NamedTuple):
    """A model that is ready, and what it was made of."""

    model: Model
    tokenizer: Tokenizer
    path: Path
    dtype: str

    def mark(self) -> str:
        """What tells its answers from those of other weights, in another dtype, or of another context."""
        known = [fingerprint(weights_file(self.path)), self.dtype, self.model.config.seq_len]
        return sha256(json.dumps(known).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Source:
    """Which model, how it computes, and in how much memory for keys and values (None: what is usual).

    Without weights: the bundled sample. `context`: its context length; None: that of training.
    """

    weights: Path | None
    dtype: str
    context: int | None = None
    cache_memory: int | None = None

    def open(self, stage: Stage) -> Opened:
        """The model and its tokenizer, everything compiled. Collective."""
        comm = stage.comm
        path = self.weights or Path(on_root(comm, lambda: str(bundled("weights", SAMPLE))))
        dtype = dtype_of(path, self.dtype, comm, stage.device is not None)
        model, about = load_model(path, stage.kernels(dtype), comm, self.context)
        if about.tokenizer is None:
            raise shared(DataError(f"{path} has no tokenizer: use it from Python, with tokens"))
        if comm.rank == 0:
            stage.notes.report_to(partial(print, file=sys.stderr))
        rehearse(model)
        return Opened(model, about.tokenizer, path, dtype)

    def lanes(self, model: Model, wanted: int, comm: Comm, lookup: int) -> Lanes:
        """As many as fit the memory of every rank. Collective."""
        return agreed_lanes(model, wanted, comm, self.cache_memory, lookup)


def infer(source: Source, prompt: str | Path | None, settings: Settings, stage: Stage, as_json: bool) -> None:
    """Continue one prompt and print it on rank 0; ranks average their scores. Collective.

    The prompt: a text, a file with one, or None for the start of a text. `settings`: those of a request.
    """
    comm = stage.comm
    refuse_senseless(settings, comm)
    model, tokenizer, *_ = source.open(stage)
    ids: list[int] = on_root(comm, lambda: _prompt(prompt, tokenizer))
    request = request_of(ids, **settings)
    lanes = source.lanes(model, request.n, comm, request.lookup)
    begun = time.perf_counter()

    def act(lanes: Lanes) -> list[Completion]:
        events = _events(Engine(lanes, tokenizer, chunk_for(model)), request)
        shown = "" if prompt is None else tokenizer.decode(ids)
        return _collect(events, request.n) if as_json else stream(shown, events, request.n)

    samples = act(lanes) if comm.size == 1 else averaged(lanes, comm, act)
    seconds = time.perf_counter() - begun
    memory = gather_ints(comm, peak_memory())
    if comm.rank != 0:
        return
    made = sum(len(sample.tokens) for sample in samples)
    if as_json:
        several = {"choices": [sample.as_json() for sample in samples]} if request.n > 1 else {}
        answer = {"prompt": tokenizer.decode(ids), **samples[0].as_json(), **several}
        print(
            json.dumps({**answer, "seconds": seconds, "tokens_per_s": made / seconds, "peak_memory": memory})
        )
    else:
        _print_probabilities(tokenizer, ids, samples[0].prompt)
        for sample in samples:
            _print_probabilities(tokenizer, sample.tokens, sample.likelihoods)
    print(f"{count(made, 'token')} in {seconds:.2f} s ({made / seconds:.1f} tokens/s)", file=sys.stderr)


def refuse_senseless(settings: Settings, comm: Comm) -> None:
    """A UsageError for what flags say, before anything is read. Collective."""
    on_every_rank(comm, lambda: request_of([0], **settings))


def _prompt(given: str | Path | None, tokenizer: Tokenizer) -> list[int]:
    text = given
    if isinstance(given, Path):
        piped = str(given) in ("-", "/dev/stdin")
        text = read_text(Path("standard input"), sys.stdin.buffer) if piped else read_text(given)
    ids = opening(tokenizer) if text is None else tokenizer.encode(str(text)).tolist()
    if not ids:
        raise UsageError("the prompt is empty: give at least one token to start from")
    return ids


def _events(engine: Engine, request: Request) -> Iterator[Event]:
    engine.submit(request)
    while not engine.is_idle:
        yield from engine.step()


def _collect(events: Iterable[Event], n: int) -> list[Completion]:
    samples = [Completion() for _ in range(n)]
    for event in events:
        samples[event.choice].add(event)
    return samples


def stream(prompt: str, events: Iterable[Event], n: int) -> list[Completion]:
    """Print the prompt, then each token as soon as its text is complete; several samples one by one."""
    shown = harmless if shown_on_terminal(sys.stdout) else str
    samples, unseen, turn = [Completion() for _ in range(n)], [""] * n, 0
    print(shown(prompt), end="", flush=True)
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
                    print(f"\n--- {turn + 1} of {n}", flush=True)
    finally:  # what ends it early is said on a line of its own
        print(flush=True)
    return samples


def _print_probabilities(
    tokenizer: Tokenizer, tokens: Sequence[int], likelihoods: Sequence[Likelihood | None] | None
) -> None:
    """A line for each token: how likely it was, and the likeliest."""
    for token, found in zip(tokens, likelihoods, strict=True) if likelihoods else ():
        if found is not None:
            pairs = [(token, found.logprob), *found.alternatives]
            words = [f"{printable(repr(tokenizer.decode([i])))} {math.exp(p):.1%}" for i, p in pairs]
            print_lines(words[0] + (f"   of {', '.join(words[1:])}" if words[1:] else ""))


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
    refuse_senseless(settings, comm)
    opened = source.open(stage)
    model, tokenizer, *_ = opened
    engine = Engine(source.lanes(model, MOST_LANES, comm, settings["lookup"]), tokenizer, chunk_for(model))
    begun = time.perf_counter()
    if comm.rank != 0:
        on_root(comm, lambda: None)
        spread(comm, engine, [], ROOM, lambda answers: None)
        return
    with ExitStack() as stack:
        todo, answers = _begin(comm, stack, prompts, out, opened, settings, engine)
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
    opened: Opened,
    settings: Settings,
    engine: Engine,
) -> tuple[list[Prompt], Answers]:
    """On rank 0: the prompts that are left, and the file of answers. All ranks raise what is wrong."""
    found: list[Any] = []

    def begin() -> None:
        asked = read_prompts(prompts, opened.tokenizer, settings)
        for prompt in asked:
            try:
                engine.check(prompt.request())
            except UsageError as error:
                raise DataError(f"{prompts}, line {prompt.line}: {error}") from None
        stack.enter_context(reserved(out))
        answers = Answers(out, asked, opened.mark())
        found[:] = [prompt for prompt in asked if prompt.line not in answers.done], answers

    on_root(comm, begin)
    return found[0], found[1]
