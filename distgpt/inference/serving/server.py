"""The HTTP server of a model: components, socket, signals, startup and shutdown."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Iterable
from ipaddress import ip_network
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from distgpt.core.base.errors import DataError, DistgptError, UsageError, escape, print_lines
from distgpt.core.base.formatting import count
from distgpt.core.base.interrupts import Interrupted
from distgpt.core.generate.engine_setup import LoadedModel
from distgpt.core.generate.slots import Slots
from distgpt.corpora.chats.format import ChatFormat, was_tuned_on_chats
from distgpt.inference.serving.answers import Served
from distgpt.inference.serving.app import ABORT, App
from distgpt.inference.serving.completions import weight_of
from distgpt.inference.serving.limits import ListenOn
from distgpt.inference.serving.runner import Runner

SILENT = 20.0  # seconds that a connection may be idle before each request


def bound(host: str, port: int) -> socket.socket:
    """Return a socket bound to this address, or raise a UsageError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        kind, result = socket.SOCK_STREAM, socket.getaddrinfo(host, port, family)[0][4]
        # asyncio sets TCP_NODELAY only if the socket names its protocol.
        listener = socket.socket(family, kind, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(result)
    except OSError as error:
        hint = "; --port 0 uses a free port" if port else ""
        raise UsageError(f"cannot listen on {host} port {port}: {error.strerror or error}{hint}") from None
    return listener


class _Connection(H11Protocol):
    """A connection that closes if it is idle for too long, and that the application can abort.

    If there are too many connections, the longest-waiting idle one is closed, so clients that send nothing or
    half a request cannot block others. If all are being answered, uvicorn answers the new one with 503.
    """

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        app = self.app

        async def reachable(scope: Scope, receive: Receive, send: Send) -> None:
            scope[ABORT] = transport.abort
            await app(scope, receive, send)

        self.app = reachable
        self._wait()
        if self.limit_concurrency and len(self.connections) >= self.limit_concurrency:
            others = [each for each in self.connections if isinstance(each, _Connection) and each is not self]
            if waited_for := [each for each in others if each.is_waited_for]:
                min(waited_for, key=lambda each: each._since).transport.abort()

    @property
    def is_waited_for(self) -> bool:
        """Whether the connection waits for a request, or for the rest of one."""
        if self.transport.is_closing():
            return False
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._silence.cancel()
        self._wait()

    def _wait(self) -> None:
        self._since = self.loop.time()
        self._silence = self.loop.call_later(SILENT, self._end_if_silent, self.cycle)

    def connection_lost(self, exc: Exception | None) -> None:
        self._silence.cancel()
        super().connection_lost(exc)

    def _end_if_silent(self, last: object) -> None:
        """Close the connection if no complete request header arrived since `last`."""
        if self.cycle is last:
            self.transport.abort()


class Server(uvicorn.Server):
    """An HTTP server of one model. The first signal waits for open requests, the second aborts them.

    The socket is bound before the model is loaded, so that a port in use is reported early.
    """

    def __init__(
        self, loaded: LoadedModel, slots: Slots, name: str, where: ListenOn, listener: socket.socket
    ) -> None:
        self.listener, self._where = listener, where
        self._about = f"{name} ({count(slots.count, 'slot')} of {loaded.model.config.seq_len} tokens)"
        self.failure: DistgptError | Interrupted | None = None
        self.runner = Runner(lambda: loaded.engine(slots), slots.count, where.limits, self.fail)
        self._app = App(served_model(loaded, name, slots), self.runner, where)
        logging.getLogger("uvicorn.error").addHandler(logging.NullHandler())
        logging.getLogger("uvicorn.error").propagate = False
        logging.getLogger("asyncio").setLevel(logging.ERROR)  # no warnings about closed connections
        config = uvicorn.Config(
            self._app.asgi(),
            http=_Connection,
            interface="asgi3",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=bool(where.proxies),
            forwarded_allow_ips=list(where.proxies),
            limit_concurrency=where.limits.connections + 1,
        )
        super().__init__(config)

    def serve_model(self) -> None:
        """Serve until a signal or failure. Raises the reason for a failure."""
        try:
            asyncio.run(self._serve_model())
        finally:
            self._app.parser.shutdown(wait=False, cancel_futures=True)
        if self.failure:
            raise self.failure

    async def _serve_model(self) -> None:
        host, port = self.listener.getsockname()[:2]
        self.listener.listen(self.config.backlog)  # before the address is printed
        self.runner.start()
        address = f"[{host}]" if ":" in host else host
        print_lines(f"serving {self._about} on http://{address}:{port}", err=True)
        if not self._where.is_local and self._where.key is None:
            print_lines(
                "anyone who can reach this address can use it; set --api-key to require a key", err=True
            )
        await self.serve([self.listener])
        self.runner.close()

    def fail(self, why: DistgptError) -> None:
        """Shut down because the engine failed."""
        self.failure, self.should_exit = why, True

    def handle_exit(self, number: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.failure = Interrupted(number)
            asyncio.get_running_loop().call_soon_threadsafe(self._abort)
        self.should_exit = True

    def _abort(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.runner.is_busy:
            print_lines("finishing active requests; signal again to stop immediately", err=True)
        await super().shutdown(sockets)


def checked_proxies(addresses: Iterable[str]) -> tuple[str, ...]:
    """Return the addresses if all are valid addresses or networks."""
    for address in addresses:
        try:
            ip_network(address)
        except ValueError as error:
            raise UsageError(f"--proxy: {escape(str(error))}") from None
    return tuple(addresses)


def served_model(loaded: LoadedModel, name: str, slots: Slots) -> Served:
    config, tokenizer = loaded.model.config, loaded.tokenizer
    chat: ChatFormat | DataError
    try:
        chat = ChatFormat(tokenizer)
    except DataError as error:  # The model can still complete text.
        print_lines(f"chat is not available: {error}", err=True)
        chat = error
    return Served(
        name,
        tokenizer,
        config.vocab_size,
        config.seq_len,
        created=int(time.time()),
        chat=chat,
        reuse=slots.is_exact,
        weight=weight_of(tokenizer),
        is_tuned=loaded.spec.weights is not None and was_tuned_on_chats(loaded.files),
    )


def checked_key(key: str | None) -> str | None:
    """Return the key if an HTTP header can carry it."""
    if key is not None and (not key.isascii() or not key.isprintable() or not key.strip() or " " in key):
        raise UsageError("the API key must contain only printable ASCII characters without spaces")
    return key
