"""The inference engine: continuous batching, in which requests join and leave at every token.

    engine = Engine(slots, tokenizer)
    ticket = engine.submit(Request(prompt, max_new_tokens=100))
    for event in engine.run():
        ...

Each `step` feeds one token of every decoding sample and a chunk of the waiting prompts. A free slot goes to
the next sample. A sample depends only on its request, not on concurrent requests: prompts are cut at
multiples of `chunk`, and random numbers depend on the seed, the sample and the position.

A request with `reuse` takes over the cached tokens of its prompt from any slot, for example from earlier chat
turns. Slots of completed requests keep their tokens until another sample takes the slot, the least recently
used first. If slots are not exact, rounding depends on this reuse.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import count

import numpy as np

from distgpt.core.base.errors import NonFiniteError, UsageError
from distgpt.core.base.interrupts import PendingSignals
from distgpt.core.config import DEFAULT_TEMPERATURE
from distgpt.core.data.tokenizers import Tokenizer
from distgpt.core.generate.plain_slots import PlainSlots
from distgpt.core.generate.request import Completion, Event, Request
from distgpt.core.generate.sample import MOST_SCORED, Sample, SharedPrompt, default_prompt
from distgpt.core.generate.slots import Feed, Logits, Slots, are_finite
from distgpt.core.model.model import Model

WORTHWHILE = 64  # minimum number of tokens to copy from another slot; on GPUs a copy is slow


class Engine:
    """An engine for one thread. After an exception in `step` it is unusable.

    Without a tokenizer, events have no text and stop strings are rejected. `chunk` is the number of prompt
    tokens per step. 0: the slots' default.
    """

    def __init__(self, slots: Slots, tokenizer: Tokenizer | None = None, chunk: int = 0) -> None:
        self._slots, self._tokenizer = slots, tokenizer
        self._chunk = chunk or slots.chunk
        self._tickets = count()
        self._waiting: deque[tuple[SharedPrompt, int]] = deque()  # samples without a slot: request, choice
        self._running: list[Sample] = []
        self._free = list(range(slots.count))  # the least recently used first
        self._prompts: dict[int, SharedPrompt] = {}  # slots that contain a request's complete prompt
        self._kept: dict[int, list[int]] = {}  # tokens cached in free slots, for reuse

    @property
    def is_idle(self) -> bool:
        """Whether all submitted requests are completed."""
        return not (self._waiting or self._running)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def submit(self, request: Request) -> int:
        """Queue a request and return its ticket, which its events have. Raises as `check` does."""
        self.check(request)
        shared = SharedPrompt(next(self._tickets), request)
        self._waiting.extend((shared, choice) for choice in range(request.n))
        return shared.ticket

    def check(self, request: Request) -> None:
        """Raise a UsageError if this request is invalid."""
        if not len(request.prompt):
            raise UsageError("the prompt is empty; pass at least one token")
        if request.prompt_logprobs and request.logprobs is None:
            raise UsageError("prompt_logprobs requires logprobs, the number of alternatives or 0")
        if request.stop and self._tokenizer is None:
            raise UsageError("stop strings require a tokenizer")
        size, most = len(request.prompt), self._slots.length
        if size > most:
            problem = f"the prompt has {size:,} tokens, but the context only {most:,}; shorten it"
            if request.overflow == "stop":
                raise UsageError(f"{problem}, or choose another overflow")
            if request.prompt_logprobs:
                raise UsageError(f"{problem}, or omit prompt_logprobs")

    def cancel(self, ticket: int) -> None:
        """Stop a request. It gets no more events and frees its slots. No effect if it is completed."""
        self._waiting = deque(each for each in self._waiting if each[0].ticket != ticket)
        for sample in [each for each in self._running if each.shared.ticket == ticket]:
            self._leave(sample)
        self._prompts = {slot: held for slot, held in self._prompts.items() if held.ticket != ticket}

    def step(self) -> list[Event]:
        """Compute the next token of every decoding sample, and a chunk of prompts."""
        events = self._admit()
        work = self._work()
        if work:
            logits = self._slots.feed([feed for _, feed in work])
            if not are_finite(logits):
                raise NonFiniteError("the model's logits are not finite; its weights are corrupt or diverged")
            end = 0
            for sample, feed in work:
                rows = logits[end : end + feed.wanted]
                end += feed.wanted
                if sample.chooses and sample.is_at_prompt:
                    self._reuse_prompt(sample, rows[-1 - sample.guessed])
                events += sample.take(feed, rows)
        for sample in [each for each in self._running if each.ended]:
            self._leave(sample)
        return events

    def run(self) -> Iterator[Event]:
        """Step until all requests are completed."""
        while not self.is_idle:
            yield from self.step()

    def _admit(self) -> list[Event]:
        """Give free slots to waiting samples, in order. While a prompt is computed, its other samples wait.

        Samples without new tokens need no slot.
        """
        events: list[Event] = []
        held: list[tuple[SharedPrompt, int]] = []
        while self._waiting:
            shared, choice = self._waiting.popleft()
            if shared.request.max_new_tokens == 0 and shared.is_scored:
                events.append(shared.empty_event(choice))
            elif shared.under_way:
                held.append((shared, choice))
            elif not self._free:
                held.append((shared, choice))
                break
            else:
                events += self._join(shared, choice)
        self._waiting.extendleft(reversed(held))
        return events

    def _join(self, shared: SharedPrompt, choice: int) -> list[Event]:
        """Give a sample a slot, with tokens from another slot. If its prompt is ready, choose a token now."""
        ready = None
        if shared.logits is not None:
            ready = next((slot for slot, held in self._prompts.items() if held is shared), None)
        if ready is None:
            source, length = self._begun(shared)
            slot = self._slot_for(source, length)
            if slot != source and length < WORTHWHILE:
                source, length = None, 0
        else:
            source, length = ready, len(shared.request.prompt)
            slot = self._slot_for(source, self._slots.length)
        self._free.remove(slot)
        self._kept.pop(slot, None)
        sample = Sample(shared, choice, self._tokenizer, self._slots.length)
        sample.slot = slot
        sample.cached = min(length, self._slots.length)
        self._running.append(sample)
        shared.to_come -= 1
        if source is not None and source != slot:
            self._slots.copy(source, slot, sample.cached)
        if ready is None:
            shared.logits = None
            shared.under_way = True
            self._prompts.pop(slot, None)
            return []
        self._prompts[slot] = shared
        assert shared.logits is not None
        event = sample.choose(shared.logits)
        if not shared.to_come:  # its slots are now like any other
            self._prompts = {slot: held for slot, held in self._prompts.items() if held is not shared}
        return [event]

    def _begun(self, shared: SharedPrompt) -> tuple[int | None, int]:
        """Return the slot with the longest common prefix of a prompt, and the prefix's length."""
        request = shared.request
        if not request.reuse or request.prompt_logprobs or len(request.prompt) > self._slots.length:
            return None, 0
        held = self._kept | {sample.slot: sample.held for sample in self._running}
        common = {slot: shared.common(each) for slot, each in held.items()}
        slot = max(common, key=lambda slot: (common[slot], -len(held[slot])), default=None)
        return (slot, common[slot]) if slot is not None and common[slot] else (None, 0)

    def _slot_for(self, source: int | None, length: int) -> int:
        """Choose a free slot: the source if the prefix is most of its content, otherwise one to copy to.

        Prefer a slot whose prompt no sample waits for, then an empty one, then the least recently used.
        """
        if source in self._free and 2 * length >= len(self._kept.get(source, ())):
            return source
        return min(self._free, key=lambda slot: (slot in self._prompts, slot in self._kept))

    def _work(self) -> list[tuple[Sample, Feed]]:
        """Build the next batch from one token and drafts of each decoding sample, and `chunk` prompt tokens.

        At most MOST_SCORED prompt tokens get logits. A sample moves to the end when its prompt is complete,
        because a sliding window has as much to feed for every token.
        """
        work: list[tuple[Sample, Feed]] = []
        through: list[Sample] = []
        room, rows = self._chunk, MOST_SCORED
        for sample in self._running:
            if sample.ended:
                continue
            if gone := sample.make_room(self._slots.can_drop):
                self._slots.drop(sample.slot, gone, sample.cached)
                self._prompts.pop(sample.slot, None)
            feed = sample.feed(self._chunk)
            if len(feed.tokens) > 1 + sample.guessed:
                if len(feed.tokens) > room or feed.wanted > rows:
                    continue
                room -= len(feed.tokens)
                rows -= feed.wanted
                if sample.chooses:
                    through.append(sample)
            if feed.start == 0:
                self._prompts.pop(sample.slot, None)
            work.append((sample, feed))
        if through:
            self._running = [each for each in self._running if each not in through] + through
        return work

    def _reuse_prompt(self, sample: Sample, logits: Logits) -> None:
        """Record that a prompt is complete in a slot, for other samples of the request."""
        shared = sample.shared
        shared.under_way = False
        if shared.to_come and shared.request.max_new_tokens:
            assert isinstance(logits, np.ndarray), "prompts ask for all logits"
            shared.logits = logits.copy()
            self._prompts[sample.slot] = shared

    def _leave(self, sample: Sample) -> None:
        self._running.remove(sample)
        self._free.append(sample.slot)
        self._kept[sample.slot] = sample.held


class Collector:
    """Collects the events of an engine into completions."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._open: dict[int, list[Completion]] = {}

    def submit(self, request: Request) -> int:
        """Queue a request and return its ticket."""
        ticket = self.engine.submit(request)
        self._open[ticket] = [Completion() for _ in range(request.n)]
        return ticket

    def step(self) -> list[tuple[int, list[Completion]]]:
        """Run one step. Return the ticket and samples of each completed request."""
        done = []
        for event in self.engine.step():
            samples = self._open[event.ticket]
            samples[event.choice].add(event)
            if event.reason is not None and all(each.reason is not None for each in samples):
                done.append((event.ticket, self._open.pop(event.ticket)))
        return done


def complete(engine: Engine, requests: Iterable[Request]) -> list[list[Completion]]:
    """Run requests to completion on an idle engine. Return the samples of each, in order."""
    collector = Collector(engine)
    done: dict[int, list[Completion]] = {}
    tickets = [collector.submit(request) for request in requests]
    while not engine.is_idle:
        done.update(collector.step())
    return [done[ticket] for ticket in tickets]


def sample(
    model: Model, tokenizer: Tokenizer, seed: int, length: int = 120, signals: PendingSignals | None = None
) -> str:
    """Generate a short text from the default prompt. A signal ends it early."""
    engine = Engine(PlainSlots(model, 1), tokenizer)
    engine.submit(
        Request(default_prompt(tokenizer), length, temperature=DEFAULT_TEMPERATURE, top_k=50, seed=seed)
    )
    pieces: list[str] = []
    while not engine.is_idle and not (signals and signals.came):
        pieces.extend(event.text for event in engine.step())
    return "".join(pieces)
