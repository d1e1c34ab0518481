"""Counters, gauges and histograms of a server, for Prometheus."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from itertools import accumulate

from distgpt.fleet.prometheus import Family, Sample, page

BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)  # seconds


class Histogram:
    """Counts durations by upper bounds, with their sum."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(BOUNDS, seconds)] += 1
        self._sum += seconds

    @property
    def mean(self) -> float:
        return self._sum / max(1, sum(self._counts))

    def samples(self) -> list[Sample]:
        sums = zip((*map(str, BOUNDS), "+Inf"), accumulate(self._counts), strict=True)
        buckets: list[Sample] = [("_bucket", {"le": bound}, count) for bound, count in sums]
        return [*buckets, ("_sum", {}, round(self._sum, 6)), ("_count", {}, sum(self._counts))]


class Metrics:
    """The numbers of a server. Written and read in the thread of its event loop."""

    def __init__(self) -> None:
        self.answered: Counter[int] = Counter()  # requests for completions, by status
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.cancelled = 0
        self.engine_failures = 0
        self.first_token, self.whole = Histogram(), Histogram()

    def text(self, **gauges: float) -> str:
        """Return the page; `gauges`: what is known elsewhere, by name."""
        answered: list[Sample] = [("", {"status": status}, n) for status, n in sorted(self.answered.items())]
        counters = ("prompt_tokens", "generated_tokens", "cancelled", "engine_failures")
        histograms = {"first_token_seconds": self.first_token, "request_seconds": self.whole}
        families: dict[str, tuple[str, list[Sample]]] = {
            "requests_total": ("counter", answered),
            **{f"{name}_total": ("counter", [("", {}, getattr(self, name))]) for name in counters},
            **{name: ("gauge", [("", {}, value)]) for name, value in gauges.items()},
            **{name: ("histogram", found.samples()) for name, found in histograms.items()},
        }
        return page(Family(name, kind, _HELP[name], found) for name, (kind, found) in families.items())


_HELP = {
    "requests_total": "Requests for completions, by the status of the answer.",
    "prompt_tokens_total": "Tokens of prompts.",
    "generated_tokens_total": "Tokens generated.",
    "cancelled_total": "Requests whose client left, or did not read.",
    "engine_failures_total": "Times that the engine failed and was renewed.",
    "queue_length": "Samples that wait for a lane.",
    "running_sequences": "Samples that are computed side by side.",
    "lanes": "The most samples side by side.",
    "open_requests": "Requests for completions without an answer yet.",
    "first_token_seconds": "From a request's arrival to its first token.",
    "request_seconds": "From a request's arrival to the end of its answer.",
}
