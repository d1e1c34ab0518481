"""The thread that parses bodies beside the event loop, and how much may wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import TypeVar

from distgpt.inference.serving.completions import Served
from distgpt.inference.serving.limits import Limits, overloaded

Parsed = TypeVar("Parsed")
Parser = Callable[[bytes, Served, Limits], Parsed]

LARGE = 1 << 16  # bytes of a body that may take a while
MOST_WAITING = 4  # times the longest body: bytes of large ones that wait, and of others
RETRY = 2  # seconds after which a client that was refused is told to try again


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
