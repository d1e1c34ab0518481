"""Page-locked memory on the host, which a device copies from and to while both sides go on."""

from __future__ import annotations

import itertools
from collections import deque
from typing import Any

import numpy as np

from distgpt.gpu.api import Array

SLOTS = 8  # uploads that may be under way
MOST_BYTES = 8 << 20  # in one piece: a slot never gives its memory back


class PinnedRing:
    """Carries uploads: what was given may be changed at once, as a copy is on its way."""

    def __init__(self, cuda: Any, stream: Any) -> None:
        self._cuda, self._stream = cuda, stream
        self._slots = itertools.cycle([_Slot(cuda) for _ in range(SLOTS)])

    def send(self, array: Array, host: Any) -> None:
        """array ← host, of one type and size and both contiguous"""
        raw = host.reshape(-1).view(np.uint8)
        for start in range(0, raw.size, MOST_BYTES):
            piece = raw[start : start + MOST_BYTES]
            slot = next(self._slots)
            slot.wait_and_grow(piece.size)
            slot.bytes[: piece.size] = piece
            (array.data + start).copy_from_host_async(slot.memory.ptr, piece.size, self._stream)
            slot.sent.record(self._stream)


class _Slot:
    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda
        self.sent = cuda.Event(disable_timing=True)
        self.memory: Any = None
        self.bytes = np.empty(0, np.uint8)

    def wait_and_grow(self, size: int) -> None:
        """Until the last upload from here has arrived; then have room for this many bytes."""
        if self.memory is not None:
            self.sent.synchronize()
        if self.bytes.size < size:
            self.memory = self._cuda.alloc_pinned_memory(size)
            self.bytes = np.frombuffer(self.memory, np.uint8, size)


class UnderWay:
    """Holds memory until the copies from or to it are done, even where nobody else does any more.

    CuPy's pool lends memory out again once it is dropped, and does not ask whether a copy is under way.
    """

    def __init__(self) -> None:
        self._copies: deque[tuple[Any, Any]] = deque()

    def hold(self, done: Any, memory: Any) -> None:
        """Until this event has happened."""
        while self._copies and self._copies[0][0].done:
            self._copies.popleft()
        self._copies.append((done, memory))


class Mirror:
    """The twin of a device's array on the host: `host` is a numpy array of the same type and shape."""

    def __init__(self, cuda: Any, stream: Any, array: Array, under_way: UnderWay) -> None:
        self._stream, self._array, self._under_way = stream, array, under_way
        self._done = cuda.Event(disable_timing=True)
        self._memory = cuda.alloc_pinned_memory(max(1, array.nbytes))
        self.host = np.frombuffer(self._memory, array.dtype, array.size).reshape(array.shape)

    def fetch(self) -> None:
        """Start copying to the host; `ready` waits until that is done."""
        self._array.data.copy_to_host_async(self._memory.ptr, self._array.nbytes, self._stream)
        self._begun()

    def ready(self) -> None:
        self._done.synchronize()

    def send(self) -> None:
        """Start copying to the device; `ready` waits until `host` may be changed again."""
        self._array.data.copy_from_host_async(self._memory.ptr, self._array.nbytes, self._stream)
        self._begun()

    def _begun(self) -> None:
        self._done.record(self._stream)
        self._under_way.hold(self._done, self._memory)
