"""The thread pool of the process: a fixed number of threads, the caller included, that share a job."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cache
from queue import SimpleQueue
from typing import Any, TypeVar
from weakref import WeakSet

from distgpt.core.base.interrupts import signals_deferred
from distgpt.core.comm.layout import layout

Work = Callable[[int], object]
Made = TypeVar("Made")

ROWS = 8  # rows are handed out in multiples of this
COLUMNS = 16  # and columns in whole cache lines of float32, so that no two workers write to one

ALONE, IN_PARTS, TOGETHER = range(3)  # how a thread computes


class _State(threading.local):
    """A thread's index in the pool, and how it computes now."""

    index = 0
    mode = ALONE


@dataclass(eq=False, slots=True)
class Job:
    """Parts 0 … count - 1, and what each helper that took part raised, or None, once it has ended."""

    work: Work
    count: int
    mode: int
    ended: SimpleQueue[BaseException | None] = field(default_factory=SimpleQueue)


_pools: WeakSet[Pool] = WeakSet()  # all that live


class Pool:
    """Splits work in three ways.

    `run_parts`: parts 0 … n - 1 of a job, each by a fixed thread. `split_range`: parts of a range.
    `run_together`: all threads make the same calls, and every `split_range` in them gives each its own part
    of the range, without waiting in between. A `split_range` inside a part of either kind is done whole by
    its thread.
    Threads of the user that compute at once take turns. Between jobs helpers wait here, or do the task
    that they are assigned (`assign_helpers`).
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.begin_anew()
        _pools.add(self)

    def begin_anew(self) -> None:
        """Forget the helpers, which a fork does not copy: the next job starts them."""
        self.state = _State()
        self.task: Any = None  # what all helpers do now (`assign_helpers`)
        self._turn = threading.Lock()
        self._jobs: list[SimpleQueue[Job]] = []  # of each helper

    @property
    def thread(self) -> int:
        """The index of the calling worker, and of its scratch memory."""
        return self.state.index

    @property
    def free_threads(self) -> int:
        """The threads among which a job from here is split: only the caller inside another job."""
        return self.threads if self.state.mode == ALONE else 1

    def run_parts(self, work: Work, count: int) -> None:
        """Call work(0) … work(count - 1) and wait for all."""
        if self.state.mode != ALONE or self.threads == 1 or count == 1:
            for part in range(count):
                work(part)
        else:
            self.share(work, count, IN_PARTS)

    def run_together(self, work: Callable[[], None]) -> None:
        """Call work() on every thread at once; see the class."""
        if self.state.mode != ALONE or self.threads == 1:
            work()
        else:
            self.share(lambda part: work(), self.threads, TOGETHER)

    def split_range(self, total: int, grain: int, job: Callable[..., object], *args: object) -> None:
        """Call job(first, last, *args) on even parts of range(total), cut at multiples of `grain`."""
        mode = self.state.mode
        if mode == TOGETHER:
            first, last = self.part_of(self.thread, self.threads, total, grain)
            if first < last:
                self.state.mode = IN_PARTS
                try:
                    self.call(job, first, last, *args)
                finally:
                    self.state.mode = TOGETHER
        elif mode == IN_PARTS or self.threads == 1 or total <= grain:
            self.call(job, 0, total, *args)
        else:
            parts = min(self.threads, -(-total // grain))

            def work(part: int) -> None:
                self.call(job, *self.part_of(part, parts, total, grain), *args)

            self.share(work, parts, IN_PARTS)

    def call(self, job: Callable[..., object], *args: object) -> None:
        """Call a compiled loop, or a function whose loops are called by this. So alone calls are captured."""
        job(*args)

    def in_turn(self, work: Callable[[], None]) -> None:
        """Call work() while the pool's other users wait. What it computes, this thread computes alone."""
        with self._turn:  # a lock's own: a signal that comes in a generator's could leave it locked
            try:
                self.state.mode = IN_PARTS
                work()
            finally:
                self.state.mode = ALONE

    def assign_helpers(self, task: Any) -> None:
        """Let helpers do task.serve(thread) until the next job calls them back. To be called `in_turn`.

        task.call_back() lets them all return, those too that have not begun yet. It may come twice.
        """
        self._call_back()
        self._jobs = self._jobs or self._started()
        with signals_deferred():  # or some helpers would be assigned and others not
            self._hand_out(Job(task.serve, self.threads, IN_PARTS))
            self.task = task

    @staticmethod
    def part_of(part: int, parts: int, total: int, grain: int) -> tuple[int, int]:
        """Return the range of one part."""
        blocks = -(-total // grain)
        return blocks * part // parts * grain, min(blocks * (part + 1) // parts * grain, total)

    def share(self, work: Work, count: int, mode: int) -> None:
        """Wake a helper per part, do the caller's own parts, wait for the others, raise what they raised."""
        with self._turn:
            try:
                self._call_back()
                self._jobs = self._jobs or self._started()
                job = self._hand_out(Job(work, count, mode))
                self.do_parts(0, job)  # the caller is worker 0
                failures = self._outcomes(job)
            except BaseException:  # the caller's own, or an interrupt, which may come anywhere in here
                self._wait_until_idle()
                raise
        for failure in failures:
            if failure is not None:
                raise failure

    def _call_back(self) -> None:
        """End the task. Helpers need not be waited for: each takes its next job once it has returned."""
        if self.task is not None:
            self.task.call_back()
            self.task = None

    def _started(self) -> list[SimpleQueue[Job]]:
        jobs: list[SimpleQueue[Job]] = [SimpleQueue() for _ in range(self.threads - 1)]
        layout().seat(0, self.threads)  # the caller
        for thread, own in enumerate(jobs, 1):
            threading.Thread(target=self._serve, args=(thread, own), daemon=True).start()
        return jobs

    def _hand_out(self, job: Job) -> Job:
        for jobs in self._jobs[: job.count - 1]:
            jobs.put(job)
        return job

    def _outcomes(self, job: Job) -> list[BaseException | None]:
        """Wait for the helpers of this job; return what each raised, or None."""
        return [job.ended.get() for _ in self._jobs[: job.count - 1]]

    def _wait_until_idle(self) -> None:
        """Wait until no helper is at work, whichever of them had been given some.

        Each takes its jobs in order, so all are through once they are through with one that is empty.
        """
        while True:
            try:
                self._call_back()
                self._outcomes(self._hand_out(Job(_nothing, self.threads, IN_PARTS)))
                return
            except KeyboardInterrupt:  # a second one: the first is raised anyway
                continue

    def do_parts(self, thread: int, job: Job) -> None:
        """Do a thread's parts of a job."""
        try:
            self.state.mode = job.mode
            for part in range(thread, job.count, self.threads):
                job.work(part)
        finally:
            self.state.mode = ALONE

    def _serve(self, thread: int, jobs: SimpleQueue[Job]) -> None:
        self.state.index = thread
        layout().seat(thread, self.threads)
        while True:
            self._help(thread, jobs.get())

    def _help(self, thread: int, job: Job) -> None:
        failure: BaseException | None = None
        try:
            self.do_parts(thread, job)
        except BaseException as error:
            failure = error
        job.ended.put(failure)


class WorkerMemory:
    """Scratch memory of each thread of a pool, made when it is first needed and then kept."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._made: dict[tuple[Hashable, ...], Any] = {}  # what their first one made

    def scratch(self, make: Callable[..., Made], *sizes: Hashable, after: int = 0) -> Made:
        """Return the calling thread's own make(*sizes), or that of the thread this many after it."""
        key = (self._pool.thread + after, make, *sizes)
        if key not in self._made:
            self._made[key] = make(*sizes)
        made: Made = self._made[key]
        return made


@cache
def pool_of(threads: int) -> Pool:
    """Return the pool of this many threads, which all models of this process share."""
    return Pool(threads)


def _begin_anew() -> None:
    for pool in _pools:
        pool.begin_anew()


os.register_at_fork(after_in_child=_begin_anew)  # models that were made before it have these pools


def _nothing(part: int) -> None:
    return None
