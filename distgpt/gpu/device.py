"""A CUDA device through CuPy, with its memory, streams, kernel launches, graphs and timing.

There are three storage types. Arrays of bfloat16 store its bits with dtype uint16, because neither NumPy nor
CuPy supports the type. Code that needs the values converts them.
"""

from __future__ import annotations

import platform
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from statistics import median
from typing import Any

import numpy as np

from distgpt.core.base.errors import UsageError
from distgpt.core.base.system import boot_id
from distgpt.core.ops.api import Array, Work
from distgpt.core.ops.low_precision import from_bfloat16
from distgpt.gpu.compiling import Kind, TuningCache, cubin, storage_define

WARP, BLOCK, LARGEST_BLOCK = 32, 256, 1024  # threads
TIMED_CALLS, TURNS = 5, 5
HOPELESS = 1.3  # ratio to the shortest time
MOST_COPIES = 8  # concurrent copies
MOST_BYTES = 8 << 20  # bytes per upload, limited because CuPy's pool of page-locked memory never shrinks
MOST_BYTES_DOWN = 32 << 20  # bytes per piece of a download; two pieces are in flight
MOVED = 16  # bytes per access of a thread, if possible
LARGEST = 2**31 - 1  # limit of indexes in kernels

DeviceArray = Any  # CuPy arrays, which have no type hints

STORAGE: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype(np.uint16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
WIDE = STORAGE | {"bfloat16": STORAGE["float32"]}
TYPE_OF = {dtype: name for name, dtype in STORAGE.items()}


class CupyDevice:
    """Memory, kernels and timing on one device.

    All work goes to one stream in call order, which is also CuPy's current stream, except inside `on`.
    `deterministic`: bitwise identical results in every run, at the cost of speed. `choices`: the candidate
    that `fastest` chose, by key.
    """

    def __init__(
        self,
        index: int,
        deterministic: bool = False,
        graphs: bool = True,
        xp: Any = None,
        uuid: str = "",
    ) -> None:
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
        # A GPU has the same place in all processes, with any index. The parts of a divided GPU (MIG) share a
        # bus address, but each has a `uuid`.
        self.place = f"{boot_id() or platform.node()} {uuid or self._cuda.runtime.deviceGetPCIBusId(index)}"
        self.recording = False
        self._graphs = graphs
        self._cut: list[tuple[Any, Work]] = []  # graphs of the current recording, and the calls after each
        self._under_way: deque[tuple[Any, Any]] = deque()  # events, and memory needed until then
        self._modules: dict[Kind, Any] = {}
        self._functions: dict[tuple[str, str, tuple[str, ...]], Any] = {}
        self.choices: dict[Hashable, int] = {}
        self.kept = TuningCache(None)
        self.sharing = 1  # ranks on this GPU, which divide its memory
        self._recordings = 1  # generation; recordings of an earlier generation are outdated

    def keep_choices(self, *versions: object) -> None:
        """Store choices for later starts on identical GPUs with these library versions.

        Choices are not stored if ranks share the GPU, since other ranks' work affects the timing.
        """
        if self.sharing == 1:
            about = (self.name, self.capability, self.multiprocessors, self.memory()[1])
            self.kept = TuningCache([*versions, *about])

    # -- memory

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Allocate an array. Not allowed while recording."""
        self._refuse_while_recording("memory was requested")
        with self.stream:  # CuPy's current stream may belong to another device
            made: Array = self.xp.zeros(shape, dtype)
            return made

    def upload(self, array: DeviceArray, host: Any) -> None:
        """Copy a host array of the same type and size to the device. It may be changed on return."""
        _require_contiguous(array)
        host = np.ascontiguousarray(host)
        if host.dtype != array.dtype or host.size != array.size:
            raise ValueError(f"{host.dtype}{list(host.shape)} does not fit {array.dtype}{list(array.shape)}")
        flat, values, step = array.reshape(-1), host.reshape(-1), max(1, MOST_BYTES // array.itemsize)
        for start in range(0, flat.size, step):
            mirror = self.mirror(flat[start : start + step])
            mirror.host[:] = values[start : start + step]
            mirror.send()

    def download(self, array: Array) -> Any:
        """Return the array as a new NumPy array. Waits for all previous work.

        Pieces are pipelined: while one is copied out of page-locked memory, the next is transferred.
        """
        _require_contiguous(array)
        host, flat = np.empty(array.shape, array.dtype), array.reshape(-1)
        out, step = host.reshape(-1), max(1, MOST_BYTES_DOWN // array.itemsize)
        under_way: deque[tuple[int, Mirror]] = deque()
        for start in (*range(0, flat.size, step), None, None):
            if start is not None:
                under_way.append((start, self.mirror(flat[start : start + step])))
                under_way[-1][1].fetch()
            if under_way and (start is None or len(under_way) > 1):
                first, mirror = under_way.popleft()
                out[first : first + step] = mirror.ready()
        return host

    def to_host_async(self, array: Array) -> Callable[[], Any]:
        """Queue a download of the array. Return a function that waits for the download and returns it."""
        mirror = self.mirror(array)
        mirror.fetch()
        return mirror.ready

    def mirror(self, array: Array) -> Mirror:
        """Create a host copy for an array that is transferred repeatedly."""
        self._refuse_while_recording("a copy was started")
        _require_contiguous(array)
        self._release()
        return Mirror(self, array)

    def hold(self, done: Any, memory: Any) -> None:
        """Keep page-locked memory until the event `done`, the end of its copy.

        CuPy's pool reuses memory as soon as it is dropped, even during a copy.
        """
        self._under_way.append((done, memory))
        self._release()

    def _release(self) -> None:
        """Return the memory of finished copies to the pool. If there are too many copies, wait."""
        while self._under_way:
            oldest, _ = self._under_way[0]
            if not oldest.done:
                if len(self._under_way) <= MOST_COPIES:
                    return
                oldest.synchronize()
            self._under_way.popleft()

    def zero(self, array: DeviceArray) -> None:
        """Set a contiguous array of any type to 0."""
        array.data.memset_async(0, array.nbytes, self.stream)

    def copy(self, array: DeviceArray, source: DeviceArray) -> None:
        """Copy between contiguous arrays of the same type and size."""
        array.data.copy_from_device_async(source.data, array.nbytes, self.stream)

    def memory(self) -> tuple[int, int]:
        """Return free and total bytes."""
        free, total = self._cuda.runtime.memGetInfo()
        return free + self.xp.get_default_memory_pool().free_bytes(), total

    def taken(self) -> int:
        """Return the peak of bytes in arrays, since the pool keeps freed memory."""
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
        """Start `kernel` of gpu/cu/`source`.cu, compiled with -D for each of `defines`.

        Arrays become pointers, and None a null pointer. An int becomes a C int, a NumPy int64 a long long, a
        float a double. `shared`: bytes of dynamic shared memory.
        """
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
        """Return a function that repeats the launches of `work` on the same arrays without its Python code.

        The first call runs `work` itself, so that everything is compiled and chosen.
        """
        if not self._graphs:
            return work
        ran, replay = 0, None

        def repeat() -> None:
            nonlocal ran, replay
            if ran == self._recordings:
                replay = replay or self.capture(work)
                replay()
            else:
                replay = None
                work()
                ran = self._recordings

        return repeat

    def between(self, act: Work) -> None:
        """Call act() now or, while recording, at this point of every replay."""
        if self.recording:
            self._cut.append((self.stream.end_capture(), act))
            self.stream.begin_capture()
        else:
            act()

    def record_anew(self) -> None:
        """Invalidate all recordings. The next call of each runs its work again. Waits for all work."""
        self.synchronize()  # a graph must not be dropped while it runs
        self._recordings += 1

    def capture(self, work: Work) -> Work:
        """Record `work` without running it. Return a function that replays it."""
        self._cut = []
        self.stream.begin_capture()
        self.recording = True
        try:
            work()
        except BaseException:
            self.recording = False
            with suppress(Exception):  # ends the capture, and raises the same error again
                self.stream.end_capture()
            raise
        self.recording = False
        cut, last = self._cut, self.stream.end_capture()

        def replay() -> None:
            for graph, act in cut:
                graph.launch(self.stream)
                act()
            last.launch(self.stream)

        return replay

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Queue kernels and communication on another stream. Do not create or download arrays inside."""
        usual, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = usual

    def after(self, stream: Any, other: Any) -> None:
        """Make later work of `stream` wait for the current work of `other`."""
        passed = self._cuda.Event(disable_timing=True)
        passed.record(other)
        stream.wait_event(passed)

    def fastest(self, key: Hashable, candidates: Sequence[Work]) -> None:
        """Run one of these equivalent, repeatable candidates.

        If `deterministic`, run the first. Otherwise run the fastest, which is timed for a new key unless an
        earlier start stored it. Timing is impossible while recording, so the first runs if the key is new.
        """

        def timed() -> bytes:
            seconds = self.times(candidates)
            return bytes([seconds.index(min(seconds))])

        if key not in self.choices and not (self.deterministic or self.recording):
            one_of = [bytes([i]) for i in range(len(candidates))]
            (self.choices[key],) = self.kept.choice(f"way of {key}", one_of.__contains__, timed)
        candidates[self.choices.get(key, 0)]()

    def times(self, works: Sequence[Work]) -> list[float]:
        """Return the time of one call of each, measured alternately because clock rates vary.

        The first turn also warms up the GPU. Candidates far from its fastest are not timed again.
        """
        first = [self.seconds(work) for work in works]
        close = [i for i, seconds in enumerate(first) if seconds <= HOPELESS * min(first)]
        if len(close) > 1:
            turns = [[self.seconds(works[i]) for i in close] for _ in range(TURNS)]
            for i, seconds in zip(close, zip(*turns, strict=True), strict=True):
                first[i] = median(seconds)
        return first

    def seconds(self, work: Work) -> float:
        """Return the time per call of `work` when it is repeated."""
        start, end = self._cuda.Event(), self._cuda.Event()
        work()
        start.record(self.stream)
        for _ in range(TIMED_CALLS):
            work()
        end.record(self.stream)
        end.synchronize()
        return float(self._cuda.get_elapsed_time(start, end)) / 1000 / TIMED_CALLS

    def mark(self) -> Mark:
        """Mark this point of the stream to measure times. Not allowed while recording."""
        self._refuse_while_recording("a time was requested")
        return Mark(self._cuda, self.stream)

    def keep(self, array: Array, work: Work) -> None:
        """Run `work`, then restore the array's contents."""
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
        """Return the device's seconds between another mark and this one. Waits for this one."""
        self._event.synchronize()
        return float(self._cuda.get_elapsed_time(earlier._event, self._event)) / 1000


class Mirror:
    """A copy of a device array in page-locked memory. `host` is a NumPy array of the same type and shape."""

    def __init__(self, device: CupyDevice, array: DeviceArray) -> None:
        self._device, self._stream, self._array = device, device.stream, array
        self._done = device.xp.cuda.Event(disable_timing=True)
        self._memory = device.xp.cuda.alloc_pinned_memory(max(1, array.nbytes))
        self.host = np.frombuffer(self._memory, array.dtype, array.size).reshape(array.shape)

    def fetch(self, start: int = 0, stop: int | None = None) -> None:
        """Start a copy of all or some elements to the host; `ready` waits for the copy."""
        there, here, size = self._stretch(start, stop)
        there.copy_to_host_async(here, size, self._stream)
        self._started()

    def ready(self) -> Any:
        self._done.synchronize()
        return self.host

    def send(self, start: int = 0, stop: int | None = None) -> None:
        """Start a copy to the device; `ready` waits until `host` may be changed."""
        there, here, size = self._stretch(start, stop)
        there.copy_from_host_async(here, size, self._stream)
        self._started()

    def _stretch(self, start: int, stop: int | None) -> tuple[Any, int, int]:
        """Return the device and host addresses of elements, and their bytes."""
        first = start * self._array.itemsize
        size = (self._array.size if stop is None else stop) * self._array.itemsize - first
        return self._array.data + first, self._memory.ptr + first, size

    def _started(self) -> None:
        self._done.record(self._stream)
        self._device.hold(self._done, self._memory)


def _require_contiguous(array: Array) -> None:
    if not array.flags.c_contiguous:
        raise ValueError(f"{array.dtype}{list(array.shape)} is not contiguous")


def _argument(value: Any) -> Any:
    """Convert a value to exactly the C type that the kernel declares."""
    if value is None:
        return np.uint64(0)
    if isinstance(value, int):
        return np.int32(value)
    return np.float64(value) if isinstance(value, float) else value


# -- kernels of one storage type


def floats(host: Any) -> Any:
    """Return a host copy as numbers; bfloat16 becomes float32."""
    return from_bfloat16(host) if host.dtype == STORAGE["bfloat16"] else host


def address(array: Array) -> int:
    data = array.data
    return int(data.ptr if hasattr(data, "ptr") else array.ctypes.data)


class Launcher:
    """Starts the kernels that are compiled for one storage type."""

    def __init__(self, device: CupyDevice, storage: str, itemsize: int) -> None:
        self.device = device
        self.defines = (storage_define(storage),)
        self._pack = MOVED // itemsize
        self._scratch: dict[Any, Array] = {}

    def start(
        self,
        source: str,
        kernel: str,
        grid: int | tuple[int, ...],
        block: int,
        *args: Any,
        shared: int = 0,
        defines: tuple[str, ...] = (),
    ) -> None:
        blocks = (grid,) if isinstance(grid, int) else grid
        self.device.launch(source, kernel, self.defines + defines, blocks, (block,), args, shared)

    def each(self, source: str, kernel: str, width: int, count: int, *args: Any) -> None:
        """Start a kernel with one thread per pack of `count` elements, which are in rows of `width`."""
        if count > LARGEST:
            many = f"an activation has {count:,} elements, more than GPU kernels support"
            raise UsageError(f"{many} ({source}.{kernel}); use smaller micro-batches")
        variant, w = self.variant(kernel, width, *args)
        self.start(source, variant, -(-count // (BLOCK * w)), BLOCK, *args)

    def variant(self, kernel: str, width: int, *args: Any) -> tuple[str, int]:
        """Return the kernel for rows of this width, and its elements per thread: 16 bytes, or one."""
        arrays = (arg for arg in args if hasattr(arg, "dtype"))
        if width % self._pack == 0 and all(address(array) % MOVED == 0 for array in arrays):
            return f"{kernel}_packed", self._pack
        return f"{kernel}_single", 1

    def scratch(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return memory for one operation at a time. It is allocated at first use, never while recording."""
        key = (name, shape)
        if key not in self._scratch:
            self._scratch[key] = self.device.zeros(shape, dtype)
        return self._scratch[key]
