"""What Prometheus reads: counters, gauges and histograms, written as its text format."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator

BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)  # seconds
RECENT = 10.0  # seconds over which the speed is taken


class Histogram:
    """How many durations were at most so long, for each bound; their sum and number."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(BOUNDS, seconds)] += 1
        self._sum += seconds

    @property
    def mean(self) -> float:
        return self._sum / max(1, sum(self._counts))

    def lines(self, name: str) -> Iterator[str]:
        so_far = 0
        for bound, count in zip((*map(str, BOUNDS), "+Inf"), self._counts, strict=True):
            so_far += count
            yield f'{name}_bucket{{le="{bound}"}} {so_far}'
        yield f"{name}_sum {self._sum:.6f}"
        yield f"{name}_count {so_far}"


class Speed:
    """Events per second, lately."""

    def __init__(self) -> None:
        self._lately: deque[tuple[float, int]] = deque()

    def add(self, count: int) -> None:
        self._lately.append((time.monotonic(), count))
        self._forget()

    @property
    def per_second(self) -> float:
        self._forget()
        return sum(count for _, count in self._lately) / RECENT

    def _forget(self) -> None:
        while self._lately and self._lately[0][0] < time.monotonic() - RECENT:
            self._lately.popleft()


class Metrics:
    """The numbers of a server. Written and read in the thread of its event loop."""

    def __init__(self) -> None:
        self.answered: Counter[int] = Counter()  # requests for completions, by status
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.cancelled = 0
        self.engine_failures = 0
        self.speed = Speed()
        self.first_token, self.whole = Histogram(), Histogram()

    def made(self, tokens: int) -> None:
        self.generated_tokens += tokens
        self.speed.add(tokens)

    def text(self, **gauges: float) -> str:
        """The page; `gauges`: what is known elsewhere, by name."""
        return "\n".join([*self._lines(gauges), ""])

    def _lines(self, gauges: dict[str, float]) -> Iterator[str]:
        yield from _head(
            "requests_total", "counter", "Requests for completions, by the status of the answer."
        )
        for status, count in sorted(self.answered.items()):
            yield f'distgpt_requests_total{{status="{status}"}} {count}'
        counters = {
            "prompt_tokens_total": (self.prompt_tokens, "Tokens of prompts."),
            "generated_tokens_total": (self.generated_tokens, "Tokens generated."),
            "cancelled_total": (self.cancelled, "Requests whose client left, or did not read."),
            "engine_failures_total": (self.engine_failures, "Times that the engine failed and was renewed."),
        }
        for name, (value, about) in counters.items():
            yield from _head(name, "counter", about)
            yield f"distgpt_{name} {value}"
        for name, gauge in {**gauges, "tokens_per_second": self.speed.per_second}.items():
            yield from _head(name, "gauge", _GAUGES[name])
            yield f"distgpt_{name} {gauge:g}"
        for name, histogram, about in (
            ("first_token_seconds", self.first_token, "From a request's arrival to its first token."),
            ("request_seconds", self.whole, "From a request's arrival to the end of its answer."),
        ):
            yield from _head(name, "histogram", about)
            yield from histogram.lines(f"distgpt_{name}")


_GAUGES = {
    "queue_length": "Samples that wait for a lane.",
    "running_sequences": "Samples that are computed side by side.",
    "lanes": "The most samples side by side.",
    "open_requests": "Requests for completions without an answer yet.",
    "tokens_per_second": f"Tokens generated a second, over the last {RECENT:g} s.",
}


def _head(name: str, kind: str, about: str) -> Iterator[str]:
    yield f"# HELP distgpt_{name} {about}"
    yield f"# TYPE distgpt_{name} {kind}"
