"""Work spread over processes, its results in the order in which it came."""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from typing import Any, TypeVar

from distgpt.errors import DistgptError

T = TypeVar("T")
R = TypeVar("R")
AHEAD = 2  # items per worker that wait or are worked on

_work: Callable[[Any], Any]


def in_order(
    build: Callable[..., Callable[[T], R]], arguments: tuple[Any, ...], items: Iterable[T], workers: int
) -> Generator[R, None, None]:
    """What `build(*arguments)`, called once in each worker, makes of the items. One worker: this process."""
    if workers == 1:
        yield from map(build(*arguments), items)
        return
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start, (build, arguments))
    waiting: deque[Future[R]] = deque()
    try:
        for item in items:
            waiting.append(_submitted(pool, item))
            if len(waiting) > AHEAD * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except (BrokenProcessPool, BrokenPipeError):  # the latter while it was starting
        raise DistgptError(
            "a worker process was killed, or ran out of memory; the same command goes on from the last shard"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _submitted(pool: ProcessPoolExecutor, item: Any) -> Future[Any]:
    """Processes may start here, and inherit that Ctrl-C does not reach them: it is the parent's affair."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return pool.submit(_worked, item)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(build: Callable[..., Callable[[Any], Any]], arguments: tuple[Any, ...]) -> None:
    global _work
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _work = build(*arguments)


def _end_with_parent() -> None:
    """A parent that was killed says nothing, and its workers would wait forever."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _worked(item: Any) -> Any:
    return _work(item)
