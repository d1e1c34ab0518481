"""An emulated GPU: FakeCupy with kernels compiled for the host, and HostLt.

It detects writes outside an array, wrong argument types, unwritten shared memory and deadlocked threads, which a GPU
does not report. Blocks, warps and lanes run in an order drawn from the seed DISTGPT_WARP_ORDER (default: 1). Run as a
program, it is the command line with WHOLE_GPU emulated GPUs. WHOLE_NCCL=1 adds an NCCL; a number such as 23007 sets
its version.
"""

from __future__ import annotations

import ctypes
import math
import os
import random
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from distgpt.core.generate import engine
from distgpt.gpu import cublaslt, device, probe, transport
from distgpt.gpu.compiling import cubin, source_text
from distgpt.gpu.device import CupyDevice
from distgpt.gpu.kernels import CudaKernels
from distgpt.gpu.matmul import LtMatmul
from distgpt.measure import jobs
from distgpt.measure.profile import session as profiling
from fakecupy import ALIGNMENT, GUARD, POISON, WORLD, FakeCupy, first_byte, ndarray, owner
from fakenccl import VERSION, FakeNccl, ProcessJob
from hostbuild import Program, build
from hostlt import HostLt

# An architecture to also compile each kernel for, to fill the cache of a later GPU session.
FILL_CACHE = os.environ.get("DISTGPT_FILL_CACHE", "")

FORWARDS, BACKWARDS = 0, -1  # orders; others are seeds
ORDER = int(os.environ.get("DISTGPT_WARP_ORDER", "1"))

_UNTOUCHED = bytes([POISON]) * GUARD
MULTIPROCESSORS = 4  # few, since it scales the size of sums
MOST_THREADS, MOST_SHARED = 1024, 227 << 10
MOST_BLOCKS, MOST_IN_BLOCK = (2**31 - 1, 65535, 65535), (1024, 1024, 64)


class HostGpuError(Exception):
    """An operation that a GPU would reject, or silently do wrong."""


class Launch(NamedTuple):
    source: str
    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int


class HostGpu(FakeCupy):
    """FakeCupy with kernels that compute.

    `order` of blocks, warps and lanes: FORWARDS, BACKWARDS, or a seed for a new order per launch; it must
    not change results. `texts`: additional sources by name.
    """

    def __init__(self, order: int = ORDER, texts: dict[str, str] | None = None, gpus: int = 1, **about: Any) -> None:
        super().__init__(gpus, free=4 << 30, total=8 << 30, **about)
        self.launches: list[Launch] = []
        self._orders, self._texts = _orders(order), texts or {}
        self._programs: dict[bytes, Program] = {}

    def cubin(self, source: str, defines: tuple[str, ...], arch: str) -> bytes:
        """Compile for the processor; the "machine code" names what was compiled."""
        code = "\0".join((source, *defines)).encode()
        if code not in self._programs:
            self._programs[code] = build(self._texts.get(source) or source_text(source), defines)
            if FILL_CACHE and source not in self._texts:
                cubin(source, defines, FILL_CACHE)
        return code

    def started(self, function: Any, grid: Any, block: Any, args: Any, shared: int) -> Callable[[], None]:
        code = function.module.cubin
        source = code.split(b"\0")[0].decode()
        name = f"{source}.{function.name}"
        sizes = _dimensions(name, "grid", grid, MOST_BLOCKS), _dimensions(name, "block", block, MOST_IN_BLOCK)
        threads = math.prod(block)
        if threads > MOST_THREADS or threads % 32:
            raise HostGpuError(f"{name}: blocks of {threads} threads, not 1 to 32 whole warps")
        if not 0 <= shared <= MOST_SHARED:
            raise HostGpuError(f"{name}: {shared} bytes of shared memory, the most is {MOST_SHARED}")
        try:
            types, entry = self._programs[code].entry(function.name)
        except AttributeError:
            raise HostGpuError(f"{name}: there is no such kernel") from None
        if len(types) != len(args):
            raise HostGpuError(f"{name}: takes {len(types)} arguments, was given {len(args)}")
        values = [self._value(f"{name}: argument {i}", *pair) for i, pair in enumerate(zip(types, args, strict=True))]
        pointers = (ctypes.c_void_p * max(1, len(values)))(*map(ctypes.addressof, values))
        blocks = {id(owner(arg.memory)): owner(arg.memory) for arg in args if isinstance(arg, ndarray)}
        launch = Launch(source, function.name, grid, block, shared)

        def start(keep: Any = values) -> None:
            self.launches.append(launch)
            order = next(self._orders)
            if failure := entry(*sizes, shared, order, pointers):
                drawn = f" (in the order {order})" if order > FORWARDS else ""
                raise HostGpuError(f"{name}: {failure.decode()}{drawn}")
            for memory in blocks.values():
                _check_guards(memory, name)

        return start

    def check(self) -> None:
        """Raise if a kernel wrote outside an array."""
        for ref in list(self.blocks.values()):
            if (memory := ref()) is not None:
                _check_guards(memory, "somebody")

    def _value(self, name: str, wanted: str, arg: Any) -> Any:
        """Convert an argument to C; raise if it does not have the declared type."""
        if isinstance(arg, ndarray):
            given = "*" + {"int32": "i", "int64": "q"}.get(arg.dtype.name, arg.dtype.char)
            if id(owner(arg.memory)) not in self.blocks:
                raise HostGpuError(f"{name} is no array of this device")
        else:
            name_of = {"uint64": "*", "int32": "i", "int64": "q", "float64": "d"}
            given = name_of.get(type(arg).__name__, type(arg).__name__)
        if wanted != given and not (wanted[0] == "*" and (given == "*" or (wanted == "*?" and given[0] == "*"))):
            raise HostGpuError(f"{name} is {wanted}, was given {given}")
        if given[0] == "*":
            return ctypes.c_void_p(arg.data.ptr if isinstance(arg, ndarray) else None)
        if given == "d":
            return ctypes.c_double(float(arg))
        return (ctypes.c_int if given == "i" else ctypes.c_longlong)(int(arg))


class HostDevice(CupyDevice):
    """distgpt's device on an emulated GPU."""

    def __init__(
        self, deterministic: bool = True, graphs: bool = True, multiprocessors: int = MULTIPROCESSORS, **about: Any
    ) -> None:
        super().__init__(0, deterministic, graphs, HostGpu(multiprocessors=multiprocessors, **about))

    def array(self, host: Any) -> Any:
        host = np.asarray(host)
        made = self.zeros(host.shape, host.dtype)
        self.upload(made, host)
        return made

    def _function(self, key: tuple[str, str, tuple[str, ...]]) -> Any:
        with WORLD, mock.patch.object(device, "cubin", self.xp.cubin):
            return super()._function(key)


def _orders(order: int) -> Iterator[int]:
    seeds = random.Random(order)
    while True:
        yield order if order <= FORWARDS else 1 + seeds.getrandbits(60)


def host_lt(xp: FakeCupy) -> cublaslt.CublasLt:
    """Return an emulated cuBLASLt that works in stream order."""

    def queue(ptr: int, work: Callable[[], None]) -> None:
        stream = next(stream for stream in xp.streams if stream.ptr == ptr)
        stream.enqueue(work)
        if stream.captured is None:  # addresses do not keep memory alive
            stream.run(stream.begun)

    return cublaslt.CublasLt(HostLt(queue))


def host_kernels(dtype: str, **about: Any) -> CudaKernels:
    on = HostDevice(**about)
    return CudaKernels(on, LtMatmul(host_lt(on.xp), on), dtype)


def install(gpus: int = 1) -> ExitStack:
    """Make `import cupy` find this number of GPUs, until the result is closed."""
    xp = HostGpu(gpus=gpus, multiprocessors=MULTIPROCESSORS)
    xp.cuda.runtime.runtimeGetVersion = lambda: 13000
    ticks = count(1)  # every operation takes time
    xp.cuda.get_elapsed_time = lambda start, end: float(next(ticks))
    version = int(os.environ.get("WHOLE_NCCL", 0))
    version = VERSION if version == 1 else version
    nccl = FakeNccl(job=ProcessJob(), xp=xp, version=version) if version else None
    undo = ExitStack()
    for module, name, value in (
        (device, "cubin", xp.cubin),
        (probe, "require_gpu", lambda *args, **more: None),
        (cublaslt, "load", lambda: host_lt(xp)),
        (transport, "nccl_module", lambda: nccl),  # an installed NCCL needs the real CuPy
        (profiling, "SIDES", (32,)),
        (profiling, "SECONDS", 0.02),
        (engine, "sample", _short_sample),  # sampling is slow on this device
    ):
        undo.enter_context(mock.patch.object(module, name, value))
    sys.modules["cupy"] = xp
    undo.callback(sys.modules.pop, "cupy")
    return undo


_sample = engine.sample


def _short_sample(model: Any, tokenizer: Any, seed: int, *length: int, **signals: Any) -> str:
    return str(_sample(model, tokenizer, seed, 8))


def _dimensions(name: str, what: str, sizes: tuple[int, ...], most: tuple[int, ...]) -> Any:
    if not 1 <= len(sizes) <= 3 or not all(1 <= n <= limit for n, limit in zip(sizes, most, strict=False)):
        raise HostGpuError(f"{name}: a {what} of {sizes}, possible is 1 to {most}")
    return (ctypes.c_uint * 3)(*sizes, *[1] * (3 - len(sizes)))


def _check_guards(block: Any, who: str) -> None:
    start = first_byte(block)
    end = len(block) - ALIGNMENT - 2 * GUARD + start
    for zone, where in ((block[start - GUARD : start], "before"), (block[end : end + GUARD], "behind")):
        if zone.tobytes() != _UNTOUCHED:
            at = int(np.flatnonzero(zone != POISON)[0])
            distance = GUARD - at if where == "before" else at
            raise HostGpuError(f"{who} wrote {distance} bytes {where} an array of {end - start} bytes")


if __name__ == "__main__":
    # Commands that start distgpt start this program.
    jobs.distgpt_command = lambda *words: [sys.executable, __file__, *map(str, words)]
    install(int(os.environ["WHOLE_GPU"]))
    if sys.argv[1:] and sys.argv[1].endswith(".py"):  # a program to run with emulated GPUs
        sys.argv = sys.argv[1:]
        sys.path.insert(0, str(Path(sys.argv[0]).parent))
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        from distgpt.commands.cli import main

        main()
