"""The routes: what each address answers, to whom, how its body is parsed, and how the answer is sent."""

from __future__ import annotations

import asyncio
import re
import time
from base64 import b64encode
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, nullcontext, suppress
from functools import cache, partial
from hashlib import sha256
from hmac import compare_digest
from importlib.resources import files
from typing import Any, TypeVar

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
    overloaded,
    too_large,
    too_late,
)
from distgpt.serving.metrics import Metrics
from distgpt.serving.runner import Call, Runner
from distgpt.serving.tokens import about_tokenizer, detokenize, tokenize

Parsed = TypeVar("Parsed")
Parser = Callable[[bytes, Served, Limits], Parsed]

ABORT = "distgpt.abort"  # of a scope: what ends its connection at once
NOTE = "distgpt.note"  # of a scope: what the log says besides
ARRIVING = 60.0  # seconds in which a body has to come
TAKING = 30.0  # seconds in which a client has to take some more of its answer
SAYING = 5.0  # the same of the end of a stream that fails
PIECE = 1 << 16  # bytes sent at once
LONG = 1 << 14  # tokens and log-probabilities of an answer that is put together beside the loop
LARGE = 1 << 16  # bytes of a body that may take a while
MOST_WAITING = 4  # times the longest body: bytes of large ones that wait, and of others
RETRY = 2  # seconds after which a client that was refused is told to try again
REST = 10.0  # seconds in which the rest of a body that is too long may come, and is dropped
DROPPED = 1 << 30  # bytes of it
PAGE = ("page.html", "playground.js", "chat.js")
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
        self.parsing = Parsing(served, where.limits)

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
            if framed_twice:  # a proxy in front may have read it as two requests
                text = "a body has a Content-Length or a Transfer-Encoding, not both"
                await refusing(Refusal(400, text, headers={"Connection": "close"}))(scope, receive, sent)
            else:
                await app(scope, receive, sent)
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
        text, policy = _page(any(each.chats for each in self._served.models.values()))
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
                return await self.parsing.parse(parse, body)
        except TimeoutError:
            raise too_late(limit) from None

    def note(self, parsed: ParsedBody, answer: Answer, call: Call) -> str:
        """Count the time of a call that is over. Return what the log says of it."""
        self._metrics.whole.observe(time.monotonic() - call.begun)
        note = f", {parsed.prompt_tokens} + {answer.tokens} tokens"
        if self._where.log == "prompts":
            decode = parsed.served.tokenizer.decode
            texts = [decode(request.prompt[:SCREEN]) for request in parsed.requests]
            note += f", prompts {texts!r:.{SCREEN}}"  # a line of the log is no longer
        return note


class Parsing:
    """Parses one body at a time, for the event loop. A small one waits for one large one at most."""

    def __init__(self, served: Served, limits: Limits) -> None:
        self._served, self._limits = served, limits
        self._pool = ThreadPoolExecutor(1, "parser")  # one, as tokenizers have memory of their own
        self._turn = asyncio.Lock()  # of large ones
        self._waiting = {True: 0, False: 0}  # bytes that are parsed or wait, of large bodies and of others

    async def parse(self, parse: Parser[Parsed], body: bytes) -> Parsed:
        """Return what `parse` makes of a body. Refuses one that would wait for too many others."""
        is_large, most = len(body) > LARGE, MOST_WAITING * max(LARGE, self._limits.body)
        if self._waiting[is_large] + len(body) > most:
            raise overloaded(RETRY)
        self._waiting[is_large] += len(body)
        work = asyncio.ensure_future(self._in_turn(parse, body, is_large))
        work.add_done_callback(lambda done: done.cancelled() or done.exception())
        # A client whose time is over leaves; a thread goes on, and the next body waits for it.
        return await asyncio.shield(work)

    async def _in_turn(self, parse: Parser[Parsed], body: bytes, is_large: bool) -> Parsed:
        try:
            async with self._turn if is_large else nullcontext():
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._pool, parse, body, self._served, self._limits)
        finally:
            self._waiting[is_large] -= len(body)

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class _Completion(Response):
    """Sends an answer while it is made. It ends early if its client leaves or reads nothing, or too late."""

    def __init__(self, app: App, parsed: ParsedBody, call: Call) -> None:
        self._app, self._parsed, self._call = app, parsed, call
        self._answer = Answer(parsed)
        self._begun = False  # the status is sent
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = asyncio.create_task(self._forget_on_disconnect(receive))
        limit, why = self._app.limits.seconds, None
        try:
            async with asyncio.timeout(limit - (time.monotonic() - self._call.begun)):
                await self._send_all(send)
        except (Refusal, TimeoutError) as error:
            why = error if isinstance(error, Refusal) else too_late(limit)
        finally:
            watch.cancel()
            self._app.runner.forget(self._call)
            scope[NOTE] = self._app.note(self._parsed, self._answer, self._call)
        if why:
            scope[NOTE] += f", {why.text}"
            await self._fail(why, scope, receive, send)

    async def _forget_on_disconnect(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._app.runner.forget(self._call)

    async def _send_all(self, send: Send) -> None:
        """Send the pieces of a stream, or the whole answer. Long work is done in a thread."""
        answer, stream = self._answer, self._parsed.stream
        async with aclosing(self._call.events()) as events:
            async for index, event in events:
                if event.prompt_likelihoods:
                    piece = await asyncio.to_thread(answer.add, index, event)
                else:
                    piece = answer.add(index, event)
                if stream and piece:
                    await self._send(send, piece)
        if stream:
            await self._send(send, answer.end())
        elif self._call.size < LONG:
            await self._send(send, answer.body())
        else:
            await self._send(send, await asyncio.to_thread(answer.body))
        await self._taken(send({"type": "http.response.body", "body": b""}))

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
            text = f"the client read nothing for {TAKING:g} s"
            raise Refusal(408, text, code="not_read") from None

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
        scope[ABORT]()


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


@cache
def _page(chats: bool) -> tuple[str, str]:
    """The page, for chats or for plain texts, and the Content-Security-Policy that lets run it alone."""
    frame, *scripts = (files("distgpt.serving").joinpath(name).read_text("utf-8") for name in PAGE)
    frame = frame.replace("<body>", '<body class="chats">') if chats else frame
    text = frame.replace("<script></script>", f"<script>\n{''.join(scripts)}</script>")
    script, style = (_sources(text, name) for name in ("script", "style"))
    policy = (
        "default-src 'none'",
        f"script-src {script}",
        f"style-src {style}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
    return text, "; ".join(policy)


def _sources(text: str, name: str) -> str:
    """Hashes of all inline elements of this name."""
    inside = re.findall(rf"<{name}>(.*?)</{name}>", text, re.DOTALL)
    return " ".join(f"'sha256-{b64encode(sha256(each.encode()).digest()).decode()}'" for each in inside)
