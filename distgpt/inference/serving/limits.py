"""The server's address, limits on requests, and errors that reject them."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from distgpt.core.config.setting import Setting, setting


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one request. All requests share `queue`, `everything` and `connections`."""

    queue: int = setting(256, "Maximum number of waiting samples.", low=0)
    body: int = setting(1 << 20, "Maximum size of a request.", low=0, flag="--max-body")
    prompt_tokens: int = setting(32768, "Maximum prompt length in tokens.", low=1, flag="--max-prompt-tokens")
    max_tokens: int = setting(4096, "Maximum tokens to generate per sample.", low=1)
    samples: int = setting(128, "Maximum samples per request: prompts times n.", low=1, flag="--max-samples")
    seconds: float = setting(300.0, "Maximum seconds per request.", low=0.1, flag="--max-seconds")
    values: int = 1 << 20  # tokens and log-probabilities of an answer
    everything: int = 1 << 22  # the same, of all open requests and their prompts, about 110 bytes each
    connections: int = 512

    def __post_init__(self) -> None:
        for name, about in LIMITS.items():
            about.check(about.flag or f"--{name}".replace("_", "-"), getattr(self, name))


LIMITS: dict[str, Setting] = {
    each.name: each.metadata["setting"] for each in fields(Limits) if "setting" in each.metadata
}


@dataclass(frozen=True, slots=True)
class ListenOn:
    """An address to listen on, access rules, and what to log: "quiet", "requests" or "prompts"."""

    host: str = "127.0.0.1"
    port: int = 8000
    key: str | None = None
    origins: tuple[str, ...] = ()
    proxies: tuple[str, ...] = ()  # addresses whose X-Forwarded-For is trusted
    log: str = "requests"
    limits: Limits = field(default_factory=Limits)

    @property
    def is_local(self) -> bool:
        return self.host in ("::1", "localhost") or self.host.startswith("127.")

    @property
    def hosts(self) -> frozenset[str] | None:
        """The allowed Host headers. None: any.

        Without a key, a local server allows only its own names, to prevent DNS rebinding.
        """
        if self.key is not None or not self.is_local:
            return None
        return frozenset({"127.0.0.1", "localhost", "[::1]", self.host.lower()})


@dataclass(slots=True, eq=False)
class Refusal(Exception):
    """An error response in OpenAI's format."""

    status: int
    text: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        return {"error": {"message": self.text, "type": kind, "param": self.param, "code": self.code}}


def invalid(text: str, param: str | None = None, code: str | None = None) -> Refusal:
    """Return the error for an invalid request (status 400)."""
    return Refusal(400, text, param=param, code=code)


def overloaded() -> Refusal:
    return Refusal(429, "too many requests are waiting", code="queue_full", headers={"Retry-After": "2"})
