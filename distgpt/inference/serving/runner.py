"""The engine's thread. Requests enter through a queue; events are delivered in the event loop's thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from functools import partial
from queue import Empty, SimpleQueue

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

from distgpt.core.base.errors import DistgptError, UsageError, first_line
from distgpt.core.generate.engine import Engine
from distgpt.core.generate.request import Event, Request
from distgpt.inference.serving.limits import Limits, Refusal, invalid, overloaded

PATIENCE = 5.0  # seconds that `close` waits for the current step
BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)  # seconds


class Metrics:
    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # avoids one extra series per metric
        self.registry = CollectorRegistry()
        counter = partial(Counter, namespace="distgpt", registry=self.registry)
        self.answered = counter("requests", "Completion requests, by response status.", ["status"])
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts.")
        self.generated_tokens = counter("generated_tokens", "Tokens generated.")
        self.cancelled = counter("cancelled", "Requests whose client disconnected or did not read.")
        self.engine_failures = counter("engine_failures", "Times that the engine failed and was restarted.")
        histogram = partial(Histogram, namespace="distgpt", registry=self.registry, buckets=BOUNDS)
        self.first_token = histogram("first_token_seconds", "Time from a request to its first token.")
        self.whole = histogram("request_seconds", "Time from a request to the end of its answer.")


class Call:
    """The requests of one client, and their unread events.

    Use it only in the event loop's thread, except `requests`, which never changes.
    """

    def __init__(self, requests: Sequence[Request], size: int, begun: float) -> None:
        self.requests, self.size, self.begun = requests, size, begun
        self.left = sum(request.n for request in requests)  # samples that have not ended
        self.answered = self.failed = False  # answered: whether its first token has arrived
        self._unread: asyncio.Queue[tuple[int, Event] | Refusal] = asyncio.Queue()

    @property
    def is_over(self) -> bool:
        return self.left == 0 or self.failed

    def add(self, index: int, event: Event) -> None:
        """Queue an event of the request `index`."""
        self._unread.put_nowait((index, event))
        self.left -= event.reason is not None

    def fail(self, why: Refusal) -> None:
        if not self.is_over:
            self.failed = True
            self._unread.put_nowait(why)

    async def events(self) -> AsyncGenerator[tuple[int, Event]]:
        """Yield (request number, event) until the last event, or raise the reason for a failure."""
        while self.left or not self._unread.empty():
            result = await self._unread.get()
            if isinstance(result, Refusal):
                raise result
            yield result


class Runner:
    """Runs an engine and replaces it if it fails. Calls `died` if it cannot be replaced.

    Its public methods must be called in the event loop's thread.
    """

    def __init__(
        self, make: Callable[[], Engine], slots: int, limits: Limits, died: Callable[[DistgptError], None]
    ) -> None:
        self.metrics = Metrics()
        self._make, self._slots, self._limits, self._died = make, slots, limits, died
        self._engine = make()
        self._calls: set[Call] = set()
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._tickets: dict[int, tuple[Call, int]] = {}  # used only in the engine's thread
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        gauge = partial(Gauge, namespace="distgpt", registry=self.metrics.registry)
        gauge("lanes", "Maximum number of concurrent samples.").set(slots)
        for name, help, count in (
            ("queue_length", "Samples that wait for a slot.", lambda: self._engine.waiting),
            ("running_sequences", "Samples being generated.", lambda: self._engine.running),
            ("open_requests", "Completion requests in progress.", lambda: len(self._calls)),
        ):
            gauge(name, help).set_function(count)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def close(self) -> None:
        """Stop the thread after the current step."""
        self._inbox.put(None)
        self._thread.join(PATIENCE)

    @property
    def is_busy(self) -> bool:
        return bool(self._calls)

    def submit(self, requests: Sequence[Request], size: int, begun: float) -> Call:
        """Submit requests that arrived at `begun`. Raise a Refusal if they exceed the limits."""
        limits = self._limits
        call = Call(requests, size, begun)
        self._refuse_beyond("samples", self._slots + limits.queue, call, lambda each: each.left)
        self._refuse_beyond("tokens and logprobs", limits.everything, call, lambda each: each.size)
        self._calls.add(call)
        self.metrics.prompt_tokens.inc(sum(len(request.prompt) for request in requests))
        self._inbox.put(partial(self._begin, call))
        return call

    def _refuse_beyond(self, what: str, most: int, call: Call, count: Callable[[Call], int]) -> None:
        """Reject a call that can never fit, or that does not fit now."""
        if count(call) > most:
            raise invalid(f"{count(call):,} {what} exceed the capacity of {most:,}")
        if count(call) + sum(map(count, self._calls)) > most:
            raise overloaded()

    def forget(self, call: Call) -> None:
        """Free a call's resources, finished or not."""
        if call in self._calls:
            if not call.is_over:
                self.metrics.cancelled.inc()
                call.fail(Refusal(499, "the client disconnected"))
            self.metrics.whole.observe(time.monotonic() - call.begun)
            self._inbox.put(partial(self._end, call))
            self._calls.discard(call)

    def _deliver(self, events: list[tuple[Call, int, Event]]) -> None:
        now, made = time.monotonic(), 0
        for call, index, event in events:
            made += event.token is not None
            if call not in self._calls or call.is_over:
                continue
            if not call.answered:
                call.answered = True
                self.metrics.first_token.observe(now - call.begun)
            call.add(index, event)
        self.metrics.generated_tokens.inc(made)

    def _failed(self, why: Refusal, calls: Iterable[Call]) -> None:
        self.metrics.engine_failures.inc()
        for call in calls:
            call.fail(why)

    def _dead(self, why: DistgptError) -> None:
        for call in self._calls:
            call.fail(Refusal(500, str(why)))
        self._died(why)

    # The methods below run in the engine's thread.

    def _run(self) -> None:
        try:
            while self._empty_inbox():
                self._step()
        except Exception as error:
            self._post(self._dead, DistgptError(f"the engine failed permanently: {_described(error)}"))

    def _step(self) -> None:
        """Run a step. If it fails, fail its calls and replace the engine."""
        try:
            events = [(*self._tickets[event.ticket], event) for event in self._engine.step()]
        except Exception as error:
            calls = {call for call, _ in self._tickets.values()}
            self._post(self._failed, Refusal(500, _described(error)), calls)
            self._tickets.clear()
            self._engine = self._make()
        else:
            self._post(self._deliver, events)

    def _empty_inbox(self) -> bool:
        """Run all queued actions; block if the engine is idle. Return False to stop."""
        while True:
            try:
                act = self._inbox.get(block=self._engine.is_idle)
            except Empty:
                return True
            if act is None:
                return False
            act()

    def _begin(self, call: Call) -> None:
        for index, request in enumerate(call.requests):
            try:
                self._tickets[self._engine.submit(request)] = call, index
            except Exception as error:
                known = isinstance(error, UsageError)
                self._end(call)
                self._post(call.fail, invalid(str(error)) if known else Refusal(500, _described(error)))
                return

    def _end(self, call: Call) -> None:
        for ticket in [ticket for ticket, (of, _) in self._tickets.items() if of is call]:
            self._engine.cancel(ticket)
            del self._tickets[ticket]

    def _post(self, act: Callable[..., None], *what: object) -> None:
        try:
            self._loop.call_soon_threadsafe(act, *what)
        except RuntimeError:  # The loop is closed.
            self._inbox.put(None)


def _described(error: Exception) -> str:
    return str(error) if isinstance(error, DistgptError) else f"{type(error).__name__}: {first_line(error)}"
