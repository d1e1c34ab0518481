"""Counters and histograms of a server, for Prometheus."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.exposition import choose_encoder

BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)  # seconds
GAUGES = {
    "queue_length": "Samples that wait for a lane.",
    "running_sequences": "Samples that are computed side by side.",
    "lanes": "The most samples side by side.",
    "open_requests": "Requests for completions without an answer yet.",
}


class Metrics:
    """The numbers of a server."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # they would be a series more for each
        self.registry = CollectorRegistry()

        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(f"distgpt_{name}", help, labels, registry=self.registry)

        self.answered = counter(
            "requests", "Requests for completions, by the status of the answer.", "status"
        )
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts.")
        self.generated_tokens = counter("generated_tokens", "Tokens generated.")
        self.cancelled = counter("cancelled", "Requests whose client left, or did not read.")
        self.engine_failures = counter("engine_failures", "Times that the engine failed and was renewed.")

        def histogram(name: str, help: str) -> Histogram:
            return Histogram(f"distgpt_{name}", help, buckets=BOUNDS, registry=self.registry)

        self.first_token = histogram("first_token_seconds", "From a request's arrival to its first token.")
        self.whole = histogram("request_seconds", "From a request's arrival to the end of its answer.")
        self._gauges = {
            name: Gauge(f"distgpt_{name}", help, registry=self.registry) for name, help in GAUGES.items()
        }

    @property
    def mean_seconds(self) -> float:
        """Mean duration of the requests so far, 0 before the first."""
        total = self.registry.get_sample_value("distgpt_request_seconds_sum") or 0.0
        return total / (self.registry.get_sample_value("distgpt_request_seconds_count") or 1)

    def page(self, accept: str, gauges: Mapping[str, float]) -> tuple[bytes, str]:
        """Return the metrics in a format that the header Accept allows, and its Content-Type."""
        for name, value in gauges.items():
            self._gauges[name].set(value)
        encode, kind = choose_encoder(accept)
        return encode(self.registry), kind
