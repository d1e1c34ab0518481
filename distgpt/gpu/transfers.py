"""Copies between the device and page-locked memory of the host, which go on while the host does."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import numpy as np

from distgpt.gpu.api import Array


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

    def __init__(self, cuda: Any, stream: Any, array: Array, under_way: UnderWay) -> None:
        self._stream, self._array, self._under_way = stream, array, under_way
        self._done = cuda.Event(disable_timing=True)
        self._memory = cuda.alloc_pinned_memory(max(1, array.nbytes))
        self.host = np.frombuffer(self._memory, array.dtype, array.size).reshape(array.shape)

    def fetch(self) -> None:
        """Start copying to the host; `ready` waits for it."""
        self._array.data.copy_to_host_async(self._memory.ptr, self._array.nbytes, self._stream)
        self._started()

    def ready(self) -> Any:
        """Wait for the copy; return `host`."""
        self._done.synchronize()
        return self.host

    def send(self) -> None:
        """Start copying to the device; `ready` waits until `host` may be changed again."""
        self._array.data.copy_from_host_async(self._memory.ptr, self._array.nbytes, self._stream)
        self._started()

    def _started(self) -> None:
        self._done.record(self._stream)
        self._under_way.hold(self._done, self._memory)
