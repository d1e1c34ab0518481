"""Thread pools: a fixed number of threads, including the caller, that share a job."""

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
from distgpt.core.comm.affinity import affinity

Work = Callable[[int], object]
Made = TypeVar("Made")

ROWS = 8  # rows are split at multiples of this
COLUMNS = 16  # columns are split at whole cache lines of float32, so that workers do not share a line

ALONE, IN_PARTS, TOGETHER = range(3)  # modes of a thread


class _State(threading.local):
    """A thread's index in the pool, and its mode."""

    index = 0
    mode = ALONE


@dataclass(eq=False, slots=True)
class Job:
    """Parts 0 … count - 1. Each participating helper puts its exception, or None, into `ended`."""

    work: Work
    count: int
    mode: int
    ended: SimpleQueue[BaseException | None] = field(default_factory=SimpleQueue)


_pools: WeakSet[Pool] = WeakSet()  # all live pools


class Pool:
    """A pool that splits work in three ways.

    `run_parts` runs parts 0 … n - 1 of a job, each on a fixed thread. `split_range` runs parts of a range. In
    `run_together`, all threads make the same calls, and every `split_range` gives each thread its part of the
    range without waiting. A `split_range` inside a part runs entirely on that thread.

    User threads that compute concurrently take turns. Between jobs, helpers wait here or run their assigned
    task (`assign_helpers`).
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.begin_anew()
        _pools.add(self)

    def begin_anew(self) -> None:
        """Reset the helpers, which a fork does not copy. The next job starts new ones."""
        self.state = _State()
        self.task: Any = None  # current task of all helpers (`assign_helpers`)
        self._turn = threading.Lock()
        self._jobs: list[SimpleQueue[Job]] = []  # a queue per helper

    @property
    def thread(self) -> int:
        """Index of the calling worker and of its scratch memory."""
        return self.state.index

    @property
    def free_threads(self) -> int:
        """Number of threads for a job from this thread: 1 inside another job."""
        return self.threads if self.state.mode == ALONE else 1

    def run_parts(self, work: Work, count: int) -> None:
        """Call work(0) … work(count - 1) and wait for all calls."""
        if self.state.mode != ALONE or self.threads == 1 or count == 1:
            for part in range(count):
                work(part)
        else:
            self.share(work, count, IN_PARTS)

    def run_together(self, work: Callable[[], None]) -> None:
        """Call work() on all threads concurrently; see the class."""
        if self.state.mode != ALONE or self.threads == 1:
            work()
        else:
            self.share(lambda part: work(), self.threads, TOGETHER)

    def split_range(self, total: int, grain: int, job: Callable[..., object], *args: object) -> None:
        """Call job(first, last, *args) on even parts of range(total), split at multiples of `grain`."""
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
        """Call a compiled loop, or a function that calls loops through this. Only such calls are captured."""
        job(*args)

    def in_turn(self, work: Callable[[], None]) -> None:
        """Call work() while other users of the pool wait. Its computations stay on this thread."""
        with self._turn:  # a plain lock: a signal inside a generator-based one could leave it locked
            try:
                self.state.mode = IN_PARTS
                work()
            finally:
                self.state.mode = ALONE

    def assign_helpers(self, task: Any) -> None:
        """Run task.serve(thread) on the helpers until the next job recalls them. Call this in `in_turn`.

        task.call_back() must release all helpers, even before they have started. It may be called twice.
        """
        self._call_back()
        self._jobs = self._jobs or self._started()
        with signals_deferred():  # otherwise, a signal could leave only some helpers assigned
            self._hand_out(Job(task.serve, self.threads, IN_PARTS))
            self.task = task

    @staticmethod
    def part_of(part: int, parts: int, total: int, grain: int) -> tuple[int, int]:
        blocks = -(-total // grain)
        return blocks * part // parts * grain, min(blocks * (part + 1) // parts * grain, total)

    def share(self, work: Work, count: int, mode: int) -> None:
        """Wake a helper per part, run the caller's parts, wait for all, and raise the helpers' exceptions."""
        with self._turn:
            try:
                self._call_back()
                self._jobs = self._jobs or self._started()
                job = self._hand_out(Job(work, count, mode))
                self.do_parts(0, job)  # the caller is worker 0
                failures = self._outcomes(job)
            except BaseException:  # the caller's error, or an interrupt at any point in this block
                self._wait_until_idle()
                raise
        for failure in failures:
            if failure is not None:
                raise failure

    def _call_back(self) -> None:
        """End the task without waiting for the helpers, which take their next job when they return."""
        if self.task is not None:
            self.task.call_back()
            self.task = None

    def _started(self) -> list[SimpleQueue[Job]]:
        jobs: list[SimpleQueue[Job]] = [SimpleQueue() for _ in range(self.threads - 1)]
        affinity().pin_thread(0, self.threads)  # the caller
        for thread, own in enumerate(jobs, 1):
            threading.Thread(target=self._serve, args=(thread, own), daemon=True).start()
        return jobs

    def _hand_out(self, job: Job) -> Job:
        for jobs in self._jobs[: job.count - 1]:
            jobs.put(job)
        return job

    def _outcomes(self, job: Job) -> list[BaseException | None]:
        """Wait for the helpers of this job. Return each one's exception, or None."""
        return [job.ended.get() for _ in self._jobs[: job.count - 1]]

    def _wait_until_idle(self) -> None:
        """Wait until all helpers are idle, also after an interrupted call.

        Each takes its jobs in order, so all are idle after they have run an empty one.
        """
        while True:
            try:
                self._call_back()
                self._outcomes(self._hand_out(Job(_nothing, self.threads, IN_PARTS)))
                return
            except KeyboardInterrupt:  # a second interrupt: the first is already being raised
                continue

    def do_parts(self, thread: int, job: Job) -> None:
        try:
            self.state.mode = job.mode
            for part in range(thread, job.count, self.threads):
                job.work(part)
        finally:
            self.state.mode = ALONE

    def _serve(self, thread: int, jobs: SimpleQueue[Job]) -> None:
        self.state.index = thread
        affinity().pin_thread(thread, self.threads)
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
    """Scratch memory of each thread of a pool, allocated on first use and then kept."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._made: dict[tuple[Hashable, ...], Any] = {}  # (thread, function, sizes) → memory

    def scratch(self, make: Callable[..., Made], *sizes: Hashable, after: int = 0) -> Made:
        """Return the calling thread's make(*sizes), or that of the thread `after` positions later."""
        key = (self._pool.thread + after, make, *sizes)
        if key not in self._made:
            self._made[key] = make(*sizes)
        made: Made = self._made[key]
        return made


@cache
def pool_of(threads: int) -> Pool:
    """Return the pool with `threads` threads, shared by all models of the process."""
    return Pool(threads)


def _begin_anew() -> None:
    for pool in _pools:
        pool.begin_anew()


os.register_at_fork(after_in_child=_begin_anew)  # models created before the fork use these pools


def _nothing(part: int) -> None:
    return None
