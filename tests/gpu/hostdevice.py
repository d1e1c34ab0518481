"""This machine's processor as a device: runs the CUDA sources on NumPy arrays, stricter than a GPU would.

It sees what a GPU would not tell: writes beside an array, arguments of the wrong type, shared memory that
nobody has written, threads that wait for each other in vain, work that a recorded graph could not contain.
"""

from __future__ import annotations

import ctypes
import math
import os
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hostbuild import Program, build

from distgpt.gpu.compiling import cubin, source_text

Work = Callable[[], None]

# An architecture: what runs here is also compiled for it, for a later session on a GPU of that kind.
FILL_CACHE = os.environ.get("DISTGPT_FILL_CACHE", "")

GUARD = 1024  # bytes before and after each array
ALIGNMENT = 256
POISON = 0xFF  # a NaN of every type
_POISONED = bytes([POISON]) * GUARD

MOST_THREADS = 1024
MOST_SHARED = 227 << 10
MOST_BLOCKS = (2**31 - 1, 65535, 65535)
MOST_IN_BLOCK = (1024, 1024, 64)


class HostDeviceError(Exception):
    """Something that a GPU would refuse, or do without a word and wrongly."""


@dataclass(frozen=True, slots=True)
class Launch:
    source: str
    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int


class HostDevice:
    """Implements `distgpt.gpu.api.Device`.

    `backwards` runs blocks, warps and lanes in the opposite order: results must not change. `texts` are
    sources beside those of the package, by name.
    """

    def __init__(
        self,
        deterministic: bool = True,
        backwards: bool = False,
        multiprocessors: int = 4,
        memory_bytes: int = 1 << 34,
        texts: dict[str, str] | None = None,
    ) -> None:
        self.name = "this machine's processor"
        self.multiprocessors = multiprocessors
        self.deterministic = deterministic
        self.launches: list[Launch] = []
        self.recording = False
        self._backwards = backwards
        self._memory_bytes = memory_bytes
        self._texts = texts or {}
        self._programs: dict[tuple[str, tuple[str, ...]], Program] = {}
        self._recorded: list[Work] = []
        self.choices: dict[Hashable, int] = {}
        self._buffers: dict[int, weakref.ref[Any]] = {}  # by the id of the array that owns the memory

    # -- memory

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Any:
        self._refuse_while_recording("zeros")
        size = math.prod(shape) * np.dtype(dtype).itemsize
        buffer = np.full(size + 2 * GUARD + ALIGNMENT, POISON, np.uint8)
        start = -(buffer.ctypes.data + GUARD) % ALIGNMENT + GUARD
        buffer[start : start + size] = 0
        key = id(buffer)
        self._buffers[key] = weakref.ref(buffer, lambda _: self._buffers.pop(key, None))
        return buffer[start : start + size].view(dtype).reshape(shape)

    def upload(self, array: Any, host: Any) -> None:
        self._refuse_while_recording("upload")
        self.owner(array, "upload")
        _contiguous(array, "upload")
        host = np.asarray(host)
        if host.dtype != array.dtype or host.size != array.size:
            raise HostDeviceError(f"upload: {_kind(host)} into {_kind(array)}")
        array[...] = host.reshape(array.shape)

    def download(self, array: Any) -> Any:
        self._refuse_while_recording("download")
        self.owner(array, "download")
        _contiguous(array, "download")
        return array.copy()

    def later(self, array: Any) -> Callable[[], Any]:
        self._refuse_while_recording("later")
        self.owner(array, "later")
        _contiguous(array, "later")
        copy = array.copy()
        return lambda: copy

    def mirror(self, array: Any) -> Any:
        self._refuse_while_recording("mirror")
        return Mirror(self, array)

    def zero(self, array: Any) -> None:
        self.owner(array, "zero")
        _contiguous(array, "zero")
        self.do(lambda: array.fill(0))

    def copy(self, array: Any, source: Any) -> None:
        for each in (array, source):
            self.owner(each, "copy")
            _contiguous(each, "copy")
        if array.dtype != source.dtype or array.size != source.size:
            raise HostDeviceError(f"copy: {_kind(source)} into {_kind(array)}")
        self.do(lambda: np.copyto(array, source.reshape(array.shape)))

    def synchronize(self) -> None:
        self._refuse_while_recording("synchronize")

    def mark(self) -> Mark:
        self._refuse_while_recording("a mark")
        return Mark()

    def memory(self) -> tuple[int, int]:
        used = sum(buffer.nbytes for ref in self._buffers.values() if (buffer := ref()) is not None)
        return self._memory_bytes - used, self._memory_bytes

    def check(self) -> None:
        """Raises if anything was written beside any array."""
        for ref in list(self._buffers.values()):
            if (buffer := ref()) is not None:
                _check_guards(buffer, "somebody")

    # -- work

    def do(self, work: Work) -> None:
        """Work of libraries on this device, which is no launch: now, or once it is recorded."""
        if self.recording:
            self._recorded.append(work)
        else:
            work()

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
        name = f"{source}.{kernel}"
        sizes = _dimensions(name, "grid", grid, MOST_BLOCKS), _dimensions(name, "block", block, MOST_IN_BLOCK)
        threads = math.prod(block)
        if threads > MOST_THREADS or threads % 32:
            raise HostDeviceError(f"{name}: blocks of {threads} threads, not 1 to 32 whole warps")
        if not 0 <= shared <= MOST_SHARED:
            raise HostDeviceError(f"{name}: {shared} bytes of shared memory, the most is {MOST_SHARED}")
        try:
            types, entry = self._program(source, tuple(defines)).entry(kernel)
        except AttributeError:
            raise HostDeviceError(f"{name}: there is no such kernel") from None
        values, buffers = self._pack(name, types, args)
        pointers = (ctypes.c_void_p * max(1, len(values)))(*map(ctypes.addressof, values))
        launch = Launch(source, kernel, tuple(grid), tuple(block), shared)

        def start(keep: Any = (args, values)) -> None:
            self.launches.append(launch)
            failure = entry(*sizes, shared, self._backwards, pointers)
            if failure:
                raise HostDeviceError(f"{name}: {failure.decode()}")
            for buffer in buffers:
                _check_guards(buffer, name)

        self.do(start)

    def record(self, work: Work) -> Work:
        calls = 0
        recorded: list[Work] = []

        def recorded_work() -> None:
            nonlocal calls, recorded
            self._refuse_while_recording("a recorded work")
            calls += 1
            if calls == 1:
                work()
                return
            if calls == 2:
                recorded = self._record(work)
            for each in recorded:
                each()

        return recorded_work

    def fastest(self, key: Hashable, candidates: Sequence[Work]) -> None:
        if key in self.choices:
            candidates[self.choices[key]]()
        elif self.deterministic or self.recording:
            candidates[0]()
        else:
            for work in candidates:
                work()
            self.choices[key] = len(candidates) - 1

    # -- within

    def _record(self, work: Work) -> list[Work]:
        self.recording = True
        try:
            work()
            return self._recorded
        finally:
            self.recording, self._recorded = False, []

    def _program(self, source: str, defines: tuple[str, ...]) -> Program:
        key = (source, defines)
        if key not in self._programs:
            text = self._texts[source] if source in self._texts else source_text(source)
            self._programs[key] = build(text, defines)
            if FILL_CACHE and source not in self._texts:
                cubin(source, defines, FILL_CACHE)
        return self._programs[key]

    def _pack(self, name: str, types: list[str], args: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The arguments as C values, and the buffers that they point into."""
        if len(types) != len(args):
            raise HostDeviceError(f"{name}: takes {len(types)} arguments, was given {len(args)}")
        values: list[Any] = []
        buffers = {}
        for i, (wanted, value) in enumerate(zip(types, args, strict=True)):
            given = _type_of(value)
            matches = wanted == given or (wanted[0] == "*" and (given == "*" or wanted == "*?"))
            if not matches:
                raise HostDeviceError(f"{name}: argument {i} is {wanted}, was given {given}")
            if given == "i":
                if not -(2**31) <= value < 2**31:
                    raise HostDeviceError(f"{name}: argument {i} is an int, which {value} does not fit into")
                values.append(ctypes.c_int(value))
            elif given == "d":
                values.append(ctypes.c_double(value))
            elif value is None:
                values.append(ctypes.c_void_p(None))
            else:
                buffer = self.owner(value, name)
                buffers[id(buffer)] = buffer
                values.append(ctypes.c_void_p(value.ctypes.data))
        return values, list(buffers.values())

    def owner(self, array: Any, what: str) -> Any:
        """The buffer that an array lies in, which must be this device's."""
        buffer = array
        while isinstance(buffer, np.ndarray) and buffer.base is not None:
            buffer = buffer.base
        if id(buffer) not in self._buffers:
            raise HostDeviceError(f"{what}: {type(array).__name__} is no array of this device")
        return buffer

    def _refuse_while_recording(self, what: str) -> None:
        if self.recording:
            raise HostDeviceError(f"{what} cannot be recorded")


class Mark:
    """Work is done when it comes: the host's clock."""

    def __init__(self) -> None:
        self._at = time.perf_counter()

    def seconds_since(self, earlier: Mark) -> float:
        return self._at - earlier._at


class Mirror:
    """What is under way has not arrived: until `ready`, a fetched host is poisoned."""

    def __init__(self, device: HostDevice, array: Any) -> None:
        self._device, self._array = device, array
        self.host = np.full(array.nbytes, POISON, np.uint8).view(array.dtype).reshape(array.shape)
        self._fetched: Any = None

    def fetch(self) -> None:
        self._fetched = self._device.download(self._array)
        self.host.reshape(-1).view(np.uint8).fill(POISON)

    def ready(self) -> None:
        if self._fetched is not None:
            self.host[...], self._fetched = self._fetched, None

    def send(self) -> None:
        self._device.upload(self._array, self.host)


def _type_of(value: Any) -> str:
    """The parameter's type that a value is for, in the letters of `Program.entry`."""
    if value is None:
        return "*"
    if isinstance(value, np.ndarray):
        return "*" + {"int32": "i", "int64": "q"}.get(value.dtype.name, value.dtype.char)
    letters = {int: "i", float: "d"}
    return letters.get(type(value), type(value).__name__)


def _dimensions(name: str, what: str, sizes: tuple[int, ...], most: tuple[int, ...]) -> Any:
    if not 1 <= len(sizes) <= 3 or not all(1 <= n <= limit for n, limit in zip(sizes, most, strict=False)):
        raise HostDeviceError(f"{name}: a {what} of {sizes}, possible is 1 to {most}")
    return (ctypes.c_uint * 3)(*sizes, *[1] * (3 - len(sizes)))


def _contiguous(array: Any, what: str) -> None:
    if not array.flags.c_contiguous:
        raise HostDeviceError(f"{what}: {_kind(array)} is not contiguous")


def _check_guards(buffer: Any, who: str) -> None:
    start = -(buffer.ctypes.data + GUARD) % ALIGNMENT + GUARD
    end = len(buffer) - ALIGNMENT - 2 * GUARD + start
    for zone, where in ((buffer[start - GUARD : start], "before"), (buffer[end : end + GUARD], "behind")):
        if zone.tobytes() != _POISONED:
            at = int(np.flatnonzero(zone != POISON)[0])
            distance = GUARD - at if where == "before" else at
            raise HostDeviceError(f"{who} wrote {distance} bytes {where} an array of {end - start} bytes")


def _kind(array: Any) -> str:
    return f"{array.dtype}{list(array.shape)}"
