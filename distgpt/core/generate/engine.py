"""The engine: requests that join and leave a running batch at every token.

    engine = Engine(slots, tokenizer)
    ticket = engine.submit(Request(prompt, max_new_tokens=100))
    for event in engine.run():
        ...

`step` feeds one token of every sample that is being decoded, and beside them a chunk of the prompts that
wait; where a slot becomes free, the next sample takes it. What a sample becomes depends on its request alone,
not on what runs beside it: prompts are cut at multiples of `chunk` from their beginning, and random numbers
belong to the seed, the sample and the place in its text. A request with `reuse` takes over what a slot holds
of its prompt, as a next turn does. Slots of requests that are done keep
their tokens until another takes them, the least recently used first. Where slots are not exact, rounding
depends on that.
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

WORTHWHILE = 64  # tokens that are copied from another slot rather than computed: on GPUs a copy is slow


class Engine:
    """Not thread-safe: one thread calls it. After an exception in `step` it is of no more use.

    Without a tokenizer events have no text, and stop strings are refused. `chunk`: tokens of prompts beside a
    step; 0: as many as suit the slots.
    """

    def __init__(self, slots: Slots, tokenizer: Tokenizer | None = None, chunk: int = 0) -> None:
        self._slots, self._tokenizer = slots, tokenizer
        self._chunk = chunk or slots.chunk
        self._tickets = count()
        self._waiting: deque[tuple[SharedPrompt, int]] = deque()  # samples without a slot: request, choice
        self._running: list[Sample] = []
        self._free = list(range(slots.count))  # the least recently used first
        self._prompts: dict[int, SharedPrompt] = {}  # slots that begin with the prompt of a request
        self._kept: dict[int, list[int]] = {}  # in free slots, for prompts that begin with them

    @property
    def is_idle(self) -> bool:
        """Tell whether all that was submitted is done."""
        return not (self._waiting or self._running)

    @property
    def running(self) -> int:
        """Samples that have a slot."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Samples that wait for one."""
        return len(self._waiting)

    def submit(self, request: Request) -> int:
        """Queue a request; return its ticket, which its events bear. Refuses what `check` does."""
        self.check(request)
        shared = SharedPrompt(next(self._tickets), request)
        self._waiting.extend((shared, choice) for choice in range(request.n))
        return shared.ticket

    def check(self, request: Request) -> None:
        """Raise a UsageError if this request can never be answered."""
        if not len(request.prompt):
            raise UsageError("the prompt is empty: give at least one token to start from")
        if request.prompt_logprobs and request.logprobs is None:
            raise UsageError("prompt_logprobs needs logprobs: how many alternatives, or 0")
        if request.stop and self._tokenizer is None:
            raise UsageError("stop strings need a tokenizer")
        size, most = len(request.prompt), self._slots.length
        if size > most:
            problem = f"the prompt has {size:,} tokens, the context {most:,}: shorten it"
            if request.overflow == "stop":
                raise UsageError(f"{problem}, or choose another overflow")
            if request.prompt_logprobs:
                raise UsageError(f"{problem}, or leave out prompt_logprobs")

    def cancel(self, ticket: int) -> None:
        """Forget a request: no more events of it come, its slots are free. Nothing happens if it is done."""
        self._waiting = deque(each for each in self._waiting if each[0].ticket != ticket)
        for sample in [each for each in self._running if each.shared.ticket == ticket]:
            self._leave(sample)
        self._prompts = {slot: held for slot, held in self._prompts.items() if held.ticket != ticket}

    def step(self) -> list[Event]:
        """Compute the next token of every sample that is being decoded, and a chunk of prompts."""
        events = self._admit()
        work = self._work()
        if work:
            logits = self._slots.feed([feed for _, feed in work])
            if not are_finite(logits):
                raise NonFiniteError("the model's logits are not finite: its weights are damaged or diverged")
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
        """Step until all that was submitted is done."""
        while not self.is_idle:
            yield from self.step()

    def _admit(self) -> list[Event]:
        """Give free slots to samples that wait, in order. Those of a prompt being computed wait for it.

        Samples without tokens need none.
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
        """Give a sample a slot, with what another slot has of its prompt: all where a sample computed it."""
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
        if not shared.to_come:  # its slots are like any other
            self._prompts = {slot: held for slot, held in self._prompts.items() if held is not shared}
        return [event]

    def _begun(self, shared: SharedPrompt) -> tuple[int | None, int]:
        """Return the slot that holds most of a prompt, and how many tokens of it."""
        request = shared.request
        if not request.reuse or request.prompt_logprobs or len(request.prompt) > self._slots.length:
            return None, 0
        held = self._kept | {sample.slot: sample.held for sample in self._running}
        common = {slot: shared.common(each) for slot, each in held.items()}
        slot = max(common, key=lambda slot: (common[slot], -len(held[slot])), default=None)
        return (slot, common[slot]) if slot is not None and common[slot] else (None, 0)

    def _slot_for(self, source: int | None, length: int) -> int:
        """Choose a free slot: the source, if these tokens are most of what it holds, or one to copy them to.

        That is one whose prompt nobody waits for, an empty one, or the least recently used.
        """
        if source in self._free and 2 * length >= len(self._kept.get(source, ())):
            return source
        return min(self._free, key=lambda slot: (slot in self._prompts, slot in self._kept))

    def _work(self) -> list[tuple[Sample, Feed]]:
        """Build the next batch: one token and its guesses of each sample that decodes, `chunk` of prompts.

        Of these at most MOST_SCORED want logits. A sample whose prompt is through goes behind the others, as
        one whose window slides has as much to feed for every token.
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
        """The prompt is in its slot: other samples may have it."""
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
    """An engine whose events are put together to completions."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._open: dict[int, list[Completion]] = {}

    def submit(self, request: Request) -> int:
        """Queue a request; return its ticket."""
        ticket = self.engine.submit(request)
        self._open[ticket] = [Completion() for _ in range(request.n)]
        return ticket

    def step(self) -> list[tuple[int, list[Completion]]]:
        """Run the engine for a step; return the samples of each request that is done, with its ticket."""
        done = []
        for event in self.engine.step():
            samples = self._open[event.ticket]
            samples[event.choice].add(event)
            if event.reason is not None and all(each.reason is not None for each in samples):
                done.append((event.ticket, self._open.pop(event.ticket)))
        return done


def complete(engine: Engine, requests: Iterable[Request]) -> list[list[Completion]]:
    """Run requests to their end on an idle engine; return the samples of each, in order."""
    collector = Collector(engine)
    done: dict[int, list[Completion]] = {}
    tickets = [collector.submit(request) for request in requests]
    while not engine.is_idle:
        done.update(collector.step())
    return [done[ticket] for ticket in tickets]


def sample(
    model: Model, tokenizer: Tokenizer, seed: int, length: int = 120, signals: PendingSignals | None = None
) -> str:
    """Write a short text from a line break, or the first token there is; shorter when a signal comes."""
    engine = Engine(PlainSlots(model, 1), tokenizer)
    engine.submit(
        Request(default_prompt(tokenizer), length, temperature=DEFAULT_TEMPERATURE, top_k=50, seed=seed)
    )
    pieces: list[str] = []
    while not engine.is_idle and not (signals and signals.came):
        pieces.extend(event.text for event in engine.step())
    return "".join(pieces)
