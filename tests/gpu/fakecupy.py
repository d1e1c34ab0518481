"""An emulation of CuPy in host memory, with the parts that CupyDevice uses.

Work is queued as on a GPU: a copy, kernel or memset runs when a thread waits for the stream or a later event, so a
missing wait gives wrong numbers. On the extra streams of a `hasty` device it runs immediately instead, before work
that it should have waited for. A graph captures one stream; operations that CUDA forbids during capture raise.
Dropped page-locked memory is reused immediately, as in CuPy's pool. Each thread may have its own device; only one
runs at a time.
"""

from __future__ import annotations

import ctypes
import math
import threading
import time
import weakref
from bisect import bisect_left, insort
from collections import defaultdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

ALIGNMENT = 512
GUARD = 1024  # bytes before and after each array
POISON = 0xFF  # a NaN of every type
WORLD = threading.Condition(threading.RLock())  # held while any device works
PATIENCE = 30  # seconds to wait for another thread's work


class CudaError(RuntimeError): ...


class FakeCupy:
    """The module. Its kernels do nothing; `HostGpu` has kernels that compute."""

    def __init__(self, devices=1, free=1000, total=3000, multiprocessors=132, capability=(9, 0)):
        self.blocks: dict[int, weakref.ref[Any]] = {}  # memory in use, by id
        self._spans: list[tuple[int, int]] = []  # their addresses, in order
        self.free_pinned: dict[int, list[Any]] = defaultdict(list)
        self.streams: list[Stream] = []
        self.current: Any = None
        self.device = 0  # the current one
        self.hasty = False
        self.pool_bytes = self.pinned = 0  # bytes in the pool, and page-locked pieces of memory
        properties = {"name": b"Fake GPU", "major": capability[0], "minor": capability[1]}
        properties["multiProcessorCount"] = multiprocessors
        runtime = SimpleNamespace(getDeviceProperties=lambda device: properties, getDeviceCount=lambda: devices)
        runtime.deviceGetPCIBusId = lambda device: f"0000:{device:02X}:00.0"
        runtime.memGetInfo = lambda: (free, total)
        kinds = {"Device": Device, "Stream": Stream, "Event": Event}
        self.cuda = SimpleNamespace(**{name: partial(kind, self) for name, kind in kinds.items()}, runtime=runtime)
        self.cuda.alloc_pinned_memory, self.cuda.get_elapsed_time = self._alloc_pinned_memory, self._get_elapsed_time
        self.cuda.function = SimpleNamespace(Module=partial(Module, self))

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> ndarray:
        array = ndarray(self, self.empty(shape, dtype))
        array.data.memset_async(0, array.nbytes)  # like CuPy, on the current stream
        return array

    def get_default_memory_pool(self) -> Any:
        return SimpleNamespace(free_bytes=lambda: self.pool_bytes, total_bytes=lambda: self.pool_bytes)

    def capturing(self) -> bool:
        return any(stream.captured is not None for stream in self.streams)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        if self.capturing():
            raise CudaError("memory was allocated during a capture")
        size = math.prod(shape) * np.dtype(dtype).itemsize
        block = np.full(size + 2 * GUARD + ALIGNMENT, POISON, np.uint8)
        key = id(block)
        span = (block.ctypes.data, block.ctypes.data + block.size)
        insort(self._spans, span)
        self.blocks[key] = weakref.ref(block, lambda _: (self.blocks.pop(key), self._spans.remove(span)))
        start = first_byte(block)
        return block[start : start + size].view(dtype).reshape(shape)

    def _alloc_pinned_memory(self, size: int) -> PinnedMemoryPointer:
        if self.capturing():
            raise CudaError("page-locked memory was allocated during a capture")
        rounded = -(-size // 512) * 512
        free = self.free_pinned[rounded]
        self.pinned += not free
        block = free.pop() if free else self.empty((rounded,), np.uint8)
        pointer = block.view(PinnedMemoryPointer)
        pointer.lent, pointer.ptr = (free, block), block.ctypes.data
        return pointer

    def _get_elapsed_time(self, start_event: Event, end_event: Event) -> float:
        for event in (start_event, end_event):
            if event.disable_timing or event.position is None or not event.done:
                raise CudaError("this event has measured nothing")
        start, end = (event.stream.done_at[event.position] for event in (start_event, end_event))
        return 1000 * (end - start)

    def move(self, to: int, source: int, size: int) -> None:
        self.require_own(to, size)
        self.require_own(source, size)
        ctypes.memmove(to, source, size)

    def require_own(self, address: int, size: int) -> None:
        before = bisect_left(self._spans, (address + 1,))
        if not before or address + size > self._spans[before - 1][1]:
            raise CudaError(f"{size} bytes at {address:#x} are nobody's memory")

    def started(self, function: Function, grid: Any, block: Any, args: Any, shared: int) -> Any:
        return lambda: None


def first_byte(block: Any) -> int:
    """Return the offset of the array in a block of memory."""
    return int(-(block.ctypes.data + GUARD) % ALIGNMENT + GUARD)


def owner(memory: Any) -> Any:
    """Return the block that a NumPy view belongs to."""
    while memory.base is not None:
        memory = memory.base
    return memory


class PinnedMemoryPointer(np.ndarray):
    lent: Any = None
    ptr: int = 0

    def __del__(self) -> None:
        if self.lent is not None:
            free, block = self.lent
            free.append(block)


class ndarray:
    """An array whose numbers the host cannot read by mistake."""

    def __init__(self, xp: FakeCupy, memory: Any) -> None:
        self._xp, self.memory = xp, memory
        self.dtype, self.shape, self.size = memory.dtype, memory.shape, memory.size
        self.nbytes, self.itemsize, self.strides = memory.nbytes, memory.itemsize, memory.strides
        self.flags = SimpleNamespace(c_contiguous=memory.flags.c_contiguous)
        self.data = MemoryPointer(xp, memory.ctypes.data, owner(memory))

    def reshape(self, *shape: Any) -> ndarray:
        return ndarray(self._xp, self.memory.reshape(*shape))

    def __getitem__(self, where: Any) -> ndarray:
        return ndarray(self._xp, self.memory[where])

    def __len__(self) -> int:
        return len(self.memory)

    def copy(self) -> ndarray:
        assert self.flags.c_contiguous
        array = ndarray(self._xp, self._xp.empty(self.shape, self.dtype))
        array.data.copy_from_device_async(self.data, self.nbytes)
        return array


class MemoryPointer:
    """`block` keeps the memory alive while work is queued."""

    def __init__(self, xp: FakeCupy, ptr: int, block: Any) -> None:
        self._xp, self.ptr, self._block = xp, ptr, block

    def __add__(self, offset: int) -> MemoryPointer:
        return MemoryPointer(self._xp, self.ptr + offset, self._block)

    def memset_async(self, value: int, size: int, stream: Any = None) -> None:
        self._do(stream, lambda: ctypes.memset(self.ptr, value, size))

    def copy_from_device_async(self, src: MemoryPointer, size: int, stream: Any = None) -> None:
        self._do(stream, lambda: self._xp.move(self.ptr, src.ptr, size))

    def copy_from_host_async(self, mem: int, size: int, stream: Any = None) -> None:
        self._do(stream, lambda: self._xp.move(self.ptr, mem, size), with_host=True)

    def copy_to_host_async(self, mem: int, size: int, stream: Any = None) -> None:
        self._do(stream, lambda: self._xp.move(mem, self.ptr, size), with_host=True)

    def _do(self, stream: Any, work: Any, with_host: bool = False) -> None:
        stream = stream or self._xp.current
        if with_host and stream.captured is not None:
            raise RuntimeError("the current stream is capturing, so transfers are disallowed")
        stream.enqueue(work)


class Device:
    def __init__(self, xp: FakeCupy, index: int) -> None:
        self._xp, self._index = xp, index

    def use(self) -> Device:
        self._xp.device = self._index
        return self


class Stream:
    def __init__(self, xp: FakeCupy, non_blocking: bool = False) -> None:
        self._xp, self.ptr = xp, 0x5000 + len(xp.streams)
        self.non_blocking = non_blocking
        self.captured: Capture | None = None
        self.waiting: list[Any] = []
        self.busy = False
        self.begun = self.finished = 0
        self.done_at = [time.perf_counter()]  # indexed by completed works
        xp.streams.append(self)

    def use(self) -> Stream:
        self._xp.current = self
        return self

    def __enter__(self) -> Stream:
        self._before, self._xp.current = self._xp.current, self
        return self

    def __exit__(self, *exception: Any) -> None:
        self._xp.current = self._before

    def begin_capture(self) -> None:
        if self.captured is not None:
            raise CudaError("this stream is being captured already")
        self.captured = Capture()

    def end_capture(self) -> Graph:
        captured = self.captured
        if captured is None:
            raise CudaError("this stream is not being captured")
        self.captured = None
        if captured.broken:
            raise CudaError("the capture was invalidated")
        return Graph(captured.works)

    def synchronize(self) -> None:
        self.refuse_captured()
        self.run(self.begun)

    def refuse_captured(self) -> None:
        if self.captured is not None:
            self.captured.broken = True
            raise CudaError("operation not permitted when stream is capturing")

    def enqueue(self, work: Any) -> None:
        if self.captured is not None:
            self.captured.works.append(work)
            return
        with WORLD:
            self.waiting.append(work)
            self.begun += 1
        if self._xp.hasty and self is not self._xp.streams[0]:
            self.run(self.begun)

    def wait_event(self, event: Event) -> None:
        if event.stream is None or event.position is None:
            raise CudaError("this event was recorded in a capture, or not at all")
        if self.captured is not None:
            self.captured.broken = True
            raise CudaError("work that is captured cannot wait for work that is not")
        stream, position = event.stream, event.position
        self.enqueue(lambda: stream.run(position))

    def run(self, position: int) -> None:
        with WORLD:
            while self.finished < position:
                if self.busy:  # waiting for another thread's work
                    if not WORLD.wait(PATIENCE):
                        raise CudaError("two streams wait for each other")
                    continue
                work, self.busy = self.waiting.pop(0), True
                try:
                    work()
                finally:
                    self.busy = False
                    self.finished += 1
                    self.done_at.append(time.perf_counter())
                    WORLD.notify_all()


class Event:
    def __init__(self, xp: FakeCupy, disable_timing: bool = False) -> None:
        self._xp, self.disable_timing = xp, disable_timing
        self.stream: Stream | None = None
        self.position: int | None = None
        self.captured: Capture | None = None

    def record(self, stream: Stream) -> None:
        self.stream, self.position = stream, stream.begun if stream.captured is None else None
        self.captured = stream.captured

    @property
    def done(self) -> bool:
        return self.stream is None or (self.position is not None and self.stream.finished >= self.position)

    def synchronize(self) -> None:
        if self.stream is None:
            return
        if self.position is None:
            assert self.captured is not None
            self.captured.broken = True
            raise CudaError("this event was recorded in a capture")
        self.stream.run(self.position)


class Capture:
    """Work that a stream records."""

    def __init__(self) -> None:
        self.broken = False
        self.works: list[Any] = []


class Graph:
    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def launch(self, stream: Stream) -> None:
        stream.refuse_captured()
        for work in self._works:
            stream.enqueue(work)


class Module:
    def __init__(self, xp: FakeCupy) -> None:
        self._xp = xp

    def load(self, cubin: bytes) -> None:
        assert type(cubin) is bytes
        self.cubin = cubin

    def get_function(self, name: str) -> Function:
        return Function(self._xp, self, name)


class Function:
    def __init__(self, xp: FakeCupy, module: Module, name: str) -> None:
        self._xp, self.module, self.name = xp, module, name

    def __call__(self, grid: Any, block: Any, args: Any, shared_mem: int = 0, stream: Any = None) -> None:
        assert type(grid) is tuple and type(block) is tuple
        if not all(isinstance(arg, ndarray | np.generic) for arg in args):
            raise TypeError(f"Unsupported type in {args}")
        stream.enqueue(self._xp.started(self, grid, block, args, shared_mem))
