"""A server of a model: its parts, put together."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from distgpt.data.tokenizers.naming import Tokenizer
from distgpt.errors import UsageError, print_lines
from distgpt.formatting import count
from distgpt.inference.engine import Engine
from distgpt.inference.lanes import Lanes
from distgpt.inference.start import chunk_for
from distgpt.model.model import Model
from distgpt.serving.app import Access, App
from distgpt.serving.completions import Served
from distgpt.serving.limits import Limits
from distgpt.serving.listening import LOOPBACK, Listening, address
from distgpt.serving.metrics import Metrics
from distgpt.serving.runner import Runner


@dataclass(frozen=True, slots=True)
class Place:
    """Where to listen, for whom, and what to log: "quiet", "requests" or "prompts"."""

    host: str = "127.0.0.1"
    port: int = 8000
    key: str | None = None
    origins: tuple[str, ...] = ()
    log: str = "requests"
    limits: Limits = field(default_factory=Limits)


class Serving:
    """A model on a socket, which is bound before the model is read: so a taken port is soon known."""

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        name: str,
        lanes: Lanes,
        place: Place,
        listener: socket.socket,
    ) -> None:
        config, metrics, limits = model.config, Metrics(), place.limits
        served = Served(name, tokenizer, config.vocab_size, config.seq_len, int(time.time()))
        self._place, self._about = place, f"{name} ({count(lanes.count, 'lane')} of {config.seq_len} tokens)"
        self.listener, self.address = listener, address(listener)
        self.listening = Listening(limits)
        chunk = chunk_for(model)
        self.runner = Runner(
            lambda: Engine(lanes, tokenizer, chunk), lanes.count, limits, metrics, self.listening.fail
        )
        self.metrics = metrics
        access = Access(place.key, place.origins, _hosts(place))
        self._app = App(served, self.runner, metrics, limits, access, place.log)

    def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Serve until a signal comes. Once it listens, say where, and call `ready`."""

        def begun() -> None:
            print_lines(f"serving {self._about} on {self.address}", err=True)
            if not _is_local(self._place) and self._place.key is None:
                print_lines("anybody who reaches this address may use it: --api-key asks for a key", err=True)
            ready()

        try:
            self.listening.run(self._app.asgi(), self.runner, self.listener, begun)
        finally:
            self._app.close()


def _is_local(place: Place) -> bool:
    return place.host in LOOPBACK or place.host.startswith("127.")


def _hosts(place: Place) -> frozenset[str] | None:
    """Without a key and on this machine alone: its own names, so that no other leads a browser here."""
    if place.key is not None or not _is_local(place):
        return None
    return frozenset({"127.0.0.1", "localhost", "[::1]", place.host.lower()})


def checked_key(key: str | None) -> str | None:
    """A key that a header can carry."""
    if key is not None and (not key.isascii() or not key.isprintable() or not key.strip() or " " in key):
        raise UsageError("the API key must be of printable ASCII characters without blanks")
    return key
