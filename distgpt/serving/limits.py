"""What a server grants its clients, and how it says no."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one request, but for `queue` and `connections`, which all share."""

    body: int = 1 << 20  # bytes
    prompt_tokens: int = 32768  # of each prompt
    max_tokens: int = 4096  # of each sample
    samples: int = 128  # prompts × n
    values: int = 1 << 20  # tokens and log-probabilities of an answer
    queue: int = 256  # samples that wait for a lane
    seconds: float = 300.0  # from a request's arrival to the last byte of its answer
    unread: int = 1024  # tokens kept for a client that does not read them
    connections: int = 512


@dataclass(slots=True, eq=False)
class Refusal(Exception):
    """A request that is answered by an error, in OpenAI's words."""

    status: int
    text: str
    kind: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {
            "error": {"message": self.text, "type": self.kind, "param": self.param, "code": self.code},
        }


def invalid(text: str, param: str | None = None, code: str | None = None) -> Refusal:
    """A request that no server of this model would answer."""
    return Refusal(400, text, param=param, code=code)


def too_large(most: int) -> Refusal:
    return Refusal(413, f"the body is longer than {most:,} bytes", headers={"Connection": "close"})


def overloaded(seconds: int) -> Refusal:
    text = f"too many requests wait already: try again in {seconds} s"
    return Refusal(429, text, "rate_limit_error", code="queue_full", headers={"Retry-After": str(seconds)})


def leaving() -> Refusal:
    return Refusal(503, "the server is shutting down", "server_error", code="shutting_down")


def too_late(seconds: float) -> Refusal:
    return Refusal(504, f"the request took longer than {seconds:g} s", "server_error", code="timeout")


def broken(why: str) -> Refusal:
    return Refusal(500, why, "server_error")
