"""Record work: at its first call it is written down, and from then on made again without Python."""

from __future__ import annotations

from functools import partial
from threading import Lock

from distgpt.core.cpu.kernels import Bfloat16Kernels, CpuKernels
from distgpt.core.cpu.pool import pool_of
from distgpt.core.ops.api import IGNORED, Array, Work
from distgpt.recorded.calls import NotRecordable
from distgpt.recorded.capture import OF_LOOPS, Capture


def record(kernels: CpuKernels, work: Work) -> Work:
    """Return a faster `work`; itself where it is one operation, or of kernels that are not known here."""
    is_known = type(kernels) in (CpuKernels, Bfloat16Kernels)
    is_operation = isinstance(work, partial) and getattr(work.func, "__self__", None) is kernels
    return Recorded(kernels, work) if is_known and not is_operation else work


class Recorded:
    """Work that is written down when it is first called."""

    def __init__(self, kernels: CpuKernels, work: Work) -> None:
        self._kernels, self._work = kernels, work
        self._pool = pool_of(kernels.threads)
        self._turn = Lock()  # of threads of the user that do this work at once
        self._targets: list[Array] = []
        self.entries: dict[bool, list[Work]] = {}  # where all targets count, and where some do not

    def __call__(self) -> None:
        # Inside a job of the pool the other threads do not come to where they would meet.
        if self._is_watched() or self._pool.free_threads < self._pool.threads:
            self._work()
            return
        with self._turn:
            if not self.entries:
                self._write_down(True)
            counts_all = not any((targets == IGNORED).any() for targets in self._targets)
            if counts_all not in self.entries:
                self._write_down(False)
            for entry in self.entries[counts_all]:
                entry()

    def _is_watched(self) -> bool:
        """Tell whether somebody stands in front of the operations, as a profile does."""
        return not OF_LOOPS.isdisjoint(vars(self._kernels))

    def _write_down(self, counts_all: bool) -> None:
        capture = Capture(self._kernels, self._pool, counts_all)
        try:
            with capture.attached():
                self._work()
            self.entries[counts_all] = capture.finish()
            self._targets = capture.targets
        except NotRecordable:
            self.entries = {True: [self._work], False: [self._work]}
