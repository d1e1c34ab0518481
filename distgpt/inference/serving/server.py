"""A server of a model: its parts put together, its socket, signals, and the way it begins and ends."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from ipaddress import ip_network
from typing import Any

import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from distgpt.core.base.errors import DataError, DistgptError, UsageError, escape, print_lines
from distgpt.core.base.formatting import count
from distgpt.core.base.interrupts import Interrupted
from distgpt.core.data.tokenizers import Tokenizer
from distgpt.core.generate.engine_setup import LoadedModel
from distgpt.core.generate.slots import Slots
from distgpt.corpora.chats.format import ChatFormat, was_tuned_on_chats
from distgpt.inference.serving.answers import Served
from distgpt.inference.serving.app import ABORT, App, refusing
from distgpt.inference.serving.completions import weight_of
from distgpt.inference.serving.limits import ListenOn, Refusal
from distgpt.inference.serving.metrics import Metrics
from distgpt.inference.serving.runner import Runner

SILENT = 20.0  # seconds that a connection may take to its first request, and to the next
CLOSING = 5  # seconds that connections have for what is still to be sent, when the server ends


def bound(host: str, port: int) -> socket.socket:
    """A socket on this address. A UsageError says why there is none."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        kind, found = socket.SOCK_STREAM, socket.getaddrinfo(host, port, family)[0][4]
        # asyncio turns off the waiting for fuller packets (TCP_NODELAY) where a socket names its protocol.
        listener = socket.socket(family, kind, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(found)
    except OSError as error:
        hint = "; --port 0 takes a free one" if port else ""
        raise UsageError(f"cannot listen on {host} port {port}: {error.strerror or error}{hint}") from None
    return listener


def address(listener: socket.socket) -> str:
    """Return the address as a browser wants it."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Connection(H11Protocol):
    """A connection that ends if it is silent for too long, and that the application can end.

    Where there are too many, the one ends that has been waited for the longest: so clients that send nothing,
    or half a request, keep nobody out.
    """

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        most, self.limit_concurrency = self.limit_concurrency, None  # by which uvicorn refuses all that come
        self._since, app = self.loop.time(), self._app_with_room(most or len(self.connections))

        async def reachable(scope: Scope, receive: Receive, send: Send) -> None:
            scope[ABORT] = transport.abort
            await app(scope, receive, send)

        self.app = reachable
        self._silence = self.loop.call_later(SILENT, self._end_if_silent, None)

    def _app_with_room(self, most: int) -> Any:
        """Return the application, or what refuses this connection where all others are at work."""
        if len(self.connections) > most:  # mostly not: then nobody is counted
            others = [
                each for each in self.connections if not each.transport.is_closing() and each is not self
            ]
            waited_for = [each for each in others if isinstance(each, _Connection) and each.is_waited_for]
            if len(others) >= most:
                if not waited_for:
                    headers = {"Retry-After": "1", "Connection": "close"}
                    text = "too many clients are being answered: try again"
                    return refusing(Refusal(429, text, code="too_many_clients", headers=headers))
                min(waited_for, key=lambda each: each._since).transport.abort()
        return self.app

    @property
    def is_waited_for(self) -> bool:
        """Tell whether its next request is not there yet, or not whole."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._since = self.loop.time()
        self._silence.cancel()
        self._silence = self.loop.call_later(SILENT, self._end_if_silent, self.cycle)

    def connection_lost(self, exc: Exception | None) -> None:
        self._silence.cancel()
        super().connection_lost(exc)

    def _end_if_silent(self, last: object) -> None:
        """Close the connection if no complete request header arrived since `last`."""
        if self.cycle is last:
            self.transport.abort()


class _UvicornServer(uvicorn.Server):
    """Leaves signals to `Server`."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Server:
    """A model behind HTTP. Serves until `end` is called, or SIGTERM or Ctrl-C comes.

    Its socket is bound before the model is read: so a taken port is soon known.
    """

    def __init__(
        self, loaded: LoadedModel, slots: Slots, name: str, where: ListenOn, listener: socket.socket
    ) -> None:
        config, self.metrics, self._where = loaded.model.config, Metrics(), where
        self.listener = listener
        self.failure: DistgptError | None = None
        self._server: _UvicornServer | None = None
        self._interrupt: Interrupted | None = None
        self._finishing: asyncio.Task[None] | None = None
        self._about = f"{name} ({count(slots.count, 'lane')} of {config.seq_len} tokens)"
        self.runner = Runner(lambda: loaded.engine(slots), slots.count, where.limits, self.metrics, self.fail)
        self._app = App(_served(loaded, name, slots), self.runner, self.metrics, where)

    def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Serve to the end; `ready` is called once it listens. Raises why it could not go on."""
        try:
            asyncio.run(self._run(ready))
        finally:
            self._app.parsing.close()
        if self._interrupt or self.failure:
            raise self._interrupt or self.failure or AssertionError

    def fail(self, why: DistgptError) -> None:
        """End, as the engine is lost."""
        self.failure = why
        self.end()

    def end(self) -> None:
        if self._server is not None:
            self._server.should_exit = True

    async def _run(self, ready: Callable[[], None]) -> None:
        logging.getLogger("uvicorn.error").addHandler(logging.NullHandler())
        logging.getLogger("uvicorn.error").propagate = False
        logging.getLogger("asyncio").setLevel(logging.ERROR)  # else it warns of writes to clients that left
        config = uvicorn.Config(
            self._app.asgi(),
            http=_Connection,
            interface="asgi3",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=bool(self._where.proxies),
            forwarded_allow_ips=list(self._where.proxies),
            limit_concurrency=self._where.limits.connections,
            timeout_graceful_shutdown=CLOSING,
        )
        self._server = _UvicornServer(config)
        self.listener.listen(config.backlog)  # so that whoever is told where can connect
        self.runner.start()
        with self._signals_handled():
            print_lines(f"serving {self._about} on {address(self.listener)}", err=True)
            if not self._where.is_local and self._where.key is None:
                print_lines("anybody who reaches this address may use it: --api-key asks for a key", err=True)
            ready()
            await self._server.serve([self.listener])
        self.runner.close()

    @contextmanager
    def _signals_handled(self) -> Iterator[None]:
        """The first signal lets what runs finish, the second ends it."""
        loop, former = asyncio.get_running_loop(), {}
        # What a parent ignores, as nohup does SIGHUP, stays ignored.
        ending = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        numbers = [number for number in ending if signal.getsignal(number) != signal.SIG_IGN]

        def came(number: int) -> None:
            if self._finishing is not None:
                self._interrupt = Interrupted(number)
                self.runner.close()
                self.end()
                return
            if self.runner.gauges["open_requests"]:
                print_lines("finishing what runs; once more to end at once", err=True)
            self._finishing = asyncio.create_task(finish())

        async def finish() -> None:
            await self.runner.finish()
            self.end()

        try:
            for number in numbers:
                former[number] = signal.getsignal(number)
                loop.add_signal_handler(number, came, number)
        except (RuntimeError, ValueError):  # not in the main thread: as in tests
            former.clear()
        try:
            yield
        finally:
            for number, handler in former.items():
                loop.remove_signal_handler(number)
                signal.signal(number, handler)


def checked_proxies(addresses: Iterable[str]) -> tuple[str, ...]:
    """Return addresses and networks of proxies."""
    for address in addresses:
        try:
            ip_network(address)
        except ValueError as error:
            raise UsageError(f"--proxy: {escape(str(error))}") from None
    return tuple(addresses)


def _served(loaded: LoadedModel, name: str, slots: Slots) -> Served:
    config, tokenizer = loaded.model.config, loaded.tokenizer
    return Served(
        name,
        tokenizer,
        config.vocab_size,
        config.seq_len,
        created=int(time.time()),
        chat=_chat_format(tokenizer),
        reuse=slots.is_exact,
        weight=weight_of(tokenizer),
        is_tuned=loaded.spec.weights is not None and was_tuned_on_chats(loaded.files),
    )


def _chat_format(tokenizer: Tokenizer) -> ChatFormat | DataError:
    """The model's chat format; without a usable one it still completes texts."""
    try:
        return ChatFormat(tokenizer)
    except DataError as error:
        print_lines(f"no chats are answered: {error}", err=True)
        return error


def checked_key(key: str | None) -> str | None:
    """A key that a header can carry."""
    if key is not None and (not key.isascii() or not key.isprintable() or not key.strip() or " " in key):
        raise UsageError("the API key must be of printable ASCII characters without blanks")
    return key
