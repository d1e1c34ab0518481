"""The server on its socket: connections, signals, and the way it begins and ends."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from distgpt.errors import DistgptError, UsageError, print_lines
from distgpt.interrupts import Interrupted
from distgpt.serving.app import ABORT
from distgpt.serving.limits import Limits
from distgpt.serving.runner import Runner

SILENT = 20.0  # seconds that a connection may take to its first request, and to the next
CLOSING = 5  # seconds that connections have for what is still to be sent, when the server ends
LOOPBACK = ("127.0.0.1", "::1", "localhost")


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
    """As a browser wants it."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Connection(H11Protocol):
    """Also ends a connection that never asks, or no more, and lets the application end one."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        app = self.app

        async def reachable(scope: Scope, receive: Receive, send: Send) -> None:
            scope[ABORT] = transport.abort
            await app(scope, receive, send)

        self.app = reachable
        self._silence = self.loop.call_later(SILENT, self._end_if_silent, None)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._silence.cancel()
        self._silence = self.loop.call_later(SILENT, self._end_if_silent, self.cycle)

    def connection_lost(self, exc: Exception | None) -> None:
        self._silence.cancel()
        super().connection_lost(exc)

    def _end_if_silent(self, last: object) -> None:
        """Since the `last` request nothing came that is a whole head of another."""
        if self.cycle is last:
            self.transport.abort()


class _Server(uvicorn.Server):
    """Leaves signals to `serve`."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Listening:
    """Serves an application until `end` is called, or SIGTERM or Ctrl-C comes."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.failure: DistgptError | None = None
        self._server: _Server | None = None
        self._interrupt: Interrupted | None = None
        self._finishing: asyncio.Task[None] | None = None

    def run(self, app: ASGIApp, runner: Runner, listener: socket.socket, ready: Callable[[], None]) -> None:
        """Until the end; `ready` is called once it listens. Raises why it could not go on."""
        asyncio.run(self._run(app, runner, listener, ready))
        if self._interrupt or self.failure:
            raise self._interrupt or self.failure or AssertionError

    def fail(self, why: DistgptError) -> None:
        """End, as the engine is lost."""
        self.failure = why
        self.end()

    def end(self) -> None:
        if self._server is not None:
            self._server.should_exit = True

    async def _run(
        self, app: ASGIApp, runner: Runner, listener: socket.socket, ready: Callable[[], None]
    ) -> None:
        logging.getLogger("uvicorn.error").addHandler(logging.NullHandler())
        logging.getLogger("uvicorn.error").propagate = False
        config = uvicorn.Config(
            app,
            http=_Connection,
            interface="asgi3",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            limit_concurrency=self._limits.connections,
            timeout_graceful_shutdown=CLOSING,
        )
        self._server = _Server(config)
        listener.listen(config.backlog)  # so that whoever is told where can connect
        runner.start()
        with self._heeding(runner):
            ready()
            await self._server.serve([listener])
        runner.close()

    @contextmanager
    def _heeding(self, runner: Runner) -> Iterator[None]:
        """The first signal lets what runs finish, the second ends it."""
        loop, former = asyncio.get_running_loop(), {}
        # What a parent ignores, as nohup does SIGHUP, stays ignored.
        ending = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        numbers = [number for number in ending if signal.getsignal(number) != signal.SIG_IGN]

        def came(number: int) -> None:
            if self._finishing is not None:
                self._interrupt = Interrupted(number)
                runner.close()
                self.end()
                return
            if runner.gauges["open_requests"]:
                print_lines("finishing what runs; once more to end at once", err=True)
            self._finishing = asyncio.create_task(finish())

        async def finish() -> None:
            await runner.finish()
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
