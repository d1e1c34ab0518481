"""One CUDA device through CuPy: its memory, one stream, our compiled kernels, recorded graphs, timing."""

from __future__ import annotations

import platform
from collections.abc import Callable, Hashable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from distgpt.gpu.api import Array, Work
from distgpt.gpu.cubins import cubin
from distgpt.gpu.pinned import Mirror, PinnedRing, UnderWay

TIMED_CALLS = 5
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
        # No other GPU has the same, however the processes of a job count theirs.
        self.place = f"{_machine()} {self._cuda.runtime.deviceGetPCIBusId(index)}"
        self.recording = False
        self._graphs = graphs
        self._ring, self._under_way = PinnedRing(self._cuda, self.stream), UnderWay()
        self._modules: dict[tuple[str, tuple[str, ...]], Any] = {}
        self._functions: dict[tuple[str, str, tuple[str, ...]], Any] = {}
        self.chosen: dict[Hashable, int] = {}  # of the candidates of each key

    # -- memory

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Array:
        self._refuse_while_recording("memory was asked for")
        with self.stream:  # CuPy's current one may be another device's by now
            return self.xp.zeros(shape, dtype)

    def upload(self, array: Array, host: Any) -> None:
        self._refuse_while_recording("numbers were sent")
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
        self._refuse_while_recording("numbers were fetched")
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
        """Bytes of arrays at their most: freed ones are kept for the next."""
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
        """The graph of what `work` starts; none of it runs yet."""
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
        if key not in self.chosen and not (self.deterministic or self.recording):
            seconds = [self.seconds(work) for work in candidates]
            self.chosen[key] = seconds.index(min(seconds))
        candidates[self.chosen.get(key, 0)]()

    def seconds(self, work: Work) -> float:
        """How long work takes when it is repeated."""
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
        """Do work and give the array its old contents back."""
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
    """An event, by which the device tells when it got there."""

    def __init__(self, cuda: Any, stream: Any) -> None:
        self._cuda, self._event = cuda, cuda.Event()
        self._event.record(stream)

    def seconds_since(self, earlier: Mark) -> float:
        self._event.synchronize()
        return float(self._cuda.get_elapsed_time(earlier._event, self._event)) / 1000


class _Recorded:
    """Runs its work once, records it the second time, and from then on repeats what was recorded."""

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
    """Leave a recording that failed; the stream says so a second time."""
    try:
        stream.end_capture()
    except Exception:
        return


def _require_contiguous(array: Array) -> None:
    if not array.flags.c_contiguous:
        raise ValueError(f"{array.dtype}{list(array.shape)} has gaps: it can't be copied in one piece")


def _machine() -> str:
    """What all containers of a machine have in common, where the system tells; its name may not be unique."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return platform.node()


def _argument(value: Any) -> Any:
    """As CuPy passes it on: exactly the C type that the kernel declares."""
    if value is None:
        return np.uint64(0)
    if isinstance(value, int):
        return np.int32(value)
    return np.float64(value) if isinstance(value, float) else value
