"""Work spread over processes, its results in the order in which it came.

Each worker has a pipe of its own, on which it gets an item only when it has nothing else to do: nobody ever
waits for somebody who waits for him, and an end of the pipe tells of the other one's death at once.
"""

from __future__ import annotations

import signal
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from distgpt.errors import DistgptError

T = TypeVar("T")
R = TypeVar("R")
AHEAD = 3  # items per worker that are under way
LARGEST_QUEUE = 1 << 26  # bytes that are under way, beyond which no more are read
_READY = None  # a worker's first word


def in_order(
    build: Callable[..., Callable[[T], R]],
    arguments: tuple[Any, ...],
    items: Iterable[T],
    bytes_of: Callable[[T], int],
    workers: int,
) -> Generator[R, None, None]:
    """What `build(*arguments)`, called once in each worker, makes of the items. One worker: this process."""
    if workers == 1:
        yield from map(build(*arguments), items)
        return
    team = _Team(build, arguments, workers)
    numbered = enumerate(items)
    queue: deque[tuple[int, T]] = deque()
    done: dict[int, R] = {}
    told = 0
    sizes: deque[int] = deque()  # of what has begun and is not told yet
    try:
        while True:
            while (
                len(sizes) < AHEAD * workers
                and sum(sizes) < LARGEST_QUEUE
                and (entry := next(numbered, None)) is not None
            ):
                queue.append(entry)
                sizes.append(bytes_of(entry[1]))
            if not sizes:
                return
            team.hand_out(queue)
            done.update(team.collect())
            while told in done:
                yield done.pop(told)
                told += 1
                sizes.popleft()
    except (EOFError, OSError):
        pass  # said below: not in here, where it would look like a closed pipe of the command's own
    finally:
        team.dismiss()
    raise DistgptError("a worker process was killed, or ran out of memory: fewer --workers need less")


class _Team:
    """Workers, started when there is something for them."""

    def __init__(self, build: Callable[..., Any], arguments: tuple[Any, ...], most: int) -> None:
        self._build, self._arguments, self._most = build, arguments, most
        self._context = get_context("spawn")
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._idle: list[Connection] = []
        self._busy: dict[Connection, int] = {}

    def hand_out(self, queue: deque[tuple[int, Any]]) -> None:
        while queue and self._idle:
            pipe = self._idle.pop()
            number, item = queue.popleft()
            self._busy[pipe] = number
            pipe.send(item)
        starting = len(self._pipes) - len(self._idle) - len(self._busy)
        for _ in range(min(len(queue) - starting, self._most - len(self._pipes))):
            self._start()

    def collect(self) -> dict[int, Any]:
        """The next results, by the numbers of their items; waits until somebody has something to say."""
        found = {}
        for pipe in wait(self._pipes):
            assert isinstance(pipe, Connection)
            word = pipe.recv()
            if isinstance(word, BaseException):
                raise word
            if word is not _READY:
                found[self._busy.pop(pipe)] = word
            self._idle.append(pipe)
        return found

    def dismiss(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()

    def _start(self) -> None:
        """A worker inherits that Ctrl-C does not reach it, which is the parent's affair."""
        resource_tracker.ensure_running()  # which would let the signal through again
        ours, theirs = self._context.Pipe()
        self._pipes.append(ours)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process = self._context.Process(target=_work, args=(theirs, self._build, self._arguments))
            process.start()
            self._processes.append(process)
        finally:
            theirs.close()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(pipe: Connection, build: Callable[..., Callable[[Any], Any]], arguments: tuple[Any, ...]) -> None:
    """Until the parent ends, or ends this."""
    with suppress(EOFError, OSError):
        try:
            work = build(*arguments)
            pipe.send(_READY)
            while True:
                pipe.send(work(pipe.recv()))
        except (EOFError, OSError):
            raise
        except BaseException as error:
            if not isinstance(error, DistgptError):
                error.add_note(traceback.format_exc())
            pipe.send(error)
