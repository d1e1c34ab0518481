"""Capture of CPU work at its first call; later calls replay it without Python.

The work runs once without its loops, to record the calls of loops and their arguments on each thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import Lock, get_ident
from typing import Any

from numba.core.dispatcher import Dispatcher

from distgpt.core.cpu.graphs.calls import Calls, NotRecordable
from distgpt.core.cpu.graphs.launch import Segment
from distgpt.core.cpu.graphs.loops import MEET, PAUSE
from distgpt.core.cpu.kernels import CpuKernels, every_cross_entropy
from distgpt.core.cpu.pool import ALONE, IN_PARTS, Job, Pool, pool_of
from distgpt.core.ops.api import IGNORE_INDEX, Array, Work
from distgpt.core.ops.kernels import Kernels

# Operations that only call loops on arrays at fixed addresses. Others may read or create arrays, so every
# replay runs them in Python.
OF_LOOPS = frozenset(
    (
        *("adamw", "add", "add_embedding", "add_norm", "attention", "attention_backward"),
        *("embed", "embed_backward", "linear", "linear_act", "linear_backward", "linear_backward_act"),
        *("linear_backward_weights", "muon", "muon_momentum", "norm_backward", "norm_backward_weights"),
        *("orthogonalise", "qk_norm", "qk_norm_backward", "qk_norm_gain", "qk_norm_gain_backward", "rope"),
        *("previous_tokens", "sum_rows", "zero"),
    )
)
# Argument positions of `start` in these operations. They read it if tokens follow others in a cache.
START = {"embed": 5, "rope": 4}
# Python operations that wake no other thread, so the other threads can wait in place
ALONE_AND_SHORT = frozenset(("sum",))
_one_at_a_time = Lock()  # otherwise, the first capture to end would restore the second one's methods
# Operations that return values, which do not exist yet during capture
ANSWERS = frozenset(
    (
        *("zeros", "accum_zeros", "scalars", "integers", "to_host", "later", "free_memory"),
        *("orthogonalise_bytes", "agree"),
    )
)
# Control flow, or operations that return their input
STEERS = frozenset(("each", "run_together", "sort_tokens", "record"))


def _begin_anew() -> None:
    global _one_at_a_time
    _one_at_a_time = Lock()


os.register_at_fork(after_in_child=_begin_anew)


def record(kernels: CpuKernels, work: Work) -> Work:
    """Return a faster `work`, or `work` itself if it is a single operation."""
    is_operation = isinstance(work, partial) and getattr(work.func, "__self__", None) is kernels
    return work if is_operation else CapturedWork(kernels, work)


class CapturedWork:
    """Work that is captured on its first call."""

    def __init__(self, kernels: CpuKernels, work: Work) -> None:
        self._kernels, self._work = kernels, work
        self._pool = pool_of(kernels.threads)
        self._turn = Lock()  # serializes user threads that run this work concurrently
        self._targets: list[Array] = []
        self.entries: dict[bool, list[Work]] = {}  # entries if all targets count, and if some do not

    def __call__(self) -> None:
        # Inside a job of the pool, other threads would not reach the barrier.
        if self._is_watched() or self._pool.free_threads < self._pool.threads:
            self._work()
            return
        with self._turn:
            if not self.entries:
                self._write_down(True)
            counts_all = not any((targets == IGNORE_INDEX).any() for targets in self._targets)
            if counts_all not in self.entries:
                self._write_down(False)
            for entry in self.entries[counts_all]:
                entry()

    def _is_watched(self) -> bool:
        """Return whether a wrapper, such as a profiler, replaces operations."""
        return not OF_LOOPS.isdisjoint(vars(self._kernels))

    def _write_down(self, counts_all: bool) -> None:
        try:
            # Capture twice: an array that the work creates has another address the second time, because the
            # first array is kept alive until then.
            captures = [GraphCapture(self._kernels, self._pool, counts_all) for _ in range(2)]
            for capture in captures:
                with capture.attached():
                    self._work()
            if captures[0].addresses != captures[1].addresses:
                raise NotRecordable("an array that the work allocated")
            self.entries[counts_all], self._targets = captures[1].entries, captures[1].targets
        except NotRecordable:
            self.entries = {True: [self._work], False: [self._work]}


class GraphCapture:
    """One capture of some work. Call its `entries` in order to replay it."""

    def __init__(self, kernels: CpuKernels, pool: Pool, counts_all: bool = True) -> None:
        """`counts_all`: whether all targets count, as in most steps; the computation depends on this."""
        self.entries: list[Work] = []
        self.targets: list[Array] = []  # targets of the loss
        self.addresses: list[int] = []  # addresses of the arrays that loops receive
        self._counts_all = counts_all
        self._kernels, self._pool = kernels, pool
        self._threads = [Calls() for _ in range(pool.threads)]
        self._at_pauses: list[Work] = []
        self._has_met = True  # whether all threads are already synchronized before the next call

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Replace the pool's methods and all operations that do more than call loops.

        Calls in this context are captured. `entries` is complete when it ends.
        """
        with _one_at_a_time, ExitStack() as stack:
            for name in ("run_parts", "share", "call"):
                stack.enter_context(_instead(self._pool, name, getattr(self, name)))
            for name in _operations() - OF_LOOPS - STEERS:
                instead = self._refused if name in ANSWERS else self._in_python
                stack.enter_context(_instead(self._kernels, name, partial(instead, name)))
            for name in START:
                stack.enter_context(_instead(self._kernels, name, partial(self._unless_started, name)))
            loss = self._linear_cross_entropy
            stack.enter_context(_instead(self._kernels, "linear_cross_entropy", loss))
            stack.callback(setattr, self._pool.state, "index", self._pool.state.index)
            yield
        self._end_segment()

    # -- replacements of the pool's methods

    def run_parts(self, work: Callable[[int], None], count: int) -> None:
        Pool.run_parts(self._pool, work, count)
        if self._pool.threads == 1 and count > 1:
            self._pause(_nothing)

    def share(self, work: Callable[[int], object], count: int, mode: int) -> None:
        self._meet()
        for thread in range(self._pool.threads):
            self._pool.state.index = thread
            self._pool.do_parts(thread, Job(work, count, mode))
        self._pool.state.index = 0
        self._meet()
        if mode == IN_PARTS:
            self._pause(_nothing)  # Python handles signals here, in the main thread

    def call(self, job: Callable[..., object], *args: object) -> None:
        if isinstance(job, Dispatcher):
            self._threads[self._pool.thread].add(job, args)
            self._has_met = False
        else:
            job(*args)

    def _meet(self) -> None:
        """Synchronize all threads, unless they have just done so."""
        if not self._has_met and self._pool.threads > 1:
            for calls in self._threads:
                calls.mark(MEET)
        self._has_met = True

    def _pause(self, work: Work) -> None:
        self._threads[0].mark(PAUSE)
        self._at_pauses.append(work)

    # -- replacements of operations

    def _in_python(self, name: str, *args: object, **named: object) -> None:
        if self._pool.state.mode != ALONE:
            raise NotRecordable(f"{name} by some threads")
        work = partial(getattr(type(self._kernels), name), self._kernels, *args, **named)
        if name in ALONE_AND_SHORT and any(map(len, self._threads)):
            self._meet()
            self._pause(work)
            self._has_met = False  # the others also wait for this
            self._meet()
        else:
            self._end_segment()
            self.entries.append(work)

    def _refused(self, name: str, *args: object, **named: object) -> None:
        raise NotRecordable(name)

    def _unless_started(self, name: str, *args: object) -> None:
        if args[START[name]] is not None:
            self._in_python(name, *args)
        else:
            getattr(type(self._kernels), name)(self._kernels, *args)

    def _linear_cross_entropy(self, *args: Any) -> None:
        self.targets.append(args[5])
        if self._counts_all:
            every_cross_entropy(self._kernels, *args)
        else:
            self._in_python("linear_cross_entropy", *args)

    def _end_segment(self) -> None:
        if any(map(len, self._threads)):
            self.entries.append(Segment(self._pool, self._threads, self._at_pauses))
            self.addresses += [address for calls in self._threads for address in calls.addresses]
        self._threads = [Calls() for _ in self._threads]
        self._at_pauses = []
        self._has_met = True


def _nothing() -> None:
    return None


def _operations() -> frozenset[str]:
    return frozenset(name for name, of in vars(Kernels).items() if callable(of) and not name.startswith("_"))


@contextmanager
def _instead(of: object, name: str, call: Callable[..., object]) -> Iterator[None]:
    """Replace a method of an object for this thread."""
    genuine, own = getattr(of, name), get_ident()

    def either(*args: object, **named: object) -> object:
        return (call if get_ident() == own else genuine)(*args, **named)

    had = vars(of).get(name)
    setattr(of, name, either)
    try:
        yield
    finally:
        if had is None:
            delattr(of, name)
        else:
            setattr(of, name, had)
