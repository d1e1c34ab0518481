"""One CUDA device through CuPy: its memory, one stream, our compiled kernels, recorded graphs, timing."""

from __future__ import annotations

import itertools
import platform
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from distgpt.gpu.api import Array, Work
from distgpt.gpu.compiling import cubin

TIMED_CALLS = 5
SLOTS = 8  # uploads that may be under way
MOST_BYTES = 8 << 20  # of one upload: a slot never gives its memory back
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class CupyDevice:
    """Implements `distgpt.gpu.api.Device`. All work goes to one stream, which is also CuPy's current one."""

    def __init__(self, index: int, deterministic: bool = False, graphs: bool = True, xp: Any = None) -> None:
        self.xp: Any = import_module("cupy") if xp is None else xp
        self._cuda = self.xp.cuda
        self._cuda.Device(index).use()
        self.stream = self._cuda.Stream(non_blocking=True)
        self.stream.use()
        facts = self._cuda.runtime.getDeviceProperties(index)
        self.index, self.deterministic = index, deterministic
        self.name = facts["name"].decode() if isinstance(facts["name"], bytes) else facts["name"]
        self.capability = (int(facts["major"]), int(facts["minor"]))
        self.multiprocessors = int(facts["multiProcessorCount"])
        # The same GPU has the same place in all processes, whatever index they know it by.
        self.place = f"{_machine()} {self._cuda.runtime.deviceGetPCIBusId(index)}"
        self.recording = False
        self._graphs = graphs
        self._ring, self._under_way = PinnedRing(self._cuda, self.stream), UnderWay()
        self._modules: dict[tuple[str, tuple[str, ...]], Any] = {}
        self._functions: dict[tuple[str, str, tuple[str, ...]], Any] = {}
        self.choices: dict[Hashable, int] = {}

    # -- memory

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Array:
        self._refuse_while_recording("memory was asked for")
        with self.stream:  # CuPy's current one may be another device's by now
            return self.xp.zeros(shape, dtype)

    def upload(self, array: Array, host: Any) -> None:
        self._refuse_while_recording("an upload was started")
        _require_contiguous(array)
        host = np.ascontiguousarray(host)
        if host.dtype != array.dtype or host.size != array.size:
            raise ValueError(f"{host.dtype}{list(host.shape)} does not fit {array.dtype}{list(array.shape)}")
        self._ring.send(array, host)

    def download(self, array: Array) -> Any:
        return self.later(array)().copy()

    def later(self, array: Array) -> Callable[[], Any]:
        mirror = self.mirror(array)
        mirror.fetch()

        def wait() -> Any:
            mirror.ready()
            return mirror.host

        return wait

    def mirror(self, array: Array) -> Mirror:
        self._refuse_while_recording("a download was started")
        _require_contiguous(array)
        return Mirror(self._cuda, self.stream, array, self._under_way)

    def zero(self, array: Array) -> None:
        array.data.memset_async(0, array.nbytes, self.stream)

    def copy(self, array: Array, source: Array) -> None:
        array.data.copy_from_device_async(source.data, array.nbytes, self.stream)

    def memory(self) -> tuple[int, int]:
        free, total = self._cuda.runtime.memGetInfo()
        return free + self.xp.get_default_memory_pool().free_bytes(), total

    def taken(self) -> int:
        """Return the peak of bytes in arrays: the pool keeps what is freed."""
        return int(self.xp.get_default_memory_pool().total_bytes())

    # -- work

    def launch(
        self,
        source: str,
        kernel: str,
        defines: tuple[str, ...],
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: Sequence[Any],
        shared: int = 0,
    ) -> None:
        key = (source, kernel, defines)
        function = self._functions.get(key) or self._function(key)
        function(grid, block, tuple(map(_argument, args)), shared, self.stream)

    def _function(self, key: tuple[str, str, tuple[str, ...]]) -> Any:
        source, kernel, defines = key
        if (source, defines) not in self._modules:
            module = self._cuda.function.Module()
            module.load(cubin(source, defines, "sm_{}{}".format(*self.capability)))
            self._modules[source, defines] = module
        self._functions[key] = self._modules[source, defines].get_function(kernel)
        return self._functions[key]

    def record(self, work: Work) -> Work:
        return _Recorded(self, work) if self._graphs else work

    def capture(self, work: Work) -> Any:
        """Return the graph of what `work` starts, without running it."""
        self.stream.begin_capture()
        self.recording = True
        try:
            work()
        except BaseException:
            self.recording = False
            _end_broken(self.stream)
            raise
        self.recording = False
        return self.stream.end_capture()

    def fastest(self, key: Hashable, candidates: Sequence[Work]) -> None:
        if key not in self.choices and not (self.deterministic or self.recording):
            seconds = [self.seconds(work) for work in candidates]
            self.choices[key] = seconds.index(min(seconds))
        candidates[self.choices.get(key, 0)]()

    def seconds(self, work: Work) -> float:
        """Return the time of one call of `work` when it is repeated."""
        start, end = self._cuda.Event(), self._cuda.Event()
        work()
        start.record(self.stream)
        for _ in range(TIMED_CALLS):
            work()
        end.record(self.stream)
        end.synchronize()
        return float(self._cuda.get_elapsed_time(start, end)) / 1000 / TIMED_CALLS

    def mark(self) -> Mark:
        self._refuse_while_recording("a time was asked for")
        return Mark(self._cuda, self.stream)

    def keep(self, array: Array, work: Work) -> None:
        """Run `work`, then restore the array's old contents."""
        with self.stream:
            old = array.copy()
        work()
        self.copy(array, old)
        self.synchronize()

    def synchronize(self) -> None:
        self.stream.synchronize()

    def _refuse_while_recording(self, what: str) -> None:
        if self.recording:
            raise RuntimeError(f"{what} while work is being recorded")


class Mark:
    """An event in the stream."""

    def __init__(self, cuda: Any, stream: Any) -> None:
        self._cuda, self._event = cuda, cuda.Event()
        self._event.record(stream)

    def seconds_since(self, earlier: Mark) -> float:
        self._event.synchronize()
        return float(self._cuda.get_elapsed_time(earlier._event, self._event)) / 1000


class PinnedRing:
    """Page-locked memory for uploads: the source may be changed at once, since a copy is sent."""

    def __init__(self, cuda: Any, stream: Any) -> None:
        self._cuda, self._stream = cuda, stream
        self._slots = itertools.cycle([_Slot(cuda) for _ in range(SLOTS)])

    def send(self, array: Array, host: Any) -> None:
        """array ← host, of one type and size, both contiguous."""
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
        """Wait until the last upload from this slot has arrived; then make room for `size` bytes."""
        if self.memory is not None:
            self.sent.synchronize()
        if self.bytes.size < size:
            self.memory = self._cuda.alloc_pinned_memory(size)
            self.bytes = np.frombuffer(self.memory, np.uint8, size)


class UnderWay:
    """Holds page-locked memory until the copies from or to it are done.

    CuPy's pool reuses memory as soon as it is dropped, whether or not a copy is under way.
    """

    def __init__(self) -> None:
        self._copies: deque[tuple[Any, Any]] = deque()

    def hold(self, done: Any, memory: Any) -> None:
        """Keep `memory` until the event `done`."""
        while self._copies and self._copies[0][0].done:
            self._copies.popleft()
        self._copies.append((done, memory))


class Mirror:
    """A device array's copy in page-locked memory."""

    def __init__(self, cuda: Any, stream: Any, array: Array, under_way: UnderWay) -> None:
        self._stream, self._array, self._under_way = stream, array, under_way
        self._done = cuda.Event(disable_timing=True)
        self._memory = cuda.alloc_pinned_memory(max(1, array.nbytes))
        self.host = np.frombuffer(self._memory, array.dtype, array.size).reshape(array.shape)

    def fetch(self) -> None:
        """Start copying to the host; `ready` waits for it."""
        self._array.data.copy_to_host_async(self._memory.ptr, self._array.nbytes, self._stream)
        self._started()

    def ready(self) -> None:
        self._done.synchronize()

    def send(self) -> None:
        """Start copying to the device; `ready` waits for it."""
        self._array.data.copy_from_host_async(self._memory.ptr, self._array.nbytes, self._stream)
        self._started()

    def _started(self) -> None:
        self._done.record(self._stream)
        self._under_way.hold(self._done, self._memory)


class _Recorded:
    """Runs `work` at the first call, records it at the second, and then repeats the recorded graph."""

    def __init__(self, device: CupyDevice, work: Work) -> None:
        self._device, self._work = device, work
        self._has_run = False
        self._graph: Any = None

    def __call__(self) -> None:
        if not self._has_run:
            self._work()
            self._has_run = True
            return
        if self._graph is None:
            self._graph = self._device.capture(self._work)
        self._graph.launch(self._device.stream)


def _end_broken(stream: Any) -> None:
    """End a capture that failed; the stream raises again."""
    try:
        stream.end_capture()
    except Exception:
        return


def _require_contiguous(array: Array) -> None:
    if not array.flags.c_contiguous:
        raise ValueError(f"{array.dtype}{list(array.shape)} is not contiguous")


def _machine() -> str:
    """An identifier that all containers of a machine share; its name may not be unique."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return platform.node()


def _argument(value: Any) -> Any:
    """Convert to exactly the C type that the kernel declares."""
    if value is None:
        return np.uint64(0)
    if isinstance(value, int):
        return np.int32(value)
    return np.float64(value) if isinstance(value, float) else value
