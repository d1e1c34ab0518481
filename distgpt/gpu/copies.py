"""Asynchronous copies between a device and page-locked memory of the host."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import numpy as np

from distgpt.gpu.api import DeviceArray


class UnderWay:
    """Holds page-locked memory until the copies from or to it are done; waits where there are `most`.

    CuPy's pool reuses memory as soon as it is dropped, whether or not a copy is under way.
    """

    def __init__(self, most: float = math.inf) -> None:
        self._most = most
        self._copies: deque[tuple[Any, Any]] = deque()

    def hold(self, done: Any, memory: Any) -> None:
        """Keep `memory` until the event `done`."""
        self._copies.append((done, memory))
        while self._copies:
            oldest, _ = self._copies[0]
            if not oldest.done:
                if len(self._copies) <= self._most:
                    return
                oldest.synchronize()
            self._copies.popleft()


class Mirror:
    """A device array's copy in page-locked memory: `host` is a NumPy array of the same type and shape."""

    def __init__(self, cuda: Any, stream: Any, array: DeviceArray, under_way: UnderWay) -> None:
        self._stream, self._array, self._under_way = stream, array, under_way
        self._done = cuda.Event(disable_timing=True)
        self._memory = cuda.alloc_pinned_memory(max(1, array.nbytes))
        self.host = np.frombuffer(self._memory, array.dtype, array.size).reshape(array.shape)

    def fetch(self, start: int = 0, stop: int | None = None) -> None:
        """Start copying to the host, all or some of the elements; `ready` waits for it."""
        there, here, size = self._stretch(start, stop)
        there.copy_to_host_async(here, size, self._stream)
        self._started()

    def ready(self) -> Any:
        """Wait for the copy; return `host`."""
        self._done.synchronize()
        return self.host

    def send(self, start: int = 0, stop: int | None = None) -> None:
        """Start copying to the device; `ready` waits until `host` may be changed again."""
        there, here, size = self._stretch(start, stop)
        there.copy_from_host_async(here, size, self._stream)
        self._started()

    def _stretch(self, start: int, stop: int | None) -> tuple[Any, int, int]:
        """Return the addresses of elements on the device and on the host, and their bytes."""
        first = start * self._array.itemsize
        size = (self._array.size if stop is None else stop) * self._array.itemsize - first
        return self._array.data + first, self._memory.ptr + first, size

    def _started(self) -> None:
        self._done.record(self._stream)
        self._under_way.hold(self._done, self._memory)
