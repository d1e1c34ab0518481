"""The HTTP routes: access checks, parsing of bodies, and sending of answers."""

from __future__ import annotations

import asyncio
import re
import time
from base64 import b64encode
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial
from hashlib import sha256
from hmac import compare_digest
from importlib.resources import files
from typing import Any, TypeVar

from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from distgpt.core.base.errors import SCREEN, escape, first_line, print_lines
from distgpt.inference.serving.answers import Answer, ParsedBody, Served, event_of
from distgpt.inference.serving.completions import (
    about_tokenizer,
    detokenize,
    parse_body,
    parse_chat,
    refuse_other_model,
    tokenize,
)
from distgpt.inference.serving.limits import Limits, ListenOn, Refusal, overloaded
from distgpt.inference.serving.runner import Call, Runner

Parsed = TypeVar("Parsed")
Parser = Callable[[bytes, Served, Limits], Parsed]

ABORT = "distgpt.abort"  # scope key: a function that aborts the connection
NOTE = "distgpt.note"  # scope key: extra text for the log
ARRIVING = 60.0  # seconds in which a body must arrive
TAKING = 30.0  # seconds in which a client must read a piece of its answer
SAYING = 5.0  # seconds to send the end of a failed stream
PIECE = 1 << 16  # bytes per send
MOST_WAITING = 4  # limit of bytes waiting to be parsed, as a multiple of the longest body
PAGE = ("page.html", "playground.js", "chat.js")
COMPLETIONS: dict[str, Parser[ParsedBody]] = {
    "/v1/completions": parse_body,
    "/v1/chat/completions": parse_chat,
}
TOKENS: dict[str, Parser[dict[str, Any]]] = {"/tokenize": tokenize, "/detokenize": detokenize}


class App:
    def __init__(self, served: Served, runner: Runner, where: ListenOn) -> None:
        self._served, self.runner, self._where = served, runner, where
        self.parser = ThreadPoolExecutor(1, "parser")  # one thread, because tokenizers have internal state
        self._waiting = 0  # bytes being parsed or waiting for it

    def asgi(self) -> ASGIApp:
        routes = [
            Route("/", self._page),
            Route("/health", self._health),
            Route("/metrics", self._metrics),
            Route("/v1/models", self._models),
            Route("/v1/models/{model:path}", self._models),
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
        """Count and log a request after it is answered."""
        status, begun = 499, time.monotonic()  # web servers log 499 for a client that disconnected

        async def sent(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in scope["headers"]}:
            # A proxy may have read it as two requests (request smuggling).
            text = "a body must not have both Content-Length and Transfer-Encoding"
            app = await _refused(Request(scope), Refusal(400, text, headers={"Connection": "close"}))
        try:
            await app(scope, receive, sent)
        finally:
            if scope["path"] in COMPLETIONS:
                self.runner.metrics.answered.labels(status).inc()
            if self._where.log != "quiet":
                what = escape(f"{(scope['client'] or ['-'])[0]} {scope['method']} {scope['path']:.200}")
                took = f"{status} {time.monotonic() - begun:.3f} s{scope.get(NOTE, '')}"
                print_lines(f"{time.strftime('%H:%M:%S')} {what} {took}", err=True)

    def _admit(self, request: Request, with_key: bool = True) -> None:
        """Reject requests without the key. Without a key, reject unknown Host headers (DNS rebinding)."""
        key, hosts = self._where.key, self._where.hosts
        host = request.headers.get("host", "")
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
        if hosts is not None and name.lower() not in hosts:
            raise Refusal(403, f"unknown host {host!r:.100}", code="unknown_host")
        if key is None or not with_key:
            return
        given = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        if not compare_digest(given.encode(), key.encode()):
            text = "incorrect API key" if given else "no API key; send it as Authorization: Bearer KEY"
            raise Refusal(401, text, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    async def _page(self, request: Request) -> Response:
        self._admit(request, with_key=False)
        text, policy = _page(self._served.chats)
        safe = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
        return HTMLResponse(text, headers={"Content-Security-Policy": policy, **safe})

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _metrics(self, request: Request) -> Response:
        self._admit(request)
        encode, kind = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(self.runner.metrics.registry), media_type=kind)

    async def _models(self, request: Request) -> Response:
        self._admit(request)
        served = self._served
        refuse_other_model(request.path_params, served)
        about = {
            "id": served.name,
            "object": "model",
            "created": served.created,
            "owned_by": "distgpt",
            "context_length": served.context,
            "chats": served.chats,
            "max_tokens": self._where.limits.max_tokens,
        }
        return JSONResponse(about if request.path_params else {"object": "list", "data": [about]})

    async def _tokenizer(self, request: Request) -> Response:
        self._admit(request)
        return JSONResponse(about_tokenizer(self._served))

    async def _tokens(self, request: Request) -> Response:
        self._admit(request)
        return JSONResponse(await self._parsed(request, TOKENS[request.url.path], time.monotonic()))

    async def _completions(self, request: Request) -> ASGIApp:
        self._admit(request)
        begun = time.monotonic()
        parsed = await self._parsed(request, COMPLETIONS[request.url.path], begun)
        call = self.runner.submit(parsed.requests, parsed.size, begun)
        return _Completion(self.runner, parsed, call, self._where).send

    async def _parsed(self, request: Request, parse: Parser[Parsed], begun: float) -> Parsed:
        """Read a body whose request arrived at `begun`, and parse it in another thread."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # other sites' pages cannot send this type without a preflight
            raise Refusal(415, "send the body as Content-Type: application/json")
        limits, loop = self._where.limits, asyncio.get_running_loop()
        try:
            async with asyncio.timeout(min(ARRIVING, limits.seconds)):
                body = await _body(request, limits.body)
        except TimeoutError:
            raise Refusal(408, "the body did not arrive in time", headers={"Connection": "close"}) from None
        except ClientDisconnect:
            raise Refusal(499, "the client disconnected") from None
        if self._waiting + len(body) > MOST_WAITING * max(PIECE, limits.body):
            raise overloaded()
        self._waiting += len(body)
        try:
            async with asyncio.timeout(limits.seconds - (time.monotonic() - begun)):
                return await loop.run_in_executor(self.parser, parse, body, self._served, limits)
        except TimeoutError:
            raise _too_late(limits) from None
        finally:
            self._waiting -= len(body)


class _Completion:
    """Sends an answer while it is generated. Ends early if the client leaves, stalls, or on timeout."""

    def __init__(self, runner: Runner, parsed: ParsedBody, call: Call, where: ListenOn) -> None:
        self._runner, self._parsed, self._call, self._where = runner, parsed, call, where
        self._answer, self._begun = Answer(parsed), False  # begun: whether the status was sent

    async def send(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = asyncio.create_task(self._forget_on_disconnect(receive))
        limits, why = self._where.limits, None
        try:
            async with asyncio.timeout(limits.seconds - (time.monotonic() - self._call.begun)):
                await self._send_all(send)
        except (Refusal, TimeoutError) as error:
            why = error if isinstance(error, Refusal) else _too_late(limits)
        finally:
            watch.cancel()
            self._runner.forget(self._call)
            scope[NOTE] = f", {self._parsed.prompt_tokens} + {self._answer.tokens} tokens"
            if self._where.log == "prompts":
                decode = self._parsed.served.tokenizer.decode
                texts = [decode(request.prompt[:SCREEN]) for request in self._parsed.requests]
                scope[NOTE] += f", prompts {texts!r:.{SCREEN}}"  # limits the length of the log line
        if why is None:
            return
        scope[NOTE] += f", {why.text}"
        if not self._begun:
            raise why
        with suppress(TimeoutError):  # The client may not be reading.
            async with asyncio.timeout(SAYING):
                if self._parsed.stream:
                    await self._send(send, event_of(why.as_json()), is_last=True)
                    return
        scope[ABORT]()

    async def _forget_on_disconnect(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._runner.forget(self._call)

    async def _send_all(self, send: Send) -> None:
        """Send the pieces of a stream, or the whole answer."""
        answer, stream = self._answer, self._parsed.stream
        async for index, event in self._call.events():
            piece = answer.add(index, event)
            if stream and piece:
                await self._send(send, piece)
        await self._send(send, answer.end() if stream else answer.body(), is_last=True)

    async def _send(self, send: Send, piece: bytes, is_last: bool = False) -> None:
        """Send a piece. Wait for a slow client, but fail if it reads nothing for TAKING seconds."""
        messages: list[Message] = []
        if not self._begun:
            self._begun = True
            kind = b"text/event-stream" if self._parsed.stream else b"application/json"
            headers = [(b"content-type", kind), (b"cache-control", b"no-store")]
            if not self._parsed.stream:
                headers.append((b"content-length", str(len(piece)).encode()))
            messages.append({"type": "http.response.start", "status": 200, "headers": headers})
        for start in range(0, len(piece), PIECE):
            body = piece[start : start + PIECE]
            more = not is_last or start + PIECE < len(piece)
            messages.append({"type": "http.response.body", "body": body, "more_body": more})
        for message in messages:
            try:
                async with asyncio.timeout(TAKING):
                    await send(message)
            except TimeoutError:
                text = f"the client read nothing for {TAKING:g} s"
                raise Refusal(408, text, code="not_read") from None


async def _body(request: Request, most: int) -> bytes:
    """Return the body. Read a body that is too long to its end, so that the client gets the error."""
    refusal = Refusal(413, f"the body is longer than {most:,} bytes", headers={"Connection": "close"})
    declared = request.headers.get("content-length", "")
    if "expect" in request.headers and declared.isdecimal() and int(declared[:20]) > most:
        raise refusal  # The client has not sent the body yet.
    body, is_long = bytearray(), False
    async for chunk in request.stream():
        if is_long := is_long or len(body) + len(chunk) > most:
            body.clear()
        else:
            body += chunk
    if is_long:
        raise refusal
    return bytes(body)


def _too_late(limits: Limits) -> Refusal:
    return Refusal(504, f"the request took longer than {limits.seconds:g} s", code="timeout")


async def _refused(request: Request, error: Refusal) -> Response:
    return JSONResponse(error.as_json(), error.status, error.headers)


async def _not_found(request: Request, error: HTTPException) -> Response:
    text = f"{error.detail}: {request.method} {request.url.path:.200}"
    return await _refused(request, Refusal(error.status_code, text, headers=dict(error.headers or {})))


async def _internal(request: Request, error: Exception) -> Response:
    print_lines(f"distgpt: {type(error).__name__}: {first_line(error)}", err=True)
    return await _refused(request, Refusal(500, "internal error"))


@cache
def _page(chats: bool) -> tuple[str, str]:
    """Return the page, for chats or text, and a Content-Security-Policy that allows only its own code."""
    frame, *scripts = (files("distgpt.inference.serving").joinpath(name).read_text("utf-8") for name in PAGE)
    frame = frame.replace("<body>", '<body class="chats">') if chats else frame
    text = frame.replace("<script></script>", f"<script>\n{''.join(scripts)}</script>")
    policy = "default-src 'none'; connect-src 'self'; img-src data:"
    policy += "; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    for name in ("script", "style"):
        inside = re.findall(rf"<{name}>(.*?)</{name}>", text, re.DOTALL)
        hashes = [b64encode(sha256(each.encode()).digest()).decode() for each in inside]
        policy += f"; {name}-src " + " ".join(f"'sha256-{each}'" for each in hashes)
    return text, policy
