"""The routes: what each address answers, to whom, and how the answer is sent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from functools import partial
from hmac import compare_digest
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from distgpt.core.base.errors import SCREEN, escape, first_line, print_lines
from distgpt.serving.chat import parse_chat
from distgpt.serving.completions import Answer, ParsedBody, Served, failed, json_of, model_of, parse_body
from distgpt.serving.limits import (
    Limits,
    ListenOn,
    Refusal,
    broken,
    leaving,
    too_large,
    too_late,
    two_lengths,
    unread,
)
from distgpt.serving.metrics import Metrics
from distgpt.serving.page import page
from distgpt.serving.parsing import Parsed, Parser, Parsing
from distgpt.serving.runner import Call, Runner
from distgpt.serving.tokens import about_tokenizer, detokenize, tokenize

ABORT = "distgpt.abort"  # of a scope: what ends its connection at once
NOTE = "distgpt.note"  # of a scope: what the log says besides
ARRIVING = 60.0  # seconds in which a body has to come
TAKING = 30.0  # seconds in which a client has to take some more of its answer
SAYING = 5.0  # the same of the end of a stream that fails
PIECE = 1 << 16  # bytes sent at once
LONG = 1 << 14  # tokens and log-probabilities of an answer that is put together beside the loop
REST = 10.0  # seconds in which the rest of a body that is too long may come, and is dropped
DROPPED = 1 << 30  # bytes of it
COMPLETIONS: dict[str, Parser[ParsedBody]] = {
    "/v1/completions": parse_body,
    "/v1/chat/completions": parse_chat,
}
TOKENS: dict[str, Parser[dict[str, Any]]] = {"/tokenize": tokenize, "/detokenize": detokenize}


class App:
    """The application."""

    def __init__(self, served: Served, runner: Runner, metrics: Metrics, where: ListenOn) -> None:
        self._served, self.runner, self._metrics, self._where = served, runner, metrics, where
        self.limits = where.limits
        self._parsing = Parsing(served, where.limits)
        self._pool = ThreadPoolExecutor(1, "answers")  # another, so that no answer waits for bodies to come

    def close(self) -> None:
        """End the threads that parse bodies and put answers together."""
        self._parsing.close()
        self._pool.shutdown(wait=False)

    def asgi(self) -> ASGIApp:
        """Return the application that a server calls."""
        routes = [
            Route("/", self._page),
            Route("/health", self._health),
            Route("/metrics", self._metrics_page),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._model),
            *(Route(path, self._completions, methods=["POST"]) for path in COMPLETIONS),
            Route("/tokenizer_info", self._tokenizer),
            *(Route(path, self._tokens, methods=["POST"]) for path in TOKENS),
        ]
        handlers: dict[Any, Any] = {Refusal: _refused, HTTPException: _not_found, Exception: _internal}
        middleware = []
        if self._where.origins:
            cors = partial(CORSMiddleware, allow_methods=["GET", "POST"], allow_headers=["*"])
            middleware.append(Middleware(cors, allow_origins=self._where.origins))
        app = Starlette(routes=routes, exception_handlers=handlers, middleware=middleware)
        return partial(self._logged, app)

    async def _logged(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Count and log a request when it has been answered."""
        status, begun = 499, time.monotonic()  # as web servers log a client that left

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            framed_twice = {b"content-length", b"transfer-encoding"} <= {name for name, _ in scope["headers"]}
            await (refusing(two_lengths()) if framed_twice else app)(scope, receive, sent)
        finally:
            seconds = time.monotonic() - begun
            if scope["type"] == "http" and scope["path"] in COMPLETIONS:
                self._metrics.answered.labels(status).inc()
            if scope["type"] == "http" and self._where.log != "quiet":
                who, note = (scope.get("client") or ["-"])[0], scope.get(NOTE, "")
                what = escape(f"{who} {scope['method']} {scope['path']:.200}")
                line = f"{time.strftime('%H:%M:%S')} {what} {status} {seconds:.3f} s{note}"
                with suppress(OSError):  # nobody reads them any more
                    print_lines(line, err=True)

    def _admit(self, request: Request, with_key: bool = True) -> None:
        """Reject requests without the key. Without a key, reject unknown Host headers (DNS rebinding)."""
        key, hosts = self._where.key, self._where.hosts
        host = request.headers.get("host", "")
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
        if hosts is not None and name.lower() not in hosts:
            raise Refusal(403, f"this server is not addressed as {host!r:.100}", code="unknown_host")
        if key is None or not with_key:
            return
        given = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        if not compare_digest(given.encode(), key.encode()):
            text = "incorrect API key" if given else "no API key: send it as Authorization: Bearer KEY"
            raise Refusal(401, text, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    async def _page(self, request: Request) -> Response:
        self._admit(request, with_key=False)
        text, policy = page(any(each.chats for each in self._served.models.values()))
        safe = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
        return HTMLResponse(text, headers={"Content-Security-Policy": policy, **safe})

    async def _health(self, request: Request) -> Response:
        if self.runner.is_leaving:
            raise leaving()
        return JSONResponse({"status": "ok"})

    async def _metrics_page(self, request: Request) -> Response:
        self._admit(request)
        page, kind = self._metrics.page(request.headers.get("accept", ""), self.runner.gauges)
        return Response(page, media_type=kind)

    async def _models(self, request: Request) -> Response:
        self._admit(request)
        data = [self._about(each) for each in self._served.models.values()]
        return JSONResponse({"object": "list", "data": data})

    async def _model(self, request: Request) -> Response:
        self._admit(request)
        return JSONResponse(self._about(model_of(request.path_params["name"], self._served)))

    def _about(self, served: Served) -> dict[str, Any]:
        return {
            "id": served.name,
            "object": "model",
            "created": served.created,
            "owned_by": "distgpt",
            "context_length": served.context,
            "chats": served.chats,
            "max_tokens": self.limits.max_tokens,
        }

    async def _tokenizer(self, request: Request) -> Response:
        self._admit(request)
        return JSONResponse(about_tokenizer(self._served))

    async def _tokens(self, request: Request) -> Response:
        self._admit(request)
        text = await self._parsed(request, partial(_as_json, TOKENS[request.url.path]), time.monotonic())
        return Response(text, media_type="application/json")

    async def _completions(self, request: Request) -> Response:
        self._admit(request)
        if self.runner.is_leaving:
            raise leaving()
        begun = time.monotonic()
        parsed = await self._parsed(request, COMPLETIONS[request.url.path], begun)
        call = self.runner.submit(parsed.requests, parsed.size, begun)
        self._metrics.prompt_tokens.inc(parsed.prompt_tokens)
        return _Completion(self, parsed, call)

    async def _parsed(self, request: Request, parse: Parser[Parsed], begun: float) -> Parsed:
        """Read a body that began to come at `begun`, and parse it beside the loop."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # pages of other sites cannot send this without a preflight
            raise Refusal(415, "send the body as Content-Type: application/json")
        limit = self.limits.seconds
        try:
            async with asyncio.timeout(min(ARRIVING, limit)):
                body = await _body(request, self.limits.body)
        except TimeoutError:
            raise Refusal(408, "the body did not arrive in time", headers={"Connection": "close"}) from None
        except ClientDisconnect:
            raise Refusal(499, "the client has left") from None
        try:
            async with asyncio.timeout(limit - (time.monotonic() - begun)):
                return await self._parsing.parse(parse, body)
        except TimeoutError:
            raise too_late(limit) from None

    async def answer(self, parsed: ParsedBody, call: Call, scope: Scope) -> AsyncGenerator[bytes]:
        """The pieces of a streamed answer, or its whole. Frees what the call has when it is closed."""
        answer = Answer(parsed)
        try:
            async with aclosing(call.events()) as events:
                async for index, event in events:
                    if event.prompt_likelihoods:  # long work, beside which others are served
                        loop = asyncio.get_running_loop()
                        piece = await loop.run_in_executor(self._pool, answer.add, index, event)
                    else:
                        piece = answer.add(index, event)
                    if parsed.stream and piece:
                        yield piece
            if parsed.stream:
                yield answer.end()
            elif call.size < LONG:
                yield answer.body()
            else:
                yield await asyncio.get_running_loop().run_in_executor(self._pool, answer.body)
        finally:
            self.runner.forget(call)
            self._metrics.whole.observe(time.monotonic() - call.begun)
            scope[NOTE] = f", {parsed.prompt_tokens} + {answer.tokens} tokens"
            if self._where.log == "prompts":
                decode = parsed.served.tokenizer.decode
                texts = [decode(request.prompt[:SCREEN]) for request in parsed.requests]
                scope[NOTE] += f", prompts {texts!r:.{SCREEN}}"  # a line of the log is no longer


class _Completion(Response):
    """Sends an answer while it is made; a client that leaves, or reads nothing, or a time limit ends it."""

    def __init__(self, app: App, parsed: ParsedBody, call: Call) -> None:
        self._app, self._parsed, self._call = app, parsed, call
        self._begun = False  # the status is sent
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = asyncio.create_task(self._cancel_on_disconnect(receive))
        pieces = self._app.answer(self._parsed, self._call, scope)
        limit = self._app.limits.seconds
        try:
            left = limit - (time.monotonic() - self._call.begun)
            async with asyncio.timeout(left), aclosing(pieces):
                async for piece in pieces:
                    await self._send(send, piece)
                await self._taken(send({"type": "http.response.body", "body": b""}))
        except (Refusal, TimeoutError) as error:
            why = error if isinstance(error, Refusal) else too_late(limit)
            scope[NOTE] = f"{scope.get(NOTE, '')}, {why.text}"
            await self._fail(why, scope, receive, send)
        finally:
            watch.cancel()

    async def _cancel_on_disconnect(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._app.runner.forget(self._call)

    async def _send(self, send: Send, piece: bytes) -> None:
        if not self._begun:
            self._begun = True
            kind = b"text/event-stream" if self._parsed.stream else b"application/json"
            headers = [(b"content-type", kind), (b"cache-control", b"no-store")]
            if not self._parsed.stream:
                headers.append((b"content-length", str(len(piece)).encode()))
            await self._taken(send({"type": "http.response.start", "status": 200, "headers": headers}))
        for start in range(0, len(piece), PIECE):
            body = piece[start : start + PIECE]
            await self._taken(send({"type": "http.response.body", "body": body, "more_body": True}))

    async def _taken(self, sending: Awaitable[None]) -> None:
        """Wait for a client that reads slowly, but not for one that reads nothing."""
        try:
            async with asyncio.timeout(TAKING):
                await sending
        except TimeoutError:
            raise unread(TAKING) from None

    async def _fail(self, why: Refusal, scope: Scope, receive: Receive, send: Send) -> None:
        """Say what went wrong, if need be at the end of a stream; not to a client that does not read."""
        if not self._begun:
            await refusing(why)(scope, receive, send)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(SAYING):
                if self._parsed.stream:
                    await self._send(send, failed(why))
                    await send({"type": "http.response.body", "body": b""})
                    return
        abort_of(scope)()


def abort_of(scope: Scope) -> Callable[[], None]:
    """Return what ends the connection of a request at once, if its server offers that."""
    found: Callable[[], None] = scope.get(ABORT, lambda: None)
    return found


async def _body(request: Request, most: int) -> bytes:
    """The body. The rest of one that is too long is read and dropped, so that the client hears the answer."""
    declared = request.headers.get("content-length", "")
    if "expect" in request.headers and declared.isdecimal() and int(declared[:20]) > most:
        raise too_large(most)  # nothing of it is sent then
    body, dropped, stream = bytearray(), 0, request.stream()
    async for chunk in stream:
        body += chunk
        if len(body) > most:
            body.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(REST):
                    async for rest in stream:
                        dropped += len(rest)
                        if dropped > DROPPED:
                            break
            raise too_large(most)
    return bytes(body)


def _as_json(parse: Parser[dict[str, Any]], body: bytes, served: Served, limits: Limits) -> bytes:
    return "".join(json_of(parse(body, served, limits))).encode()


def refusing(why: Refusal) -> Response:
    """Return the application that answers by an error."""
    return JSONResponse(why.as_json(), why.status, why.headers)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return refusing(error)


async def _not_found(request: Request, error: Exception) -> Response:
    """Addresses and methods that there are not."""
    assert isinstance(error, HTTPException)
    text = f"{error.detail}: {request.method} {request.url.path:.200}"
    return refusing(Refusal(error.status_code, text, headers=dict(error.headers or {})))


async def _internal(request: Request, error: Exception) -> Response:
    print_lines(f"distgpt: {type(error).__name__}: {first_line(error)}", err=True)
    return refusing(broken("internal error"))
